"""`deepspeed.accelerator.get_accelerator()`: the device of this rank."""

from __future__ import annotations

import functools
from typing import Any

import torch


class DeviceFacts:
    """Properties of the device that libraries read: CUDA where there is one, else the CPU."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"deepspeed.accelerator.get_accelerator().{name}: zeroaccel answers for deepspeed here and does not have"
            " this; ask torch.cuda, or torch.accelerator"
        )

    def device_name(self, device_index: int | str | None = None) -> str:
        """ "cuda:1" for index 1, "cuda" without; "cpu" where there is no other."""
        if not self._cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device()) if self._cuda else "cpu"

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._cuda else 0

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        if self._cuda:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._cuda else 1

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda else "gloo"

    def is_bf16_supported(self) -> bool:
        return not self._cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors on the device take; 0 on the CPU, where torch does not count them."""
        return torch.cuda.memory_allocated(device_index) if self._cuda else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes at the peak."""
        return torch.cuda.max_memory_allocated(device_index) if self._cuda else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)


@functools.cache
def get_accelerator() -> DeviceFacts:
    """The object of this process."""
    return DeviceFacts()
