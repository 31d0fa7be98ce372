"""Collectives that record every call and pass it on: for tests and measurements.

Public, so that a program can assert its own traffic. `calls` lists the calls of the engine. `traffic` sums the bytes
sent for them and for the other axes of a mesh: message by message in host memory; on an accelerator, the bytes that
point-to-point messages would carry. Sums of layers that ranks share follow a separate rule (`tracked_group.py`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives, Metered, Work
from zeroaccel.comm.hangs.flight_recorder import FlightRecorder
from zeroaccel.comm.quantized import INT8, QUANTIZABLE

__all__ = ["BytesSent", "CollectiveCall", "RecordingCollectives"]

Link = Literal["inside", "across"]


@dataclass(frozen=True)
class CollectiveCall:
    """One call on this rank.

    Attributes:
        op: name of the method.
        dtype: torch's name without the prefix, such as "bfloat16"; "object" for pickled objects.
        numel: elements of the full tensor: W*S for a gather and a reduction.
        nbytes: bytes that this rank sends: its shard to W-1 ranks in a plain gather, all but its shard in a reduction.
    """

    op: str
    label: str
    dtype: str
    numel: int
    nbytes: int


@dataclass(frozen=True)
class BytesSent:
    """Bytes that one rank sent along one axis of the mesh, over one class of links.

    Attributes:
        axis: "dp_shard" for ZeRO's messages to ranks that have other shards of the same model (ranks that share a
            sequence are among them); "dp_replicate" for its messages to other replicas; "sp" for heads and positions of
            sequences; "tp" for sums and gathers of layers that ranks share; "pp" for messages between stages.
        op: operation in the flight recorder, such as "all_gather int8".
        purpose: first word of the label, such as "unshard" or "reduce".
        link: "inside" a node, or "across" nodes.
        messages: number of messages.
    """

    axis: str
    op: str
    purpose: str
    link: Link
    nbytes: int
    messages: int


class RecordingCollectives(Collectives):
    """Wraps `inner` and records its calls, and the bytes sent to each rank.

    Args:
        nodes: global ranks on each machine; by default those of the topology, or of a config's `node_size`.

    Attributes:
        calls: the calls since the beginning or the last `reset`, in order.

    Example:
        >>> from zeroaccel.comm.topology import destroy, init_process_group
        >>> recording = RecordingCollectives(Collectives(init_process_group()))
        >>> recording.all_gather(torch.empty(8), torch.ones(8), "unshard weights").wait()
        >>> recording.calls
        [CollectiveCall(op='all_gather', label='unshard weights', dtype='float32', numel=8, nbytes=0)]
        >>> destroy()
    """

    def __init__(self, inner: Collectives, nodes: Sequence[Sequence[int]] | None = None) -> None:
        # No super().__init__: this object has no transports and communicates through `inner` alone.
        self._fixed_nodes = nodes
        self.calls: list[CollectiveCall] = []
        # By axis, op, purpose and receiver.
        self._sent: Counter[tuple[str, str, str, int]] = Counter()
        self._messages: Counter[tuple[str, str, str, int]] = Counter()
        self._wrap(inner)

    def _wrap(self, inner: Collectives) -> None:
        self.inner = inner
        self.job = self if inner.job is inner else inner.job
        self.peers = self if inner.peers is inner else inner.peers
        self.nodes = self._fixed_nodes or inner.nodes
        inner.meter = partial(self._count, inner.flight_recorder, "")

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # asked of a copy while it is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def over(self, hierarchical: Collectives) -> Collectives:
        """Returns a copy of this wrapper around `hierarchical`, with the same records."""
        wrapper = copy.copy(self)
        wrapper._wrap(self.inner.over(hierarchical))
        return wrapper

    def observe(self, axis: str, source: Metered) -> None:
        source.meter = partial(self._count, source.flight_recorder, axis)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        before = list(self.calls), Counter(self._sent), Counter(self._messages)
        try:
            yield
        finally:
            for total, counted in zip((self._sent, self._messages), before[1:], strict=True):
                total.clear()
                total.update(counted)
            self.calls[:] = before[0]

    def count(self, op: str | None = None, label: str = "") -> int:
        """Returns the number of calls of an operation (None: any) whose labels begin with `label`."""
        return sum(1 for call in self.calls if op in (None, call.op) and call.label.startswith(label))

    def nbytes_by_op(self) -> dict[str, int]:
        """Returns the bytes that this rank has sent, by operation."""
        totals: Counter[str] = Counter()
        for call in self.calls:
            totals[call.op] += call.nbytes
        return dict(totals)

    def traffic(self) -> list[BytesSent]:
        """Returns the bytes that this rank has sent, counted per message and sorted, without control collectives."""
        own_node = next(set(node) for node in self.nodes if self.topology.rank in node)
        nbytes: Counter[tuple[str, str, str, Link]] = Counter()
        messages: Counter[tuple[str, str, str, Link]] = Counter()
        for (axis, op, purpose, receiver), sent in self._sent.items():
            key: tuple[str, str, str, Link] = axis, op, purpose, "inside" if receiver in own_node else "across"
            nbytes[key] += sent
            messages[key] += self._messages[axis, op, purpose, receiver]
        return [BytesSent(*key, nbytes[key], messages[key]) for key in sorted(nbytes)]

    def nbytes_by_axis(self) -> dict[str, dict[Link, int]]:
        """Returns the bytes that this rank has sent along each axis of the mesh, inside and across nodes."""
        totals: dict[str, dict[Link, int]] = {}
        for sent in self.traffic():
            links = totals.setdefault(sent.axis, {"inside": 0, "across": 0})
            links[sent.link] += sent.nbytes
        return totals

    def across_nbytes(self) -> int:
        """Returns the bytes that this rank has sent to ranks on other machines."""
        return sum(sent.nbytes for sent in self.traffic() if sent.link == "across")

    def reset(self) -> None:
        self.calls.clear()
        self._sent.clear()
        self._messages.clear()

    def all_gather(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        self._note("all_gather", label, out, (self.shard_world_size - 1) * shard.nbytes)
        return self.inner.all_gather(out, shard, label, split_sizes)

    def gather_weights(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        is_quantized = self.quantized_weights and shard.dtype in QUANTIZABLE
        sent = INT8.nbytes(shard.numel()) if is_quantized else shard.nbytes
        self._note("gather_weights", label, out, (self.shard_world_size - 1) * sent)
        return self.inner.gather_weights(out, shard, label, split_sizes)

    def gather_secondary(self, out: Tensor, secondary: Tensor, label: str) -> Work:
        self._note("gather_secondary", label, out, out.nbytes - secondary.nbytes)
        return self.inner.gather_secondary(out, secondary, label)

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        self._note("reduce_scatter", label, flat, self.inner.reduction_nbytes(flat.numel(), out.numel(), flat.dtype))
        return self.inner.reduce_scatter(out, flat, label, scale, split_sizes)

    def reduction_nbytes(self, numel: int, shard_numel: int, dtype: torch.dtype) -> int:
        return self.inner.reduction_nbytes(numel, shard_numel, dtype)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        self._note("all_reduce", label, tensor, (self.world_size - 1) * tensor.nbytes)
        self.inner.all_reduce(tensor, op, label)

    def all_reduce_on_device(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        self._note("all_reduce", label, tensor, (self.world_size - 1) * tensor.nbytes)
        self.inner.all_reduce_on_device(tensor, op, label)

    def broadcast(self, tensor: Tensor, src: int, label: str) -> None:
        # Counted as if the source sent every copy; in a tree, other ranks forward some of them.
        self._note("broadcast", label, tensor, (self.world_size - 1) * tensor.nbytes if self.rank == src else 0)
        self.inner.broadcast(tensor, src, label)

    def gather_objects(self, obj: Any, label: str) -> list[Any]:
        self.calls.append(CollectiveCall("gather_objects", label, "object", 0, 0))
        return self.inner.gather_objects(obj, label)

    def barrier(self, label: str) -> None:
        self.calls.append(CollectiveCall("barrier", label, "object", 0, 0))
        self.inner.barrier(label)

    def _note(self, op: str, label: str, tensor: Tensor, nbytes: int) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.calls.append(CollectiveCall(op, label, dtype, tensor.numel(), nbytes))

    def _count(self, recorder: FlightRecorder, axis: str, tag: int, receiver: int, nbytes: int) -> None:
        """Counts a message of a call of `recorder`. ZeRO's messages have axis ""; their receiver determines it."""
        axis = axis or ("dp_shard" if receiver in self.shard_ranks else "dp_replicate")
        entry = recorder.entry(tag)
        # A message has its call's tag. A long call may have left the flight recorder's ring in the meantime.
        op, label = ("forgotten", "") if entry is None else (entry.op, entry.label)
        key = axis, op, label.partition(" ")[0], receiver
        self._sent[key] += nbytes
        self._messages[key] += 1
