"""`ParamUnit`: the parameters that travel in one collective, and the lifecycle of their storage.

[Note: faces] The `nn.Parameter` objects, their shapes and dtypes never change. While a unit is whole, each
parameter's data is a view into the unit's flat buffer; while it is sharded, the buffer's storage has size 0 and the
data is a stride-0 expand of one NaN: a stale read is visibly NaN, never a crash and never `torch.Size([0])`. The
storage *object* stays, so views that autograd saved in forward become valid again when the unit is gathered for
backward.

Does not decide when to move (`coordinator.py`, `prefetch.py`) and does not talk to torch.distributed (`comm`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.comm.quantized import INT8, dequantize, quantize
from zeroaccel.errors import OffloadError, ShardStateError
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.nvme_shard import NvmeShard
from zeroaccel.zero.tensor_subclasses import as_ordinary, as_sharded, is_split, local, set_local

__all__ = ["FlatBuffer", "ParamUnit", "Places", "ShardState"]


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


@dataclass(frozen=True)
class Places:
    """Where one buffer's shard and master live.

    Attributes:
        home: of the shard, if it is not in memory between uses.
        shard: (S,) param dtype, host memory for the shard; None leaves it on the device.
        master: the device of the master; None where an optimizer does not update these weights, or a tier takes it.
        adopt_master: takes the first master, (S,) of any floating dtype, where it goes to a tier.
        apart: whether the master is memory of its own even where the parameters could be it.
        replicated: whether the master is the whole (N,) rather than this rank's (S,).
    """

    home: NvmeShard | None = None
    shard: Tensor | None = None
    master: torch.device | None = None
    adopt_master: Callable[[Tensor], None] | None = None
    apart: bool = False
    replicated: bool = False


class FlatBuffer:
    """Parameters of one dtype, all trainable or all frozen, end to end in one buffer.

    Attributes:
        full: (N,) param dtype. Resident: always allocated. Otherwise its storage comes and goes.
        shard: (S,) param dtype. A view into `full` when resident, else a tensor of its own, here or in host memory.
            NaN where it has a home.
        home: where the shard is between uses, if not in memory; None otherwise.
        packed: (INT8.nbytes(S),) uint8, the code that stands for `shard`, which is then empty; None where it does not.
        second: this rank's part of a copy that fewer ranks hold among them; None while there is none.
        master: (S,) fp32, or (N,) when the optimizer is replicated; the weights the optimizer updates. For fp32
            parameters it is `shard` (or `full`) itself, if both live in one memory. None for frozen parameters,
            without an optimizer, and where masters are in a tier.
        master_is_replicated: whether `master` has all N elements on every rank.
        refuses_writes: sharded parameters say so when they are written; see [Note: sharded face]. Not while models are
            built, when constructors may come back to them.
        versions: torch's counters of in-place writes to the parameters, for those writes that are known of.
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
        refuses_writes: bool = False,
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.dtype = dtype
        self.rank = rank
        self.trainable = trainable
        self.resident = resident
        self.full = torch.empty(layout.numel, dtype=dtype, device=device)
        low, high = layout.bounds(rank)
        self.shard = self.full[low:high]
        self.home: NvmeShard | None = None
        self.packed: Tensor | None = None
        self.second: Tensor | None = None
        self.master: Tensor | None = None
        self.master_is_replicated = False
        self.refuses_writes = refuses_writes
        self.versions = [param._version for param in self.params]
        absent = torch.full((), _absent_value(dtype), dtype=dtype)  # a single element to expand from
        self._absent = [absent.to(device).expand(slot.shape) for slot in layout.slots]
        self._views = self._cut()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, N elements."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def is_split(self) -> bool:
        """Whether tensor parallelism splits its parameters: other ranks have other parts of them."""
        return is_split(self.params[0])

    @property
    def master_is_apart(self) -> bool:
        """Whether new masters have to be copied to the parameters: they are not the same memory."""
        own = self.full if self.resident else self.shard
        return self.master is None or self.master.untyped_storage()._cdata != own.untyped_storage()._cdata

    def adopt(self, source: Tensor, places: Places) -> None:
        """Takes over the weights and becomes what the parameters are views of.

        Args:
            source: (N,) the initial weights in their original dtype, laid out, equal on all ranks.
            places: where the shard and the master are to live.
        """
        low, high = self.layout.bounds(self.rank)
        if source.dtype is torch.float64 and self.dtype.itemsize < 4:
            source = source.float()  # rounded by way of the master, as at every step
        self.full.copy_(source)
        if places.home is not None:
            self.home = places.home
            self.home.open().copy_(self.full[low:high])
            self.home.commit()
            self.shard = torch.full((), _absent_value(self.dtype), dtype=self.dtype).expand(high - low)
        elif places.shard is not None:
            self.shard = places.shard.copy_(self.full[low:high])
        elif not self.resident:
            self.shard = self.shard.clone()
        if places.adopt_master is not None:
            places.adopt_master(source[low:high])
        elif places.master is not None:
            own = self.full if places.replicated else self.shard
            kept = slice(None) if places.replicated else slice(low, high)
            one_memory = self.home is None and own.device == places.master and not places.apart
            together = self.dtype is torch.float32 and one_memory
            # From the original weights, so that an fp32 model keeps the bits that 16-bit parameters drop.
            self.master_is_replicated = places.replicated
            self.master = own if together else source[kept].to(places.master, torch.float32, copy=True)
        self.point(whole=True)

    def pack(self) -> None:
        """Stores the shard of a frozen buffer as an int8 code from now on, and the whole buffer as what that says."""
        assert not (self.trainable or self.resident), "only what is sharded and never changes is stored as a code"
        self.packed = self.shard.new_empty(INT8.nbytes(self.shard.numel()), dtype=torch.uint8)
        quantize(self.shard, INT8, self.packed)
        self.shard = self.shard[:0].clone()

    def values(self) -> Tensor:
        """(S,) the shard, or what its code stands for."""
        if self.packed is None:
            return self.shard
        values = torch.empty(self.layout.shard_numel(self.rank), dtype=self.dtype, device=self.full.device)
        dequantize(self.packed, INT8, values)
        return values

    def keep_second(self, place: int, count: int) -> None:
        """Keeps the `place`-th of `count` parts of the whole buffer, which must be there."""
        if self.second is None:
            numel = self.layout.numel // count
            self.second = self.full[place * numel : (place + 1) * numel].clone()

    def point(self, *, whole: bool) -> None:
        """Points every parameter at its view of the full buffer, or at NaN."""
        faces = self._views if whole else self._absent
        for param, data, slot in zip(self.params, faces, self.layout.slots, strict=True):
            as_ordinary(param)
            set_local(param, data)
            if self.refuses_writes and not whole:
                as_sharded(param, slot.fqn)

    def stored_shard(self, start: int, end: int) -> Tensor:
        """Elements [start, end) of the flat buffer, which are in this rank's shard; may be called by any thread."""
        low, _ = self.layout.bounds(self.rank)
        if self.home is not None:
            return self.home.stored(start - low, end - low).copy()
        return self.values()[start - low : end - low]

    def set_shard(self, start: int, values: Tensor) -> None:
        """Replaces elements of the shard, wherever it is; `start` counts in the flat buffer."""
        offset = start - self.layout.bounds(self.rank)[0]
        if self.home is not None:
            self.home.change(offset, values)
        elif self.packed is not None:
            whole = self.values()
            whole[offset : offset + values.numel()].copy_(values)
            quantize(whole, INT8, self.packed)
        else:
            self.shard[offset : offset + values.numel()].copy_(values)

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
        else:
            self.leave()  # somebody holds a numpy array of it

    def leave(self) -> None:
        """Goes on with other storage: whoever holds a view of this one keeps it, with the values of now."""
        self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.full.device)
        self._views = self._cut()
        self.full.untyped_storage().resize_(0)

    def give_back(self) -> None:
        """Gives each parameter, which must be whole, storage of its own, as a program that saves the model expects."""
        for param in self.params:
            set_local(param, local(param).clone())
        if not self.resident:
            self.free()

    def accept_write(self, index: int) -> None:
        """What has been written to a parameter so far is in the shard and the master, or was undone."""
        self.versions[index] = self.params[index]._version

    def abandon(self, index: int) -> None:
        """Leaves a parameter to whoever has it now: it no longer follows this buffer."""
        as_ordinary(self.params[index])
        nobody = nn.Parameter(self._absent[index], requires_grad=False)
        self.params = (*self.params[:index], nobody, *self.params[index + 1 :])

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

    Args:
        copies: moves shards from host memory to the device, where they are two.
        sharded: whether the full buffers have no values, so that it starts sharded.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        buffers: Sequence[FlatBuffer],
        collectives: Collectives,
        copies: CopyStream | None = None,
        *,
        sharded: bool = False,
    ):
        self.name = name
        self.modules = tuple(modules)
        self.buffers = tuple(buffers)
        self.resident = all(buffer.resident for buffer in buffers)
        self.numel = sum(buffer.layout.numel for buffer in buffers)
        self._collectives = collectives
        self._copies = copies
        self._works: list[Work] = []
        self._exact = True
        self._state = ShardState.UNSHARDED
        if sharded:
            self.reshard()

    def __repr__(self) -> str:
        return f"ParamUnit({self.name}, {self.numel} elements, {self._state.value})"

    @property
    def state(self) -> ShardState:
        """Where the parameters are now."""
        return self._state

    def fqns(self) -> Iterator[str]:
        """Names of all its parameters."""
        return (slot.fqn for buffer in self.buffers for slot in buffer.layout.slots)

    def prefetch(self) -> None:
        """Starts to bring shards that are not in memory, ahead of `unshard`."""
        if self._state is ShardState.SHARDED:
            for buffer in self.buffers:
                if buffer.home is not None:
                    buffer.home.prefetch()

    def unshard(self, *, exact: bool = True) -> None:
        """Starts gathering the full parameters: all-gather over the shard group, (S,) -> (N,) per buffer.

        Args:
            exact: False for weights to compute with: they may come rounded, and from the second copy where there is
                one, and leave one. It is for uses that all ranks make alike.

        Raises:
            OffloadError: a rank cannot read its shard back; on every rank.
        """
        if exact and not self._exact:
            self.reshard()
        if self._state is not ShardState.SHARDED:
            return
        self._exact = exact or self.resident
        label = f"unshard {self.name}"
        brought = self._bring(label) if self.is_away else {}
        self._move(ShardState.GATHERING)
        for buffer in self.buffers:
            if buffer.resident and not buffer.trainable:
                continue  # frozen and whole everywhere: nobody changes it
            buffer.allocate()
            shard = brought.get(id(buffer), buffer.shard)
            if shard.device == buffer.full.device or self._gathers_second(buffer):
                self._works.append(self._gather(buffer, shard, label))
                continue
            assert self._copies is not None, f"{self.name}: shards on another device and nobody to copy them"
            own = buffer.full[slice(*buffer.layout.bounds(buffer.rank))]
            self._copies.to_device(own, shard)
            with self._copies.stream():
                self._works.append(self._gather(buffer, own, label))

    def _gathers_second(self, buffer: FlatBuffer) -> bool:
        return buffer.second is not None and not self._exact

    def _gather(self, buffer: FlatBuffer, shard: Tensor, label: str) -> Work:
        if buffer.second is not None and not self._exact:
            return self._collectives.gather_secondary(buffer.full, buffer.second, label)
        if buffer.packed is not None:
            return self._collectives.gather_quantized(buffer.full, buffer.packed, label)
        if self._collectives.quantized_weights and not self._exact:
            return self._collectives.gather_weights(buffer.full, shard, label, buffer.layout.uneven_sizes)
        return self._collectives.all_gather(buffer.full, shard, label, buffer.layout.uneven_sizes)

    @property
    def is_away(self) -> bool:
        """Whether a shard of it has to be read from a tier before each gather."""
        return any(buffer.home is not None for buffer in self.buffers)

    def _bring(self, label: str) -> dict[int, Tensor]:
        """id(buffer) -> its shard, read from its tier; the ranks agree that all could. (all ranks)"""
        self.prefetch()
        brought: dict[int, Tensor] = {}
        error: OffloadError | None = None
        for buffer in self.buffers:
            if buffer.home is not None and error is None:
                try:
                    brought[id(buffer)] = buffer.home.bring()
                except OffloadError as raised:
                    error = raised
        failed = torch.tensor([float(error is not None)])
        self._collectives.all_reduce(failed, "max", f"fetch of {self.name}")
        if failed.item():
            self._release()
            agree_or_raise(self._collectives, error, f"{label}: fetch")
        return brought

    def _release(self) -> None:
        """Gives what was brought, or is on its way, back to its tier."""
        for buffer in self.buffers:
            if buffer.home is not None:
                buffer.home.release()

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
        if self._copies is not None:
            self._copies.wait(finished=self.is_away)
        self._release()
        if not self.resident:
            for buffer in self.buffers:
                buffer.point(whole=True)
        self._move(ShardState.UNSHARDED)

    def reshard(self, *, leave: bool = False) -> None:
        """Gives up the full parameters and frees their storage; resident units only forget that they are whole.

        Args:
            leave: people may hold views of the full parameters: let the storage live as long as they do.
        """
        if self._state is ShardState.SHARDED:
            self._release()
            return
        self.wait()
        self._move(ShardState.SHARDED)
        if not self.resident:
            leaves_second = (
                not self._exact and self._collectives.secondary_world_size < self._collectives.shard_world_size
            )
            for buffer in self.buffers:
                if leaves_second:
                    buffer.keep_second(self._collectives.secondary_rank, self._collectives.secondary_world_size)
                buffer.point(whole=False)
                if leave:
                    buffer.leave()
                else:
                    buffer.free()
        self._exact = True

    def drop_second(self) -> None:
        """The weights are new, or about to be: the copy of the old ones goes."""
        for buffer in self.buffers:
            buffer.second = None

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
