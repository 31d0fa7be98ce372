"""`ParamUnit`: the parameters that one collective moves, and the lifecycle of their storage.

[Note: sharded values] The `nn.Parameter` objects, their shapes and dtypes never change. While a unit is unsharded, each
parameter's data is a view into the unit's flat buffer; while it is sharded, the buffer's storage has size 0 and the
data is a stride-0 expand of one NaN: a stale read is visibly NaN, never a crash and never `torch.Size([0])`. The
storage *object* stays, so views that autograd saved in forward become valid again when the unit is gathered for
backward.

`coordinator.py` and `prefetch.py` decide when to move units, and `comm` talks to torch.distributed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.errors import OffloadError, ShardStateError
from zeroaccel.offload.tier import Tier
from zeroaccel.telemetry.timeline import named_range, span
from zeroaccel.zero.changed_bits import ChangedBits
from zeroaccel.zero.layout import FlatRange, holders, whole_of
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.masters import MasterPlace, MasterStorage, NoMasters, stand_in
from zeroaccel.zero.storage.placement import BufferPlan
from zeroaccel.zero.storage.shards import MemoryShard, ShardPlace, ShardStorage, absent_value
from zeroaccel.zero.tensor_subclasses import (
    BuiltOwner,
    as_ordinary,
    is_split,
    is_watched,
    local,
    scales_of,
    set_local,
    sharded_use,
    show,
)


class ShardState(enum.Enum):
    """Location of a unit's parameters."""

    SHARDED = "sharded"
    """Only this rank's shard is up to date; the full buffer is freed, or stale in a persistent unit."""
    GATHERING = "gathering"
    """An all-gather into the full buffer is in flight."""
    UNSHARDED = "unsharded"
    """The full buffer is valid and every parameter is a view into it."""


