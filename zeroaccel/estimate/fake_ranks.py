"""Fake ranks: collectives that allocate memory like real ones and count the bytes that they would send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from zeroaccel.comm.collective_tracker import DONE
from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.comm.hangs.flight_recorder import FlightRecorder
from zeroaccel.comm.topology import Topology
from zeroaccel.config import Fact
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.parallel.axes import AXES
from zeroaccel.setup.ranks import JobRanks

_POOLED_BLOCKS = 2  # number of blocks that a `BufferPool` in `comm.transport` retains
_MOMENTS = ("earlier", "last", "step")
EXPERT_SHARDS = "dp of experts"


def traffic_axes() -> tuple[str, ...]:
    """Returns the axes of a mesh along which ranks send bytes.

    "dp" means the axes that ZeRO shards over, dp_shard x sp; `EXPERT_SHARDS` means the ranks among them with the same
    experts.
    """
    return "dp", EXPERT_SHARDS, *(axis.name for axis in AXES)


@dataclass
class SentBytes:
    """Bytes that one rank sends in a step, by axis.

    Attributes:
        moment: current moment: "earlier" for micro-batches before the last, "last" for the last, "step" for the update.
        counts: (axis, moment) -> bytes.
    """

    moment: str = "last"
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, axis: str, nbytes: float) -> None:
        """Adds bytes along an axis at the current moment."""
        key = axis, self.moment
        self.counts[key] = self.counts.get(key, 0) + round(nbytes)

    def begin(self) -> None:
        """Resets all counts."""
        self.counts.clear()

    def as_tuple(self) -> tuple[int, ...]:
        """Returns three counts per axis, in order: before the last micro-batch, in it, and in the update."""
        return tuple(self.counts.get((axis, moment), 0) for axis in traffic_axes() for moment in _MOMENTS)


def sent_per_step(counts: Sequence[int], simulated: int, accumulation: int) -> dict[str, int]:
    """Returns axis -> bytes that a rank sends in a step, for axes with traffic.

    Args:
        counts: counts from `SentBytes.as_tuple`.
        simulated: number of simulated micro-batches out of `accumulation`; all except the last send the same bytes.

    Example:
        >>> sent_per_step((10, 12, 5, *[0] * 15), simulated=2, accumulation=4)
        {'dp': 47}
    """
    sent = {}
    for index, axis in enumerate(traffic_axes()):
        earlier, last, step = counts[3 * index : 3 * index + 3]
        repeats = (accumulation - 1) / (simulated - 1) if simulated > 1 else 0.0
        if total := round(earlier * repeats) + last + step:
            sent[axis] = total
    return sent


class FakeRanks(Collectives):
    """Collectives of rank 0 in a job whose other ranks do not exist: they send nothing, but allocate the same memory as
    real ones, except for the internal memory of a backend.

    Args:
        receives_in_host_memory: True if reductions receive the parts of all ranks in a buffer, as with gloo; with NCCL
            the engine needs no buffer.
        sent: counter for the bytes sent to each other rank along `axis`.
        experts: number of ranks that divide the experts; ranks at the same place in such groups have the same experts.
    """

    def __init__(
        self,
        world_size: int,
        sent: SentBytes,
        *,
        axis: str = "dp",
        receives_in_host_memory: bool = False,
        experts: int = 1,
    ) -> None:
        ranks, group = tuple(range(world_size)), cast(Any, None)
        parts = ("none", group, group, group, FlightRecorder(), None, (ranks,))
        device = torch.device("cpu")
        super().__init__(Topology(0, world_size, 0, 1, device, *parts, transports=lambda *_: cast(Any, None)))
        self._receives = receives_in_host_memory and world_size > 1
        self._free: list[Tensor] = []
        self._sent, self._axis = sent, axis
        if experts > 1:
            alike = receives_in_host_memory
            self.part_holders = FakeRanks(
                world_size // experts, sent, axis=EXPERT_SHARDS, receives_in_host_memory=alike
            )
            self.part_holders.parts = FakeRanks(experts, sent, axis="ep")

    def as_job(self, device: torch.device) -> JobRanks:
        """Returns a job with these ranks, for `TrainPlan.of`."""
        self.topology = replace(self.topology, device=device)
        samplers = Fact(self.world_size, "the ranks")
        return JobRanks(self.topology, self, ParallelConfig(), (), self.world_size, samplers, sampler=0)

    def _count(self, nbytes: int) -> None:
        """Counts a message of `nbytes` to each other rank."""
        self._sent.add(self._axis, (self.world_size - 1) * nbytes)

    def all_gather(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        self._count(shard.nbytes)
        out.detach_()  # an operation without effect, after which the tracker measures the unsharded memory
        return DONE

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        self._sent.add(self._axis, (flat.numel() - out.numel()) * flat.element_size())
        return _PendingReduction(self._free, self.world_size * out.nbytes) if self._receives and flat.numel() else DONE

    def all_to_all(self, out: Tensor, parts: Tensor, label: str) -> Work:
        self._count(parts[0].nbytes)
        out.detach_()
        return DONE

    def exchange_rows(
        self, out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], label: str
    ) -> Work:
        self._sent.add(self._axis, (sum(sent) - sent[self.rank]) * rows.shape[1] * rows.element_size())
        out.detach_()
        return DONE

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        pass

    def broadcast(self, tensor: Tensor, src: int, label: str) -> None:
        pass

    def gather_objects(self, obj: Any, label: str) -> list[Any]:
        return [obj] * self.world_size

    def barrier(self, label: str) -> None:
        pass


class _PendingReduction:
    """A reduction in flight with its receive buffer, which is reused like those in `comm.transport.BufferPool`."""

    def __init__(self, free: list[Tensor], nbytes: int) -> None:
        self._free = free
        large_enough = [index for index, block in enumerate(free) if block.numel() >= nbytes]
        block = free.pop(large_enough[0]) if large_enough else torch.empty(nbytes, dtype=torch.uint8)
        self._block: Tensor | None = block

    def wait(self) -> None:
        if self._block is not None:
            self._free.append(self._block)
            self._free.sort(key=Tensor.numel)
            del self._free[:-_POOLED_BLOCKS]
            self._block = None

    def is_completed(self) -> bool:
        return self._block is None
