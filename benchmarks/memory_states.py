"""Measures the cost of states in memory in an undisturbed training: blocks of steps with and without them, in turn.

    python benchmarks/memory_states.py --machines 2 --interval 20 --width 1024

Starts two ranks on CPUs (stage 2, AdamW, forward and backward of `--rows` samples per rank). With two machines each
rank's folder counts as one of another machine, so the ranks exchange copies. The result is the median over blocks.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from torch import nn
from torch.utils.data import DataLoader

MEMORY = "/dev/shm"
RANKS = 2


def train(root: Path, machines: int, interval: str, width: int, rows: int, blocks: int, steps: int) -> None:
    """Trains as one rank."""
    from zeroaccel import Accelerator, ProjectConfiguration, ZeroPlugin
    from zeroaccel.accelerate import memory_states

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    folder = root / str(rank * machines // RANKS)
    folder.mkdir(exist_ok=True)
    os.environ["ZEROACCEL_MEMORY_FOLDER"] = str(folder)
    project = ProjectConfiguration(str(root), memory_interval="auto" if interval == "auto" else int(interval))
    accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin(zero_stage=2), project_config=project)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)])
    loader = DataLoader(torch.randn(4 * rows, width), batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    memory = accelerator._run._memory
    assert memory is not None, "no folder in memory"
    batches = (batch for _ in iter(int, 1) for batch in loader)
    means: dict[bool, list[float]] = {True: [], False: []}
    saved = trained = 0
    for block in range(-2, 2 * blocks):  # the first two are warm-up
        memory._is_on = on = block % 2 == 0
        memory._at, memory._last = memory_states._Moment(model.global_steps, time.monotonic()), None
        begin, last, number = time.monotonic(), None, 0
        while number < max(steps, 2 * memory.interval) or (on and memory._writing is not None):
            number += 1
            x = next(batches)
            if memory._writing is not last:
                last = memory._writing
                saved += last is not None
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if block >= 0:
            means[on].append((time.monotonic() - begin) / number)
            trained += number * on
        else:
            saved = 0
    if accelerator.is_main_process:
        report(means, sum(param.numel() for param in model.module.parameters()), saved, trained)
        print(f"interval at the end: {memory.interval}")
    accelerator.end_training()


def report(means: dict[bool, list[float]], numel: int, saved: int, steps: int) -> None:
    """Prints a row."""
    middle = {on: statistics.median(found) for on, found in means.items()}
    share = [a / b - 1 for a, b in zip(means[True], means[False], strict=True)]
    print(
        f"{numel / 1e6:.1f} M parameters, {12 * numel / RANKS / 1e6:.0f} MB per rank: {saved} states in {steps} steps, "
        f"{1000 * middle[False]:.1f} ms a step without, {1000 * middle[True]:.1f} ms with: "
        f"{100 * statistics.median(share):+.2f} % (blocks: {', '.join(f'{100 * one:+.1f}' for one in share)})"
    )


@click.command()
@click.option("--machines", default=1, show_default=True)
@click.option("--interval", default="auto", show_default=True, help='Steps between two states, or "auto".')
@click.option("--width", default=1024, show_default=True)
@click.option("--rows", default=64, show_default=True)
@click.option("--blocks", default=6, show_default=True, help="Blocks with states; as many run without.")
@click.option(
    "--steps", default=60, show_default=True, help="Least number of steps of a block; at least two intervals."
)
def main(machines: int, interval: str, width: int, rows: int, blocks: int, steps: int) -> None:
    """Starts the ranks and waits for them."""
    words = [sys.executable, __file__, "rank"]
    root = Path(tempfile.mkdtemp(prefix="states-", dir=MEMORY))
    try:
        from tests.support.environment import free_port

        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        arguments = [str(root), *map(str, (machines, interval, width, rows, blocks, steps))]
        ranks = [
            subprocess.Popen([*words, *arguments], env=os.environ | settings | {"RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(RANKS)
        ]
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {machines} machines, interval {interval}")
        sys.exit(max(rank.wait() for rank in ranks))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if sys.argv[1:2] == ["rank"]:
        train(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
    else:
        main()
