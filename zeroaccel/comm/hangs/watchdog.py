"""The watchdog: a thread per rank that detects hangs, agrees with the other ranks on one report, and ends the process.

The package's docstring describes its states and how a hang ends. It reads the `FlightRecorder`, communicates through
the `SideChannel` and inspects silent ranks through `PeerProcesses`; `topology.py` makes it. This file also contains the
exit notice, which informs the other ranks' watchdogs of the end of this process, and the lookup of the line of user
code that a rank executes.
"""

from __future__ import annotations

import enum
import os
import re
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.util import Finalize
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import ClassVar

import torch

from zeroaccel.comm.hangs.flight_recorder import Call, CollectiveRecord, FlightRecorder
from zeroaccel.comm.hangs.hang_report import (
    Alarm,
    HangReport,
    Names,
    ProcessStatus,
    RankState,
    compose,
    rank_list,
)
from zeroaccel.comm.hangs.peer_processes import PeerProcesses
from zeroaccel.comm.hangs.side_channel import ChannelLost, ChannelSilent, SideChannel
from zeroaccel.errors import CollectiveError, CollectiveTimeoutError, cut_traceback
from zeroaccel.logs import logger
from zeroaccel.ops.device_threads import CPU, start_thread

_POLL_SECONDS = 1.0
_ALARM_POLL_SECONDS = 0.1  # between polls while there is an alarm
_STALL_SECONDS = 5.0  # wait after which ranks compare histories
_COLLECT_SECONDS = 3.0  # time for the ranks' states to arrive
_STEADY_SECONDS = 0.2  # wait after which a rank counts as settled
_SETTLE_SECONDS = 1.0  # time for a rank to settle; an alarm may find it between two collectives
_SUCCESSION_SECONDS = 2.0  # after which a rank other than the lowest may write the report
_REPORT_SECONDS = _SUCCESSION_SECONDS + 2 * _COLLECT_SECONDS  # after which each rank reports alone
_RAISE_SECONDS = 5.0  # time for an interrupted thread to raise; then the watchdog ends the process
_EXIT_SECONDS = 6.0  # time for the process to end by itself; then the watchdog ends it
_PEERS_LOOK_SECONDS = 1.5  # time for the other ranks to notice a stopped rank themselves
_DRAIN_SECONDS = 2.5  # time that the rank that hosts the store gives its peers to release it


class WatchdogState(enum.Enum):
    """States of a watchdog. Only its own thread changes them."""

    WATCHING = "watching"
    """Polls the store and this rank's collectives."""
    LEAVING = "leaving"
    """This process ends or has destroyed its groups: the exit notice is published, or about to be."""
    ALARMED = "alarmed"
    """There is an alarm; the watchdogs collect the ranks' states into a report."""
    REPORTED = "reported"
    """`Watchdog.error` is set: the watchdog interrupts blocked threads, and peers may still read the report."""
    ENDING = "ending"
    """The watchdog ends the process unless it ends by itself."""
    CLOSED = "closed"
    """There is nothing left to watch."""


_TRANSITIONS = {
    WatchdogState.WATCHING: {WatchdogState.LEAVING, WatchdogState.ALARMED},
    WatchdogState.LEAVING: {WatchdogState.ALARMED, WatchdogState.CLOSED},
    # Back to the previous state if the store falls silent before the report is available.
    WatchdogState.ALARMED: {WatchdogState.REPORTED, WatchdogState.WATCHING, WatchdogState.LEAVING},
    WatchdogState.REPORTED: {WatchdogState.ENDING},
    WatchdogState.ENDING: set(),
    WatchdogState.CLOSED: set(),
}


def check_transition(old: WatchdogState, new: WatchdogState) -> None:
    """Raises AssertionError for a transition that is not in the package's diagram."""
    assert new in _TRANSITIONS[old], f"a watchdog that is {old.value} cannot become {new.value}"


@dataclass(frozen=True)
class _Followed:
    """A recorder of calls that only some ranks issue: see `Watchdog.follow`."""

    name: str
    recorder: FlightRecorder
    needs: frozenset[int]
    alike: bool
    in_turn: bool


