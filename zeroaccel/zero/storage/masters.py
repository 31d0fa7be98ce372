"""Storage of a flat buffer's fp32 masters and of their optimizer states, with one class per kind of storage.

`FlatBuffer` has one `MasterStorage`. The optimizer step iterates over its `chunks`; checkpoints and `safe_get_full_*`
read and write ranges of masters and states. These callers do not depend on the class. This module has the classes for
masters in memory, `swapped_masters.py` those for masters in a tier. A table in `placement.py` chooses the class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroaccel.offload.host_buffers import empty_on_host, zeros_on_host
from zeroaccel.ops.device_values import begin_together
from zeroaccel.ops.residual import SplitMasters
from zeroaccel.ops.shard_step import ShardOptimizer
from zeroaccel.ops.updates import BLOCK_NUMEL
from zeroaccel.optim.optimizer_copy import renew_state
from zeroaccel.zero.layout import FlatLayout, FlatRange, FlatTensor
from zeroaccel.zero.storage.shards import Elements, FillRange, ShardStorage, in_memory


def stand_in(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns one NaN (0 for integers) expanded to a shape, which replaces a tensor that is not in memory."""
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype).expand(tuple(shape))


@dataclass(eq=False)
class MasterPiece:
    """A run of masters in one param group, which the optimizer sees as one parameter.

    Attributes:
        group: index of the param group.
        shape: (range.numel,) for an elementwise rule, the parameter's shape for a rule that needs full tensors.
        param: fp32 leaf of that shape, a view of the masters; a NaN stand-in while they are not in memory.
        parts: the masters in their parts, between `swap_in` and `swap_out` if an update joins them itself; else None.
        constructed: states without elements that the optimizer's constructor made for this parameter, such as a seed
            by its place among all parameters.
    """

    range: FlatRange
    group: int
    shape: tuple[int, ...]
    param: nn.Parameter = field(init=False)
    parts: SplitMasters | None = field(init=False, default=None)
    constructed: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.param = nn.Parameter(stand_in(self.shape))


def cut_pieces(
    layout: FlatLayout, param_groups: Sequence[int], rank: int, *, replicated: bool, by_parameter: bool
) -> list[MasterPiece]:
    """Returns the pieces of one buffer that a rank steps.

    Args:
        param_groups: param group of each slot.
        replicated: pieces of all shards, see [Note: equal pieces], instead of this rank's shard.
        by_parameter: full parameters in their own shapes, instead of runs of one group.
    """
    if by_parameter:
        return [
            MasterPiece(slot.range, group, slot.shape)
            for index, (slot, group) in enumerate(zip(layout.slots, param_groups, strict=True))
            if slot.numel and (replicated or layout.owners[index] == rank)  # some rules divide by norms
        ]
    ranks = range(layout.world_size) if replicated else (rank,)
    runs = (run for each in ranks for run in layout.group_runs(param_groups, each))
    return [MasterPiece(run, group, (run.numel,)) for run, group in runs]


def make_states(optimizer: Optimizer, pieces: Sequence[MasterPiece]) -> None:
    """Creates the states of some pieces for optimizers whose constructor creates states, such as torch's Adagrad."""
    # The constructor creates states for all parameters in the groups and replaces `optimizer.state`. So it gets only
    # these pieces, and the states of the others are restored afterwards.
    before, params = dict(optimizer.state), [group["params"] for group in optimizer.param_groups]
    try:
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [piece.param for piece in pieces if piece.group == index]
        renew_state(optimizer)
    finally:
        for group, params_of in zip(optimizer.param_groups, params, strict=True):
            group["params"] = params_of
    for piece in pieces:
        optimizer.state[piece.param].update(piece.constructed)
    for param, state in before.items():
        optimizer.state.setdefault(param, state)


@dataclass(frozen=True)
class MasterPlace:
    """The buffer, weights and device for which a `MasterStorage` is created.

    Attributes:
        key: key of the buffer in tiers.
        shard: the weights in the parameters' dtype that belong to the masters.
        pieces: pieces that this rank steps.
        device: device of masters that have memory of their own.
        replicated: every rank has the masters of all N elements.
        pinned: masters in host memory are page-locked.
        resident: the device updates them, although the config offloads the optimizer.
    """

    key: str
    layout: FlatLayout
    rank: int
    shard: ShardStorage
    pieces: Sequence[MasterPiece]
    device: torch.device
    replicated: bool = False
    pinned: bool = False
    resident: bool = False

    @property
    def range(self) -> FlatRange:
        """Elements whose masters this rank has."""
        return self.layout.range if self.replicated else self.layout.shard(self.rank)


