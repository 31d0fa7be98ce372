"""Hangs have names: a thread that notices a collective nobody will complete, and ends the job on all ranks.

How a hang ends (all ranks unless noted):
1. A rank sees that one of its collectives is overdue, or can never complete: a peer stalls at the same number with
   another history, a peer has left without issuing it, or the connection is closed. It raises the alarm.
2. Each rank that hears of it, within a second, answers with its position.
3. (one rank, the lowest that can) The positions become one message, which is logged once. A rank that the store does
   not answer says alone what it knows.
4. Whoever waits in one of our collectives is interrupted and raises that message as an exception, so that `finally`
   blocks run. Whoever is elsewhere is ended with exit code 75 after a few seconds, and so is whoever does not leave.
   Ranks of this machine that are stopped (SIGSTOP) cannot do that: they are woken and ended.

All of it stays within 15 seconds of the limit. It costs one round trip to the store per second and rank. It reads the
`FlightRecorder`, speaks through the `SideChannel` and looks at silent ranks through `PeerProcesses`; `topology.py`
makes it, and `exit_notice.py` tells it of the process's end.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Collection
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import ClassVar

import torch

from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord, FlightRecorder
from zeroaccel.comm.hangs.hang_report import Alarm, HangReport, ProcessStatus, RankState, compose, rank_list
from zeroaccel.comm.hangs.peer_processes import PeerProcesses
from zeroaccel.comm.hangs.side_channel import ChannelLost, ChannelSilent, SideChannel
from zeroaccel.errors import CollectiveError, CollectiveTimeoutError
from zeroaccel.logs import logger

__all__ = ["Watchdog", "announce_end_through", "main_thread_place"]

_POLL_SECONDS = 1.0
_HURRY_SECONDS = 0.1  # between looks while there is an alarm
_STALL_SECONDS = 5.0  # a wait this long is worth comparing histories
_ANSWERS_SECONDS = 3.0  # for the positions to come in
_SUCCESSION_SECONDS = 2.0  # after which another rank than the lowest may judge
_VERDICT_SECONDS = _SUCCESSION_SECONDS + 2 * _ANSWERS_SECONDS  # after which each rank judges for itself
_RAISE_SECONDS = 5.0  # for an interrupted thread to raise; then the process is ended
_EXIT_SECONDS = 6.0  # for the process to end by itself; then it is ended
_OTHERS_LOOK_SECONDS = 1.5  # for the other ranks to notice what this one has noticed
_STAY_SECONDS = 2.5  # the keeper of the store waits this long for the others to be done with it


class Watchdog:
    """One per topology; its thread starts at once and ends with `leave`.

    Args:
        flight_recorder: of this rank's collectives.
        channel: this rank's end of the side channel.
        neighbours: the other ranks' processes.
        limit: seconds a collective may wait; `math.inf` for no limit.
        interrupt: makes every thread that waits in a collective raise, and lets no later one complete.

    Attributes:
        error: what every collective of this rank raises from now on, or None while all is well.
        reported: whether the message of `error` has been logged, so that a traceback would only repeat it.
    """

    exit_code: ClassVar[int] = CollectiveError.exit_code

    def __init__(
        self,
        flight_recorder: FlightRecorder,
        channel: SideChannel,
        neighbours: PeerProcesses,
        limit: float,
        interrupt: Callable[[], None],
    ) -> None:
        self.limit = limit
        self.error: CollectiveError | None = None
        self.reported = False
        self._flight_recorder = flight_recorder
        self._rank = channel.rank
        self._world_size = channel.world_size
        self._channel: SideChannel | None = channel  # None once the store is gone or no longer needed
        self._neighbours = neighbours
        self._interrupt = interrupt
        self._trouble: Alarm | None = None  # from a thread of this rank whose connection broke
        self._exit_notice: RankState | None = None
        self._wake = threading.Event()  # there is trouble or a farewell
        self._settled = threading.Event()  # there is a verdict, in `error`
        self._has_raised = threading.Event()
        self._may_leave = threading.Event()
        # The rest belongs to the watchdog's thread.
        self._events = 0
        self._gone: dict[int, RankState] = {}
        self._compared: CollectiveRecord | None = None
        self._listeners = channel.world_size  # the ranks that will say when they need the store no longer
        self._released_at = 0.0
        self._keeper_left_at = 0.0
        self._interruption: threading.Thread | None = None
        threading.Thread(target=self._watch, name="zeroaccel-watchdog", daemon=True).start()

    # --- called by the threads that communicate

    def failure(self) -> CollectiveError:
        """The error to raise for a collective that is called after the verdict."""
        assert self.error is not None, "asked for a failure while all is well"
        self._has_raised.set()
        return self.error

    def explain(self, entry: CollectiveRecord, cause: Exception) -> CollectiveError:
        """What to raise for a collective that the backend has given up: the ranks' positions, not the socket's words.

        Blocks until the message is there, at most a few seconds.
        """
        headline = f"rank {self._rank} failed in {entry.call}: {_reason(cause)}"
        if self._exit_notice is None:
            self._trouble = Alarm(self._rank, headline, timed_out=False)
            self._wake.set()
            self._settled.wait(_VERDICT_SECONDS)
        self._has_raised.set()
        return self.error or CollectiveError(headline)

    def leave(self, how: str, *, failed: bool = False) -> None:
        """Says farewell to the other ranks and ends the thread. Only the first call counts.

        The rank that keeps the store stays until the others need it no longer, but at most 2.5 seconds, or until a
        verdict that is under way has been given.

        Args:
            how: what follows the rank's name: "finished and left", "left with ValueError: ...".
        """
        if self._exit_notice is None:
            self._exit_notice = self._position(left=how, failed=failed)
            self._wake.set()
            self._may_leave.wait(_VERDICT_SECONDS + _STAY_SECONDS)
            if self.error is not None:
                self._end_stopped_ranks()

    # --- the watchdog's own thread

    def _watch(self) -> None:
        try:
            done = False
            while not done and self.error is None:
                self._wake.wait(_POLL_SECONDS if self._exit_notice is None else _HURRY_SECONDS)
                self._wake.clear()
                try:
                    done = self._look(self._channel)
                except ChannelSilent as silence:
                    done = self._look(None, str(silence))
                except ChannelLost:
                    self._channel = None
            if self.error is not None:
                self._see_the_others_off()
        finally:
            self._may_leave.set()
        if self.error is not None:
            self._end_process()

    def _look(self, channel: SideChannel | None, store_silence: str = "") -> bool:
        """Looks around once. Returns whether there is nothing left to watch for.

        Args:
            channel: None if nothing can be heard through it now, or ever; then `store_silence` may say why.
        """
        if channel is None:
            if alarm := self._overdue() or self._trouble:
                self._settle(self._judge_alone(alarm, store_silence), reported=False)
            # A store that is only slow gets the farewell yet, in the time that `leave` gives it.
            return self._exit_notice is not None and not store_silence
        if self._exit_notice is not None and not self._released_at:
            channel.publish_exit(self._exit_notice)
            self._release(channel)
        if self._exit_notice is not None and not channel.owns_store:
            return True
        if alarm := self._hear(channel) or self._sound(channel):
            self._answer(channel, alarm)
        elif self._exit_notice is not None:
            return self._may_take_the_store_away(channel)
        elif self._keeper_has_left(channel):
            self._release(channel)
            self._channel = None
        return False

    def _hear(self, channel: SideChannel) -> Alarm | None:
        """What the others have said since the last look."""
        events = channel.events()
        if events == self._events:
            return None
        self._events = events
        self._note_farewells(channel)
        return channel.alarm()

    def _sound(self, channel: SideChannel) -> Alarm | None:
        """Raises this rank's own alarm if there is cause. Another rank's may have come first, and is returned then."""
        if alarm := self._overdue() or self._hopeless(channel) or self._trouble:
            channel.raise_alarm(alarm)
            return channel.alarm()
        return None

    def _note_farewells(self, channel: SideChannel) -> None:
        for position in channel.exits(known=len(self._gone)):
            self._gone[position.rank] = position

    def _pending(self) -> CollectiveRecord | None:
        """The collective that has been pending longest, as far as this rank is held up by it."""
        if entry := self._flight_recorder.longest_wait:
            return entry
        if (probe := self._flight_recorder.probe) is None:
            return None
        entry, has_completed = probe
        try:
            pending = not has_completed()
        except RuntimeError:  # the accelerator has failed; its thread will say so
            pending = False
        if pending:
            return entry
        self._flight_recorder.probe = None
        return None

    def _overdue(self) -> Alarm | None:
        if (entry := self._pending()) is None:
            return None
        waited = time.monotonic() - entry.since
        if waited <= self.limit:
            return None
        headline = f"rank {self._rank} has waited {waited:.1f} s (the limit is {self.limit:g} s) for {entry.call}"
        return Alarm(self._rank, headline, timed_out=True)

    def _hopeless(self, channel: SideChannel) -> Alarm | None:
        """A collective that is known never to complete, before the limit has passed."""
        if (entry := self._pending()) is None:
            return None
        call = entry.call
        if gone := [rank for rank, position in self._gone.items() if not position.has_issued(call)]:
            headline = f"{rank_list(gone)} left the job while rank {self._rank} waits for {call}"
            return Alarm(self._rank, headline, timed_out=False)
        if time.monotonic() - entry.since <= min(_STALL_SECONDS, self.limit / 2):
            return None
        return self._parted(channel, entry) or self._crossed(channel, entry)

    def _parted(self, channel: SideChannel, entry: CollectiveRecord) -> Alarm | None:
        """Whether a rank has stalled at the same number, but not at the same call or not by the same way."""
        if entry is self._compared:
            return None
        self._compared = entry
        if self._rank == 0:
            position = self._position()
            if self._flight_recorder.longest_wait is entry:  # all the while, so the position is of one moment
                channel.publish_stall(position)
        other, same = channel.compare_history(entry)
        if same:
            return None
        ranks = rank_list((other, self._rank))
        headline = f"{ranks} have gone through different collectives by {entry.kind} #{entry.seq}"
        return Alarm(self._rank, headline, timed_out=False)

    def _crossed(self, channel: SideChannel, entry: CollectiveRecord) -> Alarm | None:
        """Whether this rank and rank 0 are blocked, each in a call that the other has not issued.

        What rank 0 has said may be old, but if so it has completed that call, for which every rank must have issued
        it; only a broadcast can be over on the first rank and still to come on the last. To compare with rank 0 is
        enough: of two ranks that have parted, one has parted from rank 0.
        """
        if self._rank == 0 or self._flight_recorder.longest_wait is not entry:
            return None
        first = channel.rank_0_stall()
        if first is None or first.waiting is None or first.waiting.op.startswith("broadcast"):
            return None
        own, theirs = entry.call, first.waiting
        if first.has_issued(own) or self._flight_recorder.issued()[theirs.kind] >= theirs.seq:
            return None
        headline = f"rank 0 waits for {theirs} while rank {self._rank} waits for {own}"
        return Alarm(self._rank, headline, timed_out=False)

    def _answer(self, channel: SideChannel, alarm: Alarm) -> None:
        """Steps 2 and 3: from the alarm to the verdict."""
        channel.publish_state(self._exit_notice or self._position())
        start = time.monotonic()
        report: HangReport | None = None
        may_claim = True
        while report is None:
            waited = time.monotonic() - start
            if waited > _VERDICT_SECONDS:
                return self._settle(self._judge_alone(alarm), reported=False)
            if may_claim and (self._is_first_to_answer() or waited > _SUCCESSION_SECONDS):
                may_claim = False
                if channel.claim_report():
                    channel.publish_report(self._judge(channel, alarm))
            report = channel.report()
            if report is None:
                time.sleep(_HURRY_SECONDS)
        self._release(channel)
        self._settle(report, reported=True)

    def _is_first_to_answer(self) -> bool:
        return all(self._neighbours.cannot_answer(rank) for rank in range(self._rank))

    def _judge(self, channel: SideChannel, alarm: Alarm) -> HangReport:
        """Collects the positions, as many as come in, and logs the message."""
        deadline = time.monotonic() + _ANSWERS_SECONDS
        positions: dict[int, RankState] = {}
        missing = list(range(self._world_size))
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._neighbours.cannot_answer(rank)]
            self._note_farewells(channel)
            positions |= self._gone
            for rank in range(self._world_size):
                if rank not in positions and (position := channel.state_of(rank)):
                    positions[rank] = position
            missing = [rank for rank in missing if rank not in positions]
            time.sleep(_HURRY_SECONDS)
        self._listeners = len(positions)
        text = compose(alarm, positions, self._world_size, self._sightings(positions))
        logger.error(text, extra={"all_ranks": True})
        return HangReport(text, alarm.timed_out)

    def _judge_alone(self, alarm: Alarm, store_silence: str = "") -> HangReport:
        """What this rank can say without the others."""
        positions = self._gone | {self._rank: self._exit_notice or self._position()}
        text = compose(alarm, positions, self._world_size, self._sightings(positions), store_silence)
        return HangReport(text, alarm.timed_out)

    def _sightings(self, answered: Collection[int]) -> dict[int, ProcessStatus]:
        return {rank: self._neighbours.status(rank) for rank in range(self._world_size) if rank not in answered}

    def _settle(self, report: HangReport, *, reported: bool) -> None:
        self.reported = reported
        self.error = CollectiveTimeoutError(report.text) if report.timed_out else CollectiveError(report.text)
        self._settled.set()
        # In a thread of its own: aborting an accelerator's communicator may block, and the end must come all the same.
        self._interruption = threading.Thread(target=self._interrupt, name="zeroaccel-interrupt", daemon=True)
        self._interruption.start()

    def _end_process(self) -> None:
        """Step 4, for the process as a whole. Does not return, unless the interpreter ends first."""
        start = time.monotonic()
        if self._has_raised.wait(_RAISE_SECONDS):
            time.sleep(max(0.0, start + _EXIT_SECONDS - time.monotonic()))
        if not self.reported:
            logger.error(str(self.error), extra={"all_ranks": True})
        self._end_stopped_ranks()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)

    def _end_stopped_ranks(self) -> None:
        """The last thing before this process ends.

        Not earlier: a launcher that sees one rank end ends the others, whose `finally` blocks may still be running. And
        not before the others have seen for themselves who is stopped, where they cannot read it in the verdict.
        """
        if not self._neighbours.any_stopped():
            return
        if not self.reported:
            time.sleep(_OTHERS_LOOK_SECONDS)
        if self._neighbours.wake_and_end() and self._channel is not None:
            # The store may have been in one of them, and now closes its connections. An interpreter that ends while
            # a thread of it is about to return from the store ends with an abort.
            self._channel.await_answer(_OTHERS_LOOK_SECONDS)

    # --- the store must outlive whoever still needs it

    def _release(self, channel: SideChannel) -> None:
        if not self._released_at:
            self._released_at = time.monotonic()
            channel.release_store()

    def _may_take_the_store_away(self, channel: SideChannel) -> bool:
        waited = time.monotonic() - self._released_at
        return waited > _STAY_SECONDS or channel.released() >= self._listeners

    def _keeper_has_left(self, channel: SideChannel) -> bool:
        """Whether the keeper of the store has said farewell, and has done so long enough ago.

        For one more look the store is still needed: this rank may be about to wait for the one that has left.
        """
        if channel.store_owner not in self._gone:
            return False
        self._keeper_left_at = self._keeper_left_at or time.monotonic()
        return time.monotonic() - self._keeper_left_at > _POLL_SECONDS / 2

    def _see_the_others_off(self) -> None:
        """Waits until the interruption is over and, if this rank keeps the store, the others have read the verdict."""
        channel = self._channel
        if self._interruption is not None:
            # An interpreter that ends while a thread is inside the backend ends with an abort.
            self._interruption.join(_STAY_SECONDS)
        try:
            while channel is not None and channel.owns_store and not self._may_take_the_store_away(channel):
                time.sleep(_HURRY_SECONDS)
        except ChannelLost:
            self._channel = None

    def _position(self, left: str = "", *, failed: bool = False) -> RankState:
        waiting, finished = None if left else self._pending(), self._flight_recorder.last_finished
        return RankState(
            rank=self._rank,
            waiting=waiting.call if waiting else None,
            waited_seconds=time.monotonic() - waiting.since if waiting else 0.0,
            finished=finished.call if finished else None,
            issued=self._flight_recorder.issued(),
            recent=self._flight_recorder.recent(),
            phase=self._flight_recorder.phase,
            step=self._flight_recorder.step,
            where="" if left else main_thread_place(),
            left=left,
            failed=failed,
        )


def _reason(cause: Exception) -> str:
    """What a backend says, without its source line and its guesses: "Connection closed by peer [10.0.0.2]:5021"."""
    first_line = next(iter(str(cause).splitlines()), type(cause).__name__)
    return re.sub(r"^\[\S+\] ", "", first_line).partition(". ")[0]


# Code that is not the user's: this package's, torch's, the interpreter's and every installed library's.
_FOREIGN = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        os.path.dirname(torch.__file__),
        *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    )
)


def main_thread_place() -> str:
    """The innermost line of the user's own code, and the function it has called, if that is a library's."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:
        return ""
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith((*_FOREIGN, "<frozen")):
        frame = frame.f_back
    if frame is None:
        return _place(innermost)
    return _place(frame) if frame is innermost else f"{_place(frame)}, inside {innermost.f_code.co_name}"


