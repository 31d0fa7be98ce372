"""How fast a checkpoint is saved, how long a save beside training holds it up, and how much a load reads.

    python benchmarks/checkpoint_saving.py FOLDER [--ranks 2] [--layers 8] [--loads 1 3 4]

Starts its own ranks (CPU, gloo, stage 3, bf16, AdamW). "plain" is what the disk allows: each rank writes the bytes of
its own file with one write and one fsync. Rounds alternate, and medians are compared, since disks have moods.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 5
WIDTH = 1024
ROWS = 256


def main() -> None:
    """Runs everything and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--loads", type=int, nargs="*", default=[1, 3, 4])
    parser.add_argument("--rank-does", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_does:
        print(json.dumps(as_rank(options)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    report = start_ranks(options, options.ranks, "save")
    report["stall"] = start_ranks(options, options.ranks, "stall")
    report["loads"] = {count: start_ranks(options, count, "load") for count in options.loads}
    report["stall_share"] = report["stall"]["seconds"] / report["save_seconds"]
    print(json.dumps(report, indent=2))
    shutil.rmtree(options.folder / "round0")


def start_ranks(options: argparse.Namespace, count: int, task: str) -> Any:
    """What rank 0 of `count` ranks reports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job["OMP_NUM_THREADS"] = max(1, (os.cpu_count() or 1) // count)
    command = [sys.executable, __file__, str(options.folder), "--layers", str(options.layers), "--rank-does", task]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=subprocess.PIPE,
        )
        for rank in range(count)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{task} on {count} ranks failed")
    return json.loads(outputs[0].splitlines()[-1])


def as_rank(options: argparse.Namespace) -> dict[str, Any]:
    """One rank's part of a task."""
    import torch
    from torch import nn

    import zeroaccel

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(options.layers)]
    beside = options.rank_does == "stall"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "checkpoint": {"async_save": beside, "staging_nbytes": 4 << 30},
    }
    engine, *_ = zeroaccel.initialize(nn.Sequential(*blocks), config=config)

    def forward_and_backward() -> None:
        engine.backward(engine(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())

    if options.rank_does == "load":
        seconds = timed(engine, lambda: engine.load_checkpoint(options.folder, tag="round0"))
        read = engine.loaded
        return {
            "seconds": seconds,
            "kept_nbytes": read.wanted_nbytes,
            "read_share": read.read_nbytes / read.wanted_nbytes,
        }
    forward_and_backward()
    engine.step()
    if beside:
        return {
            "seconds": statistics.median(held_up(engine, options.folder, forward_and_backward) for _ in range(ROUNDS))
        }
    saves, plains, nbytes = [], [], 0
    for index in range(ROUNDS + 1):  # the first is for warming up
        tag = f"round{index}"
        saves.append(timed(engine, lambda tag=tag: engine.save_checkpoint(options.folder, tag=tag)))  # type: ignore[misc]
        file = next((options.folder / tag).glob(f"rank{engine.collectives.rank:05d}*"))
        content = file.read_bytes()
        nbytes = len(content)
        plains.append(timed(engine, lambda path=file, content=content: write_plainly(path, content)))  # type: ignore[misc]
        engine.collectives.barrier("looked at")
        if index and engine.collectives.rank == 0:
            shutil.rmtree(options.folder / tag)
    save, plain = statistics.median(saves[1:]), statistics.median(plains[1:])
    return {"file_nbytes": nbytes, "save_seconds": save, "plain_seconds": plain, "speed_of_plain": plain / save}


def held_up(engine: Any, folder: Path, forward_and_backward: Callable[[], None]) -> float:
    """Seconds that a save beside training takes from the main thread: the call, and the wait before weights change."""
    from zeroaccel.checkpoint.background import BackgroundSave

    call = timed(engine, lambda: engine.save_checkpoint(folder, tag="beside"))
    forward_and_backward()
    saving: BackgroundSave = engine._saving
    begin = time.perf_counter()
    saving.wait_copied()
    wait = time.perf_counter() - begin
    engine.step()
    engine.wait_for_checkpoint()
    return call + wait


def timed(engine: Any, call: Callable[[], object]) -> float:
    """Seconds until every rank is done."""
    engine.collectives.barrier("begin")
    begin = time.perf_counter()
    call()
    engine.collectives.barrier("end")
    return time.perf_counter() - begin


def write_plainly(path: Path, content: bytes) -> None:
    """One write, one fsync."""
    target = path.with_name(path.name + ".plain")
    with open(target, "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    target.unlink()


if __name__ == "__main__":
    main()
