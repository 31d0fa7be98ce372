"""Runs that save and resume the toy model on one rank of a pool; the checkpoint tests compare their results.

Every rank trains on the same batches. Means over 1, 2 and 4 ranks are exact, so these runs have the same bits: a
resumed run must continue exactly like the saved run, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.training import Toy, batches, config, offloaded, train_step
from zeroaccel.checkpoint.save_plan import SavePlan
from zeroaccel.engine import Engine
from zeroaccel.optim.optimizer_factory import build_optimizer

PRECISIONS = ("fp32", "bf16", "fp16")
TIERS = ("none", "cpu", "nvme")
STEPS = 3
Pieces = dict[str, tuple[int, Tensor]]


@dataclass
class Snapshot:
    """State of one rank: its shards of masters, states and values at the checkpoint, and the training after it."""

    pieces: Pieces
    losses: list[float]
    weights: dict[str, Tensor]
    counters: tuple[int, ...]
    rates: list[float]
    client_state: dict[str, Any]
    read_share: float = 0.0


def make_engine(
    stage: int,
    precision: str = "fp32",
    *,
    seed: int = 7,
    reverse_groups: bool = False,
    model: nn.Module | None = None,
    checkpoint: dict[str, Any] | None = None,
    **changes: Any,
) -> Engine:
    """Builds an engine over a new toy model with two param groups (only matrices decay) and a schedule."""
    torch.manual_seed(seed)

    def grouped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
            {"params": [param for param in params if param.dim() <= 1], "lr": 3e-3},
        ]
        return build_optimizer("AdamW", {"lr": 1e-2}, groups[:: -1 if reverse_groups else 1])

    settings = config(stage, precision, **changes)
    settings.pop("optimizer")
    rates = [1e-2, 3e-3][:: -1 if reverse_groups else 1]
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": rates, "warmup_num_steps": 8}
    settings["scheduler"] = {"type": "WarmupLR", "params": warmup}
    settings["checkpoint"] = checkpoint or {}
    engine, *_ = zeroaccel.initialize(model or Toy(), optimizer=grouped, config=settings)
    assert isinstance(engine, Engine)
    return engine


def train(engine: Engine, tokens: Sequence[Tensor]) -> list[float]:
    """Trains one step per batch and returns the losses."""
    return [train_step(engine, engine(batch)) for batch in tokens]


def snapshot(engine: Engine, client_state: dict[str, Any]) -> Snapshot:
    """Records the current state, and the results of `STEPS` more steps; the engine cannot be used afterwards."""
    contents = SavePlan.collect(engine.checkpointer.state())
    pieces = {
        entry.key: (entry.start, entry.data.clone() if isinstance(entry.data, Tensor) else entry.data.copy())
        for entry in contents.entries
    }
    counters = (engine.global_steps, engine.micro_steps, engine.global_samples, int(engine.loss_scale.value))
    rates = engine.get_lr()
    losses = train(engine, batches(0, 2 * STEPS)[STEPS:])
    engine.destroy()
    weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return Snapshot(pieces, losses, weights, counters, rates, client_state)


def save(root: Path, stage: int, precision: str, *, tag: str | None = None, **changes: Any) -> Snapshot:
    """Trains a few steps and saves under the tag "<stage>-<precision>", or `tag`."""
    engine = make_engine(stage, precision, **changes)
    train(engine, batches(0, STEPS))
    engine.module.get_buffer("offset").fill_(0.125)
    client_state = {"epoch": 3, "seen": torch.arange(5), "rest": ("a", None, float("inf"), {1: 2.5})}
    assert engine.save_checkpoint(root, tag=tag or f"{stage}-{precision}", client_state=client_state)
    return snapshot(engine, client_state)


def resume(folder: Path, tag: str, stage: int, precision: str, **changes: Any) -> Snapshot:
    """Resumes in an engine that was initialized with other weights."""
    engine = make_engine(stage, precision, seed=11, **changes)
    path, client_state = engine.load_checkpoint(folder, tag=tag)
    assert path is not None
    assert engine.loaded is not None
    share = engine.loaded.read_nbytes / max(1, engine.loaded.requested_nbytes)
    found = snapshot(engine, client_state)
    found.read_share = share
    return found


def save_all(root: Path, cases: Sequence[tuple[str, int, str, str]]) -> dict[str, Snapshot]:
    """Saves each case (tag, stage, precision, tier); returns this rank's snapshots by tag."""
    return {
        tag: save(root, stage, precision, tag=tag, **tiers(root, stage, tier)) for tag, stage, precision, tier in cases
    }


def resume_all(root: Path, cases: Sequence[tuple[str, int, str, str, bool]]) -> list[Snapshot]:
    """Resumes each case (tag, stage, precision, tier, reversed param groups)."""
    return [
        resume(root, tag, stage, precision, reverse_groups=turned, **tiers(root, stage, tier))
        for tag, stage, precision, tier, turned in cases
    ]


def tiers(root: Path, stage: int, tier: str) -> dict[str, Any]:
    """Returns the config keys that move the state that the stage shards to a tier."""
    swap = root / "swap"
    swap.mkdir(exist_ok=True)
    return offloaded(swap, tier if stage >= 1 else "none", tier if stage == 3 else "none")


def assembled(snapshots: Sequence[Snapshot]) -> dict[str, Tensor]:
    """Returns for each key all elements, assembled from the pieces of all ranks."""
    parts: dict[str, dict[int, Tensor]] = {}
    for found in snapshots:
        for key, (start, data) in found.pieces.items():
            parts.setdefault(key, {})[start] = data
    return {key: torch.cat([held[start] for start in sorted(held)]) for key, held in parts.items()}
