"""`deepspeed.accelerator.get_accelerator()`: the device of this rank, CUDA where there is one, else the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from zeroaccel.comm.environment import local_size
from zeroaccel.compat import deepspeed_ops
from zeroaccel.errors import UsageError
from zeroaccel.telemetry.step_report import memory_now


class CpuStream:
    """Stands for a stream on the CPU, where operations are done when their calls return."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_: object) -> None: ...


class DeviceFacts:
    """Calls of the device that libraries and scripts make; sizes are in bytes.

    On the CPU `memory_*` count the resident memory of this process, as torch does not count its tensors there.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._name = "cuda" if self._cuda else "cpu"
        self._communication_backend_name = "nccl" if self._cuda else "gloo"
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"deepspeed.accelerator.get_accelerator().{name}: zeroaccel answers for deepspeed here and does not have"
            " this; ask torch.cuda, or torch.accelerator"
        )

    # -- devices

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
        """CUDA devices; on the CPU the ranks of this machine, each of which computes as one device would."""
        if self._cuda:
            return torch.cuda.device_count()
        return local_size() or 1

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when their calls return."""
        return not self._cuda

    def use_host_timers(self) -> bool:
        return not self._cuda

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def visible_devices_envs(self) -> list[str]:
        """The variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        """Writes these devices into an environment for other processes."""
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
        """Those that an engine trains in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # -- random numbers

    def random(self) -> Any:
        """The module `torch.random`."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seeds the device's generator."""
        torch.cuda.manual_seed(seed) if self._cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds the generators of all devices."""
        torch.cuda.manual_seed_all(seed) if self._cuda else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """(n,) uint8: the state of the device's generator."""
        if not self._cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state() if device_index is None else torch.cuda.get_rng_state(device_index)

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

    @property
    def Stream(self) -> Any:
        """The class of streams."""
        return torch.cuda.Stream if self._cuda else CpuStream

    @property
    def Event(self) -> Any:
        """The class of events; None on the CPU."""
        return torch.cuda.Event if self._cuda else None

    def stream(self, stream: Any) -> Any:
        """A context in which operations go to this stream."""
        return torch.cuda.stream(stream) if self._cuda else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index) if self._cuda else CpuStream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index) if self._cuda else CpuStream()

    def synchronize(self, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Begins a range in NVTX profiles; does nothing on the CPU."""
        if self._cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        if self._cuda:
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls it once the device is initialised; on the CPU at once."""
        return torch.cuda._lazy_call(callback) if self._cuda else callback()

    # -- memory

    def empty_cache(self) -> None:
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return memory_now(self._at(device_index)).current

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return memory_now(self._at(device_index)).peak

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self.reset_peak_memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Counts the peak anew; on the CPU the system counts it, and it stays."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self._cuda else self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else self.max_memory_allocated()

    def memory_cached(self, device_index: int | None = None) -> int:
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        self.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """torch's statistics; on the CPU the two numbers that there are."""
        if self._cuda:
            return torch.cuda.memory_stats(device_index)
        used = memory_now(torch.device("cpu"))
        return {"allocated_bytes.all.current": used.current, "allocated_bytes.all.peak": used.peak}

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the device; on the CPU of the machine."""
        if not self._cuda:
            return int(psutil.virtual_memory().total)
        return torch.cuda.get_device_properties(self._at(device_index)).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        if not self._cuda:
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A copy in memory that a CUDA device reads directly; the tensor itself where there is none."""
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._cuda and tensor.is_pinned()

    # -- compilers

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Notes the backend that `get_compile_backend` tells."""
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """An object of a class of `deepspeed.ops.op_builder`, by its name."""
        return self.get_op_builder(class_name)()

    def get_op_builder(self, class_name: str) -> Any:
        """A class of `deepspeed.ops.op_builder`, by its name."""
        return deepspeed_ops.builder_of(class_name)

    def _at(self, index: int | None) -> torch.device:
        return torch.device(self.device_name(self.current_device() if index is None else index))


_accelerator = DeviceFacts()


def get_accelerator() -> Any:
    """The object of this process."""
    return _accelerator


def set_accelerator(accel_obj: Any) -> None:
    """Makes `get_accelerator` give this object. The engine goes on asking torch.

    Raises:
        UsageError: it has no `device_name`.
    """
    global _accelerator
    if not callable(getattr(accel_obj, "device_name", None)):
        raise UsageError("deepspeed.accelerator.set_accelerator", expected="an accelerator", got=accel_obj)
    _accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether it is one that the engine computes on."""
    return getattr(_accelerator, "_name", None) in ("cuda", "cpu")
