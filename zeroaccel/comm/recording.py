"""The seam for tests and measurements: collectives that pass every call on and remember it.

Public, so that a program can assert its own traffic. Counts what a rank sends; it does not look at the wire.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from zeroaccel.comm.collectives import Collectives, Work

__all__ = ["CollectiveCall", "RecordingCollectives"]


@dataclass(frozen=True)
class CollectiveCall:
    """One call on this rank.

    Attributes:
        op: the method's name.
        dtype: as torch prints it without its prefix, "bfloat16"; "object" for pickled ones.
        numel: elements of the whole tensor: W*S for a gather and a reduction.
        nbytes: what this rank sends: (W-1)*S elements for those two.
    """

    op: str
    label: str
    dtype: str
    numel: int
    nbytes: int


class RecordingCollectives(Collectives):
    """Wraps `inner` and keeps its calls.

    Attributes:
        calls: since the beginning or the last `reset`, in order.
    """

    def __init__(self, inner: Collectives) -> None:
        # No super().__init__: this one communicates through `inner` alone.
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.journal = inner.journal
        self.calls: list[CollectiveCall] = []

    def count(self, op: str | None = None, label: str = "") -> int:
        """How many calls there were, of one operation, with labels that begin so."""
        return sum(1 for call in self.calls if op in (None, call.op) and call.label.startswith(label))

    def nbytes_by_op(self) -> dict[str, int]:
        """Bytes this rank has sent, by operation."""
        totals: Counter[str] = Counter()
        for call in self.calls:
            totals[call.op] += call.nbytes
        return dict(totals)

    def reset(self) -> None:
        self.calls.clear()

    def all_gather(self, out: Tensor, shard: Tensor, label: str) -> Work:
        self._note("all_gather", label, out, out.nbytes - shard.nbytes)
        return self.inner.all_gather(out, shard, label)

    def reduce_scatter(self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0) -> Work:
        self._note("reduce_scatter", label, flat, flat.nbytes - out.numel() * flat.element_size())
        return self.inner.reduce_scatter(out, flat, label, scale)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"], label: str) -> None:
        self._note("all_reduce", label, tensor, (self.world_size - 1) * tensor.nbytes)
        self.inner.all_reduce(tensor, op, label)

    def broadcast(self, tensor: Tensor, src: int, label: str) -> None:
        # As if the source sent every copy itself: on the way down a tree others do some of it.
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
