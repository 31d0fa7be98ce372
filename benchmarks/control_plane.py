"""Measures messages and time of the control plane with many ranks, simulated in one process.

    python benchmarks/control_plane.py --most 4096

Each rank is a thread (`tests/support/simulated_groups.py`) that runs the code of a job: an agreement without errors,
the comparison of plans, and saving and copying a state in memory, with its recovery after the loss of a machine. The
message count is that of the rank that sends the most. Seconds are processor time of the median rank, without a network.
`initialize` runs on one rank whose peers do not exist: it computes everything that a rank computes and sends nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import click
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.simulated_groups import run
from zeroaccel.accelerate.peer_copies import PeerCopies
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.estimate.fake_ranks import FakeRanks, SentBytes
from zeroaccel.setup.build import build
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.plan import TrainPlan

PER_NODE = 8
MOST_WITH_STATES = 1024
"""Largest number of ranks that fits in memory: each rank holds the list of all files."""
_NBYTES = 64


def agree(ranks: Collectives) -> None:
    """Runs an agreement in which no rank has an error."""
    with agreed(ranks, "agreement"):
        pass


def compare(ranks: Collectives) -> None:
    """Compares three digests of each rank, like `TrainPlan.compare`."""
    ranks.gather_objects(("settings" * 8, 0, "parameters" * 6), "compare plans")


def recovery(root: Path) -> Callable[[Collectives], None]:
    """Saves and copies a state in memory; the second machine loses its own; all ranks find the copy and restore it."""

    def recover(ranks: Collectives) -> None:
        machine = ranks.rank // PER_NODE
        folder = root / str(machine)
        state = folder / "checkpoints" / "checkpoint_4"
        copies = PeerCopies(ranks, folder)
        written = folder / "checkpoints" / "written_4"
        with agreed(ranks, "write"):
            written.mkdir(parents=True, exist_ok=True)
            (written / f"rank{ranks.rank:05}.safetensors").write_bytes(bytes(_NBYTES))
            if ranks.rank == 0:
                (written / "run_state.json").write_bytes(bytes(_NBYTES))
        copies.spread(written, state)
        with agreed(ranks, "loss"):
            if machine == 1 and copies.is_first:
                for path in state.iterdir():
                    path.unlink()
        states = [state] if copies.is_first and (state / "run_state.json").exists() else []
        assert copies.newest(states) is not None, "the state is on the other machines"

    return recover


def measured(world_size: int, call: Callable[[Collectives], None]) -> tuple[int, int, float]:
    """Returns (messages and bytes of the rank that sends the most, processor seconds of the median rank)."""
    sent = [one for _, one in run(world_size, call, per_node=PER_NODE)]
    seconds = statistics.median(one.seconds for one in sent)
    return max(one.messages for one in sent), max(one.nbytes for one in sent), seconds


def initialize_seconds(world_size: int) -> float:
    """Returns the processor seconds of `initialize` on one rank at stage 3."""
    with torch.device("cpu"):
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(24)]
        )
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    begin = time.process_time()
    ranks = FakeRanks(world_size, SentBytes())
    optimizer = torch.optim.AdamW(model.parameters())
    plan = TrainPlan.of(JobSpec(model, optimizer, config=config), ranks.as_job(torch.device("cpu")))
    plan.compare()
    build(plan).destroy()
    return time.process_time() - begin


@click.command()
@click.option("--most", default=4096, show_default=True, help="Number of ranks in the last row.")
def main(most: int) -> None:
    """Prints a table whose numbers of ranks are powers of four."""
    torch.set_num_threads(1)
    initialize_seconds(8)
    print(f"{date.today()}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.0f}")
    print("| ranks | call | messages of a rank | KB of a rank | ms per rank |\n|---|---|---|---|---|")
    world_size = 16
    while world_size <= most:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            calls = {"agreement": agree, "compare plans": compare, "state in memory": recovery(Path(folder))}
            if world_size > MOST_WITH_STATES:
                del calls["state in memory"]
            for name, call in calls.items():
                messages, nbytes, seconds = measured(world_size, call)
                print(f"| {world_size} | {name} | {messages} | {nbytes / 1e3:.1f} | {1e3 * seconds:.2f} |", flush=True)
        print(f"| {world_size} | initialize | | | {1e3 * initialize_seconds(world_size):.0f} |", flush=True)
        world_size *= 4


if __name__ == "__main__":
    main()
