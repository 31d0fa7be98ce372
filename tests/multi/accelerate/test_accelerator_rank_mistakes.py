"""Mistakes on one of two ranks: both ranks raise an error that gives the rank's number, and neither hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.pool import Ranks
from tests.support.refusals import complaint
from zeroaccel import Accelerator, DataLoaderConfiguration, DummyOptim, DummyScheduler, ProjectConfiguration, ZeroPlugin

DATA = TensorDataset(torch.zeros(16, 4))
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
DECAY = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": 4}}


def _net(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _config(changes: dict[str, Any], *, dummy: bool = False, schedule: str = "") -> None:
    """Prepares objects made in code that fit the config of rank 0; rank 1 applies `changes` to its config."""
    fitting = {"optimizer": ADAMW} if dummy else {}
    plugin = ZeroPlugin({"zero_optimization": {"stage": 1}, **fitting})
    accelerator = Accelerator(zero_plugin=plugin)
    if accelerator.process_index == 1:
        for key, value in changes.items():
            plugin.deepspeed_config.pop(key, None)
            if value is not None:
                plugin.deepspeed_config[key] = value
    model = _net()
    optimizer: Any = DummyOptim(model.parameters()) if dummy else _sgd(model)
    halving = torch.optim.lr_scheduler.LambdaLR
    schedules = {
        "": [],
        "code": lambda: [halving(optimizer, lambda step: 0.5)],
        "callable": lambda: [DummyScheduler(optimizer, lr_scheduler_callable=lambda o: halving(o, lambda step: 0.5))],
    }[schedule]
    accelerator.prepare(model, optimizer, *(schedules() if callable(schedules) else schedules))


def _other_model(rank: int) -> None:
    model, other = _net(), _net()
    Accelerator().prepare(model, _sgd(other if rank else model))


def _placed_model(rank: int) -> None:
    model = _net()
    if rank:
        model.hf_device_map = {"0": 0, "1": 1}  # type: ignore[assignment]
    Accelerator().prepare(model, _sgd(model))


def _sharded_loader(rank: int) -> None:
    Accelerator().prepare(DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA) if rank else None))


def _indivisible_loader(rank: int) -> None:
    settings = DataLoaderConfiguration(split_batches=True)
    Accelerator(dataloader_config=settings).prepare(DataLoader(DATA, batch_size=3 if rank else 2))


def _without_optimizer(rank: int) -> None:
    model = _net()
    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=2))
    accelerator.prepare(model) if rank else accelerator.prepare(model, _sgd(model))


def _fewer_models(rank: int) -> None:
    Accelerator().prepare(*[_net() for _ in range(2 - rank)])


def _another_batch_size(rank: int) -> None:
    model = _net()
    Accelerator().prepare(model, _sgd(model), DataLoader(DATA, batch_size=4 if rank else 2))


def _another_accumulation(rank: int) -> None:
    model = _net()
    Accelerator(gradient_accumulation_steps=1 + rank).prepare(model, _sgd(model))


def _another_precision(rank: int) -> None:
    model = _net()
    Accelerator(mixed_precision="bf16" if rank else "no").prepare(model, _sgd(model))


def _unsaveable(rank: int, folder: Path) -> None:
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(_Held(object() if rank else 1))
    accelerator.save_state(folder)


def _registered_elsewhere(rank: int, folder: Path) -> None:
    accelerator = Accelerator()
    accelerator.save_state(folder)
    if rank:
        accelerator.register_for_checkpointing(_Held(1))
    accelerator.load_state(folder)


class _Held:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


CASES: dict[str, tuple[Callable[..., object], str]] = {
    "optimizer twice": (lambda rank: _config({"optimizer": ADAMW}), "optimizer AdamW, and SGD in code"),
    "optimizer nowhere": (lambda rank: _config({"optimizer": None}, dummy=True), "the config has none"),
    "schedule twice": (lambda rank: _config({"scheduler": DECAY}, schedule="code"), "WarmupDecayLR, and LambdaLR in"),
    "callable and schedule": (
        lambda rank: _config({"scheduler": DECAY}, dummy=True, schedule="callable"),
        "scheduler WarmupDecayLR, and lr_scheduler_callable in code",
    ),
    "misspelt": (lambda rank: _config({"gradient_cliping": 1.0}), "gradient_cliping: unknown key; did you mean"),
    "batch": (
        lambda rank: _config({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4}),
        "train_batch_size: 9 is not",
    ),
    "unfillable": (
        lambda rank: _config({"scheduler": {**DECAY, "params": {"total_num_steps": "auto"}}}),
        "scheduler.params.total_num_steps",
    ),
    "another model": (_other_model, "expected its model in the same prepare(), got 'Sequential'"),
    "placed model": (_placed_model, "expected a model on one device"),
    "dealt loader": (_sharded_loader, "a loader with a DistributedSampler"),
    "indivisible loader": (_indivisible_loader, "a multiple of the 2 ranks"),
    "precision": (lambda rank: Accelerator(mixed_precision="fp8" if rank else "no"), "8-bit training is not available"),
    "plugins": (lambda rank: Accelerator(deepspeed_plugins={"one": 3} if rank else None), "'one': expected a ZeroPl"),  # type: ignore[dict-item]
    "tracker": (lambda rank: Accelerator(log_with="nothing" if rank else None), "got 'nothing'"),
    "project": (
        lambda rank: Accelerator(project_dir="a", project_config=ProjectConfiguration("b" if rank else "a")),
        "expected one project folder",
    ),
    "handler": (lambda rank: Accelerator(kwargs_handlers=[3] if rank else None), "expected handlers among"),
}
DIFFERENT: dict[str, Callable[[int], object]] = {
    "without optimizer": _without_optimizer,
    "fewer models": _fewer_models,
    "a loader more": lambda rank: Accelerator().prepare(*[DataLoader(DATA)] * (1 + rank)),
    "batch size": _another_batch_size,
    "accumulation": _another_accumulation,
    "precision": _another_precision,
}
IN_A_FOLDER: dict[str, tuple[Callable[[int, Path], object], str]] = {
    "unsaveable": (_unsaveable, "register_for_checkpointing: state of object 0 (_Held)"),
    "registered elsewhere": (_registered_elsewhere, "number of objects registered for checkpointing: expected 1"),
}


def _said(function: Callable[..., object], *args: Any) -> str:
    return complaint(function, torch.distributed.get_rank(), *args)


def _all_said() -> dict[str, str]:
    return {name: _said(function) for name, (function, _) in CASES.items()}


def test_a_mistake_of_one_rank_raises_on_both(ranks: Ranks) -> None:
    zero, one = ranks(2).run(_all_said)
    for name, (_, words) in CASES.items():
        assert words in zero[name], (name, zero[name])
        assert "[rank 1]" in zero[name], (name, zero[name])
        assert zero[name] == one[name]


def _different_said(name: str) -> str:
    return _said(DIFFERENT[name])


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_prepare_different_things_raise(ranks: Ranks, name: str) -> None:
    zero, one = ranks(2).run(_different_said, name)
    assert zero == one
    assert "rank 1" in zero


def _folder_said(name: str, folder: Path) -> str:
    return _said(IN_A_FOLDER[name][0], folder)


@pytest.mark.parametrize("name", IN_A_FOLDER)
def test_a_state_that_one_rank_cannot_share_is_refused_by_both(ranks: Ranks, tmp_path: Path, name: str) -> None:
    zero, one = ranks(2).run(_folder_said, name, tmp_path)
    assert zero == one
    assert IN_A_FOLDER[name][1] in zero
    assert "[rank 1]" in zero