class FlatBuffer:
    """Parameters of one dtype, all trainable or all frozen, end to end in one buffer.

    Args:
        device: device that computes with the parameters.
        sharded: start without memory for `full`.

    Attributes:
        full: (N,) param dtype, on the compute device. If persistent, always allocated; otherwise `unshard` allocates
            its storage and `reshard` frees it.
        shard: (S,) this rank's part, in any storage.
        masters: the fp32 weights that the optimizer updates, with its states; for frozen parameters a way to the shard.
        is_code: True if its values are codes, which no gather rounds and nothing casts.
        persistent: True if it is unsharded on every rank all the time.
        watches_uses: True if reads of and writes to sharded parameters are errors; see [Note: sharded parameters].
            False while models are built, because constructors may use parameters again.
        on_read: called when the values of a sharded parameter are read; unshards them during a pass.
        versions: torch's counters of in-place writes to the parameters, up to the accepted writes.
        changed: marks changed elements of the shard; None while the engine does not mark.
    """

    def __init__(
        self, plan: BufferPlan, device: torch.device, *, watches_uses: bool = False, sharded: bool = False
    ) -> None:
        self.key, self.rank, self.dtype = plan.key, plan.rank, plan.dtype
        self.layout = layout = plan.layout
        self.params = plan.params
        self.is_code = any(scales_of(param) is not None for param in self.params)  # rounding would destroy them
        self.trainable, self.persistent = plan.trainable, plan.persistent
        self.full = torch.empty(1 if sharded else layout.numel, dtype=self.dtype, device=device)
        self.watches_uses = watches_uses
        self.on_read: Callable[[], None] | None = None
        self.versions = [param._version for param in self.params]
        self.changed: ChangedBits | None = None
        # One element, expanded to every shape: a sharded parameter has the correct shape and dtype, without memory.
        absent = torch.full((), absent_value(self.dtype), dtype=self.dtype)
        self._absent = [absent.to(device).expand(slot.shape) for slot in layout.slots]
        if sharded:
            self.replace_storage()
        else:
            self._views = self._cut()
        self._uses = self._name_uses(None)
        self.shard: ShardStorage
        self.masters: MasterStorage
        self.store_in(MemoryShard.persistent(self.place()))

    def place(self, tier: Tier | None = None, copies: CopyStream | None = None) -> ShardPlace:
        """Returns the place for which a storage of its shard is made."""
        return ShardPlace(self.key, self.layout, self.rank, self.full, tier, copies)

    def store_in(self, shard: ShardStorage, masters: MasterStorage | None = None) -> None:
        """Replaces the storages without copying their contents; without masters no optimizer updates the buffer."""
        place = MasterPlace(self.key, self.layout, self.rank, shard, (), self.full.device)
        self.shard, self.masters = shard, masters or NoMasters(place)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the full buffer, N elements."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def own(self) -> FlatRange:
        """Range of this rank's shard, S elements."""
        return self.layout.shard(self.rank)

    def shard_tensors(self) -> Iterator[Tensor]:
        """Yields the memory of its weights besides `full`."""
        full = self.full.untyped_storage()._cdata
        tensors = (*self.shard.tensors(), *self.shard.secondary.tensors())
        return (tensor for tensor in tensors if tensor.untyped_storage()._cdata != full)

    @property
    def is_split(self) -> bool:
        """True if an axis of the mesh splits its parameters, so that other ranks have other parts of them."""
        return self.layout.slots[0].split is not None or is_split(self.params[0])

    def holders(self, collectives: Collectives) -> Collectives:
        """Returns the collectives over the data ranks that hold its elements; see `layout.holders`."""
        return holders(self.layout.slots[0].split, collectives)

    def adopt(self, source: Tensor, shard: ShardStorage, masters: MasterStorage | None = None) -> None:
        """Takes over the weights, and points the parameters at this buffer unless it starts without memory.

        Args:
            source: (N,) the initial weights in their original dtype, laid out, equal on all ranks; `full` itself if
                they are already in it.
            shard: storage for this rank's part.
            masters: storage for the optimizer's copy; None if no optimizer updates the parameters.
        """
        if source.dtype is torch.float64 and self.dtype.itemsize < 4:
            source = source.float()  # rounds through the fp32 master, as every step does
        # Weights before masters: masters may share the memory of the weights, but must not get rounded values.
        values = source if source is self.full or not self._views else self.full.copy_(source)
        self.store_in(shard, masters)
        if not self.persistent:
            shard.replace(values[shard.range.at(0)])
        self.masters.initialize(source[self.masters.range.at(0)])
        if self._views:
            self.point(unsharded=True)

    def point(self, *, unsharded: bool) -> None:
        """Points every parameter at its view of the full buffer, or at NaN."""
        if unsharded:
            show(self.params, self._views, None)
        else:
            show(self.params, self._absent, self._uses if self.watches_uses else None)

    def watch(self, owner: BuiltOwner, names: Sequence[str]) -> None:
        """Makes reads of the sharded parameters, which no engine has yet, uses of `owner`.

        Args:
            names: the fqn of each parameter, which may have changed since the buffer was made.
        """
        self.watches_uses = True
        self.layout = self.layout.renamed(names)
        self._uses = self._name_uses(owner)

    def _name_uses(self, owner: BuiltOwner | None) -> list[Any]:
        slots = zip(self.layout.slots, self.params, strict=True)
        return [sharded_use(slot.fqn, self._read, param, owner) for slot, param in slots]

    def _read(self) -> None:
        if self.on_read is not None:
            self.on_read()

    def prepare_gather(self, collectives: Collectives, label: str, *, exact: bool) -> Callable[[], Work]:
        """Returns the call that starts to gather `full` from the swapped-in shard, or from the secondary copy.

        Args:
            exact: False for weights that may be rounded, and may come from the secondary copy.
        """
        collectives = self.holders(collectives)
        if self.shard.secondary.is_valid and not exact:
            return self.shard.prepare_secondary_gather(self.full, collectives, label)
        return self.shard.prepare_gather(self.full, collectives, label, exact=exact or self.is_code)

    def allocate(self) -> None:
        """Allocates the full buffer's storage (again)."""
        if not self._views:
            self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=self.full.device)
            self._views = self._cut()
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        """Frees the full buffer's storage; the storage object and all views of it stay."""
        # Resized, not replaced: autograd's saved views share this storage object, and see the next gather's values.
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:
            self.replace_storage()  # a numpy array shares it

    def replace_storage(self) -> None:
        """Leaves the storage, with its current values, to existing views; the next `allocate` makes another one."""
        # torch gives a tensor N elements only with their memory: until then one element is expanded to all of them.
        self.full = self.full.new_empty(1).expand(self.layout.numel)
        self.full.untyped_storage().resize_(0)
        self._views = []

    def let_go_of_views(self) -> None:
        """Leaves the current memory to the program's views, if there are any: `full` continues as a copy."""
        # `full`, its views, and the Python object of this storage; any more are views of the program.
        if not 0 < self.num_aliases() <= 2 + len(self._views):
            self.full = self.full.clone()
            self._views = self._cut()

    def detach_parameters(self, collectives: Collectives) -> None:
        """Gives each unsharded parameter separate storage with all its elements. (all ranks, if it is split)"""
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            set_local(param, whole_of(slot, local(param).clone(), collectives))
        if not self.persistent:
            self.free()

    def release(self) -> None:
        """Frees all memory except that of the detached parameters: weights, masters, the secondary copy."""
        self.release_masters()
        self.full, self._views = self.full.new_empty(0), []
        self.store_in(MemoryShard.persistent(self.place()))

    def hide_until(self, on_read: Callable[[], None]) -> None:
        """Shows NaN until the first use of the parameters' values, which calls `on_read`."""
        self.on_read = on_read
        for use in self._uses:
            use.is_released = True
        show(self.params, self._absent, self._uses)

    def num_aliases(self) -> int:
        """Returns the number of tensors that share the full buffer's memory; 0 if torch does not tell."""
        count = getattr(torch._C, "_storage_Use_Count", None)
        return 0 if count is None else int(count(self.full.untyped_storage()._cdata))

    def await_use(self, on_read: Callable[[], None], *, moves: bool) -> bool:
        """Leaves the parameters sharded after the engine's end; the first use of their values calls `on_read`.

        Args:
            moves: copy the shard into memory of its own, because its tier ends with the engine.

        Returns:
            False if uses of some parameter would not be noticed, because its class has no checks.
        """
        if moves or self.persistent:
            place = self.place(copies=self.shard.copies)  # the copy may be in host memory, and the gather on a device
            self.store_in(MemoryShard(place, self.shard.read(self.own).clone()))
        self.shard.secondary.drop()
        self.hide_until(on_read)
        return all(map(is_watched, self.params))

    def release_masters(self) -> None:
        """Frees the masters, whose tensors the optimizer's groups still refer to."""
        for piece in self.masters.pieces:
            piece.param.data = stand_in(piece.shape)
        self.store_in(self.shard)

    def note_written(self, interval: FlatRange) -> None:
        """Marks weights in a range that something other than a step changes, before or after the change."""
        if self.changed is not None:
            self.changed.add(interval)

    def accept_write(self, index: int) -> None:
        """Accepts the writes to a parameter so far: shard and master have them, or they were undone."""
        self.versions[index] = self.params[index]._version

    def drop_parameter(self, index: int) -> None:
        """Stops tracking a parameter that another buffer has taken over; a frozen NaN replaces it."""
        as_ordinary(self.params[index])
        placeholder = nn.Parameter(self._absent[index], requires_grad=False)
        self.params = (*self.params[:index], placeholder, *self.params[index + 1 :])

    def _cut(self) -> list[Tensor]:
        return [self.full[slot.range.at(0)].view(slot.shape) for slot in self.layout.slots]

    def owns(self, data: Tensor) -> bool:
        """Returns True if `data`, of one of its parameters, is a view of this buffer or its NaN."""
        storages = {self.full.untyped_storage()._cdata, *(nan.untyped_storage()._cdata for nan in self._absent[:1])}
        return data.untyped_storage()._cdata in storages

    def view(self, index: int) -> Tensor:
        """Returns the view of the full buffer that parameter `index` uses while unsharded."""
        return self._views[index]


