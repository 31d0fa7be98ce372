"""zeroaccel on `cuda:1` or `xpu:1`, as one rank of a job of W ranks, in a `StreamModel`.

Replaced are: collectives (torch's group without peers, on a stream per group as in ProcessGroupNCCL),
compiled loops of the host (`ops/dispatch.launch`) and of the device (`ops/device_kernels.DeviceKernels`), page-locked
slabs (`offload/host_buffers.aligned_bytes`), the NVMe tier's file, and threads. All other code is the package's own.
"""

from __future__ import annotations

import importlib
import pkgutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.cuda_model.fake_cuda import DEVICE, FakeCuda  # first: it loads the library before torch

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import zeroaccel.checkpoint
import zeroaccel.comm
import zeroaccel.offload
import zeroaccel.ops
import zeroaccel.zero
from tests.cuda_model import model_threads
from tests.cuda_model.modelled_collectives import Said, replace_collectives
from tests.cuda_model.replacements import Replacements
from tests.cuda_model.stream_model import MAIN, StreamModel
from zeroaccel.comm import level_codes, rank_device
from zeroaccel.comm import topology as topologies
from zeroaccel.comm.collectives import Collectives
from zeroaccel.offload import activation_store, host_buffers, page_locked
from zeroaccel.offload.file_io import BlockFile, Direction, IoSettings, Traffic
from zeroaccel.offload.host_buffers import HostArena
from zeroaccel.ops import dispatch, step_control
from zeroaccel.ops.device_kernels import DeviceKernels, kernels_for
from zeroaccel.zero.access import deferred_init
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage import placement
from zeroaccel.zero.storage.shards import SecondaryShard

_PACKAGES = (zeroaccel.checkpoint, zeroaccel.comm, zeroaccel.offload, zeroaccel.ops, zeroaccel.zero)
_THREADED_PACKAGES = (
    "zeroaccel.checkpoint",
    "zeroaccel.offload",
    "zeroaccel.zero",
    "zeroaccel.comm.hierarchical",
    "zeroaccel.ops.device_threads",
)


@dataclass
class ModelledRank:
    """One rank of a job, on the model.

    Attributes:
        cuda: its device.
        model: the model that records its operations.
        turns: schedule of its threads.
    """

    cuda: FakeCuda
    model: StreamModel
    turns: model_threads.Turns


@contextmanager
def modelled_rank(
    world_size: int = 1, model: StreamModel | None = None, rank: int = 0, said: Said | None = None
) -> Iterator[ModelledRank]:
    """Yields one rank of a job; `said` has the objects that previously modelled ranks sent."""
    model = model or StreamModel()
    cuda = FakeCuda(model)
    turns = model_threads.Turns(model, cuda.modes)
    replacements = Replacements()
    # If a module imports an object from another, both get the replacement, so import all modules first.
    for package in _PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    with ExitStack() as stack:
        stack.callback(page_locked._streams.clear)  # after the links, whose pages it concerns
        stack.callback(activation_store._LINKS.clear)  # links of a device of this model
        stack.callback(level_codes._TABLES.clear)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        stack.callback(replacements.undo)
        stack.enter_context(cuda.installed())
        if DEVICE.type != rank_device.ACCELERATOR.type:  # training refuses devices on which it has not been run
            replacements.everywhere(rank_device.ACCELERATOR, rank_device.DeviceKind(DEVICE.type, "its backend"))
        replace_collectives(cuda, replacements, {} if said is None else said)
        _replace_host_work(cuda, turns, replacements)
        _watch_copies(cuda, replacements)
        model_threads.install(turns, replacements, _THREADED_PACKAGES)
        topologies.init_process_group(device=DEVICE)
        stack.callback(topologies.destroy)
        yield ModelledRank(cuda, model, turns)


# -- kernels


