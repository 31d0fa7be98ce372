"""Collectives that record every call and pass it on: for tests and measurements.

Public, so that a program can assert its own traffic. `calls` are the calls of the engine, `traffic` is what was sent
for them: message by message in host memory, and on an accelerator what point-to-point messages would carry.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.comm.quantized import INT8, QUANTIZABLE

__all__ = ["BytesSent", "CollectiveCall", "RecordingCollectives"]


@dataclass(frozen=True)
class CollectiveCall:
    """One call on this rank.

    Attributes:
        op: the method's name.
        dtype: as torch prints it without its prefix, "bfloat16"; "object" for pickled ones.
        numel: elements of the full tensor: W*S for a gather and a reduction.
        nbytes: what this rank sends: its shard to W-1 ranks in a plain gather, all but its shard in a reduction.
    """

    op: str
    label: str
    dtype: str
    numel: int
    nbytes: int


@dataclass(frozen=True)
class BytesSent:
    """Bytes that one rank sent over one class of links.

    Attributes:
        op: of the collective, as the flight recorder has it: "all_gather int8".
        purpose: the first word of its label: "unshard", "reduce".
        link: "inside" a node, or "across" nodes.
    """

    op: str
    purpose: str
    link: Literal["inside", "across"]
    nbytes: int


class RecordingCollectives(Collectives):
    """Wraps `inner` and records its calls, and how many bytes went to which ranks.

    Args:
        nodes: the global ranks on each machine; by default those of the topology, or of a config's `node_size`.

    Attributes:
        calls: since the beginning or the last `reset`, in order.

    Example:
        >>> from zeroaccel.comm.topology import destroy, init_process_group
        >>> recording = RecordingCollectives(Collectives(init_process_group()))
        >>> recording.all_gather(torch.empty(8), torch.ones(8), "unshard weights").wait()
        >>> recording.calls
        [CollectiveCall(op='all_gather', label='unshard weights', dtype='float32', numel=8, nbytes=0)]
        >>> destroy()
    """

    def __init__(self, inner: Collectives, nodes: Sequence[Sequence[int]] | None = None) -> None:
        # No super().__init__: this one has no transports, and communicates through `inner` alone.
        self._fixed_nodes = nodes
        self.calls: list[CollectiveCall] = []
        self._sent: Counter[tuple[str, str, int]] = Counter()  # by op, purpose, receiver
        self._wrap(inner)

    def _wrap(self, inner: Collectives) -> None:
        self.inner = inner
        self.topology = inner.topology
        self.rank, self.world_size, self.replica = inner.rank, inner.world_size, inner.replica
        self.shard_rank, self.shard_world_size = inner.shard_rank, inner.shard_world_size
        self.secondary_rank, self.secondary_world_size = inner.secondary_rank, inner.secondary_world_size
        self.quantized_weights = inner.quantized_weights
        self.job = self if inner.job is inner else inner.job
        self.peers = self if inner.peers is inner else inner.peers
        self.is_first_data_group = inner.is_first_data_group
        self.tensor = inner.tensor
        self.flight_recorder = inner.flight_recorder
        self.nodes = self._fixed_nodes or inner.nodes
        inner.meter = self._count

    def over(self, hierarchical: Collectives) -> Collectives:
        """A copy of this wrapper around `hierarchical`, with the same records."""
        wrapper = copy.copy(self)
        wrapper._wrap(self.inner.over(hierarchical))
        return wrapper

    def count(self, op: str | None = None, label: str = "") -> int:
        """How many calls there were, of one operation, with labels that begin with `label`."""
        return sum(1 for call in self.calls if op in (None, call.op) and call.label.startswith(label))

    def nbytes_by_op(self) -> dict[str, int]:
        """Bytes this rank has sent, by operation."""
        totals: Counter[str] = Counter()
        for call in self.calls:
            totals[call.op] += call.nbytes
        return dict(totals)

    def traffic(self) -> list[BytesSent]:
        """What this rank has sent in gathers, reductions and broadcasts, counted message by message; sorted."""
        own_node = next(set(node) for node in self.nodes if self.topology.rank in node)
        totals: Counter[tuple[str, str, Literal["inside", "across"]]] = Counter()
        for (op, purpose, receiver), nbytes in self._sent.items():
            totals[op, purpose, "inside" if receiver in own_node else "across"] += nbytes
        return [BytesSent(*key, nbytes) for key, nbytes in sorted(totals.items())]

    def across_nbytes(self) -> int:
        """Bytes this rank has sent to ranks on other machines."""
        return sum(sent.nbytes for sent in self.traffic() if sent.link == "across")

    def reset(self) -> None:
        self.calls.clear()
        self._sent.clear()

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

    def gather_quantized(self, out: Tensor, code: Tensor, label: str) -> Work:
        self._note("gather_quantized", label, out, (self.shard_world_size - 1) * code.nbytes)
        return self.inner.gather_quantized(out, code, label)

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
        # Counted as if the source sent every copy: in a tree, other ranks pass some of them on.
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

    def _count(self, tag: int, receiver: int, nbytes: int) -> None:
        entry = self.flight_recorder.entry(tag)
        # The message's tag is that of its call. A long call may have left the flight recorder's ring meanwhile.
        op, label = ("forgotten", "") if entry is None else (entry.op, entry.label)
        self._sent[op, label.partition(" ")[0], receiver] += nbytes
