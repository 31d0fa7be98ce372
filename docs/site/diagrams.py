"""The diagrams of docs/how_it_works.md, drawn from the engine's own plans, and of measured memory on the page about
long context: `python docs/site/diagrams.py`.

Units come from its wrap policy, shards from its flat layouts, the sharding of each stage from its shard plan, the
places of tensors from its tier plan, and groups of ranks from its mesh layout. A test compares the files in
docs/diagrams with the output of this program, so that they match the code.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from drawing import FOLDER, box, frame, key, line, svg, text, write
from torch import nn

from zeroaccel.cli.pages.frame import COLOURS
from zeroaccel.comm.mesh_layout import MeshLayout
from zeroaccel.config import load_config, shard_plan
from zeroaccel.config.comm_plan import comm_plan
from zeroaccel.config.parallel import RankGroups
from zeroaccel.config.shard_plan import tier_plan
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.wrap_policy import UnitSpec, group_parameters

_RANKS = 4


class Block(nn.Module):
    """A block of the model in the diagrams."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


def drawn_units() -> list[UnitSpec]:
    """Returns the units of a small model at stage 3: embedding, three blocks, head; norms are below the threshold."""
    width = 64
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(128, width))
    model.add_module("layers", nn.ModuleList(Block(width) for _ in range(3)))
    model.add_module("head", nn.Linear(width, 128, bias=False))
    return group_parameters(model, persistence_threshold=width)


def layout_of(unit: UnitSpec, ranks: int) -> FlatLayout:
    """Returns the flat buffer of a unit over a number of ranks."""
    return FlatLayout.build([(fqn, tuple(param.shape)) for fqn, param in unit.params], ranks)


# -- the diagrams


def units() -> str:
    """Draws the flat buffer of each unit: its parameters, and the part of each rank."""
    specs, left, width, row = drawn_units(), 150, 640, 64
    largest = max(layout_of(spec, _RANKS).numel for spec in specs)
    parts = [key(150, 16, [f"rank {rank}" for rank in range(_RANKS)])]
    for number, spec in enumerate(specs):
        layout, y = layout_of(spec, _RANKS), 44 + number * row
        scale = width * max(layout.numel / largest, 0.3) / layout.numel
        parts.append(text(left - 10, y + 18, spec.name, "end"))
        parts.append(text(left - 10, y + 36, f"{layout.numel:,} elements", "end small"))
        if spec.persistent:
            parts.append(box(left, y, layout.numel * scale, 24, "soft"))
            parts.append(text(left + layout.numel * scale + 10, y + 17, "whole on every rank", "small"))
        for rank in range(0 if spec.persistent else _RANKS):
            shard = layout.shard(rank)
            parts.append(box(left + shard.start * scale, y, shard.numel * scale, 24, COLOURS[rank]))
        for slot in layout.slots:
            at, length = left + slot.start * scale, slot.numel * scale
            parts.append(line(at, y + 28, at + length - 2, y + 28))
            name = slot.fqn.removeprefix(f"{spec.name}.")
            if length > 7 * len(name) and not spec.persistent:
                parts.append(text(at + length / 2, y + 42, name, "middle small"))
    return svg(parts, 900, 50 + len(specs) * row, "Units: flat buffers and their shards on four ranks")


_KINDS = ("parameters", "gradients", "masters and states")


def stages() -> str:
    """Draws the model state of each rank at each stage, to the scale of bf16 with Adam."""
    nbytes = dict(zip(_KINDS, (2, 2, 12), strict=True))  # per element: Rajbhandari et al., ZeRO, 2020, section 3.1
    left, wide, tall = 130, 150, 8.0
    parts = [key(130, 16, _KINDS)]
    for stage in range(4):
        plan = shard_plan(load_config({"zero_optimization": {"stage": stage}}))
        sharded = dict(zip(_KINDS, (plan.params, plan.grads, plan.optimizer), strict=True))
        x = left + stage * (wide + 40)
        parts.append(text(x + wide / 2, 52, f"stage {stage}", "middle"))
        total = 0.0
        for rank in range(_RANKS):
            y, at = 66.0 + rank * 36, float(x)
            if not stage:
                parts.append(text(left - 12, y + 18, f"rank {rank}", "end"))
            for kind, colour in zip(_KINDS, COLOURS, strict=False):
                share = nbytes[kind] / (_RANKS if sharded[kind] else 1)
                parts.append(box(at, y, share / 16 * wide, 3 * tall, colour))
                at += share / 16 * wide
                total += share / _RANKS
        parts.append(text(x + wide / 2, 66 + _RANKS * 36 + 14, f"{total:g} bytes per parameter", "middle small"))
    return svg(parts, left + 4 * (wide + 40), 66 + _RANKS * 36 + 34, "Stages: the model state of each of four ranks")


def tiers() -> str:
    """Draws the tiers of shards, masters and states between uses, for each setting of offload."""
    cases = {
        "no offload": {},
        "offload_optimizer: cpu": {"offload_optimizer": {"device": "cpu"}},
        "both: cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "both: nvme": {
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
        },
    }
    places = {"device": "device", "host": "host memory", "nvme": "file"}
    left, wide, row = 200, 190, 62
    parts = []
    for column, name in enumerate(places.values()):
        parts.append(text(left + column * wide + wide / 2 - 10, 24, name, "middle"))
    for number, (name, sections) in enumerate(cases.items()):
        plan = tier_plan(load_config({"zero_optimization": {"stage": 3, **sections}}))
        y = 40 + number * row
        parts.append(text(left - 14, y + 28, name, "end"))
        for column in range(3):
            parts.append(frame(left + column * wide, y, wide - 20, row - 10))
        for place, what, colour, offset in (
            (plan.param, "shards of parameters", COLOURS[0], 6),
            (plan.optimizer, "masters and states", COLOURS[2], 28),
        ):
            x = left + list(places).index(place) * wide
            parts.append(box(x + 8, y + offset, wide - 36, 18, colour))
            parts.append(text(x + wide / 2 - 10, y + offset + 14, what, "middle white"))
    y = 40 + len(cases) * row
    parts.append(text(left, y + 12, "The unsharded parameters of a unit are on the device while it computes.", "small"))
    return svg(parts, left + 3 * wide + 10, y + 26, "Tiers: where shards, masters and states live")


