"""`deepspeed.zero` and `deepspeed.runtime.zero.partition_parameters`, where they are more than `zeroaccel.zero`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zeroaccel.compat.dicts import from_library
from zeroaccel.compat.parameters import attach
from zeroaccel.config import load_config
from zeroaccel.errors import UsageError
from zeroaccel.zero.init import Init as OwnInit

__all__ = ["Init", "zero_wrapper_for_fp_tensor_constructor"]


class Init(OwnInit):
    """`zeroaccel.zero.Init` with DeepSpeed's arguments; its parameters show the members that libraries read.

    Parameters keep the dtype the model gives them unless `dtype` is given: the engine casts them, and its masters then
    have the bits that they have at the other stages.

    Args:
        data_parallel_group, mpu: must be None.
        mem_efficient_linear, sequence_data_parallel_group: accepted; there is no other linear layer here.
    """

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
    ) -> None:
        for name, value in (("data_parallel_group", data_parallel_group), ("mpu", mpu)):
            if value is not None:
                raise UsageError(f"deepspeed.zero.Init({name})", expected="None", got=type(value).__name__)
        source = config_dict_or_path if config_dict_or_path is not None else config
        settings = load_config(from_library(source) if isinstance(source, Mapping) else source or {})
        offload = settings.zero_optimization.offload_param
        device = remote_device or (None if offload is None else offload.device)
        super().__init__(
            module,
            dtype=dtype,
            remote_device=None if device == "none" else device,  # type: ignore[arg-type]
            nvme_path=None if offload is None else offload.nvme_path,
            pin_memory=pin_memory,
            enabled=enabled and settings.zero_optimization.stage == 3,
        )
        if self._shards is not None:
            attach(self._shards.keeper)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`fn` as it is: `Init` shards parameters and leaves the dtype of other tensors to the model.

    transformers replaces this name for the time of a model's construction, to keep the dtype of position tables.
    """
    return fn
