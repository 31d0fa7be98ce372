"""The page of models that fit: `python docs/site/model_table.py` estimates every cell, and writes docs/models.md.

Each row is a model, a method and a number of GPUs; each cell is the first plan of `zeroaccel estimate` that fits. The
whole table takes long; a test estimates a few rows again. With names of models as arguments, the program estimates
their rows only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroaccel.cli.pages.estimate_page import command
from zeroaccel.estimate import Capacity, Workload, plan_table, subject
from zeroaccel.estimate.simulate import Simulated, simulate

PAGE = Path(__file__).resolve().parents[1] / "models.md"
GB = 10**9
DEVICES = (24, 48, 80, 141)
"""Memory of a GPU, in GB."""
HOST, DISK = 512, 2000
"""Memory and disk of a machine, in GB."""
RANKS = (1, 2, 8)
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora_rank": 16},
    "QLoRA": {"lora_rank": 16, "frozen_weights": "nf4"},
}
MODELS = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3.5-27b",
    "qwen3.6-35b-a3b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-3-27b",
    "gemma-4-31b",
    "gemma-4-26b-a4b",
)
_SEQUENCE = 2048
_START = "<!-- table: docs/site/model_table.py -->"


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    model: str
    method: str
    ranks: int

    @property
    def workload(self) -> Workload:
        """The settings that the row's commands estimate."""
        frozen = {"frozen_weights": "mxfp4"} if self.method == "QLoRA" and "gpt-oss" in self.model else {}
        settings = {**METHODS[self.method], **frozen}
        return Workload(ranks=self.ranks, sequence=_SEQUENCE, checkpointing=True, **settings)

    def capacity(self, device: int) -> Capacity:
        """A machine with GPUs of this size in GB."""
        return Capacity(device=device * GB, host=HOST * GB, disk=DISK * GB)

    def command(self, device: int) -> str:
        """The command that estimates a cell."""
        return command(self.model, self.workload, self.capacity(device))

    def cells(self) -> list[str]:
        """Returns a cell per size of GPU: the plan that fits with its memory, or "no"."""
        simulated: dict[tuple[object, ...], Simulated] = {}

        def once(what: object, workload: object, stage: int, **settings: Any) -> Simulated:
            key = (stage, *sorted(settings.items()))
            if key not in simulated:
                simulated[key] = simulate(what, workload, stage, **settings)  # type: ignore[arg-type]
            return simulated[key]

        what = subject(self.model)
        cells = []
        for device in DEVICES:
            best = plan_table(what, self.workload, self.capacity(device), simulate=once)[0]
            cells.append(f"{best.estimate.name}: {best.estimate.device.total / GB:.1f}" if best.recommended else "no")
        return cells


def lines() -> Iterator[Line]:
    """Yields every row."""
    for model in MODELS:
        for method in METHODS:
            for ranks in RANKS:
                yield Line(model, method, ranks)


def row(line: Line, cells: list[str]) -> str:
    """Returns a row of the table as Markdown."""
    return f"| {line.model} | {line.method} | {line.ranks} | {' | '.join(cells)} |"


def write(new: dict[Line, str]) -> None:
    """Writes the page with these rows in place of its own ones."""
    head, _, old = PAGE.read_text().partition(_START)
    there = {tuple(each.split(" | ")[:3]): each for each in old.splitlines()}
    rows = [new.get(line) or there.get(tuple(row(line, []).split(" | ")[:3]), "") for line in lines()]
    first = f"| model | method | GPUs | {' | '.join(f'`{device} GB`' for device in DEVICES)} |"
    table = [first, "|---|---|---|" + "---|" * len(DEVICES), *filter(None, rows)]
    PAGE.write_text(head + "\n".join([_START, "", *table]) + "\n")


if __name__ == "__main__":
    estimated: dict[Line, str] = {}
    for each in lines():
        if each.model in (sys.argv[1:] or MODELS):
            print(each, file=sys.stderr, flush=True)
            estimated[each] = row(each, each.cells())
            write(estimated)
