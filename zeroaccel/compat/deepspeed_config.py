"""Configs in DeepSpeed's forms: its classes for them, those that libraries pass, and its choice of a batch size.

`DeepSpeedConfig`, enumerations and section classes are those of DeepSpeed's config modules. accelerate, transformers
and TRL read a file into a dict, change it, and pass the dict. `ReadConfig` is such a dict that remembers its file.
`from_library` converts it to the documented format, since the libraries also add keys that users do not write and that
the config checks would refuse. `finder` lets accelerate's reader call `read`.

ms-swift calls `compute_elastic_config`, which releases of DeepSpeed before 0.19.7 have. The engine refuses the config
section, since resuming on another number of ranks needs none.
"""

from __future__ import annotations

import copy
import enum
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import model_validator

from zeroaccel.compat.assertions import asserting
from zeroaccel.compat.surface import QUESTIONS
from zeroaccel.config import Config, load_config, solve_batch
from zeroaccel.config.auto_values import after
from zeroaccel.config.diagnostics import at, put
from zeroaccel.config.document import Document, key_paths, read_document
from zeroaccel.config.normalize import NormalizedConfig
from zeroaccel.config.schema_zero import OffloadOptimizer, ZeroOptimization
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import log_note


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


@asserting
def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Returns the batch size, the numbers of ranks that it suits, and for a number of ranks its largest micro-batch.

    The batch size is the one, among multiples of a micro-batch or of all, that suits most numbers of ranks.

    Args:
        ds_config: a config with a section `elasticity`.
        target_deepspeed_version: has no effect.
        world_size: number of ranks; 0 returns two values, unless `return_microbatch`.

    Raises:
        ConfigError: the section is missing, disabled or incomplete, or does not suit `world_size`.
    """
    section = ds_config.get("elasticity") or {}
    sizes: Any = section.get("micro_batch_sizes")
    most: int = section.get("max_train_batch_size") or 0
    valid = isinstance(sizes, list) and sizes and all(isinstance(size, int) and 0 < size <= most for size in sizes)
    if not section.get("enabled") or not valid:
        raise ConfigError(
            "elasticity",
            expected='"enabled": true, "max_train_batch_size", and "micro_batch_sizes" of at most this size',
            got=dict(section),
        )
    version = float(section.get("version", 0.2))
    machine = section.get("num_gpus_per_node", 1) if version >= 0.2 else 1
    per_machine = machine // section.get("model_parallel_size", 1)
    bounds = [max(1, section.get(key, default) // machine) for key, default in (("min_gpus", 1), ("max_gpus", 10_000))]
    larger = section.get("prefer_larger_batch", True)
    batch, counts = _most_suitable(sizes, most // per_machine, bounds[0], bounds[1], larger=larger)
    batch, counts = batch * per_machine, [count * per_machine for count in counts]
    if version >= 0.2 and world_size and world_size not in counts:
        multiples = [most // (size * world_size) * size * world_size for size in sizes]
        batch, counts = (max if larger else min)(multiples), [world_size]
    if not world_size and not return_microbatch:
        return batch, counts
    fitting = [size for size in sizes if world_size and batch and batch // world_size % size == 0]
    if world_size not in counts or not fitting:
        raise ConfigError(
            "elasticity", expected=f"one of {counts} ranks, which share the batch of {batch}", got=f"{world_size} ranks"
        )
    return batch, counts, max(fitting)


def _most_suitable(sizes: Sequence[int], most: int, least_ranks: int, most_ranks: int, *, larger: bool) -> Any:
    """Returns the batch size up to `most` that suits most numbers of ranks, and these."""
    bases = [base for base in (*sizes, math.lcm(*sizes)) if base <= most]
    found = []
    for batch in {base * _most_divisible(most // base) for base in bases}:
        shares = [batch // size for size in sizes if batch % size == 0]
        counts = {count for share in shares for count in range(1, share + 1) if share % count == 0}
        found.append((batch, sorted(count for count in counts if least_ranks <= count <= most_ranks)))
    return max(found, key=lambda each: (len(each[1]), each[0] if larger else -each[0]))


def _most_divisible(limit: int) -> int:
    """Returns the smallest number up to `limit` that has the most divisors: the largest highly composite number."""
    counts = [0] * (limit + 1)
    for divisor in range(1, limit + 1):
        for multiple in range(divisor, limit + 1, divisor):
            counts[multiple] += 1
    return counts.index(max(counts))


_CLIPPING = 1.0  # DeepSpeed's default since 0.19.3
_SECTIONS = ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16")


class ReadConfig(dict[str, Any]):
    """The content of a config file, which a library changes; copies remember the file, and pickled ones are dicts."""

    def __init__(self, tree: Mapping[str, Any], document: Document) -> None:
        super().__init__(tree)
        self.document = document

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadConfig:
        return ReadConfig({key: copy.deepcopy(value, memo) for key, value in self.items()}, self.document)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def read(source: Any) -> Any:
    """Reads a file or a text into a `ReadConfig`; returns dicts unchanged.

    Raises:
        ConfigError: as for `read_document`.
    """
    if not isinstance(source, (str, os.PathLike)):
        return source
    document = read_document(source)
    return ReadConfig(copy.deepcopy(document.tree), document)


def from_library(config: Mapping[str, Any] | str | os.PathLike[str] | Config) -> Document:
    """Returns the config in the documented format, with the places of keys that came from a file.

    A dotted key at the top level of a dict, such as TRL's "zero_optimization.reduce_bucket_size", moves into its
    section; accelerate's `steps_per_print: inf` is removed; members of DeepSpeed's enumerations become their values.

    Raises:
        ConfigError: as for `read_document`; or the section of a dotted key is not an object.
    """
    if not isinstance(config, Mapping):
        return read_document(config.raw if isinstance(config, Config) else config)
    tree: dict[str, Any] = _values(copy.deepcopy(dict(config)))
    for key in [key for key in tree if "." in key and key.partition(".")[0] in _SECTIONS]:
        value = tree.pop(key)
        size = int(value) if isinstance(value, float) else value  # computed, such as 0.9 * hidden ** 2
        if at(tree, key) in (None, "auto") and not put(tree, key.split("."), size):
            raise ConfigError(key, expected="an object for its section", got=at(tree, key.rpartition(".")[0]))
    if tree.get("steps_per_print") == math.inf:
        del tree["steps_per_print"]
    if not isinstance(config, ReadConfig):
        return replace(read_document({}), tree=tree)
    document = config.document
    places = dict(document.places)
    for path in key_paths(tree):
        if at(document.tree, path) == "auto" and at(tree, path) != "auto":
            places[path] = after(places.get(path), '"auto", which the program filled in')
    return replace(document, tree=tree, places=places)


def with_clipping(
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | Document, *, has_optimizer: bool = False
) -> Document:
    """Reads a config and adds DeepSpeed's clipping if it sets none: gradients are clipped at norm 1.0.

    accelerate omits the key if a launcher or its environment asks for 0; then nothing is clipped.

    Args:
        has_optimizer: log a note, as for a config with an optimizer.
    """
    document = config if isinstance(config, Document) else from_library(config)
    if document.tree.get("gradient_clipping", "auto") != "auto":
        return document
    asked = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "")
    norm = 0.0 if asked.strip() in ("0", "0.0") else _CLIPPING
    if norm and (has_optimizer or document.tree.get("optimizer")):
        log_note(
            logging.WARNING,
            f"gradient_clipping: not in the config, so gradients are clipped at norm {norm}, as DeepSpeed clips since "
            "0.19.3; set it to this norm, or to 0 to clip nothing",
        )
    places = {("gradient_clipping",): "DeepSpeed's default", **document.places}
    return replace(document, tree={**document.tree, "gradient_clipping": norm}, places=places)


def _values(tree: Any) -> Any:
    """Replaces members of enumerations, such as `OffloadDeviceEnum.cpu`, by their values."""
    if isinstance(tree, Mapping):
        return {key: _values(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_values(value) for value in tree]
    return tree.value if isinstance(tree, enum.Enum) else tree
