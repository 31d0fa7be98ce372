"""`ParamUnit`: the parameters that travel in one collective, and the lifecycle of their storage.

[Note: sharded values] The `nn.Parameter` objects, their shapes and dtypes never change. While a unit is unsharded, each
parameter's data is a view into the unit's flat buffer; while it is sharded, the buffer's storage has size 0 and the
data is a stride-0 expand of one NaN: a stale read is visibly NaN, never a crash and never `torch.Size([0])`. The
storage *object* stays, so views that autograd saved in forward become valid again when the unit is gathered for
backward.

Does not decide when to move (`coordinator.py`, `prefetch.py`) and does not talk to torch.distributed (`comm`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives, Work
from zeroaccel.errors import OffloadError, ShardStateError
from zeroaccel.offload.tier import Tier
from zeroaccel.telemetry.timeline import span
from zeroaccel.zero.changed_bits import ChangedBits
from zeroaccel.zero.layout import FlatRange, holders, whole_of
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.masters import MasterPlace, MasterStorage, NoMasters, stand_in
from zeroaccel.zero.storage.placement import BufferPlan
from zeroaccel.zero.storage.shards import MemoryShard, ShardPlace, ShardStorage, absent_value
from zeroaccel.zero.tensor_subclasses import as_ordinary, is_split, local, scales_of, set_local, sharded_use, show


class ShardState(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    """Only this rank's shard is up to date; the full buffer is freed, or stale where the unit is persistent."""
    GATHERING = "gathering"
    """An all-gather into the full buffer is in flight."""
    UNSHARDED = "unsharded"
    """The full buffer is valid and every parameter is a view into it."""


