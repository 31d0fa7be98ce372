"""States in the memory of the machines: saved every few steps, and available after the launcher has restarted ranks.

The launcher owns the memory, a folder in an in-memory file system, and removes it when the job ends: states outlive the
ranks, but not the job. States have the same format and commit as on disk (`run_state.py`): if a rank dies while writing
a state, the previous state remains. Each of several machines has the files of its own ranks and copies of the files of
another machine (`peer_copies.py`). `RunSaving` calls this module between two batches, and selects the state from which
a run resumes.

[Note: owners of states] A script may train several times: folds, sweeps, pretraining and fine-tuning. States belong to
an owner: a name, which is a digest of the training, and the number of earlier owners of that name in this process. A
run only resumes from the states of its owner. Its first state removes those of owners that have ended, which start
again, or from the disk, if ranks are lost later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from zeroaccel.accelerate.peer_copies import FoundState, PeerCopies, step_of
from zeroaccel.accelerate.project import ProjectConfiguration, saved_states
from zeroaccel.checkpoint.rank_file import is_part_of_a_save
from zeroaccel.checkpoint.save import OVERWRITTEN, Part, Save
from zeroaccel.checkpoint.save_plan import saved_nbytes
from zeroaccel.comm.agree import agree_or_raise, agreed, from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.environment import launcher_memory
from zeroaccel.config.schema import PeerStates
from zeroaccel.engine import EngineBase
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import log_always, log_once, logger
from zeroaccel.offload.page_locked import free_nbytes
from zeroaccel.ops.device_threads import start_thread

MOST_COST = 0.02
"""Maximum share of the training time that states in memory take, if their interval is measured."""

_FIRST_INTERVAL = 2
_STEPS_COUNTED, _STATES_COUNTED = 64, 5
_WRITTEN = "written_"  # prefix of a folder that is not a complete state yet; the step follows


class StatePart(Protocol):
    """The parts of a run that this rank saves besides its engines. The constructor prepares or writes small parts.

    Attributes:
        name: name of this rank's file in the folder of the state.
    """

    name: str

    def write(self) -> None:
        """Writes this rank's file, in a thread."""

    def complete(self) -> None:
        """Makes the folder a complete state after every rank has written all its files. (all ranks)"""


class StateSave:
    """A state whose files a thread writes while training continues. (created by all ranks)

    Life cycle: 1. `write` in a thread of each rank; 2. `complete` (all ranks) after all have written, or `abandon`.

    Args:
        engines: tag in `folder` -> engine.

    Attributes:
        device: device that the thread uses.
        names: relative paths of this rank's files.
    """

    def __init__(
        self,
        folder: Path,
        engines: Mapping[str, EngineBase],
        run_part: StatePart,
        device: torch.device,
    ) -> None:
        self._part = run_part
        self._saves: list[Save] = []
        self._written: list[Part] = []
        self.device = device
        try:
            for tag, engine in engines.items():
                self._saves.append(engine.checkpointer.begin_save(folder, tag))
        except Exception:
            self.abandon()
            raise
        names = [f"{save.tag}/{save.writer.path.name}" for save in self._saves]
        self.names: Sequence[str] = [*names, run_part.name]

    def write(self) -> None:
        """Writes this rank's files. Training may change tensors as soon as their values are copied."""
        try:
            self._written = [save.write() for save in self._saves]
            self._part.write()
        finally:
            for save in self._saves:
                save.writer.copied.set()

    def complete(self) -> None:
        """Makes the folder a complete state. (all ranks)"""
        for save, description in zip(self._saves, self._written, strict=True):
            save.commit_together(description)
        self._part.complete()

    def abandon(self) -> None:
        """Removes this rank's files and lets training change the tensors; a call of `write` must have ended."""
        for save in self._saves:
            save.abandon()


@dataclass(frozen=True)
class _Moment:
    """A moment between two batches: the number of steps so far, and the time in seconds."""

    num_steps: int
    time: float


class _Writing:
    """A thread that writes this rank's files of a state and exchanges copies with other machines.

    Attributes:
        error: the error that ended it; None without an error, and while it runs.
    """

    def __init__(self, save: StateSave, folder: Path, peers: PeerCopies, begin: _Moment) -> None:
        self.save, self.folder, self.begin = save, folder, begin
        self.error: Exception | None = None
        self._peers = peers
        self._thread = start_thread(self._run, "state in memory", save.device)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self.save.write()
        except Exception as error:
            self.error = error
        try:
            self._peers.send(self.folder, self.save.names if self.error is None else None)
        except (OSError, RuntimeError) as error:
            self.error = self.error or CheckpointError(f"{self.folder}: cannot be copied ({error})")


