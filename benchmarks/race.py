"""Starts the ranks of every contender and runs the contenders in turn, round after round.

The speed of a machine varies over minutes. Each round therefore runs all contenders, in a random order, and ratios
compare times of the same round. Contenders that are not running block.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from contenders import needs_deepspeed
from models import Shape

__all__ = ["OLDER", "Conditions", "ContenderFailed", "Result", "TooLittleMemory", "race"]

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 600.0
RESERVE_NBYTES = 1 << 30
PHASES = ("forward", "backward", "update")
OLDER = "@older"


class ContenderFailed(Exception):
    """Raised if a rank ended or did not answer; the message is the end of its log."""


class TooLittleMemory(Exception):
    """Raised if the contenders do not fit in memory: they would swap or be killed."""


@dataclass(frozen=True)
class Conditions:
    """Settings that all contenders share.

    Attributes:
        steps: timed steps in each round.
        warmup: untimed steps at the start, in addition to one before the timed steps of each round.
        deepspeed_python: interpreter that has DeepSpeed, or None.
        older: another checkout of this tree, which runs contenders whose names end in `OLDER`; "" for none.
    """

    shape: Shape
    world_size: int = 2
    threads: int = 1
    rounds: int = 15
    steps: int = 5
    warmup: int = 5
    deepspeed_python: str | None = None
    older: str = ""


@dataclass
class Result:
    """Measurements of one contender.

    Attributes:
        seconds: median step time of each round.
        processor_seconds: processor time of the median step of each round, all threads, mean over ranks.
        phases: median times of forward, backward and update in each round.
        losses: mean loss over ranks after the last step of each round.
        peak_rss: peak in bytes of the worst rank during the rounds.
        peak_rss_start: peak in bytes of the worst rank, from its start to the end of the warm-up.
        sent_nbytes: bytes that rank 0 sends per step, by collective; empty if not counted.
        model_state_nbytes: bytes of model states of rank 0 between two steps; empty if not counted.
        failure: reason why the measurements are missing.
    """

    numel: int = 0
    torch: str = ""
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_rss: int = 0
    peak_rss_start: int = 0
    sent_nbytes: dict[str, float] = field(default_factory=dict)
    model_state_nbytes: dict[str, int] = field(default_factory=dict)
    failure: str = ""


def race(
    names: Sequence[str], conditions: Conditions, say: Callable[[str], None] = lambda line: None
) -> dict[str, Result]:
    """Runs all rounds.

    Args:
        say: function that gets progress messages.

    Raises:
        ContenderFailed: if a contender fails after a successful start.
        TooLittleMemory: if the contenders do not all fit in memory.
    """
    results = {name: Result() for name in names}
    teams: dict[str, _Team] = {}
    turns = random.Random(0)
    try:
        for name in names:
            say(f"starting {name}")
            try:
                teams[name] = _started(name, conditions, results[name])
            except ContenderFailed as error:
                results[name].failure = str(error)
                say(f"{name} is out: {error}")
            if (left := _available_nbytes()) < RESERVE_NBYTES:
                raise TooLittleMemory(f"{left >> 20} MiB of memory left after starting {', '.join(teams)}")
        for index in range(conditions.rounds):
            say(f"round {index + 1} of {conditions.rounds}")
            order = list(teams)
            turns.shuffle(order)
            for name in order:
                _run(teams[name], conditions.steps, results[name])
        for name, team in teams.items():
            results[name].peak_rss = max(answer["peak_rss"] for answer in team.ask({"do": "peak"}))
    finally:
        for team in teams.values():
            team.stop()
    return results


def _started(name: str, conditions: Conditions, result: Result) -> _Team:
    team = _Team(name, conditions)
    try:
        hello = team.answers()[0]
        result.numel, result.torch = hello["numel"], hello["torch"]
        team.ask({"do": "steps", "count": conditions.warmup})
        result.peak_rss_start = max(answer["peak_rss"] for answer in team.ask({"do": "peak"}))
    except ContenderFailed:
        team.stop()
        raise
    return team


def _run(team: _Team, steps: int, result: Result) -> None:
    answers = team.ask({"do": "steps", "count": steps + 1})
    # A step ends when the slowest rank ends; the first one runs with caches that others have used.
    worst = [
        [max(phase) for phase in zip(*(answer["seconds"][step] for answer in answers), strict=True)]
        for step in range(1, steps + 1)
    ]
    whole = [max(sum(answer["seconds"][step]) for answer in answers) for step in range(1, steps + 1)]
    result.seconds.append(statistics.median(whole))
    busy = [statistics.fmean(answer["processor"][step] for answer in answers) for step in range(1, steps + 1)]
    result.processor_seconds.append(statistics.median(busy))
    result.phases.append({phase: statistics.median(row[i] for row in worst) for i, phase in enumerate(PHASES)})
    result.losses.append(statistics.fmean(answer["loss"] for answer in answers))
    facts = answers[0]["facts"]
    result.sent_nbytes = {op: nbytes / (steps + 1) for op, nbytes in facts.get("sent_nbytes", {}).items()}
    result.model_state_nbytes = facts.get("model_state_nbytes", {})


class _Team:
    """The processes of one contender."""

    def __init__(self, name: str, conditions: Conditions) -> None:
        python: str | None = sys.executable
        if needs_deepspeed(name):
            python = conditions.deepspeed_python
        if python is None:
            raise ContenderFailed("DeepSpeed is not installed; name an interpreter with --deepspeed-python")
        self.name = name
        self._logs: list[IO[bytes]] = []
        self._ranks: list[subprocess.Popen[str]] = []
        tree = Path(conditions.older) if name.endswith(OLDER) else ROOT
        job = {"contender": name.removesuffix(OLDER), "threads": conditions.threads, "shape": asdict(conditions.shape)}
        port = _free_port()
        for rank in range(conditions.world_size):
            log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
            self._logs.append(log)
            self._ranks.append(
                subprocess.Popen(
                    [python, str(tree / "benchmarks" / "rank.py"), json.dumps(job)],
                    env=_environment(rank, conditions, port, tree, foreign=python != sys.executable),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )

    def ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Sends the order to all ranks and returns their answers, by rank."""
        for process in self._ranks:
            assert process.stdin is not None, "started with a pipe"
            try:
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended; `answers` reports why
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """Returns one answer per rank.

        Raises:
            ContenderFailed: if a rank has ended or is silent.
        """
        found = []
        for process, log in zip(self._ranks, self._logs, strict=True):
            assert process.stdout is not None, "started with a pipe"
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
            line = process.stdout.readline() if ready else ""
            if not line:
                raise ContenderFailed(_end_of(log) or f"no answer within {PATIENCE_SECONDS:.0f} s")
            found.append(json.loads(line))
        return found

    def stop(self) -> None:
        """Ends the ranks: first closes their input, then kills them."""
        for process in self._ranks:
            assert process.stdin is not None, "started with a pipe"
            process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()


def _environment(rank: int, conditions: Conditions, port: int, tree: Path, *, foreign: bool) -> dict[str, str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(conditions.world_size),
        "LOCAL_WORLD_SIZE": str(conditions.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(conditions.threads),
        "MKL_NUM_THREADS": str(conditions.threads),
    }
    if foreign:  # its interpreter has its own packages
        environment.pop("PYTHONPATH", None)
    else:
        paths = [str(tree), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _available_nbytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_of(log: IO[bytes], lines: int = 8) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").strip().splitlines()[-lines:])
