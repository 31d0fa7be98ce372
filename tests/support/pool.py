"""A pool of real gloo ranks that outlives a test, so that torch is imported once per rank and not once per test.

    pool.run(function, *args) -> [result of rank 0, result of rank 1, ...]

The function is pickled by reference, so it must be a module-level function of an importable test module. Each call
starts from the same random seeds. After a call that fails, hangs or loses a rank, the pool ends its processes, and the
next call starts new ones: the state of a process group after a failed test is unknown. `worker.py` is the other end.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests import time_limits
from tests.support.environment import ROOT, free_port, rank_environment
from tests.support.processes import start
from tests.support.worker import DUMP_SIGNAL, Answer, Setup

T = TypeVar("T")

START_SECONDS = 100.0  # for importing torch in every rank, on a busy machine
GRACE_SECONDS = 5.0  # for the other ranks after one has failed: they may be waiting for it
DUMP_SECONDS = 2.0
IMPORTS = ("transformers.models.llama.modeling_llama",)  # imports most of transformers as well
# Above a new rank's 17: every process group adds three, and one of them wakes 100 times a second until the rank ends.
MOST_THREADS = 40


class RankFailure(Exception):
    """A call raised on at least one rank.

    Attributes:
        reports: traceback of each failed rank, or stack of each rank that was still running.
    """

    def __init__(self, headline: str, reports: dict[int, str]) -> None:
        self.reports = reports
        super().__init__("\n".join([headline, *(reports[rank] for rank in sorted(reports))]))


class RankTimeout(RankFailure):
    """A call did not return on at least one rank, and no rank had failed."""


class _Rank:
    """One worker process and the socket to it."""

    def __init__(self, rank: int, world_size: int, port: int, setup: Setup, imports: tuple[str, ...]) -> None:
        self.rank = rank
        self._stacks = setup.stacks
        self.connection: Connection[bytes, bytes]
        self.connection, theirs = Pipe()
        with theirs:
            setup = replace(setup, socket=theirs.fileno())
            self._process = start(
                [sys.executable, "-c", "from tests.support.worker import main; main()", pickle.dumps(setup).hex()],
                rank_environment(rank, world_size, port),
                ROOT,
                passed=[theirs.fileno()],
                imports=imports,
            )

    def receive(self) -> Answer:
        try:
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            code = self._process.wait()
            return Answer(failure=f"the process ended with exit code {code}", details=self._read_stacks())
        assert isinstance(answer, Answer), f"rank {self.rank} sent {answer!r}"
        return answer

    def stack(self) -> str:
        """Returns the current stacks of all threads of this rank, or a reason if the rank does not write them."""
        if self._process.poll() is not None:
            return f"(the process ended with exit code {self._process.returncode})\n"
        os.kill(self._process.pid, DUMP_SIGNAL)
        limit = time_limits.Limit(DUMP_SECONDS)
        written = ""
        while not limit.is_over():
            time.sleep(0.02)
            before, written = written, self._read_stacks()
            if written and written == before:
                return written
        return written or "(no stack: the process did not react to the signal)\n"

    def is_worn(self) -> bool:
        """Returns True if the process has ended, or has so many threads that a new one costs less."""
        return self._process.poll() is not None or psutil.Process(self._process.pid).num_threads() > MOST_THREADS

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def _read_stacks(self) -> str:
        return self._stacks.read_text() if self._stacks.exists() else ""


class Pool:
    """`world_size` ranks in one gloo process group; the processes start with the first call.

    Args:
        world_size: number of ranks, each a process with one thread.
        folder: an existing folder for the stacks of ranks that hang or crash.
        warning_filters: the warning filters of every call, in pytest's format.
        join: False for bare processes: no torch, no process group.

    Attributes:
        imports: modules that its processes import at their start.
    """

    def __init__(self, world_size: int, folder: Path, warning_filters: Sequence[str] = (), join: bool = True) -> None:
        self.world_size = world_size
        self.imports = IMPORTS if join else ()
        self._folder = folder
        self._setup = Setup(socket=-1, stacks=folder, join=join, warning_filters=tuple(warning_filters))
        self._ranks: list[_Rank] = []
        self._is_used = False

    def run(self, function: Callable[..., T], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[T]:
        """Calls ``function(*args, **kwargs)`` on every rank and returns the results by rank.

        Args:
            timeout: seconds of a quiet machine after which a rank that has not returned counts as hanging; the start of
                the pool is not included.

        Raises:
            RankFailure: with the traceback of every rank that raised, and the stack of every rank that still waited.
            RankTimeout: with the stack of every rank that did not return in time.
        """
        __tracebackhide__ = True  # pytest shows a failure at the caller's line
        self._is_used = True
        call = pickle.dumps((function, args, kwargs))
        name = getattr(function, "__qualname__", repr(function))
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                rank.connection.send_bytes(call)
            return [answer.value for answer in self._collect(name, timeout)]
        except BaseException:
            self.close()
            raise

    def rest(self) -> None:
        """Ends the processes after a file of tests if they cost more than new ones.

        They do if the file did not use them, or has left process groups behind.
        """
        is_used, self._is_used = self._is_used, False
        if not is_used or any(rank.is_worn() for rank in self._ranks):
            self.close()

    def close(self) -> None:
        """Ends the processes; the next call starts new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.end()

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.world_size):
            stacks = self._folder / f"rank{rank}.txt"
            stacks.unlink(missing_ok=True)
            self._ranks.append(_Rank(rank, self.world_size, port, replace(self._setup, stacks=stacks), self.imports))
        self._collect("the start of the pool", START_SECONDS)

    def _collect(self, name: str, timeout: float) -> list[Answer]:
        """Waits for one answer per rank; raises unless every answer is a value."""
        __tracebackhide__ = True
        limits = [time_limits.Limit(timeout)]
        answers: dict[int, Answer] = {}
        waiting: dict[Any, _Rank] = {rank.connection: rank for rank in self._ranks}
        while waiting and (left := min(limit.left() for limit in limits)) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                answers[rank.rank] = answer = rank.receive()
                if answer.failure:
                    limits.append(time_limits.Limit(GRACE_SECONDS))
        failed = {rank: answer for rank, answer in answers.items() if answer.failure}
        if waiting or failed:
            raise self._failure(name, timeout, failed, list(waiting.values()))
        return [answers[rank] for rank in range(self.world_size)]

    def _failure(self, name: str, timeout: float, failed: dict[int, Answer], waiting: list[_Rank]) -> RankFailure:
        reports = {rank: _section(rank, answer.failure, answer.details) for rank, answer in failed.items()}
        for rank in waiting:
            reports[rank.rank] = _section(rank.rank, "still running, at", rank.stack())
        if failed:
            return RankFailure(f"{name}: {len(failed)} of {self.world_size} ranks failed", reports)
        return RankTimeout(
            f"{name}: {len(waiting)} of {self.world_size} ranks had not returned in {timeout:g} s", reports
        )


Ranks = Callable[[int], Pool]  # type of the fixture `ranks`: returns the pool of that many ranks


def _section(rank: int, title: str, body: str) -> str:
    return f"--- rank {rank}: {title}\n{body}"