@dataclass
class _StateOwner:
    """An owner of states in this process, see [Note: owners of states].

    Attributes:
        folder: folder of its states, in the memory of this machine's launcher.
    """

    folder: Path
    states: weakref.ref[MemoryStates]

    @property
    def has_ended(self) -> bool:
        states = self.states()
        return states is None or states.owner is not self


_owners: list[_StateOwner] = []  # of this process, in order


def digest_of(facts: object) -> str:
    """Returns a digest of plain data, for the name of an owner of states."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class MeasuredInterval:
    """Measures the number of steps between two states at which they take `MOST_COST` of the training time.

    The cost of a state is the extra time of the steps during its saving, compared with steps without a state: waiting,
    and processor time of its threads. The measurement uses medians of the last steps and states, because a pause for
    an evaluation is not a step, and because the first state allocates its memory.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS_COUNTED)
        self._states: deque[tuple[int, float, float]] = deque(maxlen=_STATES_COUNTED)

    def note_step(self, seconds: float) -> None:
        """Records the time of a step without a state."""
        self._steps.append(seconds)

    def note_state(self, steps: int, seconds: float, blocked_seconds: float) -> None:
        """Records a complete state whose saving began `steps` steps ago.

        Args:
            seconds: time since saving began.
            blocked_seconds: part of it during which training waited.
        """
        self._states.append((steps, seconds, blocked_seconds))

    @property
    def step_seconds(self) -> float:
        """Median time in seconds of a step without a state."""
        return max(statistics.median(self._steps), 1e-9)

    @property
    def state_seconds(self) -> float:
        """Median cost of a state in seconds, at least the time that training waited for it."""
        step = self.step_seconds
        costs = [max(blocked, seconds - steps * step) for steps, seconds, blocked in self._states]
        return statistics.median_high(costs)

    @property
    def interval(self) -> int:
        """Number of steps from the end of a state to the next one; at least the steps during the last state."""
        beside = self._states[-1][0]
        return max(1, beside, math.ceil(self.state_seconds / (MOST_COST * self.step_seconds)))


