"""Runs that resume from a checkpoint written by DeepSpeed, on one rank of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zeroaccel
from tests.support.scripts import load_script
from tests.support.training import train_step
from zeroaccel.checkpoint.save_plan import SavePlan

MAKE = load_script("tests/data/deepspeed/make.py")


@dataclass
class Resumed:
    """State of one rank after loading, and the losses of the next two steps."""

    pieces: dict[str, tuple[int, Tensor]]
    losses: list[float]
    global_steps: int
    rates: list[float]
    scheduler: dict[str, Any]
    client_state: dict[str, Any]
    buffers: dict[str, Tensor]


def resume_deepspeed(
    root: Path, stage: int, precision: str, empty: bool, tag: str | None = None, *, muon: bool = False
) -> Resumed:
    """Resumes at a stage and precision, with the effects of seed 0 undone, and trains two steps."""
    model, optimizer = MAKE.build(empty=empty)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    rates = {"warmup_num_steps": 2, "warmup_max_lr": [0.01, 0.02], "warmup_min_lr": [0.01, 0.02]}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1000.0,
        "scheduler": {"type": "WarmupLR", "params": rates},
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        **(MAKE.MUON if muon else {}),
    }
    engine, *_ = zeroaccel.initialize(model=model, optimizer=None if muon else optimizer, config=config)
    _, client_state = engine.load_checkpoint(str(root), tag)
    contents = SavePlan.collect(engine.checkpointer.state())
    pieces = {entry.key: (entry.start, entry.data.clone()) for entry in contents.entries}
    scheduler = engine.lr_scheduler.state_dict()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    steps = engine.global_steps
    losses = []
    for step in range(MAKE.STEPS, MAKE.STEPS + 2):
        losses.append(train_step(engine, engine(MAKE.batch(step))))
    found = [group["lr"] for group in engine.optimizer.param_groups]
    return Resumed(pieces, losses, steps, found, scheduler, client_state, buffers)
