"""`deepspeed.zero` and `deepspeed.runtime.zero.partition_parameters`, where they are more than `zeroaccel.zero`.

Also `from_library`, which turns config dicts as accelerate, transformers and TRL make them into what the config's
checks accept: these add keys that no user has written, and that the checks would rightly refuse of a user.
"""

from __future__ import annotations

import copy
import enum
import math
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zeroaccel.compat.assertions import asserting
from zeroaccel.compat.parameters import attach, attach_whole
from zeroaccel.config import load_config
from zeroaccel.config.diagnostics import at, put
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.zero import GatheredParameters
from zeroaccel.zero.access.deferred_init import Init as OwnInit

_HOW_TO_CALL = (
    "hand the model to deepspeed.initialize(), a Trainer or Accelerator.prepare() first, and call what they return. "
    "A model without an engine, as a frozen encoder beside the one that trains, has to be loaded whole: "
    "load it before the Accelerator or TrainingArguments is made, after which transformers shards what it loads. "
    "accelerate prepares no DeepSpeed engine where ACCELERATE_USE_CPU is true: leave it out of the environment"
)
_SECTIONS = ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16")


class DeepSpeedGatheredParameters(GatheredParameters):
    """`zeroaccel.zero.GatheredParameters`; as in DeepSpeed, a write at stage 3 without a `modifier_rank` is lost.

    A warning names the parameters. At other stages, where DeepSpeed's does nothing, it stays an error.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        listed = [params] if isinstance(params, torch.Tensor) else list(params or ())
        discards = any(hasattr(param, "ds_id") for param in listed)
        super().__init__(listed, modifier_rank, fwd_module, enabled, discard_writes=discards)


class DeepSpeedInit(OwnInit):
    """`zeroaccel.zero.Init` with DeepSpeed's arguments; its parameters have the members that libraries read.

    Without `dtype` parameters keep the dtype that the model gives them: the engine casts them, and its masters then
    have the bits that they have at the other stages. With a config of another stage than 3 it does nothing, as the
    engine would unshard the parameters again; without a config they are sharded.

    Args:
        data_parallel_group: None or the default group. Groups of fewer ranks, as of `mics_shard_size`, are made with
            the engine.
        mem_efficient_linear: of no effect: linear layers are torch's, which store no copy of a weight.
        mpu, zero_param_parallel_group, sequence_data_parallel_group, param_swapper: must be None.
        zero_quantized_weights, zero_quantized_nontrainable_weights: must be left False, as they are the engine's.
    """

    _HOW_TO_CALL = _HOW_TO_CALL

    @asserting
    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        _refuse_others(
            data_parallel_group=None if _is_default(data_parallel_group) else data_parallel_group,
            mpu=mpu,
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights or None,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights or None,
            sequence_data_parallel_group=sequence_data_parallel_group,
            param_swapper=param_swapper,
        )
        source = config_dict_or_path if config_dict_or_path is not None else config
        if isinstance(source, Mapping):
            source = from_library(source)
        settings = None if source is None else load_config(source, unknown_keys="lenient")
        offload = None if settings is None else settings.zero_optimization.offload_param
        device = remote_device or (None if offload is None else offload.device)
        self._built: list[weakref.ref[nn.Module]] = []
        super().__init__(
            module,
            dtype=dtype,
            remote_device=None if device == "none" else device,  # type: ignore[arg-type]
            nvme_path=None if offload is None else offload.nvme_path,
            pin_memory=pin_memory,
            enabled=enabled and (settings is None or settings.zero_optimization.stage == 3),
        )
        if self._shards is not None:
            attach(self._shards.registry)
            if module is not None and self._shards.collectives.world_size == 1:
                attach_whole(module.parameters())

    def note(self, module: nn.Module) -> None:
        super().note(module)
        self._built.append(weakref.ref(module))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        built, self._built = [reference() for reference in self._built], []
        if self._shards is not None and self._shards.collectives.world_size == 1:
            attach_whole(p for module in built if module is not None for p in module.parameters(recurse=False))


_IN_CONFIG = "leave it out; what the config given to deepspeed.initialize says is applied to these parameters too"


def _refuse_others(**arguments: Any) -> None:
    """Raises UsageError for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            got = value if isinstance(value, bool) else type(value).__name__
            raise UsageError(f"deepspeed.zero.Init({name})", expected="nothing", got=got, fix=_IN_CONFIG)


def _is_default(group: Any) -> bool:
    """Whether a process group is the default one."""
    return torch.distributed.is_initialized() and group is torch.distributed.group.WORLD


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`fn` as it is: `DeepSpeedInit` leaves the dtype of tensors that are no parameters to the model.

    transformers replaces this name while it builds a model, to preserve the dtype of position tables.
    """
    return fn


def from_library(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` in the documented format.

    A dotted key at the top, such as "zero_optimization.reduce_bucket_size" from TRL, is the value of that key within
    its section; `steps_per_print: inf` from accelerate is never; a member of DeepSpeed's enumerations is its value.
    """
    tree: dict[str, Any] = _values(copy.deepcopy(dict(config)))
    for key in [key for key in tree if "." in key and key.partition(".")[0] in _SECTIONS]:
        value = tree.pop(key)
        size = int(value) if isinstance(value, float) else value  # computed, as 0.9 * hidden ** 2
        if at(tree, key) in (None, "auto") and not put(tree, key.split("."), size):
            raise ConfigError(key, expected="an object for its section", got=at(tree, key.rpartition(".")[0]))
    if tree.get("steps_per_print") == math.inf:
        del tree["steps_per_print"]
    return tree


def _values(tree: Any) -> Any:
    """The tree with members of enumerations, such as `OffloadDeviceEnum.cpu`, replaced by their values."""
    if isinstance(tree, Mapping):
        return {key: _values(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_values(value) for value in tree]
    return tree.value if isinstance(tree, enum.Enum) else tree
