"""Measures the cost of training with states on the host, compared with other implementations.

    python benchmarks/offload.py adam
    python benchmarks/offload.py adam --deepspeed-python /path/to/env/bin/python --check

`adam`: one optimizer step on host memory, from a bf16 gradient to bf16 weights. Every contender is a process of
`host_adam.py`; they take turns, and a ratio is the median over rounds of the ratio within a round. Memory bandwidth
limits all of them, so the lower bound of a ratio is that of the bytes they move: 30 per parameter here (28, and 2 that
the processor fetches before it overwrites them), 54 for upcast, scale, update and downcast as four passes over buffers
that stay allocated.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from host_adam import BYTES_PER_ELEMENT, CONTENDERS, FETCHED_BYTES_PER_ELEMENT
from report import Bar, machine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent


class Contender:
    """One process of `host_adam.py`."""

    def __init__(self, name: str, python: str, numel: int, threads: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": "cpu",
        }
        command = [python, str(HERE / "host_adam.py"), name, str(numel), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def steps(self, count: int) -> list[float]:
        """Runs `count` steps and returns the seconds of each."""
        assert self._process.stdin is not None, "a contender listens on its standard input"
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        seconds: list[float] = self._answer()
        return seconds

    def stop(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        """Returns the next line that is JSON; skips other output of libraries."""
        assert self._process.stdout is not None, "a contender answers on its standard output"
        for line in self._process.stdout:
            if line.startswith(("[", '"')):
                try:
                    return json.loads(line)
                except json.JSONDecodeError:
                    continue
        assert self._process.stderr is not None, "the end of the log is there to be shown"
        lines = self._process.stderr.read().strip().splitlines() or ["it ended without output"]
        raise click.ClickException(lines[-1])


@click.group()
def main() -> None:
    """Measures offload on this machine."""


@main.command(context_settings={"show_default": True})
@click.option("--numel", default=50_000_000, help="Parameters.")
@click.option("--threads", default=2, help="Threads of each contender.")
@click.option("--rounds", default=9, help="Rounds; each runs every contender once.")
@click.option("--steps", default=3, help="Steps of a contender in a round; the result is the median.")
@click.option("--deepspeed-python", type=click.Path(exists=True, dir_okay=False), help="Interpreter with DeepSpeed.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--check", is_flag=True, help="Exit with 1 if a bar is missed.")
def adam(
    numel: int,
    threads: int,
    rounds: int,
    steps: int,
    deepspeed_python: str | None,
    json_path: Path | None,
    check: bool,
) -> None:
    """One optimizer step on the host, from a bf16 gradient to bf16 weights."""
    if deepspeed_python is None and importlib.util.find_spec("deepspeed") is not None:
        deepspeed_python = sys.executable
    console = Console(width=None if sys.stdout.isatty() else 120)
    seconds: dict[str, list[float]] = {}
    contenders: dict[str, Contender] = {}
    try:
        for name in CONTENDERS:
            python = deepspeed_python if name.startswith("deepspeed") else sys.executable
            if python is None:
                console.print(f"{name} is left out: no interpreter has it (--deepspeed-python)")
                continue
            try:
                contenders[name] = Contender(name, python, numel, threads)
            except click.ClickException as error:
                if not name.startswith("deepspeed"):
                    raise
                console.print(f"{name} is left out: {error.message}")
        turns = random.Random(0)
        for _ in range(rounds):
            for name in turns.sample(list(contenders), len(contenders)):
                contenders[name].steps(1)  # warms up its caches and the clock
                seconds.setdefault(name, []).append(statistics.median(contenders[name].steps(steps)))
    finally:
        for contender in contenders.values():
            contender.stop()
    _show(seconds, numel, console)
    found = _bars(seconds)
    for bar in found:
        verdict = "passed" if bar.passed else "MISSED"
        console.print(f"{bar.claim}: {bar.value:.3f}, at most {bar.limit:.3f}: {verdict}", highlight=False)
    if json_path is not None:
        conditions = {"numel": numel, "threads": threads, "rounds": rounds, "steps": steps}
        whole = {"machine": machine(), "conditions": conditions, "seconds": seconds}
        json_path.write_text(json.dumps(whole, indent=1) + "\n")
    if check and not all(bar.passed for bar in found):
        sys.exit(1)


def _show(seconds: Mapping[str, Sequence[float]], numel: int, console: Console) -> None:
    table = Table(title=f"one step on {numel / 1e6:.0f} million parameters")
    for head in ("contender", "milliseconds", "zeroaccel takes", "GB/s", "GB/s with fetched lines"):
        table.add_column(head, justify="left" if head == "contender" else "right")
    for name, each in seconds.items():
        kind = {"zeroaccel": "adam", "triad": "triad"}.get(name)
        middle = statistics.median(each)
        rates = [
            f"{size[kind] * numel / middle / 1e9:.1f}" if kind else ""
            for size in (BYTES_PER_ELEMENT, FETCHED_BYTES_PER_ELEMENT)
        ]
        table.add_row(name, f"{middle * 1e3:.1f}", f"{_ratio(seconds, 'zeroaccel', name):.2f} x", *rates)
    console.print(table)


def _ratio(seconds: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def _bars(seconds: Mapping[str, Sequence[float]]) -> list[Bar]:
    """Returns the bars. The rates of Adam and of the triad include cache lines that are fetched and overwritten."""
    limits = {"deepspeed": 0.45, "torch fused": 0.45, "torch unfused": 0.2, "torch unfused, update only": 0.2}
    found = [
        Bar(f"time against {name}", _ratio(seconds, "zeroaccel", name), limit)
        for name, limit in limits.items()
        if name in seconds
    ]
    bytes_ratio = FETCHED_BYTES_PER_ELEMENT["adam"] / FETCHED_BYTES_PER_ELEMENT["triad"]
    time_ratio = _ratio(seconds, "zeroaccel", "triad")
    return [*found, Bar("the triad's bytes per second against ours", time_ratio / bytes_ratio, 1 / 0.8)]


if __name__ == "__main__":
    main()
