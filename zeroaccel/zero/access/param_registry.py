"""The parameter registry finds the unit of a bare `nn.Parameter`, for calls whose only arguments are parameters.

A process-wide weak table maps a parameter to its `ParamRegistry`. An engine's registry lives as long as the engine; the
registry of a `zero.Init` lives as long as its parameters, which refer to it. A registry counts the holders of each
unsharded unit. It moves no data: its owner passes the functions that pin and unpin a unit. `full_params.py` and
`safe_get_set.py` read and write values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import EngineStateError
from zeroaccel.zero.grad_reducer import GradReducer
from zeroaccel.zero.layout import FlatRange, Slot
from zeroaccel.zero.param_check import WriteDetector
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit, ShardState
from zeroaccel.zero.precision import LossScale
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.tensor_subclasses import local
from zeroaccel.zero.weight_update import WeightUpdate

_REGISTRIES: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to its registry
_NUMBERS = itertools.count()
_REGISTRY = "_zero_registry"


class Unpin(Protocol):
    """Reshards a unit."""

    def __call__(self, unit: ParamUnit, /, *, keep_values: bool = False) -> None: ...


@dataclass(frozen=True)
class Training:
    """An engine's optimizer, gradients and loss scale.

    Attributes:
        updates: the weight update, which may overlap with other work; None without an optimizer.
    """

    optimizer: ShardedOptimizer | None
    reducer: GradReducer
    loss_scale: Callable[[], LossScale]
    updates: WeightUpdate | None


@dataclass(frozen=True, eq=False)
class ParamHandle:
    """A parameter's position: registry, unit, flat buffer and slot. `order` is the same on all ranks."""

    registry: ParamRegistry
    unit: ParamUnit
    buffer: FlatBuffer
    index: int
    order: tuple[int, int, int]

    @property
    def slot(self) -> Slot:
        """Name, shape and range in the flat buffer."""
        return self.buffer.layout.slots[self.index]

    @property
    def param(self) -> nn.Parameter:
        """The parameter itself."""
        return self.buffer.params[self.index]

    def reach(self, rank: int) -> FlatRange:
        """Returns the range of the parameter's elements in the shard of `rank`; may be empty."""
        return self.slot.range & self.buffer.layout.shard(rank)

    def require_settled(self, call: str) -> None:
        """Raises EngineStateError while masters are ahead of the weights: `call` would see old and new values.

        Completes an update that the forward awaits.
        """
        training = self.registry.training
        if training is not None and training.updates is not None:
            training.updates.require_settled(f"{call} of {self.slot.fqn}")

    @property
    def is_absent(self) -> bool:
        """True if the parameter is not gathered on this rank, and therefore reads as NaN."""
        return self.unit.state is ShardState.SHARDED and not self.buffer.persistent

    @property
    def replaced(self) -> bool:
        """True if the program replaced the parameter's storage or shape in the unit."""
        data = local(self.param)
        return data.shape != self.slot.shape or not self.buffer.owns(data)


