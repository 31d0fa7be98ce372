"""The trainer: policy gradients on samples of generate.py, which gets the weights as deltas.

    zeroaccel launch --num_processes 2 train.py --folder /dev/shm/policy

A sample's reward is the share of tokens that follow their predecessor in the cycle 0, 1, ..., 15, 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from policy import TOKENS, Policy
from torch import Tensor

import zeroaccel
from zeroaccel.errors import UsageError
from zeroaccel.rollout import FileSink, send

CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


def publish(engine: zeroaccel.Engine, sink: FileSink) -> int:
    """Sends the weights that the step changed, or all if a generator missed a version. Returns this rank's bytes."""
    try:
        return send(engine, engine.stream_deltas(engine.streamed_version), sink)
    except UsageError as refused:
        print(refused)
        return send(engine, engine.stream_deltas(None), sink)


def samples_of(folder: Path, version: int) -> Tensor:
    """Returns the samples that the generator drew with a version."""
    path, until = folder / f"samples-{version}.pt", time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit(f"no samples of version {version} for a minute")
        time.sleep(0.01)
    samples: Tensor = torch.load(path)
    return samples


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains; returns the mean reward of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    engine, *_ = zeroaccel.initialize(Policy(), config=CONFIG)
    rank, ranks = engine.collectives.rank, engine.collectives.world_size
    sink = FileSink(arguments.folder)
    engine.mark_changes()  # from now on, steps mark the weights that they change: one bit each
    send(engine, engine.stream_weights(only_rank=0), sink if rank == 0 else None)
    rewards = []
    for _ in range(arguments.steps):
        samples = samples_of(arguments.folder, engine.streamed_version)
        hits = ((samples[:, :-1] + 1) % TOKENS == samples[:, 1:]).float()
        rewards.append(hits.mean().item())
        rank_samples, gains = samples[rank::ranks], (hits - hits.mean())[rank::ranks]
        chosen = engine(rank_samples[:, :-1]).float().log_softmax(-1).gather(-1, rank_samples[:, 1:, None])[..., 0]
        engine.backward(-(chosen * gains).mean())
        engine.step()
        nbytes = publish(engine, sink)
        if rank == 0 and len(rewards) % 10 == 0:
            print(f"step {len(rewards)}: reward {rewards[-1]:.2f}, {nbytes} bytes from this rank")
    engine.destroy()
    return rewards


if __name__ == "__main__":
    main()
