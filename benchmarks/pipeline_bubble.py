"""Compares the measured idle part of a pipeline's steps with the formula of its schedules, (p - 1) / (m + p - 1).

    python benchmarks/pipeline_bubble.py [--stages 2,3,4] [--micro-batches 4,8] [--markdown FILE] [--check]

p ranks have one stage each. A stage computes almost nothing and sleeps, twice as long in backward as in forward, so the
result depends only on the schedule, for any number of cores. A rank is idle while it does not sleep. The time of a step
is that of the whole `train_batch` of the slowest rank, including the agreement on the batch, the optimizer's step and
the loss. The result is the median over steps of the mean over ranks. The bar: within 10 % of the formula.

(GPipe: Huang et al., 2019, arXiv:1811.06965, section 2.3; 1F1B: Narayanan et al., 2021, arXiv:2104.04473, section 2.2.)
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

BAR = 0.1
SCHEDULES = ("1f1b", "gpipe")
WIDTH, SAMPLES = 64, 4
_ROOT = Path(__file__).resolve().parents[1]


def run_rank(stages: int, micro_batches: list[int], forward_seconds: float, steps: int) -> None:
    """Trains with every schedule; rank 0 prints one JSON line."""
    import torch
    from torch import Tensor, nn

    import zeroaccel

    slept = 0.0

    def pad(seconds: float) -> None:
        nonlocal slept
        start = time.perf_counter()
        time.sleep(seconds)
        slept += time.perf_counter() - start

    class Padding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            pad(forward_seconds)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            pad(2 * forward_seconds)
            return grads[0]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            padded: Tensor = Padding.apply(self.linear(x))  # type: ignore[no-untyped-call]
            return padded

    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for schedule in SCHEDULES:
        for count in micro_batches:
            torch.manual_seed(0)
            model = nn.Sequential(*(Block() for _ in range(stages)))
            settings = {
                "train_micro_batch_size_per_gpu": SAMPLES,
                "gradient_accumulation_steps": count,
                "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            }
            pipeline = zeroaccel.PipelineConfig(schedule=schedule, split=(1,) * stages, loss=nn.functional.mse_loss)
            parallel = zeroaccel.ParallelConfig(pp=stages)
            engine, *_ = zeroaccel.initialize(model, config=settings, parallel=parallel, pipeline=pipeline)
            job = engine.collectives.job
            batch = (torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH))
            idle = []
            for step in range(steps + 1):
                job.barrier("measure")
                slept, start = 0.0, time.perf_counter()
                engine.train_batch(iter([batch] * count))
                times = job.gather_objects((time.perf_counter() - start, slept), "times")
                if step:  # the first step learns the shapes between stages
                    longest = max(seconds for seconds, _ in times)
                    idle.append(1 - statistics.fmean(busy for _, busy in times) / longest)
            found.append({"schedule": schedule, "micro_batches": count, "idle": idle})
            engine.destroy()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)


def _measure(stages: int, micro_batches: list[int], forward_seconds: float, steps: int) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sizes = ",".join(map(str, micro_batches))
    options = [f"--stages={stages}", f"--micro-batches={sizes}", f"--seconds={forward_seconds}", f"--steps={steps}"]
    ranks = []
    for rank in range(stages):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(stages),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, __file__, "--rank", *options], env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    try:
        output = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed; its message is above")
    found: list[dict[str, Any]] = json.loads(output[0].splitlines()[-1])
    return found


def main() -> None:
    """Measures every number of stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="2,3,4")
    parser.add_argument("--micro-batches", default="4,8")
    parser.add_argument("--seconds", type=float, default=0.15, help="seconds of a forward of one micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="timed ones")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bar is missed")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    stages, micro_batches = (
        [int(size) for size in text.split(",")] for text in (options.stages, options.micro_batches)
    )
    if options.rank:
        run_rank(stages[0], micro_batches, options.seconds, options.steps)
        return
    lines = [
        f"# The idle part of a pipeline's steps, {date.today()}",
        "",
        f"`python benchmarks/pipeline_bubble.py --stages {options.stages} --micro-batches {options.micro_batches}",
        f"--seconds {options.seconds:g} --steps {options.steps}`: a rank per stage, over gloo on one machine",
        f"with {os.cpu_count()} cores, whose load average was {os.getloadavg()[0]:.1f} at the start. A forward of a",
        f"micro-batch on a stage sleeps {options.seconds:g} s, its backward twice that. Idle is the median over",
        f"{options.steps} steps, with the smallest and largest in parentheses; the formula is (p - 1) / (m + p - 1).",
        "",
        "| schedule | stages p | micro-batches m | formula | idle | of the formula |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    worst = 0.0
    for size in stages:
        for row in _measure(size, micro_batches, options.seconds, options.steps):
            formula = (size - 1) / (row["micro_batches"] + size - 1)
            idle = statistics.median(row["idle"])
            worst = max(worst, abs(idle / formula - 1))
            lines.append(
                f"| {row['schedule']} | {size} | {row['micro_batches']} | {formula:.4f} | {idle:.4f} "
                f"({min(row['idle']):.4f} to {max(row['idle']):.4f}) | {idle / formula:.3f} |"
            )
            print(lines[-1], flush=True)
    lines += ["", f"The largest deviation is {worst:.1%}; the bar is {BAR:.0%}."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.check and worst > BAR:
        sys.exit(f"{worst:.1%} off the formula")


if __name__ == "__main__":
    main()
