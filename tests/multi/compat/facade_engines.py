"""The small model that tests of the facade train, its config, and its engine made by `deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel import compat

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.99]}},
}


def with_facade(body: Callable[..., Any], *args: Any) -> Any:
    compat.install()
    try:
        return body(*args)
    finally:
        compat.uninstall()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 2))


def make_engine(stage: int = 0, **more: Any) -> Any:
    import deepspeed  # type: ignore[import-not-found]

    engine, *_ = deepspeed.initialize(
        model=small_model(), config={**CONFIG, "zero_optimization": {"stage": stage}, **more}
    )
    return engine


def loss_of(engine: Any) -> Tensor:
    return engine(torch.ones(2, 4, dtype=next(engine.parameters()).dtype)).float().square().mean()