class MasterStorage(ABC):
    """The fp32 weights of one flat buffer that the optimizer updates, and their optimizer states.

    A new class implements the abstract methods and, if its masters are not in memory all the time, `sub_groups`,
    `swap_in`, `swap_out`, `prefetch`, `release` and `settle`. It also needs an entry in `placement.MASTER_STORAGES`.

    1. `initialize` with the first weights. 2. `bind` to the optimizer. 3. In every step, each of the `sub_groups` is
    swapped in, updated, rounded to `stage_weights()`, and swapped out. Between steps, callers read and write ranges;
    writing masters does not change the weights, which the caller must write too.

    Attributes:
        range: elements whose masters are here: this rank's S, or all N for a replicated optimizer.
        is_replicated: every rank has all N by design (an owner's shard may happen to contain all).
        pieces: pieces that this rank steps, in the order of the buffer.
        shard: the weights that belong to the masters.
        aliases_weights: masters and weights are the same memory.
        reads_weights: masters can be read only while the weights equal the rounded masters.
        is_resident: the device updates them, although the config offloads the optimizer.
        waited_seconds: time spent waiting for a tier in all steps so far.
    """

    aliases_weights = False
    reads_weights = False

    def __init__(self, place: MasterPlace) -> None:
        self.range = place.range
        self.is_replicated = place.replicated or place.layout.world_size == 1
        self.pieces: Sequence[MasterPiece] = tuple(place.pieces)
        self.shard = place.shard
        self.is_resident = place.resident
        self.waited_seconds = 0.0
        self._bound_to: Optimizer | None = None
        self._makes_states = False

    # -- the interface that subclasses implement

    @abstractmethod
    def initialize(self, source: Tensor) -> None:
        """Stores the first masters, (range.numel,) of any floating dtype, before the weights can be read."""

    @abstractmethod
    def elements(self, interval: FlatRange, state: str | None = None) -> Elements:
        """Returns masters of `interval`, or a state with one value per element: a live view, or a reader of them."""

    @abstractmethod
    def write(self, interval: FlatRange, values: Tensor, state: str | None = None) -> None:
        """Replaces masters, or values of a state, and returns when they are stored.

        Raises:
            OffloadError: reading or storing them failed.
        """

    @abstractmethod
    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        """Registers masters to be filled, all or in part; calls `flush` before it returns memory that is on loan."""

    @abstractmethod
    def load_states(self, state_of: Callable[[MasterPiece], dict[str, Any]], flush: Callable[[], None]) -> None:
        """Replaces the optimizer's state of each piece; an empty dictionary removes it. `flush`: see `load`."""

    @abstractmethod
    def publish(self) -> None:
        """Replaces the weights by the rounded masters, after `load`."""

    @property
    def sub_groups(self) -> Sequence[Sequence[MasterPiece]]:
        """Groups of pieces, in step order, that are in memory together."""
        return (self.pieces,)

    def swap_in(self, index: int, following: MasterStorage | None = None, *, joined: bool = True) -> None:
        """Brings the masters and states of a sub-group into memory, until `swap_out`.

        Args:
            index: number of the sub-group; `swap_in` and `swap_out` go through all of them in order.
            following: storage of the next step, to prefetch during the update of the last sub-group.
            joined: whole masters. Without it, masters that are stored in parts may stay so (`MasterPiece.parts`).

        Raises:
            OffloadError: a tier failed.
        """
        if following is not None:
            following.prefetch()  # it may be in a tier although these masters are in memory

    def swap_out(self, index: int) -> None:
        """Stores the masters and states of a sub-group after its update; see `swap_in`."""
        return None

    def prefetch(self) -> None:
        """Starts to read the first sub-group."""
        return None

    def release(self) -> None:
        """Discards prefetched values after a step that failed. Idempotent."""
        return None

    def settle(self) -> None:
        """Waits until every store is complete; raises OffloadError if one failed."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yields the memory of the masters, unless they share it with the weights."""
        return iter(())

    def as_weights(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the masters, (range.numel,), if they are in memory and have this dtype; else None."""
        return None

    def new_memory(self, device: torch.device) -> Tensor | None:
        """Returns memory, (range.numel,) fp32 on `device`, from which `initialize` copies nothing; None without such.

        The caller fills it with the first masters, passes it to `initialize`, and leaves it unchanged afterwards.
        """
        return None

    # -- methods on top of the interface

    def bind(self, optimizer: Optimizer, *, makes_states: bool) -> None:
        """Sets the optimizer that has the states.

        Args:
            makes_states: the optimizer creates states in its constructor and not at its first step.
        """
        self._bound_to, self._makes_states = optimizer, makes_states

    def stage_weights(self) -> FlatTensor | None:
        """Returns the memory to which a step writes the new weights; None if the masters are the weights."""
        return self.shard.stage()

    def read(self, interval: FlatRange, state: str | None = None) -> Tensor:
        """Returns the values of `elements`, (n,), in memory.

        Raises:
            OffloadError: reading them failed.
        """
        return in_memory(self.elements(interval, state))

    def follow_weights(self, interval: FlatRange, weights: Tensor, before: Tensor | None = None) -> None:
        """Sets masters to new weights; a master that rounds to its new weight keeps its fp32 bits.

        Args:
            weights: (n,) new weights, which are already stored.
            before: masters before the change, required if `reads_weights`.
        """
        masters = self.read(interval) if before is None else before
        new = weights.to(masters.device)
        if new.dtype is not torch.float32:
            # The comparison is bitwise, so that it distinguishes NaNs and signed zeros. Without it, saving 16-bit
            # values and loading them back would round every master.
            same = masters.to(new.dtype).view(torch.int16) == new.view(torch.int16)
            new = torch.where(same, masters, new.float())
        self.write(interval, new)

    @property
    def _optimizer(self) -> Optimizer:
        assert self._bound_to is not None, "states of masters that no optimizer updates"
        return self._bound_to


class NoMasters(MasterStorage):
    """Weights that no optimizer updates: reads return the weights, which only `ShardStorage` writes."""

    aliases_weights = True

    def __init__(self, place: MasterPlace) -> None:
        super().__init__(place)
        # Every rank can read all of a persistent buffer without a collective.
        self.range = place.shard.range
        self.is_replicated = place.shard.range == place.layout.range

    def initialize(self, source: Tensor) -> None:
        return None

    def elements(self, interval: FlatRange, state: str | None = None) -> Elements:
        assert state is None, f"state {state} of weights without an optimizer"
        return self.shard.elements(interval)

    def write(self, interval: FlatRange, values: Tensor, state: str | None = None) -> None:
        return None

    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        self.shard.load(fill, flush)

    def load_states(self, state_of: Callable[[MasterPiece], dict[str, Any]], flush: Callable[[], None]) -> None:
        return None

    def publish(self) -> None:
        return None

    def follow_weights(self, interval: FlatRange, weights: Tensor, before: Tensor | None = None) -> None:
        return None


class SeparateMasters(MasterStorage):
    """Masters in separate memory, on the device of the optimizer step or in host memory."""

    def __init__(self, place: MasterPlace) -> None:
        super().__init__(place)
        self._device = place.device
        self._pinned = place.pinned
        self._masters = FlatTensor(self.range, stand_in((self.range.numel,)))
        self._new: Tensor | None = None  # memory that the caller fills

    def initialize(self, source: Tensor) -> None:
        # From the original weights, so that an fp32 model keeps the bits that 16-bit parameters lose.
        if self._pinned:
            source = empty_on_host(source.shape, torch.float32, pinned=True).copy_(source)
        elif source.device.type != self._device.type == "cpu":
            source = zeros_on_host(source.shape, torch.float32).copy_(source)  # once: locking would take longer
        elif self._new is None or not begin_together(source, self._new):
            source = source.to(self._device, torch.float32, copy=True)
        self._new = None
        self._point_at(source)

    def new_memory(self, device: torch.device) -> Tensor | None:
        if not self._pinned and self._device == device:
            self._new = torch.empty(self.range.numel, device=device)
        return self._new

    def _point_at(self, values: Tensor) -> None:
        self._masters = FlatTensor(self.range, values)
        for piece in self.pieces:
            piece.param.data = self._masters[piece.range].view(piece.shape)

    def bind(self, optimizer: Optimizer, *, makes_states: bool) -> None:
        super().bind(optimizer, makes_states=makes_states)
        if makes_states and self.pieces:
            make_states(optimizer, self.pieces)

    def elements(self, interval: FlatRange, state: str | None = None) -> Tensor:
        if state is None:
            return self._masters[interval]
        parts = [self._state(piece, state, both) for piece in self.pieces if (both := piece.range & interval)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _state(self, piece: MasterPiece, name: str, interval: FlatRange) -> Tensor:
        # For 8-bit moments, only the requested blocks are decoded: a checkpoint reads a piece parameter by parameter.
        # Pieces and slots start at multiples of a block, and so does `interval`.
        within = interval.at(piece.range.start)
        entries: Mapping[str, Any] = self._optimizer.state[piece.param]
        if isinstance(self._optimizer, ShardOptimizer) and entries[name].dtype is torch.uint8:
            cut = {key: _block_part(value, piece.range.numel, within) for key, value in entries.items()}
            entries, within = self._optimizer.portable(cut), slice(None)
        flat: Tensor = entries[name].detach().contiguous().view(-1)
        return flat[within]

    def write(self, interval: FlatRange, values: Tensor, state: str | None = None) -> None:
        if state is None:
            self._masters[interval].copy_(values)
            return
        for piece in self.pieces:
            both = piece.range & interval
            if both:
                flat = self._optimizer.state[piece.param][state].detach().view(-1)
                flat[both.at(piece.range.start)].copy_(values[both.at(interval.start)])

    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        fill(self.range, self._masters.values)  # this memory stays allocated, so one flush can serve many storages
        torch.autograd.graph.increment_version(self._masters.values)

    def load_states(self, state_of: Callable[[MasterPiece], dict[str, Any]], flush: Callable[[], None]) -> None:
        for piece in self.pieces:
            self._optimizer.state.pop(piece.param, None)
            if state := state_of(piece):
                self._optimizer.state[piece.param] = state

    def publish(self) -> None:
        self.shard.stage()[self.range].copy_(self._masters.values)
        self.shard.commit()

    def tensors(self) -> Iterator[Tensor]:
        yield self._masters.values

    def as_weights(self, dtype: torch.dtype) -> Tensor | None:
        return self._masters.values if self._masters.values.dtype is dtype else None

    def spare(self) -> Tensor:
        """Returns separate memory with the values of the masters, for an update out of place."""
        return empty_on_host((self.range.numel,), torch.float32, pinned=self._pinned).copy_(self._masters.values)

    def exchange(self, values: Tensor) -> Tensor:
        """Makes `values`, (range.numel,), the masters; returns memory that `values` may become at the next exchange."""
        before = self._masters.values
        self._point_at(values)
        return before


class AliasedMasters(SeparateMasters):
    """Masters of fp32 parameters that share memory with the weights, so that an update writes only once."""

    aliases_weights = True

    def initialize(self, source: Tensor) -> None:
        self._point_at(self.shard.stage()[self.range])

    def write(self, interval: FlatRange, values: Tensor, state: str | None = None) -> None:
        self.shard.stage()  # copies of the weights to the device may still read this memory
        super().write(interval, values, state)

    def load(self, fill: FillRange, flush: Callable[[], None]) -> None:
        self.shard.stage()
        super().load(fill, flush)

    def stage_weights(self) -> FlatTensor | None:
        return None

    def follow_weights(self, interval: FlatRange, weights: Tensor, before: Tensor | None = None) -> None:
        return None

    def publish(self) -> None:
        return None

    def tensors(self) -> Iterator[Tensor]:
        return iter(())

    def exchange(self, values: Tensor) -> Tensor:
        self.shard.stage()
        self._masters.values.copy_(values)
        return values


def _block_part(value: Any, numel: int, elements: slice) -> Any:
    """Returns elements of a state's tensor, or the exponents of the 8-bit blocks that contain them."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.numel() == numel:
        return value.reshape(-1)[elements]
    return value.reshape(-1)[elements.start // BLOCK_NUMEL : -(-elements.stop // BLOCK_NUMEL)]
