"""Trains until it is killed; `fault_injection.py` runs this script: ``endless_training.py FOLDER``.

Each rank writes its process id to ``FOLDER/RANK`` after a few steps that all ranks took together.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import zeroaccel

STEPS_BEFORE = 3


def train(folder: Path) -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRAINING_KEEPS_ON"):  # imitates a script that saves before it exits, and takes long
        signal.signal(signal.SIGTERM, lambda *_: None)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(2)])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = zeroaccel.initialize(model=model, config=config)
    step = 0
    while True:
        engine.backward(engine(torch.randn(2, 16)).pow(2).mean())
        engine.step()
        step += 1
        if step == STEPS_BEFORE:
            file = folder / os.environ["RANK"]
            file.with_suffix(".half").write_text(str(os.getpid()))
            file.with_suffix(".half").replace(file)
        time.sleep(0.02)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
