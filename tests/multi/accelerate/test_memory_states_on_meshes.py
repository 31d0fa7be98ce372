"""States in memory with tensor parallelism and with pipeline stages."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.multi.accelerate.test_memory_states import VARIABLE, memory_of_machine
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES, small_llama
from tests.support.pool import Ranks
from zeroaccel import Accelerator, ParallelConfig, PipelineConfig, ProjectConfiguration, ZeroPlugin, set_seed
from zeroaccel.accelerate import memory_states

STEPS = 6


@contextmanager
def lagging() -> Iterator[None]:
    """Reports a state as written only at the second query."""
    asked: Counter[object] = Counter()

    def is_over(writing: memory_states._Writing) -> bool:
        asked[writing] += 1
        return asked[writing] > 1 and writing.wait() is None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_states._Writing, "is_over", property(is_over))
        yield


def accelerator_of(root: Path, interval: int | None, machines: int, mesh: ParallelConfig, **more: Any) -> Accelerator:
    memory_of_machine(root, machines)
    project = ProjectConfiguration(str(root), memory_interval=interval)
    return Accelerator(
        cpu=True, zero_plugin=ZeroPlugin(zero_stage=1), project_config=project, parallelism_config=mesh, **more
    )


def losses_of_stages(accelerator: Accelerator) -> Iterator[float]:
    """Trains two micro-batches per step through two stages; returns the losses."""
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(4)])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = TensorDataset(*torch.randn(2, 4 * STEPS, 4, generator=torch.Generator().manual_seed(0)))
    loader: Any = DataLoader(rows, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    batches = chain.from_iterable(loader for _ in range(loader.epoch, 2))
    while model.global_steps < STEPS:
        yield model.train_batch(batches).item()


def losses_of_layers(accelerator: Accelerator) -> Iterator[float]:
    """Trains with tensor parallelism on two ranks; returns the losses."""
    model: Any = small_llama(attention_dropout=0.1)
    model.train()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = torch.randint(64, (4 * STEPS, 8), generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def life(root: Path, kind: str, interval: int | None, lost_at: int | None = None, machines: int = 1) -> list[float]:
    """Trains from the newest state to the end, or until the run is lost; returns the losses."""
    staged = kind == "pp"
    more: dict[str, Any] = {"pipeline": PipelineConfig(loss=nn.functional.mse_loss)} if staged else {}
    mesh = ParallelConfig(**{kind: 2})
    accelerator = accelerator_of(root, interval, machines, mesh, gradient_accumulation_steps=1 + staged, **more)
    set_seed(1)
    losses = (losses_of_stages if staged else losses_of_layers)(accelerator)
    try:
        with lagging():
            return [next(losses) for _ in range(lost_at)] if lost_at else list(losses)
    finally:
        accelerator.free_memory()
        del os.environ[VARIABLE]


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("kind", [pytest.param("pp", marks=NEEDS_STAGES), pytest.param("tp", marks=NEEDS_SPLIT_LAYERS)])
def test_a_mesh_resumes_with_the_same_bits(ranks: Ranks, tmp_path: Path, kind: str, machines: int) -> None:
    (tmp_path / "whole").mkdir()
    world_size = 2 * machines  # on two machines, each has a rank of every part or stage
    whole = ranks(world_size).run(life, tmp_path / "whole", kind, None)
    # A pipeline reads two batches per step and queries once: the state after step 1 is complete before step 4.
    ranks(world_size).run(life, tmp_path, kind, 1, lost_at=4, machines=machines)
    if machines > 1:
        shutil.rmtree(tmp_path / "memory1")
    rest = ranks(world_size).run(life, tmp_path, kind, 100, machines=machines)
    for own, all_steps in zip(rest, whole, strict=True):
        assert own
        assert own == all_steps[1:]