class MemoryStates:
    """The states that one process group keeps in folders of the launchers, one per machine. (calls of all ranks)

    The newest state is kept, and the previous one until the next save overwrites its files. If the memory does not
    suffice, the object logs a warning and saves no more states.

    Life cycle: 1. `belong_to`; 2. `has_newest`, then `open` and `fetch`; 3. `at_batch`; 4. `close`.

    Args:
        memory: folder in memory of this machine's launcher.
        settings: interval and memory limit. With "auto", the interval is measured so that states take at most
            `MOST_COST` of the time.
        save: function `save(folder, step)` that begins a state. (all ranks)

    Attributes:
        interval: number of steps until the next state.
        place: name of the machines with the memory, for messages.
        owner: the owner of the states; None before `belong_to` and after `close`.
    """

    def __init__(
        self, memory: Path, settings: PeerStates, save: Callable[[Path, int], StateSave], collectives: Collectives
    ) -> None:
        self._memory = memory
        self.owner: _StateOwner | None = None
        self._name = ""
        self._is_measured = settings.interval == "auto"
        self.interval = _FIRST_INTERVAL if settings.interval == "auto" else int(settings.interval)
        self._limit = settings.memory
        self._save = save
        self._collectives = collectives
        self._peers = PeerCopies(collectives, memory)
        machines = self._peers.num_machines
        self.place = "the machine" if machines == 1 else f"{machines} machines"
        self._at: _Moment | None = None  # start of the current interval
        self._writing: _Writing | None = None
        self._last: _Moment | None = None  # when the last step began
        self._costs = MeasuredInterval()
        self._blocked = 0.0  # seconds that training waited for the current state
        self._is_on = True
        self._found: FoundState | None = None

    def belong_to(self, name: str) -> None:
        """Makes the states those of a new owner, unless the name is still the same. (all ranks)

        Args:
            name: the same on all ranks, and on those that the launcher starts again.
        """
        if name == self._name:
            return
        if self.owner is not None:
            self._give_up()
        number = sum(owner.folder.name.rpartition("_")[0] == name for owner in _owners)
        self._name, self._at = name, None
        self.owner = _StateOwner(self._memory / f"{name}_{number}", weakref.ref(self))
        _owners.append(self.owner)
        self._project = ProjectConfiguration(str(self.owner.folder), total_limit=1)
        self._folder = self.owner.folder / "checkpoints"
        self._overwritten = self._folder / OVERWRITTEN

    def reserve(self, engines: Collection[EngineBase]) -> None:
        """Checks that every machine has enough memory; otherwise logs a warning and disables states on all machines.

        Args:
            engines: engines that the states contain.
        """
        nbytes = 0
        with agreed(self._collectives, "states in memory: size"):
            nbytes = sum(saved_nbytes(engine.checkpointer.state()) for engine in engines)
        reads_all = any(not engine.settings.plan.optimizer for engine in engines)
        if self._peers.is_first:  # all ranks have ended the work of these owners
            for owner in _ended():
                _remove_parts(owner.folder / "checkpoints")
        folders = [self._folder, *(owner.folder for owner in _ended())]
        earlier = sum(path.stat().st_size for each in folders for path in each.rglob("*") if path.is_file())
        free = earlier + min(shutil.disk_usage(self._memory).free, free_nbytes())
        short = self._peers.short_of_room(nbytes, free, self._limit, reads_all=reads_all)
        self._is_on = not short
        if short:
            logger.warning("no states in memory: %s; training continues without them", short)

    def has_newest(self, other: Callable[[], tuple[object, int | None]]) -> bool:
        """Returns True if memory holds an intact state and the state in `other` is not newer; logs the comparison.

        Args:
            other: returns the newest state outside the memory and its step, or None for both. Called on rank 0.
        """
        states = saved_states(self._project)
        self._found = self._peers.newest(states)
        if self._found is None:
            if any(self._collectives.gather_objects(bool(states), "states in memory: any")):
                name, _ = from_rank_0(self._collectives, other, "states in memory: another state")
                rest = "the run starts anew" if name is None else f"resuming from {name}"
                log_always(f"the memory of {self.place} has no intact state; {rest}")
            return False
        steps = step_of(self._found.name)
        name, steps_of_other = from_rank_0(self._collectives, other, "states in memory: another state")
        rest, is_older = "there is no other state", False
        if steps_of_other is not None:
            is_older = steps_of_other > steps
            rest = f"{name} is {abs(steps - steps_of_other)} steps {'newer, so it is taken' if is_older else 'older'}"
        log_always(f"{'skipped' if is_older else 'resuming from'} the memory of {self.place}, step {steps}; {rest}")
        return not is_older

    def open(self) -> Path:
        """Copies the files that all ranks read and returns this machine's folder of the state from `has_newest`."""
        assert self._found is not None, "there is no state in memory"
        self._peers.fetch_common(self._folder / self._found.name, self._found)
        return self._folder / self._found.name

    def fetch(self, to_read: Callable[[], Collection[str]]) -> None:
        """Completes the folder that `open` has returned.

        Args:
            to_read: returns the files of single ranks that this rank reads.
        """
        assert self._found is not None, "there is no state in memory"
        self._peers.fetch_own(self._folder / self._found.name, self._found, to_read)

    def discard(self) -> None:
        """Deletes the state from `has_newest`, which does not fit the run. (all ranks)"""
        assert self._found is not None, "there is no state in memory"
        if self._peers.is_first:
            shutil.rmtree(self._folder / self._found.name, ignore_errors=True)
        self._found = None

    def at_batch(self, num_steps: int, micro_step: int) -> None:
        """Begins a state after `interval` steps, or completes a written state. Called between two batches.

        Args:
            num_steps: number of steps of all engines so far.
            micro_step: the accelerator's `step`, which is passed to `save`.
        """
        now = time.monotonic()
        at = self._at
        if at is None or num_steps < at.num_steps:
            at = self._begin_counting(num_steps)
        if not self._is_on:
            return
        try:
            if self._writing is None:
                if self._last is not None and num_steps > self._last.num_steps:
                    self._costs.note_step((now - self._last.time) / (num_steps - self._last.num_steps))
                if num_steps - at.num_steps >= self.interval:
                    self._begin(num_steps, micro_step, now)
            elif self._is_written(self._writing):
                self._complete(self._writing, num_steps, now)
        except CheckpointError as error:
            logger.warning("no more states in memory: %s", error)
            self._is_on = False
            self._give_up()
        self._last = _Moment(num_steps, time.monotonic())
        self._blocked += self._last.time - now

    def _begin(self, num_steps: int, micro_step: int, now: float) -> None:
        self._at = at = _Moment(num_steps, now)
        self._blocked = 0.0
        self._peers.connect()
        if self._peers.is_first:  # the collectives of the save follow
            self._give_to_next_save(saved_states(self._project)[:-1])
        folder = self._folder / f"{_WRITTEN}{num_steps}"
        self._writing = _Writing(self._save(folder, micro_step), folder, self._peers, at)

    def _is_written(self, writing: _Writing) -> bool:
        """Returns True if all ranks have written and copied their files. (all ranks)"""
        standing = torch.tensor([not writing.is_over, writing.error is not None]).int()
        self._collectives.all_reduce(standing, "max", "states in memory: progress")
        is_written = not standing[0].item()
        if is_written and standing[1].item():
            agree_or_raise(self._collectives, writing.error, "states in memory: files")
        return is_written

    def _complete(self, writing: _Writing, num_steps: int, called: float) -> None:
        begin = writing.begin
        writing.save.complete()
        self._peers.spread(writing.folder, self._folder / f"checkpoint_{begin.num_steps}")
        self._writing = None
        if self._peers.is_first:
            for owner in _ended():
                shutil.rmtree(owner.folder, ignore_errors=True)
        if not self._is_measured:
            return
        now = time.monotonic()
        self._costs.note_state(num_steps - begin.num_steps, now - begin.time, self._blocked + now - called)
        self.interval = from_rank_0(self._collectives, lambda: self._costs.interval, "interval of states in memory")
        self._at = _Moment(num_steps, now)

    def _give_to_next_save(self, states: Sequence[Path]) -> None:
        """Makes the next save overwrite the last state in `states` instead of allocating memory."""
        for state in states:
            shutil.rmtree(self._overwritten, ignore_errors=True)
            state.rename(self._overwritten)
        for path in self._overwritten.rglob("*"):
            if path.is_file() and not is_part_of_a_save(path.name):
                path.unlink()

    def _give_up(self) -> None:
        """Removes the files of an incomplete state and the files that the next save would overwrite. (all ranks)"""
        self._abandon()
        self._collectives.barrier("states in memory: removed")
        if self._peers.is_first:
            _remove_parts(self._folder)

    def close(self) -> None:
        """Abandons an incomplete state, and ends the owner of the states."""
        self._abandon()
        self.owner, self._name = None, ""

    def _abandon(self) -> None:
        """Waits for this rank's thread and abandons its files, which are not a complete state."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()
            writing.save.abandon()

    def _begin_counting(self, num_steps: int) -> _Moment:
        """Starts counting here and removes states of later steps, which belong to an earlier run."""
        self._at = at = _Moment(num_steps, time.monotonic())
        self._last = None
        self._give_up()
        if self._peers.is_first:
            for path in saved_states(self._project):
                if step_of(path.name) > num_steps:
                    shutil.rmtree(path, ignore_errors=True)
        return at


def _ended() -> list[_StateOwner]:
    return [owner for owner in _owners if owner.has_ended]


def _remove_parts(folder: Path) -> None:
    """Removes what is not a complete state from a folder of states."""
    for path in (*folder.glob(f"{_WRITTEN}*"), folder / OVERWRITTEN):
        shutil.rmtree(path, ignore_errors=True)


def folder_for_states(collectives: Collectives, asked: str) -> Path | None:
    """Returns the launcher's folder in memory; None, with a warning, if a machine has no such folder. (all ranks)

    Args:
        asked: the setting that enables states in memory, for the warning.
    """
    folder = launcher_memory()
    have = collectives.gather_objects(folder is not None, "states in memory")
    if all(have):
        return folder
    without = [rank for rank, has in enumerate(have) if not has]
    who = collectives.named(without) if any(have) else "this job"
    why, fix = f"no launcher keeps memory for {who}", "start it with `zeroaccel launch --max_restarts N`"
    log_once(logging.WARNING, f"{asked} has no effect: {why}; {fix}")
    return None