class Watchdog:
    """One per topology; its thread starts immediately and ends with `leave`.

    Args:
        flight_recorder: recorder of this rank's collectives.
        channel: this rank's end of the side channel.
        peers: the other ranks' processes.
        limit: seconds that a collective may wait; `math.inf` for no limit.
        interrupt: makes every thread that waits in a collective raise, and prevents later ones from completing.
        names: names ranks in messages.

    Attributes:
        error: the error that every later collective of this rank raises; None before there is a report.
        error_logged: True if the message of `error` has been logged, so that a traceback would only repeat it.
    """

    exit_code: ClassVar[int] = CollectiveError.exit_code

    def __init__(
        self,
        flight_recorder: FlightRecorder,
        channel: SideChannel,
        peers: PeerProcesses,
        limit: float,
        interrupt: Callable[[], None],
        names: Names = rank_list,
        device: torch.device = CPU,
    ) -> None:
        self.limit = limit
        self._device = device
        self.error: CollectiveError | None = None
        self.error_logged = False
        self._flight_recorder = flight_recorder
        self._followed: list[_Followed] = []
        self._names = names
        self._rank = channel.rank
        self._world_size = channel.world_size
        self._channel: SideChannel | None = channel  # None once the store is gone or no longer needed
        self._peers = peers
        self._interrupt = interrupt
        # Set by other threads, read by the watchdog's.
        self._backend_failure: Alarm | None = None  # from a thread of this rank whose connection broke
        self._exit_notice: RankState | None = None
        self._wake = threading.Event()  # set on a backend failure or an exit notice
        self._has_raised = threading.Event()
        # Set by the watchdog's thread; other threads wait for them.
        self._has_report = threading.Event()
        self._may_exit = threading.Event()
        # The rest belongs to the watchdog's thread.
        self._state = WatchdogState.WATCHING
        self._num_events = 0
        self._exited: dict[int, RankState] = {}
        self._compared: dict[str, CollectiveRecord] = {}  # by the name of the recorder
        self._num_store_users = channel.world_size  # number of ranks that will release the store
        self._released_at = 0.0
        self._store_owner_left_at = 0.0
        self._interruption: threading.Thread | None = None
        start_thread(self._watch, "zeroaccel-watchdog", device, daemon=True)

    # --- called by the threads that communicate

    def follow(
        self,
        name: str,
        flight_recorder: FlightRecorder,
        needs: frozenset[int],
        *,
        alike: bool = False,
        in_turn: bool = False,
    ) -> None:
        """Also watches a recorder of calls that only some ranks issue.

        Args:
            name: name of the recorder, the same on the ranks that issue the calls.
            needs: ranks that every one of its calls needs to complete.
            `alike`: True if these ranks issue the same calls. Their histories are then compared, and a rank that left
                after it issued a call does not block that call.
            in_turn: requires `alike`, and a rank that waits for one of these calls does nothing else. Two ranks that
                each wait for a call that the other has not issued are therefore deadlocked.
        """
        self._followed.append(_Followed(name, flight_recorder, needs, alike, in_turn))

    def failure(self) -> CollectiveError:
        """Returns the error to raise for a collective that is called after the report."""
        assert self.error is not None, "no failure has been reported"
        self._has_raised.set()
        return self.error

    def explain(self, entry: CollectiveRecord, cause: Exception) -> CollectiveError:
        """Returns the error to raise for a collective that the backend has given up: the hang report.

        Blocks until the report is available, at most a few seconds.
        """
        headline = f"{self._own_name} failed in {entry.call}: {_reason(cause)}"
        if self._exit_notice is None:
            self._backend_failure = Alarm(self._rank, headline, timed_out=False)
            self._wake.set()
            self._has_report.wait(_REPORT_SECONDS)
        self._has_raised.set()
        return self.error or CollectiveError(headline)

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Publishes the exit notice of this rank and ends the thread. Only the first call counts.

        The rank that hosts the store stays until its peers have released it, at most 2.5 seconds, or until a pending
        report has been published.

        Args:
            reason: text that follows the rank's name: "finished and left", "left with ValueError: ...".
        """
        if self._exit_notice is None:
            self._exit_notice = self._rank_state(exit_reason=reason, failed=failed)
            self._wake.set()
            self._may_exit.wait(_REPORT_SECONDS + _DRAIN_SECONDS)
            if self.error is not None:
                self._end_stopped_ranks()

    @property
    def left_in_order(self) -> bool:
        """True if this rank has ended without a failure and waits for nothing."""
        notice = self._exit_notice
        is_waiting = self._flight_recorder.longest_wait is not None
        return notice is not None and not notice.failed and self.error is None and not is_waiting

    def holds(self, error: BaseException) -> bool:
        """True if the report names this exception as one that the other ranks were not told of."""
        return self._flight_recorder.exception is error

    # --- the watchdog's own thread

    def _watch(self) -> None:
        """Runs in the watchdog's thread."""
        try:
            while self._state not in (WatchdogState.REPORTED, WatchdogState.CLOSED):
                self._wake.wait(_POLL_SECONDS if self._exit_notice is None else _ALARM_POLL_SECONDS)
                self._wake.clear()
                if self._exit_notice is not None and self._state is WatchdogState.WATCHING:
                    self._move(WatchdogState.LEAVING)
                self._poll()
            if self.error is not None:
                self._drain_peers()
        finally:
            self._may_exit.set()
        if self.error is not None:
            self._end_process()

    def _move(self, new: WatchdogState) -> None:
        check_transition(self._state, new)
        self._state = new

    def _poll(self) -> None:
        """Checks the store and this rank's collectives once."""
        if self._channel is None:
            return self._poll_without_store()
        try:
            self._poll_store(self._channel)
        except ChannelSilent as silence:
            # A store that is only slow must not end the job: this rank reports only its own observations, and queries
            # the store again at the next poll.
            self._abandon_report()
            self._poll_without_store(str(silence))
        except ChannelLost:
            self._abandon_report()
            self._channel = None

    def _poll_store(self, channel: SideChannel) -> None:
        if self._state is WatchdogState.LEAVING:
            if not self._released_at:
                assert self._exit_notice is not None, "a leaving rank has an exit notice"
                channel.publish_exit(self._exit_notice)
                self._release_store(channel)
            if not channel.owns_store:
                return self._move(WatchdogState.CLOSED)
        if alarm := self._poll_events(channel) or self._raise_alarm(channel):
            self._answer_alarm(channel, alarm)
        elif self._state is WatchdogState.LEAVING:
            if self._is_drained(channel):
                self._move(WatchdogState.CLOSED)
        elif self._store_owner_has_left(channel):
            self._release_store(channel)
            self._channel = None

    def _poll_without_store(self, store_silence: str = "") -> None:
        """Checks this rank alone, because the store is gone or, for the given reason, silent."""
        if alarm := self._overdue() or self._backend_failure:
            self._move(WatchdogState.ALARMED)
            self._adopt(self._report_alone(alarm, store_silence), logged=False)
        elif self._state is WatchdogState.LEAVING and not store_silence:
            # If the store is only slow, the exit notice still gets through within the time that `leave` allows.
            self._move(WatchdogState.CLOSED)

    def _abandon_report(self) -> None:
        if self._state is WatchdogState.ALARMED:
            self._move(WatchdogState.WATCHING if self._exit_notice is None else WatchdogState.LEAVING)

    # --- detection

    def _poll_events(self, channel: SideChannel) -> Alarm | None:
        """Returns the alarm if another rank has raised one since the last poll. Records exit notices on the way."""
        num_events = channel.events()
        if num_events == self._num_events:
            return None
        self._num_events = num_events
        self._note_exits(channel)
        return channel.alarm()

    def _raise_alarm(self, channel: SideChannel) -> Alarm | None:
        """Raises this rank's own alarm if there is cause. Returns the first alarm, which may be another rank's."""
        if alarm := self._overdue() or self._is_doomed(channel) or self._backend_failure:
            channel.raise_alarm(alarm)
            return channel.alarm()
        return None

    def _note_exits(self, channel: SideChannel) -> None:
        for state in channel.exits(skip=len(self._exited)):
            self._exited[state.rank] = state

    def _longest_pending(self, recorder: FlightRecorder | None = None) -> CollectiveRecord | None:
        """Returns the collective that has blocked this rank longest; by default among those that all ranks issue."""
        recorder = recorder or self._flight_recorder
        if entry := recorder.longest_wait:
            return entry
        # On an accelerator `wait` does not block the host; a probe follows one collective at a time.
        if (probe := recorder.probe) is None:
            return None
        entry, has_completed = probe
        try:
            is_pending = not has_completed()
        except RuntimeError:  # the accelerator has failed; the thread that uses it raises the error
            is_pending = False
        if is_pending:
            return entry
        recorder.probe = None
        return None

    def _blocked_in(self) -> tuple[str, CollectiveRecord | None]:
        """Returns the collective that blocks this rank, of all ranks if any, after the name of its recorder."""
        recorders = ("", self._flight_recorder), *((each.name, each.recorder) for each in self._followed)
        waits = ((name, entry) for name, recorder in recorders if (entry := self._longest_pending(recorder)))
        return next(waits, ("", None))

    def _overdue(self) -> Alarm | None:
        """Returns an alarm if a collective has waited longer than the limit."""
        if (entry := self._blocked_in()[1]) is None:
            return None
        waited = time.monotonic() - entry.since
        if waited <= self.limit:
            return None
        headline = f"{self._own_name} has waited {waited:.1f} s (the limit is {self.limit:g} s) for {entry.call}"
        return Alarm(self._rank, headline, timed_out=True)

    def _is_doomed(self, channel: SideChannel) -> Alarm | None:
        """Returns an alarm if a collective can never complete, before the limit has passed."""
        if (entry := self._longest_pending()) is None:
            return self._is_deserted() or self._has_parted(channel)
        call = entry.call
        if exited := [rank for rank, state in self._exited.items() if not state.has_issued(call)]:
            headline = f"{self._names(exited)} left the job while {self._own_name} waits for {call}"
            return Alarm(self._rank, headline, timed_out=False)
        if not self._is_long(entry):
            return None
        return self._desynced(channel, entry) or self._deadlocked(channel, entry) or self._crossed(channel, entry)

    def _is_long(self, entry: CollectiveRecord) -> bool:
        """True if a wait is long enough to compare histories, which takes a few round trips."""
        return time.monotonic() - entry.since > min(_STALL_SECONDS, self.limit / 2)

    def _is_deserted(self) -> Alarm | None:
        """Returns an alarm if a call of a followed recorder waits for ranks that have left."""
        for followed in self._followed:
            gone = followed.needs & self._exited.keys()
            if not gone or (entry := self._longest_pending(followed.recorder)) is None:
                continue
            call = entry.call
            if exited := [
                rank for rank in gone if not (followed.alike and self._exited[rank].has_issued(call, followed.name))
            ]:
                headline = f"{self._names(exited)} left the job while {self._own_name} waits for {call}"
                return Alarm(self._rank, headline, timed_out=False)
        return None

    def _has_parted(self, channel: SideChannel) -> Alarm | None:
        """Returns an alarm if a call of a followed recorder waits for ranks that issued other calls."""
        for followed in self._followed:
            entry = self._longest_pending(followed.recorder) if followed.alike else None
            if entry is None or not self._is_long(entry):
                continue
            if alarm := self._desynced(channel, entry, followed.name):
                return alarm
            if followed.in_turn and (alarm := self._crossed(channel, entry, followed.name)):
                return alarm
        return None

    def _desynced(self, channel: SideChannel, entry: CollectiveRecord, group: str = "") -> Alarm | None:
        """Returns an alarm if another rank stalled at the same number, but in another call or with another history."""
        if entry is self._compared.get(group):
            return None
        self._compared[group] = entry
        if self._rank == 0 or any(followed.in_turn for followed in self._followed):
            state = self._rank_state()
            # The state belongs to a single moment only if the wait lasted while it was taken.
            if self._blocked_in() == (group, entry):
                channel.publish_stall(state)
        other, is_same = channel.compare_history(entry, group)
        if is_same:
            return None
        headline = f"{self._names((other, self._rank))} have issued different collectives by {entry.kind} #{entry.seq}"
        return Alarm(self._rank, headline, timed_out=False)

    def _deadlocked(self, channel: SideChannel, entry: CollectiveRecord) -> Alarm | None:
        """Returns an alarm if this rank and rank 0 are each blocked in a call that the other has not issued.

        The state of rank 0 may be outdated. In that case rank 0 has completed that call, which every rank must have
        issued; only a broadcast can be over on the first rank before the last one issues it. Comparing with rank 0 is
        enough: of two ranks that have desynced, one has desynced from rank 0.
        """
        if self._rank == 0 or self._flight_recorder.longest_wait is not entry:
            return None
        first = channel.stall_of(0)
        if first is None or first.waiting is None or first.waiting_in or first.waiting.op.startswith("broadcast"):
            return None
        ours, theirs = entry.call, first.waiting
        if first.has_issued(ours) or self._flight_recorder.issued()[theirs.kind] >= theirs.seq:
            return None
        headline = f"{self._names([0])} waits for {theirs} while {self._own_name} waits for {ours}"
        return Alarm(self._rank, headline, timed_out=False)

    def _crossed(self, channel: SideChannel, entry: CollectiveRecord, group: str = "") -> Alarm | None:
        """Returns an alarm if this rank and an `in_turn` peer each wait for a call that the other has not issued.

        One of the calls belongs to an `in_turn` recorder that both ranks share. The other one may belong to the same
        recorder, or be a control call of all ranks. Each needs both ranks, so neither rank has moved since its state
        was taken.
        """
        ours = entry.call
        if not group and not _needs_all(ours):
            return None
        own_names = {followed.name: followed for followed in self._followed if followed.in_turn}
        peers = {rank for followed in own_names.values() for rank in followed.needs} - {self._rank}
        for rank in sorted(peers):
            other = channel.stall_of(rank)
            if other is None or other.waiting is None or other.has_issued(ours, group):
                continue
            theirs, their_group = other.waiting, other.waiting_in
            followed = own_names.get(their_group)
            if followed is None and (their_group or not group or not _needs_all(theirs)):
                continue
            recorder = self._flight_recorder if followed is None else followed.recorder
            if recorder.issued()[theirs.kind] >= theirs.seq:
                continue
            headline = f"{self._names([rank])} waits for {theirs} while {self._own_name} waits for {ours}"
            return Alarm(self._rank, headline, timed_out=False)
        return None

    # --- from the alarm to the report

    def _answer_alarm(self, channel: SideChannel, alarm: Alarm) -> None:
        """Steps 2 and 3 of the package's docstring: publishes this rank's state, and writes or awaits the report."""
        self._move(WatchdogState.ALARMED)
        channel.publish_state(self._settled_state(alarm))
        start = time.monotonic()
        report: HangReport | None = None
        may_claim = True
        while report is None:
            waited = time.monotonic() - start
            if waited > _REPORT_SECONDS:
                return self._adopt(self._report_alone(alarm), logged=False)
            # The lowest rank that can answer writes the report. If it does not (stuck in native code), any other rank
            # may, and the store admits one of them.
            if may_claim and (all(map(self._peers.cannot_answer, range(self._rank))) or waited > _SUCCESSION_SECONDS):
                may_claim = False
                if channel.claim_report():
                    channel.publish_report(self._write_report(channel, alarm))
            report = channel.report()
            if report is None:
                time.sleep(_ALARM_POLL_SECONDS)
        self._release_store(channel)
        self._adopt(report, logged=True)

    def _settled_state(self, alarm: Alarm) -> RankState:
        """Returns this rank's state after it has stopped moving, or after a short time.

        Another rank may raise an alarm while this one still runs towards the collective in which it will wait. Its
        position on the way would not explain the hang.
        """
        deadline = time.monotonic() + (_SETTLE_SECONDS if alarm.rank != self._rank else 0.0)
        while self._exit_notice is None and time.monotonic() < deadline:
            _, entry = self._blocked_in()
            if entry is not None and time.monotonic() - entry.since >= _STEADY_SECONDS:
                break
            time.sleep(_STEADY_SECONDS / 4)
        return self._exit_notice or self._rank_state()

    def _write_report(self, channel: SideChannel, alarm: Alarm) -> HangReport:
        """Collects the states of the ranks that answer in time, and logs the report."""
        deadline = time.monotonic() + _COLLECT_SECONDS
        states: dict[int, RankState] = {}
        missing = list(range(self._world_size))
        while missing and time.monotonic() < deadline:
            # The report does not wait for ranks that are stopped or gone.
            missing = [rank for rank in missing if not self._peers.cannot_answer(rank)]
            self._note_exits(channel)
            states |= self._exited
            for rank in range(self._world_size):
                if rank not in states and (state := channel.state_of(rank)):
                    states[rank] = state
            missing = [rank for rank in missing if rank not in states]
            time.sleep(_ALARM_POLL_SECONDS)
        self._num_store_users = len(states)
        text = compose(alarm, states, self._world_size, self._silent_statuses(states), names=self._names)
        logger.error(text, extra={"all_ranks": True})
        return HangReport(text, alarm.timed_out)

    def _report_alone(self, alarm: Alarm, store_silence: str = "") -> HangReport:
        """Returns a report without the states of other running ranks."""
        states = self._exited | {self._rank: self._exit_notice or self._rank_state()}
        text = compose(alarm, states, self._world_size, self._silent_statuses(states), store_silence, self._names)
        return HangReport(text, alarm.timed_out)

    def _silent_statuses(self, answered: Collection[int]) -> dict[int, ProcessStatus]:
        return {rank: self._peers.status(rank) for rank in range(self._world_size) if rank not in answered}

    def _adopt(self, report: HangReport, *, logged: bool) -> None:
        """Makes every collective raise the report, and interrupts the threads that are blocked in one."""
        self.error_logged = logged
        self.error = CollectiveTimeoutError(report.text) if report.timed_out else CollectiveError(report.text)
        self._move(WatchdogState.REPORTED)
        self._has_report.set()
        # In a separate thread: aborting an accelerator's communicator may block, and the process must end anyway.
        self._interruption = start_thread(self._interrupt, "zeroaccel-interrupt", self._device, daemon=True)

    # --- the end of the process

    def _end_process(self) -> None:
        """Step 4 of the package's docstring. Does not return, unless the interpreter ends first."""
        self._move(WatchdogState.ENDING)
        start = time.monotonic()
        if self._has_raised.wait(_RAISE_SECONDS):
            time.sleep(max(0.0, start + _EXIT_SECONDS - time.monotonic()))
        if not self.error_logged:
            logger.error(str(self.error), extra={"all_ranks": True})
        self._end_stopped_ranks()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)

    def _end_stopped_ranks(self) -> None:
        """Wakes and ends stopped ranks of this machine, as the last action before this process ends.

        Not earlier: a launcher that sees one rank end terminates the others, whose `finally` blocks may still be
        running. If each rank reports alone, the others first need time to see which rank is stopped.
        """
        if not self._peers.any_stopped():
            return
        if not self.error_logged:
            time.sleep(_PEERS_LOOK_SECONDS)
        if self._peers.wake_and_end() and self._channel is not None:
            # One of them may have hosted the store, which now closes its connections. An interpreter that ends while
            # one of its threads is about to return from the store aborts.
            self._channel.await_answer(_PEERS_LOOK_SECONDS)

    # --- the store must outlive the ranks that still need it

    def _release_store(self, channel: SideChannel) -> None:
        if not self._released_at:
            self._released_at = time.monotonic()
            channel.release_store()

    def _is_drained(self, channel: SideChannel) -> bool:
        """True if the process of the store may end: its peers have released the store, or their time is up."""
        waited = time.monotonic() - self._released_at
        return waited > _DRAIN_SECONDS or channel.num_released() >= self._num_store_users

    def _store_owner_has_left(self, channel: SideChannel) -> bool:
        """True if the rank that hosts the store published its exit long enough ago.

        The store is still needed for one more poll: this rank may be about to wait for the one that has left.
        """
        if channel.store_owner not in self._exited:
            return False
        self._store_owner_left_at = self._store_owner_left_at or time.monotonic()
        return time.monotonic() - self._store_owner_left_at > _POLL_SECONDS / 2

    def _drain_peers(self) -> None:
        """Waits until the interruption is over and, if this rank hosts the store, the others have read the report."""
        channel = self._channel
        if self._interruption is not None:
            # An interpreter that ends while a thread is inside the backend aborts.
            self._interruption.join(_DRAIN_SECONDS)
        try:
            while channel is not None and channel.owns_store and not self._is_drained(channel):
                time.sleep(_ALARM_POLL_SECONDS)
        except ChannelLost:
            self._channel = None

    @property
    def _own_name(self) -> str:
        return self._names([self._rank])

    def _rank_state(self, exit_reason: str = "", *, failed: bool = False) -> RankState:
        recorder = self._flight_recorder
        waiting_in, waiting = ("", None) if exit_reason else self._blocked_in()
        recorders = (recorder, *(followed.recorder for followed in self._followed))
        finished = max(
            (entry for each in recorders if (entry := each.last_finished)), key=lambda entry: entry.since, default=None
        )
        return RankState(
            rank=self._rank,
            waiting=waiting.call if waiting else None,
            waiting_in=waiting_in,
            waited_seconds=time.monotonic() - waiting.since if waiting else 0.0,
            finished=finished.call if finished else None,
            issued=recorder.issued(),
            issued_in_groups={followed.name: followed.recorder.issued() for followed in self._followed},
            recent=recorder.recent(),
            phase=recorder.phase,
            step=recorder.step,
            activity=recorder.activity,
            where="" if exit_reason else user_frame(),
            exit_reason=exit_reason,
            failed=failed,
            exception=_told(recorder.exception),
        )


