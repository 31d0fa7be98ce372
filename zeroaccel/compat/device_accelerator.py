"""`deepspeed.accelerator.get_accelerator()`: the device of this rank, CUDA if available, otherwise the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from zeroaccel.comm.environment import local_size
from zeroaccel.errors import UsageError
from zeroaccel.telemetry.step_report import memory_now


class CpuStream:
    """Stand-in for a stream on the CPU, where operations are complete when their calls return."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_: object) -> None: ...


def _nothing(_: Any = None) -> None: ...


# Name in torch.cuda, used with CUDA -> its value on the CPU.
_ON_CPU: Mapping[str, Any] = {
    "Event": None,
    "Stream": CpuStream,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "initial_seed": torch.initial_seed,
    "stream": contextlib.nullcontext,
}
# The same for functions with an optional device index.
_ON_CPU_BY_INDEX: Mapping[str, Callable[..., Any]] = {
    "current_device": lambda: 0,
    "current_stream": lambda _=None: CpuStream(),
    "default_stream": lambda _=None: CpuStream(),
    "empty_cache": _nothing,
    "get_rng_state": lambda _=None: torch.get_rng_state(),
    "reset_peak_memory_stats": _nothing,  # the operating system's peak cannot be reset
    "set_device": _nothing,
    "synchronize": _nothing,
}
_OLDER = {
    "max_memory_cached": "max_memory_reserved",
    "memory_cached": "memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


class DeviceFacts:
    """Calls of the device that libraries and scripts make; sizes are in bytes.

    On the CPU, `memory_*` return the resident memory of this process, since torch does not count its tensors there.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._name = "cuda" if self._cuda else "cpu"
        self._communication_backend_name = "nccl" if self._cuda else "gloo"
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        if name in _OLDER:
            return getattr(self, _OLDER[name])
        if name in _ON_CPU:
            return getattr(torch.cuda, name) if self._cuda else _ON_CPU[name]
        if name in _ON_CPU_BY_INDEX:
            call = getattr(torch.cuda, name) if self._cuda else _ON_CPU_BY_INDEX[name]
            return lambda device_index=None: call() if device_index is None else call(device_index)
        raise AttributeError(
            f"deepspeed.accelerator.get_accelerator().{name}: zeroaccel provides deepspeed here, but not"
            " this name; use torch.cuda or torch.accelerator"
        )

    # -- devices

    def device_name(self, device_index: int | str | None = None) -> str:
        """Returns "cuda:1" for index 1, "cuda" without an index; "cpu" without CUDA."""
        if not self._cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device()) if self._cuda else "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        """Returns the number of CUDA devices; on the CPU the ranks of this machine, each of which acts as a device."""
        if self._cuda:
            return torch.cuda.device_count()
        return local_size() or 1

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        """True if operations are complete when their calls return."""
        return not self._cuda

    def use_host_timers(self) -> bool:
        return not self._cuda

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def visible_devices_envs(self) -> list[str]:
        """Returns the names of the environment variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        """Sets these devices in an environment for other processes."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    # -- dtypes

    def is_bf16_supported(self) -> bool:
        return not self._cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return self._cuda and torch.cuda.get_device_capability() >= (7, 0)

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes that an engine can train in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # -- random numbers

    def random(self) -> Any:
        """Returns the module `torch.random`."""
        return torch.random

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if not self._cuda:
            torch.set_rng_state(new_state)
        elif device_index is None:
            torch.cuda.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    # -- streams, events and profiles

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Begins a range in NVTX profiles; does nothing on the CPU."""
        if self._cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        if self._cuda:
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls `callback` after the device's initialization; on the CPU immediately."""
        return torch.cuda._lazy_call(callback) if self._cuda else callback()

    # -- memory

    def memory_allocated(self, device_index: int | None = None) -> int:
        return memory_now(self._at(device_index)).current

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return memory_now(self._at(device_index)).peak

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self._cuda else self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else self.max_memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Returns torch's statistics; on the CPU only current and peak memory."""
        if self._cuda:
            return torch.cuda.memory_stats(device_index)
        used = memory_now(torch.device("cpu"))
        return {"allocated_bytes.all.current": used.current, "allocated_bytes.all.peak": used.peak}

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the memory of the device; on the CPU, the machine's."""
        if not self._cuda:
            return int(psutil.virtual_memory().total)
        return torch.cuda.get_device_properties(self._at(device_index)).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        if not self._cuda:
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Returns a copy in pinned memory; without CUDA the tensor itself."""
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._cuda and tensor.is_pinned()

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Sets the backend that `get_compile_backend` returns."""
        self._compile_backend = backend

    def _at(self, index: int | None) -> torch.device:
        return torch.device(self.device_name(self.current_device() if index is None else index))


_accelerator = DeviceFacts()


def get_accelerator() -> Any:
    """Returns the accelerator object of this process."""
    return _accelerator


def set_accelerator(accel_obj: Any) -> None:
    """Makes `get_accelerator` return this object. The engine continues to use torch directly.

    Raises:
        UsageError: it has no `device_name`.
    """
    global _accelerator
    if not callable(getattr(accel_obj, "device_name", None)):
        raise UsageError("deepspeed.accelerator.set_accelerator", expected="an accelerator", got=accel_obj)
    _accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """True if the engine can compute on the current accelerator."""
    return getattr(_accelerator, "_name", None) in ("cuda", "cpu")
