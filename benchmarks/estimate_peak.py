"""The peak memory that `zeroaccel.estimate` predicts, compared with that of a real run.

    python benchmarks/estimate_peak.py                     # all stages, two ranks each; about three minutes
    zeroaccel launch --cpu --num_processes 2 benchmarks/estimate_peak.py --stage 3    # one of them, as JSON

The model is that of examples/train_gpt.py. Measured is the most that torch's CPU allocator has given out at a time,
as its own memory profiler counts: all tensors and all that kernels allocate inside themselves. A stage runs in
processes of its own, since a second profile in one process loses events.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zeroaccel
from zeroaccel.estimate import Precision, Workload, estimate

ROOT = Path(__file__).resolve().parents[1]
BATCH, LENGTH, RANKS = 8, 128, 2


def demo() -> tuple[nn.Module, Callable[[nn.Module, int, int], Any]]:
    """The example's model as its loop steps it; a MODEL for `zeroaccel estimate`."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None and spec.loader is not None, "the example has moved"
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.GPT(dim=320, layers=3, heads=5), _step


def _step(model: nn.Module, batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def measure(stage: int, precision: str, accumulation: int, steps: int = 2) -> int:
    """The most bytes allocated at a time, from before the model is made. (all ranks)"""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model, step = demo()
        engine, *_ = zeroaccel.initialize(model=model, config=config)
        for _ in range(steps * accumulation):
            loss, _logits = step(engine, BATCH, LENGTH)
            engine.backward(loss)
            engine.step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    engine.destroy()
    return peak


def compare(stage: int, precision: Precision, accumulation: int) -> dict[str, Any]:
    """Both numbers for one plan, on every rank. (all ranks)"""
    measured = measure(stage, precision, accumulation)
    workload = Workload(
        ranks=dist.get_world_size(), precision=precision, batch=BATCH, sequence=LENGTH, accumulation=accumulation
    )
    (estimated,) = estimate(demo, workload, [(stage, "none", "none")], on_cpu=True)
    plan = {"stage": stage, "precision": precision, "accumulation": accumulation}
    return plan | {"measured": measured, "estimated": estimated.device.total, "peak": estimated.peak}


@click.command()
@click.option("--stage", type=click.IntRange(0, 3), help="This one, in a job that runs already.")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16")
@click.option("--accumulation", type=click.IntRange(1), default=1)
def main(stage: int | None, precision: Precision, accumulation: int) -> None:
    if stage is not None:
        result = compare(stage, precision, accumulation)
        if dist.get_rank() == 0:
            print(json.dumps(result))
        dist.destroy_process_group()
        return
    table = Table("stage", "precision", "accumulation", "estimated, bytes", "measured, bytes", "difference", "peak in")
    for precision in ("bf16", "fp32"):
        for accumulation in (1, 2):
            for stage in range(4):
                row = _in_a_job(stage, precision, accumulation)
                off = row["estimated"] / row["measured"] - 1
                sizes = f"{row['estimated']:,}", f"{row['measured']:,}", f"{off:+.3%}"
                table.add_row(str(stage), precision, str(accumulation), *sizes, row["peak"])
    Console(width=110).print(table)


def _in_a_job(stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(RANKS), __file__]
    plan = ["--stage", str(stage), "--precision", precision, "--accumulation", str(accumulation)]
    done = subprocess.run([*launch, *plan], check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    main()