def groups() -> str:
    """Draws the groups of eight ranks on two machines, with the three parts of ZeRO++ enabled."""
    zero = {
        "stage": 3,
        "zero_hpz_partition_size": 4,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }
    everyone = tuple(range(8))
    config = load_config({"zero_optimization": zero})
    plan = comm_plan(config, shard_plan(config), world_size=len(everyone))
    layout = MeshLayout.of(plan, data=(everyone,), nodes=(everyone[:4], everyone[4:]))
    assert layout.hops is not None, layout.exact_reason
    rows: list[tuple[str, str, RankGroups]] = [
        ("gather in forward", "int8 (qwZ), over all ranks", layout.shard_groups),
        ("gather in backward", "from a second copy (hpZ), within a machine", layout.secondary_groups),
        ("reduction, first hop", "int4 (qgZ), within a machine", layout.hops[0]),
        ("reduction, second hop", "int4, between ranks of one place", layout.hops[1]),
    ]
    left, step, row = 340, 62, 66
    parts = [frame(left - 22 + machine * 4 * step, 30, 4 * step - 16, len(rows) * row + 8) for machine in range(2)]
    parts += [
        text(left + 1.5 * step + machine * 4 * step - 8, 22, f"machine {machine}", "middle") for machine in range(2)
    ]
    for number, (name, how, of_ranks) in enumerate(rows):
        y = 60 + number * row
        parts.append(text(left - 36, y, name, "end"))
        parts.append(text(left - 36, y + 18, how, "end small"))
        for group, ranks in enumerate(of_ranks):
            colour = COLOURS[group % len(COLOURS)]
            for rank in ranks:
                parts.append(f'<circle cx="{left + rank * step}" cy="{y + 2}" r="15" fill="{colour}"/>')
                parts.append(text(left + rank * step, y + 7, str(rank), "middle white"))
    return svg(parts, left + 8 * step, 30 + len(rows) * row + 20, "ZeRO++: ranks of one colour are one group")


def checkpoints() -> str:
    """Draws a checkpoint of three ranks, and the ranges that each of two ranks reads from its files."""
    unit = next(spec for spec in drawn_units() if len(spec.params) > 1 and not spec.persistent)
    saved, loaded = layout_of(unit, 3), layout_of(unit, 2)
    left, width = 150, 640
    scale = width / max(saved.numel, loaded.numel)
    parts = [text(left - 12, 36, "file of a rank", "end")]
    for rank in range(3):
        shard = saved.shard(rank)
        parts.append(box(left + shard.start * scale, 18, shard.numel * scale, 26, COLOURS[rank]))
        parts.append(text(left + (shard.start + shard.end) / 2 * scale, 36, f"rank {rank} of 3", "middle white"))
    parts.append(text(left - 12, 80, "parameters", "end"))
    for slot in saved.slots:
        at, length = left + slot.start * scale, slot.numel * scale
        parts.append(line(at, 66, at + length - 2, 66))
        name = slot.fqn.removeprefix(f"{unit.name}.")
        parts.append(text(at + length / 2, 82, f"{name}, {slot.numel:,} elements", "middle small"))
    for rank in range(2):
        y, own = 104 + rank * 40, loaded.shard(rank)
        parts.append(text(left - 12, y + 18, f"rank {rank} of 2 reads", "end"))
        for other in range(3):
            piece = own & saved.shard(other)
            if piece:
                parts.append(box(left + piece.start * scale, y, piece.numel * scale, 26, COLOURS[other]))
                middle = left + (piece.start + piece.end) / 2 * scale
                parts.append(text(middle, y + 18, f"{piece.numel:,} of rank {other}'s", "middle white"))
    return svg(parts, left + width + 20, 196, f"Checkpoints: {unit.name}, saved by three ranks, read by two")


_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "long_context.md"


def long_context() -> str:
    """Draws the activations of a rank by the number of ranks that share a sequence, from the measured table."""
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d.]+) \|", _RESULTS.read_text(encoding="utf-8"), re.MULTILINE)
    left, wide, parts = 90, 420, []
    for place, (ranks, nbytes, share) in enumerate(rows):
        y, length = 14 + 40 * place, wide * float(share)
        parts.append(text(left - 12, y + 20, f"{ranks} rank{'s' if ranks != '1' else ''}", "end"))
        parts.append(box(left, y, length, 28, COLOURS[0]))
        megabytes = int(nbytes.replace(",", "")) / 1e6
        parts.append(text(left + length + 10, y + 20, f"{megabytes:.0f} MB, {float(share):.2f} x", "small"))
    return svg(parts, left + wide + 140, 20 + 40 * len(rows), "Activations of each rank that shares a sequence")


DIAGRAMS = {"units": units, "stages": stages, "tiers": tiers, "zeropp": groups, "checkpoints": checkpoints}
MEASURED = {"long_context": long_context}


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(FOLDER, {name: draw() for name, draw in {**DIAGRAMS, **MEASURED}.items()})