def _place(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    here = os.path.join(os.getcwd(), "")
    return f"{path.removeprefix(here)}:{frame.f_lineno} in {frame.f_code.co_name}"


_FIRST = 100  # among the finalizers: before those that wait for child processes


class _ProcessEnd:
    """What is to happen when this process ends, however it does."""

    def __init__(self) -> None:
        self.watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
        self._process = os.getpid()
        self._report = sys.excepthook
        sys.excepthook = self._on_exception
        # Rather than `atexit`, which processes started by multiprocessing never run.
        Finalize(None, self._on_exit, exitpriority=_FIRST)

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # After a verdict, a RuntimeError is that verdict, or what the backend makes of connections that are closed.
        struck = [watchdog for watchdog in self.watchdogs if watchdog.error and isinstance(error, RuntimeError)]
        if not any(watchdog.reported for watchdog in struck):
            self._report(kind, error, traceback)
        self._leave(error)
        for watchdog in struck:
            # The interpreter honours this, and would end with code 1 otherwise.
            raise SystemExit(watchdog.exit_code)

    def _on_exit(self) -> None:
        # A child process of multiprocessing gets here with the exception that ends it still in flight.
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if os.getpid() != self._process:
            return  # a fork of it, which is not a rank
        if error is None:
            how = "finished and left"
        else:
            first_line = next(iter(str(error).splitlines()), "")
            how = f"left with {type(error).__name__}" + (f": {first_line}" if first_line else "")
        for watchdog in tuple(self.watchdogs):
            watchdog.leave(how, failed=error is not None)


_process_end: _ProcessEnd | None = None


def announce_end_through(watchdog: Watchdog) -> None:
    """From now on the end of this process is announced through `watchdog`, as long as that exists."""
    global _process_end
    if _process_end is None:
        _process_end = _ProcessEnd()
    _process_end.watchdogs.add(watchdog)
