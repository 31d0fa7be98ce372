"""Parts that the sweeps share: seed and count from the command line, a report of cases, a sum with a planted fault."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from zeroaccel.comm.collectives import Collectives


@dataclass
class Case:
    """One random case of a sweep and its outcome."""

    sweep: str
    name: str
    group: str  # row of the table: a model with a certain head, or a number of ranks
    outcome: str  # "equal", perhaps with a condition, "refused", "not built", "different", "failed"
    detail: str = ""

    @property
    def is_right(self) -> bool:
        """True if the outcome needs no inspection."""
        return self.outcome.startswith("equal") or self.outcome in ("refused", "not built")


@dataclass
class Sweep:
    """The options --sweep-seed, --sweep-count and --sweep-report."""

    seed: int = 0
    count: int = 0
    report: str = ""

    def add(self, case: Case) -> Case:
        """Appends the case to the report, if there is one."""
        if self.report:
            with Path(self.report).open("a") as file:
                file.write(json.dumps({"seed": self.seed, **asdict(case)}) + "\n")
        return case


def table(cases: list[Case]) -> str:
    """Returns a Markdown table with groups in rows and outcomes in columns."""
    outcomes = sorted({case.outcome for case in cases})
    counts = Counter((case.group, case.outcome) for case in cases)
    rows = [["", *outcomes, "all"], ["---"] * (len(outcomes) + 2)]
    for group in dict.fromkeys(case.group for case in cases):
        numbers = [counts[group, outcome] for outcome in outcomes]
        rows.append([group, *map(str, [*numbers, sum(numbers)])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@contextmanager
def wrong_sums() -> Iterator[None]:
    """Plants a fault in the engine: the last rank's shard of each sum of gradients is a thousandth too large."""
    right = Collectives._sum_parts

    def wrong(self: Collectives, parts: Tensor, out: Tensor, scale: float) -> None:
        right(self, parts, out, scale * 1.001 if self.rank == self.world_size - 1 else scale)

    Collectives._sum_parts = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        Collectives._sum_parts = right  # type: ignore[method-assign]
