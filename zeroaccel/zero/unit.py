"""`ParamUnit`: the parameters that travel in one collective, and the lifecycle of their storage.

[Note: faces] The `nn.Parameter` objects, their shapes and dtypes never change. While a unit is whole, each
parameter's data is a view into the unit's flat buffer; while it is sharded, the buffer's storage has size 0 and the
data is a stride-0 expand of one NaN: a stale read is visibly NaN, never a crash and never `torch.Size([0])`. The
storage *object* stays, so views that autograd saved in forward become valid again when the unit is gathered for
backward.

Does not decide when to move (`residency.py`, `schedule.py`) and does not talk to torch.distributed (`comm`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.errors import ShardStateError
from zeroaccel.zero.layout import FlatLayout

__all__ = ["FlatBuffer", "ParamUnit", "ShardState"]


class ShardState(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    """Only this rank's shard is up to date; the full buffer is freed, or stale when it is resident."""
    GATHERING = "gathering"
    """An all-gather into the full buffer is in flight."""
    UNSHARDED = "unsharded"
    """The full buffer is valid and every parameter is a view into it."""


_LEGAL = {
    (ShardState.SHARDED, ShardState.GATHERING),
    (ShardState.GATHERING, ShardState.UNSHARDED),
    (ShardState.UNSHARDED, ShardState.SHARDED),
}


class FlatBuffer:
    """Parameters of one dtype, all trainable or all frozen, end to end in one buffer.

    Attributes:
        full: (N,) param dtype. Resident: always allocated. Otherwise its storage comes and goes.
        shard: (S,) param dtype. A view into `full` when resident, else a tensor of its own.
        master: (S,) fp32, or (N,) when the optimizer is replicated; the weights the optimizer updates. For fp32
            parameters it is `shard` (or `full`) itself. None for frozen parameters and without an optimizer.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        trainable: bool,
        resident: bool,
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.dtype = dtype
        self.rank = rank
        self.trainable = trainable
        self.resident = resident
        self.full = torch.zeros(layout.numel, dtype=dtype, device=device)
        low, high = layout.bounds(rank)
        self.shard = self.full[low:high]
        self.master: Tensor | None = None
        absent = torch.full((), _absent_value(dtype), dtype=dtype)  # a single element to expand from
        self._absent = [absent.to(device).expand(param.shape) for param in params]
        self._views = self._cut()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, N elements."""
        return self.layout.numel * self.dtype.itemsize

    def adopt(self, source: Tensor, *, master: bool, replicated: bool) -> None:
        """Takes over the weights and becomes what the parameters are views of.

        Args:
            source: (N,) the initial weights in their original dtype, laid out, equal on all ranks.
            master: whether an optimizer will update these weights.
            replicated: whether the master is the whole (N,) rather than this rank's (S,).
        """
        self.full.copy_(source)
        if not self.resident:
            self.shard = self.shard.clone()
        if master:
            kept = slice(None) if replicated else slice(*self.layout.bounds(self.rank))
            own = self.full if replicated else self.shard
            # From the original weights, so that an fp32 model keeps the bits that 16-bit parameters drop.
            self.master = own if self.dtype is torch.float32 else source[kept].to(torch.float32, copy=True)
        self.point(whole=True)

    def point(self, *, whole: bool) -> None:
        """Points every parameter at its view of the full buffer, or at NaN."""
        for param, data in zip(self.params, self._views if whole else self._absent, strict=True):
            param.data = data

    def allocate(self) -> None:
        """Gives the full buffer its storage (again)."""
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        """Takes the full buffer's storage away; the storage object and all views of it stay."""
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
            return
        # Somebody holds a numpy array of it. That keeps the memory, with the values of now; the unit goes on elsewhere.
        self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.full.device)
        self._views = self._cut()
        self.full.untyped_storage().resize_(0)

    def give_back(self) -> None:
        """Gives each parameter, which must be whole, storage of its own, as a program that saves the model expects."""
        for param in self.params:
            param.data = param.data.clone()
        if not self.resident:
            self.free()

    def _cut(self) -> list[Tensor]:
        return [self.full[slot.start : slot.end].view(slot.shape) for slot in self.layout.slots]

    def owns(self, data: Tensor) -> bool:
        """Whether `data`, of one of its parameters, is a view of this buffer or says that it is sharded."""
        storages = {self.full.untyped_storage()._cdata, *(nan.untyped_storage()._cdata for nan in self._absent[:1])}
        return data.untyped_storage()._cdata in storages

    def view(self, index: int) -> Tensor:
        """The view of the full buffer that parameter `index` uses while whole."""
        return self._views[index]