class FlatBuffer:
    """Parameters of one dtype, all trainable or all frozen, end to end in one buffer.

    Args:
        device: that computes with it.

    Attributes:
        full: (N,) param dtype, on the compute device. Persistent: always allocated. Otherwise its storage is allocated
            by `unshard` and freed by `reshard`.
        shard: this rank's (S,) of it, wherever they live.
        masters: the fp32 weights the optimizer updates, with its states; for frozen parameters a way to the shard.
        persistent: unsharded on every rank all the time.
        watches_uses: reads of and writes to sharded parameters are errors; see [Note: sharded parameters]. Not while
            models are built, when constructors may come back to them.
        on_read: called when the values of a sharded parameter are read; unshards them during a pass.
        versions: torch's counters of in-place writes to the parameters, for those writes that have been accepted.
        all_slots: the indices of its slots.
        valid: while sharded: slots whose present values are in `full`.
        shown: of those, the ones whose parameters are views of it all the same.
        changed: marks elements of the shard that change; None while the engine does not mark.
    """

    def __init__(self, plan: BufferPlan, device: torch.device, *, watches_uses: bool = False) -> None:
        self.key, self.rank, self.dtype = plan.key, plan.rank, plan.dtype
        self.layout = layout = plan.layout
        self.params = plan.params
        self._is_code = any(scales_of(param) is not None for param in self.params)  # which rounding would destroy
        self.trainable, self.persistent = plan.trainable, plan.persistent
        self.full = torch.empty(layout.numel, dtype=self.dtype, device=device)
        self.watches_uses = watches_uses
        self.on_read: Callable[[], None] | None = None
        self.versions = [param._version for param in self.params]
        self.all_slots = set(range(len(layout.slots)))
        self.valid: set[int] = set()
        self.shown: set[int] = set()
        self.changed: ChangedBits | None = None
        # One element, expanded to every shape: shape and dtype of a sharded parameter are right, at no memory.
        absent = torch.full((), absent_value(self.dtype), dtype=self.dtype)
        self._absent = [absent.to(device).expand(slot.shape) for slot in layout.slots]
        self._views = self._cut()
        self._uses = [sharded_use(slot.fqn, self._read) for slot in layout.slots]
        self.shard: ShardStorage
        self.masters: MasterStorage
        self.store_in(MemoryShard.persistent(self.place()))

    def place(self, tier: Tier | None = None, copies: CopyStream | None = None) -> ShardPlace:
        """What a storage of its shard is made for."""
        return ShardPlace(self.key, self.layout, self.rank, self.full, tier, copies)

    def store_in(self, shard: ShardStorage, masters: MasterStorage | None = None) -> None:
        """Replaces the storages, whatever is in them; without masters no optimizer updates it."""
        place = MasterPlace(self.key, self.layout, self.rank, shard, (), self.full.device)
        self.shard, self.masters = shard, masters or NoMasters(place)

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer, N elements."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def own(self) -> FlatRange:
        """The elements of this rank's shard, S of them."""
        return self.layout.shard(self.rank)

    def shard_tensors(self) -> Iterator[Tensor]:
        """The memory of its weights besides `full`."""
        full = self.full.untyped_storage()._cdata
        tensors = (*self.shard.tensors(), *self.shard.secondary.tensors())
        return (tensor for tensor in tensors if tensor.untyped_storage()._cdata != full)

    @property
    def is_split(self) -> bool:
        """Whether an axis of the mesh splits its parameters: other ranks have other parts of them."""
        return self.layout.slots[0].split is not None or is_split(self.params[0])

    def holders(self, collectives: Collectives) -> Collectives:
        """Those over the data ranks that hold its elements; see `layout.holders`."""
        return holders(self.layout.slots[0].split, collectives)

    def adopt(self, source: Tensor, shard: ShardStorage, masters: MasterStorage | None = None) -> None:
        """Takes over the weights and becomes what the parameters are views of.

        Args:
            source: (N,) the initial weights in their original dtype, laid out, equal on all ranks.
            shard: where this rank's part is to live.
            masters: where the optimizer's copy is to live; None where none updates them.
        """
        if source.dtype is torch.float64 and self.dtype.itemsize < 4:
            source = source.float()  # rounded by way of the master, as at every step
        # Weights before masters: masters may be the memory of the weights, and are never read from what was rounded.
        self.full.copy_(source)
        self.store_in(shard, masters)
        if not self.persistent:
            shard.replace(self.full[shard.range.at(0)])
        self.masters.initialize(source[self.masters.range.at(0)])
        self.point(unsharded=True)

    def point(self, *, unsharded: bool) -> None:
        """Points every parameter at its view of the full buffer, or at NaN, except those that are shown."""
        if unsharded:
            show(self.params, self._views, None)
            return
        show(self.params, self._absent, self._uses if self.watches_uses else None)
        shown = sorted(self.shown)
        if shown:
            show([self.params[index] for index in shown], [self._views[index] for index in shown], None)

    def _read(self) -> None:
        if self.on_read is not None:
            self.on_read()

    def all_gather(self, collectives: Collectives, label: str, *, exact: bool) -> Work:
        """Starts to gather `full`; the shard is swapped in. From the secondary copy where that may be rounded, too."""
        collectives = self.holders(collectives)
        if self.shard.secondary.is_valid and not exact:
            return self.shard.gather_secondary(self.full, collectives, label)
        return self.shard.all_gather(self.full, collectives, label, exact=exact or self._is_code)

    def missing(self, wanted: Iterable[int]) -> list[FlatRange]:
        """The elements of slots whose values are not in `full`; neighbours in one range, with the padding between."""
        runs: list[FlatRange] = []
        last = -2
        for index in sorted(set(wanted) - self.valid):
            slot = self.layout.slots[index].range
            if index == last + 1:
                runs[-1] = FlatRange(runs[-1].start, slot.end)
            else:
                runs.append(slot)
            last = index
        return runs

    def all_gather_part(self, part: FlatRange, collectives: Collectives, label: str) -> Work:
        """Starts to gather the elements of `part` into `full`; this rank's are there."""
        numels = [(part & self.layout.shard(rank)).numel for rank in range(self.layout.world_size)]
        return self.shard.all_gather_part(part, self.full, self.holders(collectives), label, numels)

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
        # Resized, not replaced: autograd's saved views share this storage object, and see the values gathered next.
        storage = self.full.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:
            self.replace_storage()  # a numpy array shares it

    def replace_storage(self) -> None:
        """Lets existing views keep the storage, with its present values; the next `allocate` makes another one."""
        # torch gives a tensor N elements only with their memory: until then one element stands for all of them.
        self.full = self.full.new_empty(1).expand(self.layout.numel)
        self.full.untyped_storage().resize_(0)
        self._views = []

    def let_go_of_views(self) -> None:
        """Leaves the present memory to the views that the program has of it: `full` goes on with a copy."""
        count = getattr(torch._C, "_storage_Use_Count", None)
        # Of `full`, its views, and the Python object that is asked; more are the views of the program.
        if count is None or count(self.full.untyped_storage()._cdata) > 2 + len(self._views):
            self.full = self.full.clone()
            self._views = self._cut()

    def detach_parameters(self, collectives: Collectives) -> None:
        """Gives each parameter, unsharded now, storage of its own and all its elements. (all ranks, if it is split)"""
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            set_local(param, whole_of(slot, local(param).clone(), collectives))
        if not self.persistent:
            self.free()

    def release(self) -> None:
        """Lets go of all memory but the parameters', which are detached: weights, masters, the secondary copy."""
        for piece in self.masters.pieces:
            piece.param.data = stand_in(piece.shape)
        self.full, self._views = self.full.new_empty(0), []
        self.store_in(MemoryShard.persistent(self.place()))

    def note_written(self, part: FlatRange) -> None:
        """Weights in a range of it are about to be others, or are already, by something else than a step."""
        if self.changed is not None:
            self.changed.add(part)

    def accept_write(self, index: int) -> None:
        """What has been written to a parameter so far is in the shard and the master, or was undone."""
        self.versions[index] = self.params[index]._version

    def drop_parameter(self, index: int) -> None:
        """Stops following a parameter that another buffer has taken over; a frozen NaN is in its place."""
        as_ordinary(self.params[index])
        placeholder = nn.Parameter(self._absent[index], requires_grad=False)
        self.params = (*self.params[:index], placeholder, *self.params[index + 1 :])

    def _cut(self) -> list[Tensor]:
        return [self.full[slot.range.at(0)].view(slot.shape) for slot in self.layout.slots]

    def owns(self, data: Tensor) -> bool:
        """Whether `data`, of one of its parameters, is a view of this buffer or the NaN of a sharded one."""
        storages = {self.full.untyped_storage()._cdata, *(nan.untyped_storage()._cdata for nan in self._absent[:1])}
        return data.untyped_storage()._cdata in storages

    def view(self, index: int) -> Tensor:
        """The view of the full buffer that parameter `index` uses while unsharded."""
        return self._views[index]


