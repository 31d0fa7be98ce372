"""`deepspeed.DeepSpeedConfig`, and the enumerations and section classes of DeepSpeed's config modules."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import model_validator

from zeroaccel.compat.assertions import asserting
from zeroaccel.compat.library_config import with_clipping
from zeroaccel.compat.surface import QUESTIONS
from zeroaccel.config import load_config, solve_batch
from zeroaccel.config.normalize import NormalizedConfig
from zeroaccel.config.schema_zero import OffloadOptimizer, ZeroOptimization
from zeroaccel.errors import UsageError


class OffloadDeviceEnum(str, enum.Enum):
    """Devices of `offload_optimizer` and `offload_param`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """States that `engine.offload_states(include=[...])` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, enum.Enum):
    """ZeRO stages, named by the states that they shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroOffloadOptimizerConfig(OffloadOptimizer):
    """The section `offload_optimizer` as an object."""

    @property
    def pipeline(self) -> bool:
        """True if the engine reads or writes states while it updates others."""
        return self.pipeline_read or self.pipeline_write


class DeepSpeedZeroConfig(ZeroOptimization):
    """The section `zero_optimization` as an object; accepts all spellings of the keys.

    Raises:
        pydantic.ValidationError: a value is wrong, or a key unknown.

    Example:
        >>> config = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=1000, cpu_offload=True)
        >>> config.prefetch_bucket_size, config.overlap_comm, config.offload_optimizer.device
        (1000, True, 'cpu')
    """

    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    """Placement of the optimizer states (stages 1 to 3)."""

    @model_validator(mode="before")
    @classmethod
    def _in_own_names(cls, keys: Any) -> Any:
        if not isinstance(keys, Mapping):
            return keys
        normalized = NormalizedConfig(cls, keys, "strict")
        if normalized.problems:
            raise ValueError("; ".join(f"{p.path[-1]}: {p.text or p.expected}, {p.fix}" for p in normalized.problems))
        return {"overlap_comm": normalized.tree.get("stage", 0) == 3, **normalized.tree}


# Attribute of `DeepSpeedConfig` -> place in zeroaccel's `Config`; QUESTIONS has those that the engine provides too.
_PLACES: Mapping[str, str] = {
    **QUESTIONS,
    "activation_checkpointing_config": "activation_checkpointing",
    "bfloat16_config": "bf16",
    "checkpoint_config": "checkpoint",
    "comms_config": "comms_logger",
    "compile_config": "compile",
    "float16_config": "fp16",
    "flops_profiler_config": "flops_profiler",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "hybrid_engine": "hybrid_engine",
    "loss_scale": "fp16.loss_scale",
    "optimizer_name": "optimizer.type",
    "tensor_parallel_config": "tensor_parallel",
    "timers_config": "timers",
    "zero_config": "zero_optimization",
    "zero_optimization_stage": "zero_optimization.stage",
}


class DeepSpeedConfig:
    """A checked config with DeepSpeed's attribute names; `zeroaccel.config.load_config` returns one with zeroaccel's.

    Args:
        config: a dict, the path of a file, or base64 of JSON.
        mpu, mesh_device: must be None.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: all three, computed if missing.
        world_size, global_rank: of the job; 1 and 0 without a job.
        config: zeroaccel's `Config`.
        monitor_config: the same; its `tensorboard`, `csv_monitor`, `wandb` and `comet` are the sections of monitors.

    Raises:
        ConfigError: the config is wrong.

    Example:
        >>> config = DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 2}})
        >>> config.train_micro_batch_size_per_gpu, config.zero_optimization_stage, config.gradient_clipping
        (8, 2, 1.0)
    """

    @asserting
    def __init__(
        self, config: Mapping[str, Any] | str | os.PathLike[str], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        if mpu is not None or mesh_device is not None:
            raise UsageError(
                "DeepSpeedConfig(mpu, mesh_device)",
                expected="None",
                got=type(mpu if mpu is not None else mesh_device).__name__,
                fix="pass axes of a mesh as zeroaccel.initialize(parallel=ParallelConfig(...))",
            )
        joined = torch.distributed.is_initialized()
        self.world_size = torch.distributed.get_world_size() if joined else 1
        self.global_rank = torch.distributed.get_rank() if joined else 0
        self.config = load_config(with_clipping(config), unknown_keys="lenient")
        sizes = solve_batch(self.config, self.world_size)
        self.monitor_config = self.config
        self.train_batch_size = sizes.train
        self.train_micro_batch_size_per_gpu = sizes.micro
        self.gradient_accumulation_steps = sizes.accumulation

    @property
    def zero_enabled(self) -> bool:
        return self.config.zero_optimization.stage > 0

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.config.fp16.loss_scale == 0

    def print_user_config(self) -> None:
        """Prints the keys that the config sets."""
        print(self.config.model_dump_json(exclude_unset=True, indent=4))

    def print(self, name: str) -> None:
        """Prints all settings, including defaults, under a title."""
        print(f"{name}:")
        print(self.config.model_dump_json(indent=4))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":
            raise AttributeError(name)
        value: Any = self.config
        for key in _PLACES.get(name, name).split("."):
            if value is not None and key not in type(value).model_fields:
                raise AttributeError(
                    f"DeepSpeedConfig.{name}: zeroaccel provides deepspeed here, but not this name; "
                    "zeroaccel.config.load_config returns a config whose attributes are the keys of the file"
                )
            value = None if value is None else getattr(value, key)
        return value
