"""DDP behind the names of DeepSpeed that the example scripts use: the reference for their losses.

Independent of zeroaccel, and as simple as possible: `DistributedDataParallel`, torch's AdamW over fp32 masters,
and the settings in the scripts' configs. All modules of the package are this one.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import math
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class FusedAdam(torch.optim.AdamW):
    """AdamW, with DeepSpeed's default of no weight decay."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, **kwargs: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, **kwargs)


DeepSpeedCPUAdam = FusedAdam


class WarmupLR:
    """Warms up from 0 to the full rate with the logarithm of the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_max_lr: float, warmup_num_steps: int, **_: Any) -> None:
        self._optimizer, self._most, self._steps, self._step = optimizer, warmup_max_lr, warmup_num_steps, -1
        self._set(0.0)

    def _set(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def step(self) -> None:
        self._step += 1
        self._set(self._most * min(1.0, math.log(self._step + 1) / math.log(self._steps)))


class EpochSampler(DistributedSampler[Any]):
    """Draws another order in every epoch, because the example scripts do not call `set_epoch`."""

    def __iter__(self) -> Any:
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


class Timer:
    def update_epoch_count(self) -> None: ...


class Engine(nn.Module):
    """DDP over the model in the config's dtype, and an optimizer over fp32 copies of its weights."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, config: dict[str, Any]) -> None:
        super().__init__()
        self._config, self._half = config, any(config.get(key, {}).get("enabled") for key in ("bf16", "bfloat16"))
        if not optimizer:
            optimizer = FusedAdam(model.parameters(), **config["optimizer"]["params"])
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        if scheduler is None and "scheduler" in config:
            self.lr_scheduler = WarmupLR(optimizer, **config["scheduler"]["params"])
        self._weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._masters = self._weights
        if self._half:
            self._masters = [weight.detach().float().clone().requires_grad_() for weight in self._weights]
            masters = dict(zip(self._weights, self._masters, strict=True))
            for group in optimizer.param_groups:
                group["params"] = [masters[weight] for weight in group["params"]]
            model.bfloat16()
        self.module = model
        # In a list, so that it is no submodule. Some of the scripts' models have weights that their loss does not use.
        self._parallel = [DistributedDataParallel(model, find_unused_parameters=True)]
        self.local_rank, self.tput_timer = int(os.environ["LOCAL_RANK"]), Timer()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._parallel[0](*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self._half:
            for weight, master in zip(self._weights, self._masters, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        if clip := self._config.get("gradient_clipping"):
            nn.utils.clip_grad_norm_(self._masters, clip)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        self.module.zero_grad()

    def bfloat16_enabled(self) -> bool:
        return self._half

    def fp16_enabled(self) -> bool:
        return False

    def save_checkpoint(self, save_dir: Any, client_state: Any) -> None: ...


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    dist_init_required: bool | None = None,
    config: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    init_distributed()
    engine, loader = Engine(model, optimizer, lr_scheduler, config), None
    if training_data is not None:
        batch = config["train_batch_size"] // dist.get_world_size()
        loader = DataLoader(training_data, batch_size=batch, sampler=EpochSampler(training_data))
    return engine, engine.optimizer, loader, engine.lr_scheduler


def init_distributed(*_: Any, **__: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config")
    parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))  # DeepSpeed's launcher passes it
    return parser


class _Device:
    def device_name(self, index: int | None = None) -> str:
        return "cpu"

    def set_device(self, index: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def is_available(self) -> bool:
        return True

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return dist.get_world_size()


def get_accelerator() -> _Device:
    return _Device()


class ZeroParamStatus(enum.Enum):
    AVAILABLE, NOT_AVAILABLE, INFLIGHT = 1, 2, 3


def GatheredParameters(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


def recursive_getattr(model: nn.Module, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), model)


def recursive_setattr(model: nn.Module, name: str, value: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, value)


def split_params_into_different_moe_groups_for_optimizer(groups: Any) -> Any:
    return groups


for _name in (
    "accelerator",
    "comm",
    "compression",
    "compression.helper",
    "moe",
    "moe.utils",
    "ops",
    "ops.adam",
    "runtime",
    "runtime.zero",
    "runtime.zero.partition_parameters",
    "zero",
):
    _module = ModuleType(f"{__name__}.{_name}")
    _module.__dict__.update({name: value for name, value in globals().items() if not name.startswith("_")})
    _module.__path__ = []  # type: ignore[attr-defined]
    sys.modules[_module.__name__] = _module
comm, zero = sys.modules[f"{__name__}.comm"], sys.modules[f"{__name__}.zero"]
comm.get_world_size = dist.get_world_size  # type: ignore[attr-defined]