class _ModelKernels(DeviceKernels):
    """Kernels that are recorded in the model; on small tensors they compute, with torch operations of the same name."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def launch(
        self,
        name: str,
        arguments: Sequence[Any],
        *,
        reads: Sequence[Tensor | None],
        writes: Sequence[Tensor | None],
        blocks: int,
        rows: int = 1,
    ) -> None:
        read, written = ([tensor for tensor in side if tensor is not None] for side in (reads, writes))
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in (*read, *written))
        self._cuda.kernel(name, read, written, nbytes, 0.0)

    def max_abs_into(self, tensor: Tensor, largest: Tensor) -> None:
        super().max_abs_into(tensor, largest)
        self._cuda.compute(largest, lambda: torch.ones(1).view(torch.int32))

    def square_sums_into(self, tensor: Tensor, largest: Tensor, sums: Tensor) -> None:
        super().square_sums_into(tensor, largest, sums)
        self._cuda.compute(sums, lambda: torch.ones(2, dtype=torch.int64))

    def write_facts(self, largest: Tensor, history: int, settings: int, stop: bool, order: int, facts: Tensor) -> None:
        super().write_facts(largest, history, settings, stop, order, facts)
        self._cuda.call(
            lambda small, out: step_control.write_facts(small, history, settings, stop, order, out), largest, facts
        )

    def largest_of_facts(self, facts: Tensor, largest: Tensor) -> None:
        super().largest_of_facts(facts, largest)
        self._cuda.call(step_control.largest_of_facts, facts, largest)

    def finalize(
        self,
        facts: Tensor,
        sums: Tensor | None,
        control: Tensor,
        summary: Tensor,
        factors: tuple[float, float, float],
        *,
        skip_overflow: bool,
    ) -> None:
        super().finalize(facts, sums, control, summary, factors, skip_overflow=skip_overflow)
        scale, clipping, grad_factor = factors
        settings: dict[str, Any] = {"scale": scale, "clipping": clipping, "grad_factor": grad_factor}
        outputs = {"control": self._cuda.values_of(control), "summary": self._cuda.values_of(summary)}
        inputs = self._cuda.values_of(facts), None if sums is None else self._cuda.values_of(sums)
        with _disable_current_modes():
            step_control.finalize(*inputs, **settings, **outputs, skip_overflow=skip_overflow)


# -- the host


class _ModelFile:
    """`BlockFile` without a file: transfers run on a thread of their own, in order."""

    def __init__(self, cuda: FakeCuda, calls: Callable[..., Any], folder: Any, nbytes: int, where: str, io: IoSettings):
        self._cuda = cuda
        self._thread = calls(1, "of a file")
        self.folder, self.nbytes, self.settings, self.direct = folder, nbytes, io, True
        self.traffic: dict[Direction, Traffic] = {"read": Traffic(), "write": Traffic()}

    def start(self, direction: Direction, data: Tensor, offset: int, done: Callable[[Exception | None], None]) -> None:
        """See `BlockFile.start`."""
        self._thread.submit(self._move, direction, data, done)

    def measure(self) -> tuple[float, float]:
        """See `BlockFile.measure`."""
        return (self._cuda.model.rates.disk,) * 2

    def close(self) -> None:
        """See `BlockFile.close`."""
        self._thread.shutdown()

    def _move(self, direction: Direction, data: Tensor, done: Callable[[Exception | None], None]) -> None:
        uses = self._cuda.uses_of([data])
        reads, writes = ([], uses) if direction == "read" else (uses, [])
        seconds = data.numel() / self._cuda.model.rates.disk
        self._cuda.model.run_on_host(reads, writes, f"{direction} of a file", seconds)
        self.traffic[direction].nbytes += data.numel()
        del data, uses, reads, writes
        done(None)


def _replace_host_work(cuda: FakeCuda, turns: model_threads.Turns, replacements: Replacements) -> None:
    def launch(
        kernel: str, numel: int, bind: Any, *, reads: Sequence[Tensor], writes: Sequence[Tensor], divisible: bool = True
    ) -> list[Any]:
        cuda.on_host(kernel, reads, writes)
        if kernel != "examine":
            return [(1, 1)] if kernel == "square_sums" else [None]
        bits = torch.int32 if reads[0].itemsize == 4 else torch.int16
        with _disable_current_modes():
            one = int(torch.ones(1, dtype=reads[0].dtype).view(bits))
        return [(one, 1)]

    def aligned_bytes(nbytes: int, *, pinned: bool = False, populated: bool = False, file: int = -1) -> Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8)
        if pinned:
            cuda.pin(made)
        elif populated:
            cuda.populate(made)
        return made

    def states(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return host_buffers.zeros_on_host(shape, dtype).zero_()  # as new pages of the system are

    def empty(arena: HostArena, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        if made.numel():
            base = arena._take(host_buffers.aligned_nbytes(made.numel() * made.itemsize))
            cuda.place_in(made, base, lambda: arena._returned.append(base))
        return made

    def copying_lanes() -> set[int]:
        return {cuda.current_lane(), MAIN, *(stream.lane for stream in page_locked._streams)}

    cuda.model.copying_lanes = copying_lanes
    kernels = _ModelKernels(cuda)
    replacements.everywhere(kernels_for, lambda device: kernels if device.type == DEVICE.type else None)
    _, _, executor = model_threads.thread_classes(turns)
    replacements.everywhere(dispatch.launch, launch)
    replacements.everywhere(host_buffers.aligned_bytes, aligned_bytes)
    replacements.set(placement, "zeros_on_host", states)
    replacements.set(deferred_init, "_PLAIN", [nn.Parameter, FakeTensor])
    replacements.set(HostArena, "empty", empty)  # its tensors report their end through arrays, which fake tensors lack
    replacements.everywhere(BlockFile, lambda *arguments: _ModelFile(cuda, executor, *arguments))


def _watch_copies(cuda: FakeCuda, replacements: Replacements) -> None:
    """Finds gathers of secondary copies whose weights have changed since; on a GPU, wrong values would show it."""
    kept: weakref.WeakKeyDictionary[SecondaryShard, int] = weakref.WeakKeyDictionary()
    keep, prepare = SecondaryShard.keep, FlatBuffer.prepare_gather

    def watched_keep(secondary: SecondaryShard, *arguments: Any) -> None:
        was_valid = secondary.is_valid
        keep(secondary, *arguments)
        if secondary.is_valid and not was_valid:
            kept[secondary] = cuda.model.num_operations

    def watched_prepare(buffer: FlatBuffer, collectives: Collectives, label: str, *, exact: bool) -> Any:
        if buffer.shard.secondary.is_valid and not exact:
            changed = max((cuda.memory_of(tensor).changed for tensor in buffer.shard.tensors()), default=0)
            if changed > kept.get(buffer.shard.secondary, changed):
                cuda.model.find(f"STALE COPY: {label} gathers a copy of weights that have changed since")
        return prepare(buffer, collectives, label, exact=exact)

    replacements.set(SecondaryShard, "keep", watched_keep)
    replacements.set(FlatBuffer, "prepare_gather", watched_prepare)
