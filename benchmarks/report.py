"""Turns the results of a race into tables, ratios, bars and JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from race import OLDER, PHASES, Conditions, Result
from rich.console import Console
from rich.table import Table

__all__ = ["Bar", "Ratio", "bars", "document", "holds", "losses_agree", "machine", "pairs_of", "ratio", "show"]

MIB = 1 << 20
LOSS_TOLERANCE = 0.01
"""Largest relative difference of losses: bf16 keeps 8 bits, and the engines round at different places."""

Results = Mapping[str, Result]


@dataclass(frozen=True)
class Ratio:
    """Ratio of two contenders' times, computed per round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


@dataclass(frozen=True)
class Bar:
    """A requirement: a value and its upper limit."""

    claim: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


def ratio(of: Result, to: Result, measure: str = "seconds") -> Ratio:
    """Returns median, smallest and largest of the rounds' ratios."""
    pairs = [mine / theirs for mine, theirs in zip(getattr(of, measure), getattr(to, measure), strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def _fastest(results: Results, names: Iterable[str]) -> str | None:
    there = [name for name in names if results.get(name) and not results[name].failure]
    return min(there, key=lambda name: statistics.median(results[name].seconds), default=None)


_OTHER_TRAINING = ("bare", "ddp-bf16")
# Contender, peers, limit. A name with variants means the fastest of them.
_DDP = ("ddp-master", "ddp-autocast")
_DEEPSPEED_2 = ("deepspeed-2", "deepspeed-2-torch-adam")
# Without fsdp2-keep, which is sharded in backward only; the table shows it.
_STAGE_3 = ("fsdp2", "fsdp2-fp32-reduce", "deepspeed-3", "deepspeed-3-lean", "deepspeed-3-torch-adam")
_SPEED_BARS = (
    ("zeroaccel-3-lean", _STAGE_3, 0.6),
    ("zeroaccel-3", _STAGE_3, 0.6),
    ("zeroaccel-2", _DEEPSPEED_2, 0.75),
    ("zeroaccel-2", _DDP, 1.0),
)
_MEMORY_BARS = (("zeroaccel-3-lean", "fsdp2", 1.1), ("zeroaccel-3", "fsdp2", 1.1), ("zeroaccel-3", "fsdp2-keep", 1.1))
# Gathers and reductions of the model. Stage 3 with the default reuse distance keeps this small model unsharded.
_TRAFFIC = {"zeroaccel-0": 2, "zeroaccel-1": 2, "zeroaccel-2": 2, "zeroaccel-3": 2, "zeroaccel-3-lean": 3}


def bars(results: Results, world_size: int) -> list[Bar]:
    """Returns all bars whose contenders ran."""
    there = {name: result for name, result in results.items() if not result.failure}
    found = []
    for name, peers, limit in _SPEED_BARS:
        peer = _fastest(there, peers)
        if name in there and peer is not None:
            value = ratio(there[name], there[peer]).median
            found.append(Bar(f"step time of {name} / {peer}", value, limit))
    for name, peer, limit in _MEMORY_BARS:
        if name in there and peer in there:
            value = there[name].peak_rss / there[peer].peak_rss
            found.append(Bar(f"peak RSS of {name} / {peer}", value, limit))
    for name, times in _TRAFFIC.items():
        if name in there:
            error = abs(traffic(there[name], world_size) / times - 1)
            found.append(Bar(f"bytes sent by {name} beside {times} x model, relative error", error, 0.01))
    return found


def traffic(result: Result, world_size: int) -> float:
    """Returns the bytes that a rank sends per step, divided by those of one gather of the bf16 model."""
    return sum(result.sent_nbytes.values()) / (2 * result.numel * (world_size - 1) / world_size)


def losses_agree(results: Results) -> tuple[str, float]:
    """Returns the contender whose loss is farthest from the median in any round, and its relative distance.

    Leaves out contenders that train without fp32 masters, or not at all.
    """
    there = {name: r for name, r in results.items() if not r.failure and name not in _OTHER_TRAINING}
    middle = [statistics.median(losses) for losses in zip(*(r.losses for r in there.values()), strict=True)]
    distances = {
        name: max(abs(loss / mid - 1) for loss, mid in zip(result.losses, middle, strict=True))
        for name, result in there.items()
    }
    farthest = max(distances, key=lambda name: distances[name])
    return farthest, distances[farthest]


def holds(results: Results, world_size: int) -> bool:
    """Returns True if every bar is met and the losses agree."""
    there = [result for result in results.values() if not result.failure]
    agree = len(there) < 2 or losses_agree(results)[1] <= LOSS_TOLERANCE
    return agree and all(bar.passed for bar in bars(results, world_size))


def show(results: Results, conditions: Conditions, console: Console) -> None:
    """Prints tables, ratios and bars."""
    there = {name: result for name, result in results.items() if not result.failure}
    references = [name for name in (_fastest(there, names) for names in _COLUMNS) if name]
    if there:
        _show_times(there, references, conditions, console)
    for name, result in results.items():
        if result.failure:
            console.print(f"[red]{name} did not run:[/] {result.failure.splitlines()[-1]}")
    if len(there) > 1:
        name, distance = losses_agree(there)
        verdict = "agree" if distance <= LOSS_TOLERANCE else "[red]DO NOT AGREE[/]"
        console.print(f"losses {verdict}: farthest from the median is {name}, by {distance:.2%}")
    for name, peer, seconds, processor in pairs_of(there):
        console.print(f"{name} / {peer}: step time {seconds}, processor time {processor}")
    for bar in bars(there, conditions.world_size):
        mark = "[green]holds[/]" if bar.passed else "[red]misses[/]"
        console.print(f"{mark}  {bar.claim}: {bar.value:.2f}, at most {bar.limit:.2f}")


_COMPILED, _PEER = "-compiled", "fsdp2-compiled"
_COLUMNS = (
    _DDP,
    _DEEPSPEED_2,
    ("fsdp2", "fsdp2-fp32-reduce"),
    ("fsdp2-keep",),
    ("deepspeed-3", "deepspeed-3-lean", "deepspeed-3-torch-adam"),
)


def _show_times(there: Results, references: Sequence[str], conditions: Conditions, console: Console) -> None:
    table = Table(title=f"{conditions.world_size} ranks, {conditions.threads} thread(s) each, {conditions.shape}")
    table.add_column("contender")
    for head in ("ms/step", *PHASES, "busy ms", "peak MiB", "sent MiB", "models sent"):
        table.add_column(head, justify="right")
    for name in references:
        table.add_column(f"/ {name}", justify="right")
    for name, result in there.items():
        sent = sum(result.sent_nbytes.values())
        table.add_row(
            name,
            f"{statistics.median(result.seconds) * 1e3:.0f}",
            *(f"{statistics.median(row[phase] for row in result.phases) * 1e3:.0f}" for phase in PHASES),
            f"{statistics.median(result.processor_seconds) * 1e3:.0f}",
            f"{result.peak_rss / MIB:.0f}",
            f"{sent / MIB:.1f}" if sent else "",
            f"{traffic(result, conditions.world_size):.2f}" if sent else "",
            *(str(ratio(result, there[peer])) for peer in references),
        )
    console.print(table)


def pairs_of(there: Results) -> list[tuple[str, str, Ratio, Ratio]]:
    """Returns pairs to compare: compiled contenders with eager ones and compiled FSDP2; others with an older tree."""
    pairs = [(name, name.removesuffix(_COMPILED)) for name in there if name.endswith(_COMPILED)]
    pairs += [(name, _PEER) for name, _ in pairs if name != _PEER]
    pairs += [(name.removesuffix(OLDER), name) for name in there if name.endswith(OLDER)]
    return [
        (name, peer, ratio(there[name], there[peer]), ratio(there[name], there[peer], "processor_seconds"))
        for name, peer in pairs
        if name in there and peer in there
    ]


def document(results: Results, conditions: Conditions) -> dict[str, Any]:
    """Returns all results of one heat, for JSON."""
    there = {name: result for name, result in results.items() if not result.failure}
    return {
        "results": {name: asdict(result) for name, result in results.items()},
        "median_seconds": {name: statistics.median(result.seconds) for name, result in there.items()},
        "ratios": {a: {b: asdict(ratio(there[a], there[b])) for b in there if b != a} for a in there},
        "losses_farthest": losses_agree(there) if len(there) > 1 else None,
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in bars(there, conditions.world_size)],
    }


def machine() -> dict[str, Any]:
    """Returns a description of the machine."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
