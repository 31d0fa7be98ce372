"""What `initialize` would refuse in a config, found out from the config alone: optimizer, schedule and their arguments.

For `zeroaccel config validate`. Builds what the sections name over stand-ins of a few numbers, by the calls that
`initialize` makes, so that the two cannot differ. What depends on the model, the ranks or the machine is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroaccel.config import Config
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.optim.lr_schedules import build_scheduler
from zeroaccel.optim.optimizer_factory import build_optimizer

__all__ = ["addressed", "check_training"]

# What stands for an argument that is "auto", that `auto_rules` fills, and that its class cannot do without.
_STAND_INS: Mapping[str, Any] = {"total_num_steps": 1000, "warmup_num_steps": 10, "lr": 1e-3}


@contextmanager
def addressed(config: Config) -> Iterator[None]:
    """Gives errors about a key of `config`, which begin with its path, the place at which it was written.

    Raises:
        ConfigError: raised inside, from "optimizer.params.lr: ..." made "ds_config.json:7:9: optimizer.params.lr: ...".
    """
    try:
        yield
    except ConfigError as error:
        path, colon, rest = str(error).partition(":")
        key, space, more = path.partition(" ")
        where = config.where(key) if key.partition(".")[0] in ("optimizer", "scheduler") else key
        if where == key:
            raise
        raise ConfigError(f"{where}{space}{more}{colon}{rest}") from error


def check_training(config: Config) -> None:
    """Checks the optimizer and the schedule that a config names; an "auto" among their arguments is taken for right.

    Raises:
        ConfigError: what `initialize` would say, of all that is wrong.
    """
    lines: list[str] = []
    optimizer: Optimizer | None = None
    try:
        optimizer = _optimizer(config)
    except ConfigError as error:
        lines.append(str(error))
    try:
        _check_schedule(config, optimizer)
    except ConfigError as error:
        lines.append(str(error))
    lines += _batch_sizes(config)
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n  ".join([f"{len(lines)} settings are wrong", *lines]))


def _optimizer(config: Config) -> Optimizer | None:
    section = config.optimizer
    if section is None or section.type is None:
        return None
    params = _with_stand_ins(config, "optimizer", section.params)
    if config.bf16.bf16_optimizer_states:
        params.setdefault("moments_dtype", "bf16")
    model = nn.Linear(4, 4, bias=False)
    with addressed(config):
        return build_optimizer(section.type, params, list(model.parameters()), model)


def _check_schedule(config: Config, optimizer: Optimizer | None) -> None:
    section = config.scheduler
    if section is None:
        return
    params = _with_stand_ins(config, "scheduler", section.params)
    groups = max((len(value) for value in params.values() if isinstance(value, (list, tuple))), default=1)
    stand_in = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(max(groups, 1))])
    one_group = groups == 1 and optimizer is not None
    with addressed(config):
        try:
            build_scheduler(section.type, params, optimizer if one_group and optimizer is not None else stand_in)
        except UsageError as error:
            raise ConfigError(str(error)) from error


def _with_stand_ins(config: Config, section: str, params: Mapping[str, Any]) -> dict[str, Any]:
    start = f"{section}.params."
    unknown = {path.removeprefix(start) for path in config.unresolved if path.startswith(start)}
    return {**{name: _STAND_INS[name] for name in unknown if name in _STAND_INS}, **params}


def _batch_sizes(config: Config) -> list[str]:
    """What is wrong with the batch sizes on any number of ranks."""
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    per_rank = (micro or 1) * (steps or 1)
    if train is None or train % per_rank == 0:
        return []
    factors = [
        f"{name} {value}"
        for name, value in (("train_micro_batch_size_per_gpu", micro), ("gradient_accumulation_steps", steps))
        if value is not None
    ]
    fix = f"set it to a multiple of {per_rank}, which times the ranks is what a step takes"
    return [
        str(
            ConfigError(f"{config.where('train_batch_size')}: {train} is no multiple of {' * '.join(factors)}", fix=fix)
        )
    ]
