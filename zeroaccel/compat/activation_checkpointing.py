"""`deepspeed.checkpointing`: recomputation of activations, implemented by `zeroaccel.activations`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from zeroaccel import activations
from zeroaccel.compat.deepspeed_config import from_library
from zeroaccel.config import load_config
from zeroaccel.config.schema import ActivationCheckpointing
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once

_section: ActivationCheckpointing | None = None

# Argument of `configure` -> key of the config's section.
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets how `checkpoint` stores inputs in this process from now on.

    Args:
        mpu_: an object with `get_tensor_model_parallel_group` or `get_model_parallel_group`, whose ranks share
            partitioned inputs; or None.
        deepspeed_config: a config or its path; provides the section `activation_checkpointing`.
        partition_activations, ..., profile: override the config's keys.

    Raises:
        UsageError: contiguous memory without the number of checkpointed calls.
    """
    global _section
    arguments = {_KEYS[name]: value for name, value in locals().items() if name in _KEYS and value is not None}
    section = ActivationCheckpointing()
    if deepspeed_config is not None:
        section = load_config(from_library(deepspeed_config), unknown_keys="lenient").activation_checkpointing
    section = section.model_copy(update=arguments)
    group = _tensor_parallel_group(mpu_)
    if section.partition_activations and group is None:
        log_once(
            logging.WARNING,
            "deepspeed.checkpointing.configure(partition_activations): inputs stay whole, since mpu_ has no group of "
            "ranks that split the model",
        )
        section = section.model_copy(update={"partition_activations": False})
    activations.configure(section, tensor_parallel_group=group)
    _section = section


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(*args, **kwargs)`` and recomputes it in backward; see `zeroaccel.activations.checkpoint`."""
    return activations.checkpoint(function, *args, **kwargs)


def is_configured() -> bool:
    """True if `configure` was called."""
    return _section is not None


def reset() -> None:
    """Drops stored inputs without a backward, for example after an evaluation with gradients."""
    if _section is not None:
        activations.configure(_section)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Calls `configure(None, partition_activations=...)`; keeps the other settings."""
    _change("partition_activations", partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Calls `configure(None, num_checkpoints=...)`; keeps the other settings."""
    _change("number_checkpoints", nlayers)


def _change(key: str, value: Any) -> None:
    if _section is None:
        raise UsageError(f"deepspeed.checkpointing, {key}", expected="a preceding configure()")
    configure(None, {"activation_checkpointing": _section.model_dump(exclude_unset=True) | {key: value}})


def _tensor_parallel_group(mpu: Any) -> Any:
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return None


def offloading_from_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps TRL's `get_act_offloading_ctx_manager`, which fails on a machine without an accelerator."""

    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> Any:
        if torch.accelerator.is_available():
            return original(*args, **kwargs)
        log_once(logging.WARNING, "activation_offloading: a CPU's activations are in host memory already; no effect")
        return nullcontext()

    return get