class ParamRegistry:
    """The parameters of one owner, with a count of holders for each unsharded unit.

    Args:
        pin: unshards a unit and keeps it unsharded during forward and backward.
        unpin: undoes `pin`; with `keep_values`, the next `pin` of the same unit needs no gather.
        on_empty: called with a unit after the registry has dropped all its parameters.
        training: None before there is an engine; the parameters then keep the registry alive.

    Attributes:
        write_detector: detects writes to unsharded parameters, for `full_params.py`.
        before_write: blocks while a background save copies weights and states.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        pin: Callable[[ParamUnit], None],
        unpin: Unpin,
        on_empty: Callable[[ParamUnit], None] | None = None,
        training: Training | None = None,
    ) -> None:
        self.collectives = collectives
        self.training = training
        self.write_detector = WriteDetector()
        self.before_write: Callable[[], object] = list  # does nothing
        self._units: dict[int, ParamUnit] = {}
        self._num_params: dict[int, int] = {}
        self._pin, self._unpin, self._on_empty = pin, unpin, on_empty
        self._own = weakref.ref(self)
        self._number = next(_NUMBERS)
        self._order = itertools.count()
        self._positions: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._holders: dict[int, int] = {}

    def __reduce__(self) -> Any:
        raise EngineStateError(
            "pickling a model of zero.Init: each rank has only a shard of its values",
            fix="pass the model to initialize() and save a checkpoint",
        )

    def add(self, units: Iterable[ParamUnit]) -> None:
        """Registers units and their parameters."""
        for unit in units:
            # (registry, unit, parameter) numbers instead of names: cheap to compare, and equal on all ranks, because
            # all register the same units in the same order. `GatheredParameters` gathers in this order.
            number = next(self._order)
            self._units[number] = unit
            count = 0
            for buffer in unit.buffers:
                for index, param in enumerate(buffer.params):
                    self._positions[param] = (unit, buffer, index, (self._number, number, count))
                    _REGISTRIES[param] = self._own
                    if self.training is None:
                        # No engine refers to this registry, so its parameters keep it alive.
                        vars(param)[_REGISTRY] = self
                    count += 1
            self._num_params[number] = count

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        """Removes parameters that another owner takes over, and units without any left."""
        for param in params:
            position = self._positions.pop(param, None)
            if position is not None:
                unit, buffer, index, (_, number, _) = position
                buffer.drop_parameter(index)
                self._num_params[number] -= 1
                if not self._num_params[number]:
                    del self._units[number], self._num_params[number]
                    if self._on_empty is not None:
                        self._on_empty(unit)
            if _REGISTRIES.get(param) is self._own:
                del _REGISTRIES[param]
                vars(param).pop(_REGISTRY, None)

    def close(self) -> None:
        """Unregisters all parameters."""
        for unit in self.units:
            for buffer in unit.buffers:
                for param in buffer.params:
                    if _REGISTRIES.get(param) is self._own:
                        del _REGISTRIES[param]
        self._units.clear()

    @property
    def everyone(self) -> Collectives:
        """Collectives over all ranks that have the parameters or parts of them."""
        return self.collectives.everyone

    @property
    def units(self) -> tuple[ParamUnit, ...]:
        """Registered units, in the order of registration, which is the same on all ranks."""
        return tuple(self._units.values())

    def handle(self, param: Tensor) -> ParamHandle | None:
        """Returns the handle of a parameter, or None if this registry does not have it."""
        fields = self._positions.get(param)
        return None if fields is None else ParamHandle(self, *fields)

    def is_acquired(self, unit: ParamUnit) -> bool:
        """Returns True if the unit has holders."""
        return id(unit) in self._holders

    def acquire(self, units: Sequence[ParamUnit]) -> None:
        """Adds a holder to units, which stay unsharded until `release`. (all ranks, same units in the same order)"""
        if self.training is not None and self.training.updates is not None:
            self.training.updates.finish(late=False)
        # Counted per unit, because nested `GatheredParameters` may name parameters of one unit, and only the last
        # release reshards.
        for unit in units:
            count = self._holders.get(id(unit), 0)
            if not count:
                self._pin(unit)
            self._holders[id(unit)] = count + 1

    def release(self, units: Sequence[ParamUnit], *, keep_values: bool = False) -> None:
        """Undoes one `acquire` of each unit.

        Args:
            keep_values: keep the last unit's values for an `acquire` that may follow; the same on all ranks.
        """
        for unit in units:
            count = self._holders.pop(id(unit)) - 1
            if count:
                self._holders[id(unit)] = count
            else:
                self._unpin(unit, keep_values=keep_values and unit is units[-1])

    def require_free(self, call: str) -> None:
        """Raises EngineStateError while a unit has holders, because `call` would change its weights."""
        if self._holders:
            raise EngineStateError(
                f"{call} while parameters are gathered",
                expected="no GatheredParameters or engine.gathered() around it",
                fix="leave their with-block first",
            )


def handle_of(param: object) -> ParamHandle | None:
    """Returns the handle of a parameter in any registry, or None if no engine or `zero.Init` has it."""
    if not isinstance(param, torch.Tensor):
        return None
    # Weak references on both sides: the table must keep neither a discarded model nor a destroyed engine alive.
    reference = _REGISTRIES.get(param)
    registry = None if reference is None else reference()
    return None if registry is None else registry.handle(param)


def parameter_of(tensor: Tensor) -> Tensor:
    """Returns the parameter of a sharded unit that a tensor is a view of; the tensor itself if there is none.

    Under `saved_tensors_hooks` autograd returns such views instead of the parameters that a function saved.
    """
    if isinstance(tensor, nn.Parameter):
        return tensor
    storage, first = tensor.untyped_storage()._cdata, tensor.storage_offset()
    registries = {reference() for reference in _REGISTRIES.values()} - {None}
    for buffer in (buffer for registry in registries for unit in registry.units for buffer in unit.buffers):
        if buffer.full.untyped_storage()._cdata == storage:
            named = zip(buffer.params, buffer.layout.slots, strict=True)
            return next((param for param, slot in named if slot.start <= first < slot.start + slot.numel), tensor)
    return tensor
