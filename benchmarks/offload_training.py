"""Measures a training step with states on the host, and the rate at which an update streams states from a file.

    python benchmarks/offload_training.py step --deepspeed-python /path/to/env/bin/python
    python benchmarks/offload_training.py stream --folder /path/on/the/disk
    python benchmarks/offload_training.py beside --folder /path/on/the/disk

`step`: the contenders of `step_time.py`, with and without `offload_optimizer.device: cpu`. `stream`: one process
updates masters and moments in a file, in turn with plain sequential direct I/O of the same file in the same slabs and
blocks, which gives the speed of the disk at that moment. `beside`: the part of that update that
`offload_optimizer.update_during` hides, and its effect on the step time.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import torch
from models import Shape
from race import Conditions, ContenderFailed, TooLittleMemory, race
from report import Bar, document, machine, ratio, show
from rich.console import Console
from torch import nn

import zeroaccel
from zeroaccel.offload.file_io import BlockFile, Direction

_STEP_BARS = (
    ("zeroaccel-2-host", "zeroaccel-2", 1.15),
    ("zeroaccel-3-host", "zeroaccel-3", 1.15),
    ("zeroaccel-3-host-both", "zeroaccel-3", 1.15),
    ("zeroaccel-2-host", "deepspeed-2-host", 0.5),
    ("zeroaccel-3-host", "deepspeed-3-host", 0.5),
)
_STREAM_BAR = 1 / 0.8


@click.group()
def main() -> None:
    """Measures the cost of offload in a training step, and its streaming rate beside that of the disk."""


@main.command(context_settings={"show_default": True})
@click.option("--rounds", default=7, help="Rounds; each runs every contender once.")
@click.option("--steps", default=3, help="Timed steps of a contender in a round.")
@click.option("--stage", type=click.Choice(["2", "3"]), multiple=True, default=["2", "3"])
@click.option("--deepspeed-python", type=click.Path(exists=True, dir_okay=False), help="Interpreter with DeepSpeed.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--check", is_flag=True, help="Exit with 1 if a bar is missed.")
def step(
    rounds: int, steps: int, stage: tuple[str, ...], deepspeed_python: str | None, json_path: Path | None, check: bool
) -> None:
    """Compares steps with the optimizer on the host with steps without offload and with DeepSpeed's."""
    if deepspeed_python is None and importlib.util.find_spec("deepspeed") is not None:
        deepspeed_python = sys.executable
    names = [name for bar in _STEP_BARS for name in bar[:2] if any(f"-{number}" in name for number in stage)]
    names = [name for name in dict.fromkeys(names) if deepspeed_python or not name.startswith("deepspeed")]
    conditions = Conditions(Shape(), rounds=rounds, steps=steps, warmup=2, deepspeed_python=deepspeed_python)
    progress = Console(stderr=True)
    try:
        results = race(names, conditions, lambda line: progress.print(line, style="dim", highlight=False))
    except (ContenderFailed, TooLittleMemory) as error:
        raise click.ClickException(str(error)) from error
    console = Console(width=None if sys.stdout.isatty() else 160)
    show(results, conditions, console)
    there = {name: result for name, result in results.items() if not result.failure}
    found = [
        Bar(f"step time of {name} / {other}", ratio(there[name], there[other]).median, limit)
        for name, other, limit in _STEP_BARS
        if name in there and other in there
    ]
    _finish(found, {"machine": machine(), "step": document(results, conditions)}, console, json_path, check=check)


