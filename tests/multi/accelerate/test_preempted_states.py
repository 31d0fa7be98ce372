"""`ProjectConfiguration(save_on_preemption=True)`: the loop of an accelerator saves between two batches and exits."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import Ranks
from zeroaccel import Accelerator, GradientAccumulationPlugin, ProjectConfiguration, ZeroPlugin, set_seed
from zeroaccel.errors import ConfigError, Preempted

EPOCHS = 3
Left = tuple[list[float], list[float]]  # losses of the micro-steps, and of the evaluations


def life(root: Path | None, stage: int, signals: dict[int, int]) -> tuple[bool, Left]:
    """Trains on shuffled data with dropout, a schedule and accumulation, from the newest state.

    Returns whether the run ended, and its losses.

    Args:
        signals: number of a micro-step -> the rank that gets a signal before it.
    """
    project = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=2, save_on_preemption=True)
    accelerator = Accelerator(
        cpu=True,
        zero_plugin=ZeroPlugin(zero_stage=stage),
        project_config=project if root is not None else None,
        gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_with_dataloader=False),
    )
    set_seed(1)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.3), nn.Linear(9, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
    held_out = accelerator.prepare(DataLoader(TensorDataset(inputs[:8]), batch_size=4))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    counter = _Counter(torch.zeros((), dtype=torch.int64))
    accelerator.register_for_checkpointing(counter)
    losses: list[float] = []
    evaluations: list[float] = []
    try:
        if root is not None and (root / "checkpoints").exists():
            accelerator.load_state()
        for _ in range(loader.epoch, EPOCHS):
            model.train()
            for (x,) in loader:
                if signals.get(int(counter.value)) == accelerator.process_index:
                    os.kill(os.getpid(), signal.SIGTERM)
                with accelerator.accumulate(model):
                    loss = model(x).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                counter.value += 1
            model.eval()
            with torch.no_grad():
                evaluations.append(sum(model(x).sum().item() for (x,) in held_out))
        return True, (losses, evaluations)
    except Preempted:
        return False, (losses, evaluations)
    finally:
        accelerator.free_memory()


class _Counter:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"].clone()


def lives(root: Path, stage: int, seed: int) -> tuple[int, Left]:
    draw = random.Random(seed)
    signals = {micro: draw.randrange(2) for micro in draw.sample(range(12), 2)}
    losses: list[float] = []
    evaluations: list[float] = []
    count, ended = 0, False
    while not ended:
        ended, (more, evaluated) = life(root, stage, signals)
        losses, evaluations, count = losses + more, evaluations + evaluated, count + 1
        signals = {micro: who for micro, who in signals.items() if micro >= len(losses)}
    return count, (losses, evaluations)


@pytest.mark.parametrize(("stage", "seed"), [(0, 0), (2, 1), (3, 2), (3, 3)])
def test_a_preempted_script_goes_on_with_the_same_bits(ranks: Ranks, tmp_path: Path, stage: int, seed: int) -> None:
    whole = ranks(2).run(life, None, stage, {})
    results = ranks(2).run(lives, tmp_path, stage, seed)
    assert results[0][0] == results[1][0] >= 2
    assert [left for _, left in results] == [left for _, left in whole]


def test_states_need_names() -> None:
    with pytest.raises(ConfigError, match=r"save_on_preemption: expected automatic_checkpoint_naming=True"):
        ProjectConfiguration("runs", save_on_preemption=True)
