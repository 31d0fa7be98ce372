"""The page and the JSON of `zeroaccel checkpoint inspect`: which rank's file holds which interval of which tensor."""

from __future__ import annotations

from typing import Any

from zeroaccel.checkpoint.manifest import Manifest
from zeroaccel.zero.access.safetensors_file import ITEMSIZE

from .frame import COLOURS, Table, escaped, figure, legend, page

_LEFT, _WIDTH, _BAR, _GAP = 330, 640, 14, 6
_MOST_BARS, _MOST_ROWS = 150, 500


def checkpoint_facts(manifest: Manifest) -> dict[str, Any]:
    """All of it as plain data: elements [start, stop) of each tensor, and the rank whose file has them."""
    tensors = {
        key: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "intervals": [
                {
                    "rank": manifest.files[file].rank,
                    "file": manifest.files[file].name,
                    "start": start,
                    "stop": start + length,
                    "byte": offset,
                }
                for file, start, length, offset in tensor.pieces
            ],
        }
        for key, tensor in manifest.tensors.items()
    }
    return {
        "tag": manifest.tag,
        "stage": sum(manifest.sharded.values()),
        "world_size": manifest.world_size,
        "step": manifest.global_steps,
        "optimizer": manifest.optimizer["type"] if manifest.optimizer else None,
        "files": [{"rank": file.rank, "name": file.name, "bytes": file.nbytes} for file in manifest.files],
        "tensors": tensors,
    }


def checkpoint_page(manifest: Manifest) -> str:
    """The whole page. Of many tensors it shows the first ones, and says how many it leaves out."""
    facts = checkpoint_facts(manifest)
    title = f"Checkpoint {facts['tag']}: stage {facts['stage']}, {facts['world_size']} ranks, step {facts['step']}"
    # One drawing per parameter: what is of one parameter is cut alike, master and states.
    drawn = [key for fqn in manifest.order if (key := manifest.weight_key(fqn)) is not None][:_MOST_BARS]
    ranks = sorted({file["rank"] for file in facts["files"]})
    files = Table(
        "Files", ["file", "rank", "bytes"], [[one["name"], one["rank"], one["bytes"]] for one in facts["files"]]
    )
    rows = [
        [
            key,
            tensor["dtype"],
            " x ".join(map(str, tensor["shape"])) or "one value",
            interval["rank"],
            interval["start"],
            interval["stop"],
            (interval["stop"] - interval["start"]) * ITEMSIZE[tensor["dtype"]],
            interval["file"],
        ]
        for key, tensor in facts["tensors"].items()
        for interval in tensor["intervals"]
    ]
    left_out = len(rows) - _MOST_ROWS
    headings = ["tensor", "dtype", "shape", "rank", "from element", "to", "bytes", "file"]
    intervals = Table("Elements [from, to) of each tensor", headings, rows[:_MOST_ROWS], texts=(0, 1, 2, 7))
    weights = len([fqn for fqn in manifest.order if manifest.weight_key(fqn) is not None])
    body = [
        "<h2>Who has what</h2>",
        f"<p>Each bar is one parameter from its first element to its last; {len(drawn)} of {weights} are drawn.</p>",
        legend({f"rank {rank}": _colour(rank) for rank in ranks[: len(COLOURS)]}),
        _bars(facts, drawn),
        "<h2>Files</h2>",
        files.html(),
        "<h2>Intervals</h2>",
        intervals.html(),
    ]
    if left_out > 0:
        body.append(f"<p>{left_out} more intervals are left out; --json has all of them.</p>")
    return page(title, body, about=f"Optimizer: {facts['optimizer'] or 'none'}.")


def _bars(facts: dict[str, Any], drawn: list[str]) -> str:
    parts = []
    for index, key in enumerate(drawn):
        y, tensor = 4 + index * (_BAR + _GAP), facts["tensors"][key]
        name = key.partition("/")[2]
        shown = name if len(name) <= 46 else f"...{name[-43:]}"
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 11}" class="end">{escaped(shown)}</text>')
        numel = max([one["stop"] for one in tensor["intervals"]], default=1)
        for one in tensor["intervals"]:
            width = (one["stop"] - one["start"]) / numel * _WIDTH
            at, said = _LEFT + one["start"] / numel * _WIDTH, f"rank {one['rank']}: {one['start']} to {one['stop']}"
            parts.append(
                f'<rect x="{at:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_colour(one["rank"])}">'
                f"<title>{said}</title></rect>"
            )
    label = "Intervals of each parameter by rank; the table below has the numbers"
    return figure("".join(parts), _LEFT + _WIDTH + 10, 8 + len(drawn) * (_BAR + _GAP), label)


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]
