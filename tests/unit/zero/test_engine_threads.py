"""An engine's threads end with it, and it refuses later calls from the program's own threads by name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroaccel
from zeroaccel.comm import topology
from zeroaccel.errors import EngineStateError


def test_no_thread_outlives_an_engine(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    files = {"device": "nvme", "nvme_path": str(tmp_path), "update_during": "next_step"}
    engine, *_ = zeroaccel.initialize(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "checkpoint": {"async_save": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": files},
        },
    )

    def step() -> None:
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()

    step()
    engine.save_checkpoint(tmp_path)
    step()
    own = {thread.name.rstrip("_0123456789") for thread in set(threading.enumerate()) - before}
    assert {"zeroaccel-update", "zeroaccel-file-"} <= own, "the test needs running threads"
    engine.destroy()
    topology.destroy()
    assert set(threading.enumerate()) <= before
    errors: list[BaseException] = []

    def late() -> None:
        try:
            step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    thread.join()
    with pytest.raises(EngineStateError, match=r"an engine after destroy.*end the threads and loaders"):
        raise errors[0]
