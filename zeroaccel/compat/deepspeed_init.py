"""`deepspeed.zero` and `deepspeed.runtime.zero.partition_parameters`, where they differ from `zeroaccel.zero`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zeroaccel.compat.assertions import asserting
from zeroaccel.compat.deepspeed_config import from_library
from zeroaccel.compat.parameters import attach, attach_whole
from zeroaccel.config import load_config
from zeroaccel.errors import UsageError
from zeroaccel.zero import GatheredParameters
from zeroaccel.zero.access.deferred_init import Init as OwnInit


class DeepSpeedGatheredParameters(GatheredParameters):
    """`zeroaccel.zero.GatheredParameters`; like DeepSpeed, discards writes at stage 3 without a `modifier_rank`.

    A warning names the parameters. At other stages, where DeepSpeed's context does nothing, such a write is an error.
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

    Without `dtype`, parameters keep the dtype that the model gives them: the engine casts them, and its master weights
    then have the same bits as at the other stages. With a config of another stage than 3 it does nothing, since the
    engine would unshard the parameters again; without a config it shards them.

    Args:
        data_parallel_group: None or the default group. The engine creates smaller groups, such as for
            `mics_shard_size`.
        mem_efficient_linear: no effect: torch's linear layers store no copy of a weight.
        mpu, zero_param_parallel_group, sequence_data_parallel_group, param_swapper: must be None.
        zero_quantized_weights, zero_quantized_nontrainable_weights: must be False; set them in the engine's config.
    """

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
        settings = None if source is None else load_config(from_library(source), unknown_keys="lenient")
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


_IN_CONFIG = "remove the argument; the config passed to deepspeed.initialize also applies to these parameters"


def _refuse_others(**arguments: Any) -> None:
    """Raises UsageError for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            got = value if isinstance(value, bool) else type(value).__name__
            raise UsageError(f"deepspeed.zero.Init({name})", expected="nothing", got=got, fix=_IN_CONFIG)


def _is_default(group: Any) -> bool:
    """True if a process group is the default one."""
    return torch.distributed.is_initialized() and group is torch.distributed.group.WORLD


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Returns `fn` unchanged: `DeepSpeedInit` leaves the dtype of tensors other than parameters to the model.

    transformers replaces this name while it builds a model, to preserve the dtype of position tables.
    """
    return fn