@main.command(context_settings={"show_default": True})
@click.option("--folder", type=click.Path(exists=True, file_okay=False), default=".", help="Folder on the disk.")
@click.option("--layers", default=12, help="Layers of 4 million parameters each.")
@click.option("--rounds", default=5)
@click.option("--block-size", default=1 << 20, help="Bytes of one request (aio.block_size).")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--check", is_flag=True, help="Exit with 1 if the bar is missed.")
def stream(folder: str, layers: int, rounds: int, block_size: int, json_path: Path | None, check: bool) -> None:
    """Times an update of states in a file, in turn with its I/O alone."""
    engine = _engine(folder, layers, block_size)
    shard = engine.sharded_optimizer
    assert shard is not None
    assert shard.states is not None
    tier: Any = shard.states.tier
    seconds, raw = [], []
    for turn in range(rounds + 1):
        engine.backward(engine(torch.ones(1, 2048, dtype=torch.bfloat16)))
        before, moved = shard.update_seconds, _moved(tier)
        engine.step()
        if turn:  # the first step has no states to read
            seconds.append(shard.update_seconds - before)
            nbytes = _moved(tier) - moved
            raw.append(_plain(tier.file, nbytes // 2, tier.buffers.peak_nbytes // 3))
    engine.destroy()
    ratios = [mine / plain for mine, plain in zip(seconds, raw, strict=True)]
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        f"{nbytes / 1e9:.2f} GB per update of {layers * 4.2:.0f} M parameters: {statistics.median(seconds):.3f} s, "
        f"{nbytes / statistics.median(seconds) / 1e9:.2f} GB/s; plain sequential reads and writes: "
        f"{statistics.median(raw):.3f} s, {nbytes / statistics.median(raw) / 1e9:.2f} GB/s; buffers "
        f"{tier.buffers.peak_nbytes / 1e6:.0f} MB"
    )
    bar = Bar("seconds of the update / of plain sequential I/O", statistics.median(ratios), _STREAM_BAR)
    facts = {"machine": machine(), "seconds": seconds, "plain_seconds": raw, "nbytes": nbytes, "ratios": ratios}
    _finish([bar], facts, console, json_path, check=check)


@main.command(context_settings={"show_default": True})
@click.option("--folder", type=click.Path(exists=True, file_okay=False), default=".", help="Folder on the disk.")
@click.option("--device", type=click.Choice(["cpu", "nvme"]), default="nvme", help="Tier of the states.")
@click.option("--layers", default=6, help="Layers of 4 million parameters each.")
@click.option("--batch", default=64, help="Rows of a forward: more rows hide more of the update.")
@click.option("--threads", default=1, help="Threads of forward and backward; the other cores can update meanwhile.")
@click.option("--rounds", default=5)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--check", is_flag=True, help="Exit with 1 if the bar is missed.")
def beside(
    folder: str, device: str, layers: int, batch: int, threads: int, rounds: int, json_path: Path | None, check: bool
) -> None:
    """Times a step with the update in it, in the next forward, in the backward, and during the next step; in turn."""
    torch.set_num_threads(threads)
    times = ("step", "forward", "backward", "auto", "next_step")
    engines = {during: _engine(folder, layers, 1 << 20, device, during) for during in times}
    rows = torch.ones(batch, 2048, dtype=torch.bfloat16)
    seconds: dict[str, list[tuple[float, float, float]]] = {during: [] for during in engines}
    for turn in range(rounds + 2):
        for during, engine in engines.items():
            for _ in range(2):  # the second of two consecutive steps overlaps the update of the first
                shard, begun = engine.sharded_optimizer, time.perf_counter()
                update, hidden = shard.update_seconds, shard.hidden_seconds
                engine.backward(engine(rows))
                engine.step()
                found = (
                    time.perf_counter() - begun,
                    shard.update_seconds - update,
                    max(0.0, shard.hidden_seconds - hidden),
                )
            engine.finish_update()
            if turn > 1:  # the first steps have no states to read, and update nothing early
                seconds[during].append(found)
    console = Console(width=None if sys.stdout.isatty() else 160)
    medians: dict[str, float] = {}
    for during, found_all in seconds.items():
        step_seconds, update, hidden = (statistics.median(column) for column in zip(*found_all, strict=True))
        medians[during] = step_seconds
        line = f"{during}: step {step_seconds:.3f} s, update {update:.3f} s, {hidden:.3f} s of it hidden"
        console.print(line, highlight=False)
    for engine in engines.values():
        engine.destroy()
    bar = Bar('seconds of a step with "auto" / with "step"', medians["auto"] / medians["step"], 1.02)
    _finish([bar], {"machine": machine(), "device": device, "seconds": seconds}, console, json_path, check=check)


def _engine(folder: str, layers: int, block_size: int, device: str = "nvme", during: str = "step") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(layers)])
    model.append(nn.Flatten(0))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "aio": {"block_size": block_size},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {
                "device": device,
                "nvme_path": folder,
                "update_during": during,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
    }
    engine = zeroaccel.initialize(_Mean(model), config=config)[0]
    return engine


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().square().mean()


def _moved(tier: Any) -> int:
    return sum(traffic.nbytes for traffic in tier.traffic.values())


def _plain(file: BlockFile, nbytes: int, slab_nbytes: int) -> float:
    """Returns the seconds to read `nbytes` of the file in consecutive slabs, and then to write as many."""
    from zeroaccel.offload.host_buffers import aligned_bytes, aligned_nbytes

    slab = aligned_bytes(aligned_nbytes(slab_nbytes))
    total = 0.0
    directions: tuple[Direction, Direction] = ("read", "write")
    for direction in directions:
        begun = time.perf_counter()
        for offset in range(0, nbytes - slab.numel() + 1, slab.numel()):
            finished = threading.Event()
            file.start(direction, slab, offset, lambda error, finished=finished: finished.set())  # type: ignore[misc]
            finished.wait()
        whole = nbytes // slab.numel() * slab.numel()
        total += (time.perf_counter() - begun) * nbytes / whole
    return total


def _finish(found: list[Bar], facts: dict[str, Any], console: Console, path: Path | None, *, check: bool) -> None:
    for bar in found:
        verdict = "passed" if bar.passed else "[red]MISSED[/]"
        console.print(f"{bar.claim}: {bar.value:.3f}, at most {bar.limit:.3f}: {verdict}", highlight=False)
    if path is not None:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    if check and not all(bar.passed for bar in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