class FetchOutcome:
    """Whether all shards of a pass could be read from their tier, which the ranks agree on once, at its end.

    A disk fails on one rank. That rank goes on with NaN in place of what it could not read, so that no other waits for
    it in a gather; nothing leaves the pass before `agree`.
    """

    def __init__(self) -> None:
        self._error: OffloadError | None = None
        self._has_fetched = False

    def note(self, error: OffloadError | None) -> None:
        """A unit was read, or was not. (all ranks)"""
        self._has_fetched = True
        self._error = self._error or error

    def agree(self, collectives: Collectives, label: str) -> None:
        """Raises OffloadError where a rank has failed since the last call, on every rank; one small all-reduce."""
        error, has_fetched = self._error, self._has_fetched
        self._error, self._has_fetched = None, False
        if not has_fetched:
            return
        failed = torch.tensor([float(error is not None)])
        collectives.all_reduce(failed, "max", label)
        if failed.item():
            agree_or_raise(collectives, error, f"{label}: fetch")

    def forget(self) -> None:
        """The pass was broken off, on all ranks."""
        self._error, self._has_fetched = None, False


class ParamUnit:
    """One or a few flat buffers that are unsharded and resharded together.

    Its buffers are all persistent or none, except those whose elements no other rank holds: such experts stay as they
    are while the rest of the unit is gathered and freed.

    Lifecycle (all ranks, in the same order): 1. `unshard()` starts the all-gather, 2. `wait()` before the first use,
    3. `reshard()` after the last. Each is a no-op where it has nothing to do; anything illegal raises ShardStateError.
    Of a sharded unit, `unshard_some()` gathers some parameters and shows them until `hide_some()`, through any of the
    others' gathers.

    Args:
        sharded: whether the full buffers have no values, so that it starts sharded.
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

    @property
    def is_swapped(self) -> bool:
        """Whether each gather swaps a shard in first; see `ShardStorage`."""
        for buffer in self.buffers:  # noqa: SIM110  # a generator takes calls, and each step asks several times
            if buffer.shard.is_swapped:
                return True
        return False

    @property
    def _shows_some(self) -> bool:
        for buffer in self._gathered:  # noqa: SIM110  # as above
            if buffer.shown:
                return True
        return False

    def watch_uses(self) -> None:
        """From now on reads and writes of its parameters while it is sharded are errors."""
        for buffer in self._gathered:
            if not buffer.watches_uses:
                buffer.watches_uses = True
                if self._state is ShardState.SHARDED:
                    buffer.point(unsharded=False)

    def fqns(self) -> Iterator[str]:
        """Names of all its parameters."""
        return (slot.fqn for buffer in self.buffers for slot in buffer.layout.slots)

    def prefetch(self) -> None:
        """Starts to swap shards in, ahead of `unshard`."""
        if self._state is ShardState.SHARDED:
            for buffer in self.buffers:
                buffer.shard.prefetch()

    def unshard(self, *, exact: bool = True, outcome: FetchOutcome | None = None) -> None:
        """Starts gathering the full parameters: all-gather over the shard group, (S,) -> (N,) per buffer.

        Args:
            exact: False for weights to compute with: they may be rounded, and come from the secondary copy where there
                is one, and leave one. It is for uses that all ranks make alike.
            outcome: of the pass, at whose end the ranks agree on what they could read; None agrees here.

        Raises:
            OffloadError: a rank cannot read its shard back; on every rank. Not with `outcome`.
        """
        if not exact and not self._shows_some:
            self.drop_values()
        else:  # beside parameters that are shown, which a program may have written, come exact ones
            exact = True
        if exact and not self._exact:
            self.reshard()
        if self._state is not ShardState.SHARDED:
            return
        if any(buffer.valid for buffer in self._gathered):
            self._exact = True
            works = self._gather_missing(f"unshard the rest of {self.name}", every=True)
            self._move(ShardState.SHARDED, ShardState.GATHERING)
            self._works += works
            return
        # A persistent unit is read by everything until the next step, so only exact values may ever be in it.
        self._exact = exact or self.persistent
        label = f"unshard {self.name}"
        if self.is_swapped:
            with span("copy", self.name, "wait for a tier"):
                self._swap_in(label, outcome)
        self._move(ShardState.SHARDED, ShardState.GATHERING)
        for buffer in self.buffers:
            if buffer.persistent and not buffer.trainable:
                continue  # frozen and unsharded everywhere: it never changes
            # The storage is resized in place, so that the views that parameters and autograd have of it stay valid.
            buffer.allocate()
            self._works.append(buffer.all_gather(self._collectives, label, exact=self._exact))

    def unshard_some(self, wanted: Sequence[tuple[FlatBuffer, int]]) -> bool:
        """Gathers some parameters, (buffer, index of the slot), and shows them until `hide_some`. (all ranks)

        Where `hide_some` has kept values of others, a loop goes through the unit: then all that is missing is gathered.

        Returns:
            Whether a loop goes through the unit.

        Raises:
            OffloadError: as `unshard`.
        """
        # A buffer that no other rank has is brought up to date by `unshard` only.
        refreshes = any(buffer.persistent and buffer.trainable for buffer in self.buffers)
        slots = sum(len(buffer.layout.slots) for buffer in self._gathered)
        if self._state is not ShardState.SHARDED or refreshes or len(wanted) == slots:
            self.unshard()
            self.wait()
            return False
        self._finish_gathers()
        in_loop = any(buffer.valid - buffer.shown for buffer in self._gathered)
        is_missing = any(not buffer.persistent and index not in buffer.valid for buffer, index in wanted)
        before = [set(buffer.shown) for buffer in self._gathered]
        for buffer, index in wanted:
            if not buffer.persistent:
                buffer.shown.add(index)
        try:
            label = f"unshard the rest of {self.name}" if in_loop else f"unshard {len(wanted)} of {self.name}"
            for work in self._gather_missing(label, every=in_loop and is_missing):
                work.wait()
        except BaseException:
            for buffer, shown in zip(self._gathered, before, strict=True):
                buffer.shown = shown
            raise
        for buffer in self._gathered:
            buffer.point(unsharded=False)
        return in_loop

    def unshard_ahead(self) -> bool:
        """Starts to gather what `unshard_some` will show, for a loop that comes to this unit next. (all ranks)

        Returns:
            False, and does nothing, where a tier has the shards or some values are here. `drop_values` frees them.
        """
        is_here = self._state is not ShardState.SHARDED or any(buffer.valid for buffer in self._gathered)
        if is_here or self.is_swapped:
            return False
        for buffer in self._gathered:
            buffer.allocate()
            self._works.append(buffer.all_gather(self._collectives, f"unshard {self.name} ahead", exact=True))
            buffer.valid = buffer.all_slots.copy()
        return True

    def _finish_gathers(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()

    def _gather_missing(self, label: str, *, every: bool) -> list[Work]:
        """Starts to gather values that `full` lacks: of all parameters, or of those that are shown. (all ranks)"""
        runs: list[tuple[FlatBuffer, FlatRange]] = []
        for buffer in self._gathered:
            own = buffer.missing(buffer.all_slots if every else buffer.shown)
            if own:
                buffer.allocate()
            runs += [(buffer, run) for run in own]

        def read() -> None:
            for buffer, run in runs:
                buffer.shard.copy_own(run, buffer.full)

        if self.is_swapped and runs:
            self._read_agreed(read, label)
        else:
            read()
        for buffer in self._gathered:
            buffer.valid |= buffer.all_slots if every else buffer.shown
        return [buffer.all_gather_part(run, self._collectives, label) for buffer, run in runs]

    def hide_some(self, *, keep_values: bool = False) -> None:
        """Undoes `unshard_some`; views that the program has of the values live on.

        Args:
            keep_values: as for `reshard`.
        """
        if self._shows_some:
            for buffer in self._gathered:
                buffer.shown.clear()
            if self._state is ShardState.SHARDED:
                self._cover(keep_views=True, keep_values=keep_values)

    def _swap_in(self, label: str, outcome: FetchOutcome | None) -> None:
        """Brings shards into memory, all of them on every rank or with an error for `outcome`. (all ranks)"""

        def read() -> None:
            for buffer in self.buffers:
                buffer.shard.swap_in()

        self.prefetch()  # of all buffers, before the first is waited for
        if outcome is None:
            self._read_agreed(read, label)
            return
        error: OffloadError | None = None
        for buffer in self.buffers:
            try:
                buffer.shard.swap_in()
            except OffloadError as raised:  # the gather takes place all the same, since the other ranks take part
                error = error or raised
                buffer.shard.stage_absent()
        outcome.note(error)

    def _read_agreed(self, read: Callable[[], None], label: str) -> None:
        """Reads from tiers; the ranks agree that all could, before any starts the gather. (all ranks)"""
        outcome = FetchOutcome()
        try:
            read()
            outcome.note(None)
        except OffloadError as raised:
            outcome.note(raised)
        # A disk fails on one rank. Without this small all-reduce the others would hang in a gather it never joins.
        try:
            outcome.agree(self._collectives.everyone, label)
        except OffloadError:
            self._release()
            raise

    def _release(self) -> None:
        """Gives what was swapped in, or is on its way, back to its tier."""
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
        self._finish_gathers()
        self._release()
        for buffer in self._gathered:
            buffer.point(unsharded=True)
        self._move(ShardState.GATHERING, ShardState.UNSHARDED)

    def reshard(self, *, keep_views: bool = False, keep_values: bool = False) -> None:
        """Frees the full parameters; of a persistent unit it only says that they are stale.

        Args:
            keep_views: the program may hold views of the full parameters: let their storage live as long as they do.
            keep_values: for the next `unshard`, which then gathers nothing, until `drop_values`. (on all ranks alike)
        """
        # What `unshard_some` shows stays.
        if self._state is ShardState.SHARDED:
            self._release()  # of a prefetch that no gather followed
            return
        self.wait()
        self._move(ShardState.UNSHARDED, ShardState.SHARDED)
        for buffer in self._gathered:
            if not self._exact:
                # Only of values to compute with: backward then reads the very values that forward read.
                buffer.shard.keep_secondary(buffer.full, self._collectives)
            buffer.valid = buffer.all_slots.copy()
        self._cover(keep_views=keep_views, keep_values=keep_values)
        self._exact = True

    def _cover(self, *, keep_views: bool, keep_values: bool) -> None:
        """Has parameters read as NaN, except those that are shown, and frees values that are not kept."""
        for buffer in self._gathered:
            buffer.point(unsharded=False)
            if keep_values:
                if buffer.valid:  # else it has no memory that views could be of
                    buffer.let_go_of_views()
                continue
            buffer.valid = set(buffer.shown)
            if not buffer.shown:
                if keep_views:
                    buffer.replace_storage()
                else:
                    buffer.free()

    def drop_values(self) -> None:
        """Frees what `reshard(keep_values=True)` has kept, or `unshard_ahead` gathered; without them nothing."""
        if self._state is not ShardState.SHARDED:
            return
        self._finish_gathers()
        for buffer in self._gathered:
            if buffer.valid != buffer.shown:
                buffer.valid = set(buffer.shown)
                if not buffer.shown:
                    buffer.free()

    def drop_copies(self) -> None:
        """The weights are new, or about to be: drops the copies of the old ones."""
        self.drop_values()
        self.drop_secondary()

    def drop_secondary(self) -> None:
        """As `drop_copies`, where the full buffers have the new weights."""
        for buffer in self.buffers:
            buffer.shard.secondary.drop()

    def join_gather(self) -> None:
        """Participates in an all-gather that other ranks need; restores this rank's state."""
        was_unsharded = self._state is ShardState.UNSHARDED
        self.drop_values()
        self.reshard()  # also where it is unsharded: the other ranks need this rank's shard, and a gather needs all
        self.unshard()
        self.wait()
        if not was_unsharded:
            self.reshard()

    def _move(self, before: ShardState, to: ShardState) -> None:
        if self._state is not before:
            raise ShardStateError(f"unit {self.name}: illegal move from {self._state.value} to {to.value}")
        self._state = to