def _needs_all(call: Call) -> bool:
    """True if no rank can complete a call of all ranks before every rank has issued it."""
    return call.kind == "control" and not call.op.startswith("broadcast")


def _told(error: Exception | None) -> str:
    """Returns "ValueError: message, at file:line in function", with the user's own line; "" for None."""
    if error is None:
        return ""
    first_line = next(iter(str(error).splitlines()), "")
    frames = list(walk_tb(error.__traceback__))
    user_frames = [(frame, line) for frame, line in frames if not _is_library(frame)] or frames
    place = f", at {_location(*user_frames[-1])}" if user_frames else ""
    return type(error).__name__ + (f": {first_line}" if first_line else "") + place


def _reason(cause: Exception) -> str:
    """Returns a backend's message without source line and advice: "Connection closed by peer [10.0.0.2]:5021"."""
    first_line = next(iter(str(cause).splitlines()), type(cause).__name__)
    return re.sub(r"^\[\S+\] ", "", first_line).partition(". ")[0]


# --- the exit notice: publishes the end of this process to the ranks that may be waiting for it

_FINALIZER_PRIORITY = 100  # before the finalizers that wait for child processes


class _ExitNotice:
    """Publishes an ordinary end or an uncaught exception through every watchdog of the process.

    A hang report is logged once for all ranks, so the process then ends silently with the report's exit code. A process
    that is killed publishes nothing; its peers notice the closed connection. Patches `sys.excepthook` once, until the
    process ends.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self.watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        # `Finalize` instead of `atexit`, which does not run in processes started by multiprocessing.
        Finalize(None, self._on_exit, exitpriority=_FINALIZER_PRIORITY)

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # After a report, a RuntimeError is the report itself, or the backend's error for the closed connections.
        failing = [
            watchdog
            for watchdog in self.watchdogs
            if watchdog.error and isinstance(error, RuntimeError) and not watchdog.holds(error)
        ]
        if not any(watchdog.error_logged for watchdog in failing):
            cut_traceback(error)
            self._previous_hook(kind, error, traceback)
        self._leave(error)
        for watchdog in failing:
            # The interpreter uses this exit code; without it, the process would end with code 1.
            raise SystemExit(watchdog.exit_code)

    def _on_exit(self) -> None:
        # A child process of multiprocessing arrives here with the exception that ends it still active.
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None
        self._leave(error)
        self._then()

    def _leave(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid:
            return  # in a fork, which is not a rank
        if error is None:
            reason = "finished and left"
        else:
            first_line = next(iter(str(error).splitlines()), "")
            reason = f"left with {type(error).__name__}" + (f": {first_line}" if first_line else "")
        for watchdog in tuple(self.watchdogs):
            watchdog.leave(reason, failed=error is not None)


_exit_notice: _ExitNotice | None = None


def send_exit_notice_through(watchdog: Watchdog, then: Callable[[], None]) -> None:
    """Publishes the end of this process through `watchdog`, as long as that object exists.

    Args:
        then: called afterwards; only the first call's function is used.
    """
    global _exit_notice
    if _exit_notice is None:
        _exit_notice = _ExitNotice(then)
    _exit_notice.watchdogs.add(watchdog)


# --- the line of user code that the main thread executes

# Library code: this package, torch, the standard library and every installed package.
_LIBRARY_FOLDERS = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")),
        os.path.dirname(torch.__file__),
        *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    )
)


def user_frame() -> str:
    """Returns the innermost line of the user's own code, and the library function that it has called, if any.

    The format is "file:line in function". Reads the main thread's frames from another thread without running code.
    """
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:
        return ""
    frame: FrameType | None = innermost
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return _location(innermost)
    return _location(frame) if frame is innermost else f"{_location(frame)}, inside {innermost.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARY_FOLDERS, "<frozen"))


def _location(frame: FrameType, line: int | None = None) -> str:
    path = frame.f_code.co_filename
    here = os.path.join(os.getcwd(), "")
    return f"{path.removeprefix(here)}:{line or frame.f_lineno} in {frame.f_code.co_name}"
