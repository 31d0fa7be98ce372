"""Ranks that do not exist: collectives that allocate what they would, send nothing, and count what they would send."""

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

_POOLED_BLOCKS = 2  # that a `BufferPool` of `comm.transport` retains
_MOMENTS = ("earlier", "last", "step")
EXPERT_SHARDS = "dp of experts"


def traffic_axes() -> tuple[str, ...]:
    """Axes of a mesh along which ranks send bytes.

    "dp" stands for those over which ZeRO shards, dp_shard x sp; `EXPERT_SHARDS` for the part of them that has the same
    experts.
    """
    return "dp", EXPERT_SHARDS, *(axis.name for axis in AXES)


@dataclass
class SentBytes:
    """Bytes that one rank sends in a step, by axis.

    Attributes:
        moment: now: "earlier" in a micro-step before the last, "last" in that, "step" in the update.
        counts: (axis, moment) -> bytes.
    """

    moment: str = "last"
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, axis: str, nbytes: float) -> None:
        """Counts messages along an axis."""
        key = axis, self.moment
        self.counts[key] = self.counts.get(key, 0) + round(nbytes)

    def begin(self) -> None:
        """From now on counts anew."""
        self.counts.clear()

    def as_tuple(self) -> tuple[int, ...]:
        """In the order of the axes, three each: before the last micro-step, in it, in the update."""
        return tuple(self.counts.get((axis, moment), 0) for axis in traffic_axes() for moment in _MOMENTS)


def sent_per_step(counts: Sequence[int], simulated: int, accumulation: int) -> dict[str, int]:
    """Axis -> bytes that a rank sends in a step, of axes with any.

    Args:
        counts: as of `SentBytes.as_tuple`.
        simulated: micro-steps that were run, of `accumulation`; all but the last are alike.

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
    """Collectives of rank 0 of a job whose other ranks do not exist: nothing is sent, but memory is allocated as it
    would be. What a backend allocates inside itself is not modelled.

    Args:
        receives_in_host_memory: reductions receive the parts of all ranks in a buffer and add them there, as on gloo;
            NCCL needs no buffer of ours.
        sent: what is sent to each of the others is counted there, along `axis`.
        experts: how many of them divide the experts; the others have the same ones.
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
        """A job of these ranks, for `TrainPlan.of`."""
        self.topology = replace(self.topology, device=device)
        samplers = Fact(self.world_size, "the ranks")
        return JobRanks(self.topology, self, ParallelConfig(), (), self.world_size, samplers, sampler=0)

    def _count(self, nbytes: int) -> None:
        """Counts a message of so many bytes to each of the others."""
        self._sent.add(self._axis, (self.world_size - 1) * nbytes)

    def all_gather(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        self._count(shard.nbytes)
        out.detach_()  # an operation without effect, so that the tracker sees what is unsharded now
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
    """A reduction in flight and its receive buffer, which is reused as in a `BufferPool` of `comm.transport`."""

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
