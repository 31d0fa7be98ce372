"""States in the memory of the machines: saved every few steps, and there when the launcher starts lost ranks again.

The launcher owns the memory, a folder of a file system in it, and removes it when the job ends; so states outlive the
ranks and not the job. A state has the format and the commit of every other (`run_state.py`): a rank that dies while one
is written leaves the one before. On several machines each has the files of its own ranks and copies of another
machine's (`peer_copies.py`). `RunSaving` decides when it is between two batches and which state a run resumes from.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from zeroaccel.accelerate.peer_copies import PeerCopies, Sizes, step_of
from zeroaccel.accelerate.project import ProjectConfiguration, prune_states, saved_states
from zeroaccel.comm.agree import from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.config.schema import PeerStates
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import logger
from zeroaccel.offload.page_locked import free_nbytes

MOST_COST = 0.02
"""Of the time of training, what all states in memory together take where their interval is measured."""

_FIRST_INTERVAL = 2


class MemoryStates:
    """The states that one process group keeps in folders of the launchers, one per machine. (calls of all ranks)

    The newest one stays, and the one before until the newest is complete. Where the memory does not suffice, a warning
    says so and no more states are saved.

    Args:
        folder: of this machine's launcher, in memory.
        settings: interval and memory; an interval is measured so that states take at most `MOST_COST` of the time.
        save: `save(folder, step)` writes a complete state.

    Attributes:
        interval: steps until the next state.
        place: whose memory it is, for messages.
    """

    def __init__(
        self, folder: Path, settings: PeerStates, save: Callable[[Path, int], object], collectives: Collectives
    ) -> None:
        self._project = ProjectConfiguration(str(folder), total_limit=1)
        self._folder = folder / "checkpoints"
        self._is_measured = settings.interval == "auto"
        self.interval = _FIRST_INTERVAL if settings.interval == "auto" else int(settings.interval)
        self._limit = settings.memory
        self._save = save
        self._collectives = collectives
        self._peers = PeerCopies(collectives, folder)
        machines = self._peers.num_machines
        self.place = "the machine" if machines == 1 else f"{machines} machines"
        self._last: tuple[int, float] | None = None  # number of steps and time at the last state
        self._start = self._spent = 0.0  # time at the first step, and seconds of all states since
        self._is_on = True
        self._found: tuple[str, list[Sizes]] | None = None

    def reserve(self, own_nbytes: int, *, reads_all: bool) -> None:
        """Sees to it that the machines have room; where one has not, a warning says so, and none saves.

        Args:
            own_nbytes, reads_all: as for `PeerCopies.short_of_room`.
        """
        earlier = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        free = earlier + min(shutil.disk_usage(self._folder.parent).free, free_nbytes())
        short = self._peers.short_of_room(own_nbytes, free, self._limit, reads_all=reads_all)
        self._is_on = not short
        if short:
            logger.warning("no states in memory: %s; training goes on without", short)

    def newest(self) -> int | None:
        """The step of the newest complete state."""
        self._found = self._peers.newest(saved_states(self._project))
        return None if self._found is None else step_of(self._found[0])

    def fetch(self, to_read: Callable[[Path], Collection[str]]) -> Path:
        """The folder of the state that `newest` has found, on this machine.

        Args:
            to_read: which files of single ranks in the folder this rank reads.
        """
        assert self._found is not None, "there is no state in memory"
        name, machines = self._found
        folder = self._folder / name
        self._peers.fetch(folder, machines, lambda: to_read(folder))
        return folder

    def save_if_due(self, num_steps: int, micro_step: int) -> None:
        """Saves if `interval` steps have gone by.

        Args:
            num_steps: of all engines so far.
            micro_step: as for `save`.
        """
        begin = time.monotonic()
        if self._last is None or num_steps < self._last[0]:
            self._begin(num_steps)
        assert self._last is not None, "counted from nowhere"
        steps = num_steps - self._last[0]
        if not self._is_on or steps < self.interval:
            return
        written = self._folder / f"written_{num_steps}"
        try:
            self._save(written, micro_step)
            self._peers.spread(written, self._folder / f"checkpoint_{num_steps}")
        except CheckpointError as error:
            logger.warning("no more states in memory: %s", error)
            self._is_on = False
            if self._peers.is_first:
                shutil.rmtree(written, ignore_errors=True)
            return
        end = time.monotonic()
        if self._is_measured:
            per_step, cost = (begin - self._last[1]) / steps, end - begin
            self._spent += cost
            until = interval_of(self._spent + cost, end - self._start, per_step)
            self.interval = from_rank_0(self._collectives, lambda: until, "interval of states in memory")
        self._last = num_steps, end
        if self._peers.is_first:
            prune_states(self._project)

    def _begin(self, num_steps: int) -> None:
        """Counts from here. Removes states of later steps: a run that started anew would take them for its own."""
        self._last = num_steps, time.monotonic()
        self._start = self._start or self._last[1]
        if self._peers.is_first:
            for path in [*saved_states(self._project), *self._folder.glob("written_*")]:
                if path.name.startswith("written_") or step_of(path.name) > num_steps:
                    shutil.rmtree(path, ignore_errors=True)


def interval_of(spent_seconds: float, elapsed_seconds: float, step_seconds: float) -> int:
    """Steps until a state may be saved with which all states so far have taken at most `MOST_COST` of the time.

    Args:
        spent_seconds: on states, with the next one.
        elapsed_seconds: since the first step.

    Example:
        >>> interval_of(1.0, 10.0, 1.0), interval_of(0.1, 10.0, 1.0)
        (40, 1)
    """
    return max(1, math.ceil((spent_seconds / MOST_COST - elapsed_seconds) / max(step_seconds, 1e-9)))