def _absent_value(dtype: torch.dtype) -> float | bool:
    """NaN; integers have none and show their lowest value instead."""
    if dtype is torch.bool:
        return False
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


class ParamUnit:
    """One or a few flat buffers that become whole and sharded together.

    Lifecycle (all ranks, in the same order): 1. `unshard()` starts the all-gather, 2. `wait()` before the first use,
    3. `reshard()` after the last. Each is a no-op where it has nothing to do; anything illegal raises ShardStateError.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], buffers: Sequence[FlatBuffer], collectives: Collectives
    ):
        self.name = name
        self.modules = tuple(modules)
        self.buffers = tuple(buffers)
        self.resident = all(buffer.resident for buffer in buffers)
        self.numel = sum(buffer.layout.numel for buffer in buffers)
        self._collectives = collectives
        self._works: list[Work] = []
        self._state = ShardState.UNSHARDED

    def __repr__(self) -> str:
        return f"ParamUnit({self.name}, {self.numel} elements, {self._state.value})"

    @property
    def state(self) -> ShardState:
        """Where the parameters are now."""
        return self._state

    def fqns(self) -> Iterator[str]:
        """Names of all its parameters."""
        return (slot.fqn for buffer in self.buffers for slot in buffer.layout.slots)

    def unshard(self) -> None:
        """Starts gathering the full parameters: all-gather over the shard group, (S,) -> (N,) per buffer."""
        if self._state is not ShardState.SHARDED:
            return
        self._move(ShardState.GATHERING)
        label = f"unshard {self.name}"
        for buffer in self.buffers:
            if buffer.resident and not buffer.trainable:
                continue  # frozen and whole everywhere: nobody changes it
            buffer.allocate()
            self._works.append(self._collectives.all_gather(buffer.full, buffer.shard, label))

    def wait(self) -> None:
        """Finishes the gather in flight; the parameters are whole afterwards."""
        if self._state is ShardState.UNSHARDED:
            return
        if self._state is ShardState.SHARDED:
            raise ShardStateError(
                f"unit {self.name}", expected="a gather in flight", got=self._state.value, fix="call unshard() first"
            )
        for work in self._works:
            work.wait()
        self._works.clear()
        if not self.resident:
            for buffer in self.buffers:
                buffer.point(whole=True)
        self._move(ShardState.UNSHARDED)

    def reshard(self) -> None:
        """Gives up the full parameters and frees their storage; resident units only forget that they are whole."""
        if self._state is ShardState.SHARDED:
            return
        self.wait()
        self._move(ShardState.SHARDED)
        if not self.resident:
            for buffer in self.buffers:
                buffer.point(whole=False)
                buffer.free()

    def take_part(self) -> None:
        """Joins a gather that other ranks need; here the unit is afterwards as it was."""
        was_whole = self._state is ShardState.UNSHARDED
        self.reshard()
        self.unshard()
        self.wait()
        if not was_whole:
            self.reshard()

    def _move(self, to: ShardState) -> None:
        if (self._state, to) not in _LEGAL:
            raise ShardStateError(f"unit {self.name}: illegal move from {self._state.value} to {to.value}")
        self._state = to