class FetchOutcome:
    """The result of reading a pass's shards from their tier, on which the ranks agree once, at the end of the pass.

    A disk fails on one rank. That rank continues with NaN in place of the unread values, so that no other rank waits
    for it in a gather; no results leave the engine before `agree`.
    """

    def __init__(self) -> None:
        self._error: OffloadError | None = None
        self._has_fetched = False

    def note(self, error: OffloadError | None) -> None:
        """Records that a unit was read, or the error. (all ranks)"""
        self._has_fetched = True
        self._error = self._error or error

    def agree(self, collectives: Collectives, label: str) -> None:
        """Raises OffloadError on every rank if one has failed since the last call; needs one small all-reduce."""
        error, has_fetched = self._error, self._has_fetched
        self._error, self._has_fetched = None, False
        if not has_fetched:
            return
        failed = torch.tensor([float(error is not None)])
        collectives.all_reduce(failed, "max", label)
        if failed.item():
            agree_or_raise(collectives, error, f"{label}: fetch")

    def forget(self) -> None:
        """Discards the results of a pass that failed, on all ranks."""
        self._error, self._has_fetched = None, False


class ParamUnit:
    """One or a few flat buffers that are unsharded and resharded together.

    Either all of its buffers are persistent or none, except buffers whose elements no other rank holds: such experts
    stay unsharded while the rest of the unit is gathered and freed.

    Lifecycle (all ranks, in the same order): 1. `unshard()` starts the all-gather, 2. `wait()` before the first use,
    3. `reshard()` after the last. Each does nothing if it is not needed; an illegal call raises ShardStateError.
    A sharded unit may keep the values of its last gather for the next one, until `drop_values()`.

    Args:
        sharded: the full buffers have no values, so the unit starts sharded.

    Attributes:
        install: installs the weights of an update that the next gather awaits, and returns its failure; None without.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        buffers: Sequence[FlatBuffer],
        collectives: Collectives,
        *,
        sharded: bool = False,
    ):
        self.name = name
        self.modules = tuple(modules)
        self.buffers = tuple(buffers)
        self.persistent = all(buffer.persistent for buffer in buffers)
        self._gathered = tuple(buffer for buffer in buffers if not buffer.persistent)
        self.numel = sum(buffer.layout.numel for buffer in buffers)
        self._collectives = collectives
        self._works: list[Work] = []
        self._exact = True  # the gathered values are those of the shards, and not rounded
        self._keeps_values = False  # a sharded unit whose full buffers have the exact values
        self._state = ShardState.UNSHARDED
        self.install: Callable[[], OffloadError | None] | None = None
        if sharded:
            self.reshard()

    def __repr__(self) -> str:
        return f"ParamUnit({self.name}, {self.numel} elements, {self._state.value})"

    @property
    def state(self) -> ShardState:
        """Current location of the parameters."""
        return self._state

    @property
    def is_swapped(self) -> bool:
        """True if each gather swaps a shard in first; see `ShardStorage`."""
        for buffer in self.buffers:  # noqa: SIM110  # a generator costs calls, and each step asks several times
            if buffer.shard.is_swapped:
                return True
        return False

    def watch_uses(self, owner: BuiltOwner, name_of: Callable[[nn.Parameter, str], str]) -> None:
        """From now on, operations on its sharded parameters that need or write values are uses of `owner`.

        Args:
            name_of: (parameter, name so far) -> its fqn.
        """
        for buffer in self._gathered:
            if not buffer.watches_uses:
                named = zip(buffer.params, buffer.layout.slots, strict=True)
                buffer.watch(owner, [name_of(param, slot.fqn) for param, slot in named])
                if self._state is ShardState.SHARDED:
                    buffer.point(unsharded=False)

    def fqns(self) -> Iterator[str]:
        """Yields the names of all its parameters."""
        return (slot.fqn for buffer in self.buffers for slot in buffer.layout.slots)

    def prefetch(self) -> None:
        """Starts to swap shards in, ahead of `unshard`."""
        if self._state is ShardState.SHARDED and self.install is None:
            for buffer in self.buffers:
                buffer.shard.prefetch()

    def unshard(self, *, exact: bool = True, outcome: FetchOutcome | None = None) -> None:
        """Starts gathering the full parameters: all-gather over the shard group, (S,) -> (N,) per buffer.

        Args:
            exact: False for weights to compute with: these may be rounded, come from the secondary copy if there is
                one, and leave one. Use it only for uses that all ranks make in the same way.
            outcome: outcome of the pass, at whose end the ranks agree on their reads; None agrees here.

        Raises:
            OffloadError: a rank cannot read its shard back; on every rank. With `outcome`, `agree` raises it instead.
        """
        if not exact:
            self.drop_values()
        elif not self._exact:
            self.reshard()
        if self._state is not ShardState.SHARDED:
            return
        if self.install is not None:
            with span("update", self.name, "wait for the host"):
                error = self.install()
            self.install = None
            self._note(error, f"update {self.name}", outcome)
        if self._keeps_values:
            self._keeps_values = False
            self._move(ShardState.SHARDED, ShardState.GATHERING)
            return
        # Every use until the next step reads a persistent unit, so it must only contain exact values.
        self._exact = exact or self.persistent
        label = f"unshard {self.name}"
        with named_range("unshard", self.name):
            if self.is_swapped:
                with span("copy", self.name, "wait for a tier"):
                    self._swap_in(label, outcome)
            self._move(ShardState.SHARDED, ShardState.GATHERING)
            for buffer in self.buffers:
                if buffer.persistent and not buffer.trainable:
                    continue  # frozen and unsharded everywhere: it never changes
                # Resized in place, so that the views that parameters and autograd have of the storage stay valid.
                buffer.allocate()
                start_gather = buffer.prepare_gather(self._collectives, label, exact=self._exact)
                self._works.append(start_gather())

    def _swap_in(self, label: str, outcome: FetchOutcome | None) -> None:
        """Brings all shards into memory, or notes the error in `outcome`. (all ranks)"""
        self.prefetch()  # of all buffers, before waiting for the first
        error: OffloadError | None = None
        for buffer in self.buffers:
            try:
                buffer.shard.swap_in()
            except OffloadError as raised:
                error = error or raised
                if outcome is not None:  # gather anyway, because the other ranks participate
                    buffer.shard.stage_absent()
        self._note(error, label, outcome)

    def _note(self, error: OffloadError | None, label: str, outcome: FetchOutcome | None) -> None:
        """Records an error on this rank in `outcome`, or raises it on every rank. (all ranks)"""
        if outcome is not None:
            outcome.note(error)
            return
        # A disk fails on one rank. Without this small all-reduce the others would hang in a gather it never joins.
        now = FetchOutcome()
        now.note(error)
        try:
            now.agree(self._collectives.everyone, label)
        except OffloadError:
            self._release()
            raise

    def _release(self) -> None:
        """Gives shards in memory, and those on their way there, back to their tier."""
        for buffer in self.buffers:
            buffer.shard.release()

    def wait(self) -> None:
        """Finishes the gather in flight; the parameters are unsharded afterwards."""
        if self._state is ShardState.UNSHARDED:
            return
        if self._state is ShardState.SHARDED:
            raise ShardStateError(
                f"unit {self.name}", expected="a gather in flight", got=self._state.value, fix="call unshard() first"
            )
        with named_range("wait for unshard", self.name):
            for work in self._works:
                work.wait()
            self._works.clear()
        self._release()
        for buffer in self._gathered:
            buffer.point(unsharded=True)
        self._move(ShardState.GATHERING, ShardState.UNSHARDED)

    def reshard(self, *, keep_views: bool = False, keep_values: bool = False) -> None:
        """Frees the full parameters; only marks a persistent unit as stale.

        Args:
            keep_views: the program may hold views of the full parameters: keep their storage as long as the views live.
            keep_values: keep the values until `drop_values`, so that the next `unshard` gathers nothing. (all ranks)
        """
        if self._state is ShardState.SHARDED:
            self._release()  # after a prefetch without a gather
            return
        self.wait()
        self._move(ShardState.UNSHARDED, ShardState.SHARDED)
        with named_range("reshard", self.name):
            for buffer in self._gathered:
                if not self._exact:
                    # Only for values to compute with: backward then reads the same values that forward read.
                    buffer.shard.keep_secondary(buffer.full, self._collectives)
                buffer.point(unsharded=False)
                if keep_values:
                    buffer.let_go_of_views()
                elif keep_views:
                    buffer.replace_storage()
                else:
                    buffer.free()
        self._keeps_values = keep_values
        self._exact = True

    def drop_values(self) -> None:
        """Frees the values that `reshard(keep_values=True)` kept, if there are any."""
        if self._keeps_values:
            self._keeps_values = False
            for buffer in self._gathered:
                buffer.free()

    def drop_copies(self) -> None:
        """Drops the copies of the old weights, when the weights change."""
        self.drop_values()
        self.drop_secondary()

    def drop_secondary(self) -> None:
        """Does the same as `drop_copies` when the full buffers already have the new weights."""
        for buffer in self.buffers:
            buffer.shard.secondary.drop()

    def end(self, collectives: Collectives, *, moves: bool, waits: bool) -> None:
        """Gives each parameter separate storage with all its elements; the unit is not usable afterwards.

        If the parameters are sharded, this happens at the first use of their values, and ranks communicate only then.

        Args:
            moves: copy shards into memory of their own, because their tiers end with the engine.
            waits: False unshards now. (all ranks)
        """

        def detach() -> None:
            if self._state is not ShardState.UNSHARDED:
                self.unshard()
                self.wait()
            for buffer in self.buffers:
                buffer.point(unsharded=True)
                buffer.detach_parameters(collectives)
                buffer.release()

        # Parts of layers are joined on all ranks, and buffers of one rank's experts are never sharded.
        waits = waits and not any(buffer.is_split or buffer.persistent != self.persistent for buffer in self.buffers)
        if waits and self._state is ShardState.SHARDED:
            watched = [buffer.await_use(detach, moves=moves) for buffer in self.buffers]
            if all(watched):
                for buffer in self.buffers:
                    buffer.release_masters()
                return
        detach()

    def join_gather(self) -> None:
        """Participates in an all-gather that other ranks need; restores this rank's state."""
        was_unsharded = self._state is ShardState.UNSHARDED
        self.drop_values()
        self.reshard()  # even if unsharded: the other ranks need this rank's shard, and a gather needs all ranks
        self.unshard()
        self.wait()
        if not was_unsharded:
            self.reshard()

    def _move(self, before: ShardState, to: ShardState) -> None:
        if self._state is not before:
            raise ShardStateError(f"unit {self.name}: illegal move from {self._state.value} to {to.value}")
        self._state = to
