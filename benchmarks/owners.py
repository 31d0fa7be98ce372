"""How evenly owners share a model whose optimizer needs full tensors: computed, nothing is trained.

    python benchmarks/owners.py

Lays out a Llama-shaped model without values, as the engine would, and counts for each number of ranks: the elements of
masters and states on the fullest rank over the average ("owned"), the same within the worst unit, which what one rank
sends in an all-gather follows ("unit"), ranks that own nothing, and what all ranks together send per step at stage 3,
in elements of the model, which owners do not change but for padding.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from zeroaccel.config.shard_plan import ShardPlan
from zeroaccel.zero.build_units import BufferPlan, Placement, plan_units
from zeroaccel.zero.wrap_policy import group_parameters

RANKS = (8, 64, 1024)


@dataclass(frozen=True)
class Shape:
    """Of a Llama: `key` is the width of keys and values."""

    name: str
    layers: int
    hidden: int
    inner: int
    key: int
    vocabulary: int


SHAPES = (
    Shape("Llama 3 8B", 32, 4096, 14336, 1024, 128256),
    Shape("Llama 3 70B", 80, 8192, 28672, 1024, 128256),
)


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.key, bias=False)
        self.v = nn.Linear(shape.hidden, shape.key, bias=False)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.empty(shape.hidden)) for _ in range(2))


class _Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.empty(shape.hidden))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)


def plans(model: nn.Module, world_size: int, *, split: bool) -> list[list[BufferPlan]]:
    """The buffers of each unit at stage 3.

    Args:
        split: matrices of the blocks have owners, and the rest is sharded evenly, as with Muon and AdamW; else all
            of it has owners, as with Adafactor or LAMB.
    """
    groups = {
        id(param): int(split and (param.dim() < 2 or ".".join(name.split(".")[:1]) in {"embed", "head"}))
        for name, param in model.named_parameters()
    }
    sharded = ShardPlan(optimizer=True, grads=True, params=True)
    device = torch.device("meta")
    placement = Placement(torch.bfloat16, frozenset(), device, sharded, groups, full_tensor_groups=frozenset({0}))
    return plan_units(group_parameters(model), placement, world_size)


def row(units: list[list[BufferPlan]], world_size: int) -> tuple[str, ...]:
    """What is counted of one layout."""
    owned = [0] * world_size
    worst = 1.0
    for unit in units:
        within = [sum(plan.layout.shard_numel(rank) for plan in unit) for rank in range(world_size)]
        owned = [total + own for total, own in zip(owned, within, strict=True)]
        worst = max(worst, max(within) * world_size / sum(within))
    numel = sum(plan.layout.numel for plan in chain(*units))
    used = sum(plan.layout.used_numel for plan in chain(*units))
    return (
        str(world_size),
        f"{max(owned) * world_size / numel:.3f}",
        f"{worst:.2f}",
        str(sum(not own for own in owned)),
        f"{3 * numel / used:.4f} x (W-1)",
    )


def main() -> None:
    """Prints a table per model."""
    console = Console(width=100, no_color=not sys.stdout.isatty())
    for shape in SHAPES:
        with torch.device("meta"):
            model = _Llama(shape)
        for split, rule in ((True, "matrices of blocks by owners, the rest even"), (False, "all by owners")):
            table = Table("ranks", "owned: most / mean", "unit: most / mean", "ranks without", "sent by all, stage 3")
            table.title = f"{shape.name}, {sum(p.numel() for p in model.parameters()):,} parameters: {rule}"
            for world_size in RANKS:
                table.add_row(*row(plans(model, world_size, split=split), world_size))
            console.print(table)


if __name__ == "__main__":
    main()
