"""Who keeps a parameter: from a bare `nn.Parameter` to the unit it lies in, for calls that are given nothing else.

A process-wide weak table maps a parameter to its `ParamRegistry`. That of an engine lives as long as the engine; one
that a `zero.Init` made lives as long as the parameters, which therefore hold it. A keeper counts who needs which unit
whole. It moves nothing itself: its owner says how a unit is pinned. Reading and writing values is `full_params.py`'s
and `safe_get_set.py`'s.
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
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.precision import LossScale
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.tensor_subclasses import local

__all__ = ["ParamHandle", "ParamRegistry", "Training", "place_of"]

_KEEPERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to its keeper
_NUMBERS = itertools.count()
_HELD = "_kept_by"


class Updates(Protocol):
    """Updates that may run beside other work; see `weight_update.py`."""

    def require_own_step(self, call: str) -> None:
        """Raises EngineStateError where the update with the gradients of this step has begun."""

    def require_settled(self, call: str) -> None:
        """Raises EngineStateError while masters are ahead of the weights."""


@dataclass(frozen=True)
class Training:
    """What an engine has besides weights.

    Attributes:
        updates: what may run beside; None without an optimizer.
    """

    optimizer: ShardedOptimizer | None
    reducer: GradReducer
    loss_scale: Callable[[], LossScale]
    updates: Updates | None


@dataclass(frozen=True, eq=False)
class ParamHandle:
    """Where a parameter lies. `order` sorts places alike on all ranks."""

    keeper: ParamRegistry
    unit: ParamUnit
    buffer: FlatBuffer
    index: int
    order: tuple[int, int, int]

    @property
    def slot(self) -> Slot:
        """Name, shape and place in the flat buffer."""
        return self.buffer.layout.slots[self.index]

    @property
    def param(self) -> nn.Parameter:
        """The parameter itself."""
        return self.buffer.params[self.index]

    def reach(self, rank: int) -> FlatRange:
        """The parameter's elements that are in the shard of `rank`; may be empty."""
        return self.slot.range & self.buffer.layout.shard(rank)

    @property
    def replaced(self) -> bool:
        """Whether somebody gave the parameter other storage or another shape than the unit's."""
        data = local(self.param)
        return data.shape != self.slot.shape or not self.buffer.owns(data)


class ParamRegistry:
    """The parameters of one owner, and who needs which of their units whole.

    Args:
        pin: makes a unit whole and keeps it so, whatever forward and backward do.
        unpin: lets it go again.
        training: None where there is no engine yet; the parameters then keep the keeper alive.

    Attributes:
        prints: what whole parameters looked like, for `full_params.py`.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        pin: Callable[[ParamUnit], None],
        unpin: Callable[[ParamUnit], None],
        training: Training | None = None,
    ) -> None:
        self.collectives = collectives
        self.training = training
        self.prints = WriteDetector()
        self._units: dict[int, ParamUnit] = {}
        self._left: dict[int, int] = {}
        self._pin, self._unpin = pin, unpin
        self._own = weakref.ref(self)
        self._number = next(_NUMBERS)
        self._order = itertools.count()
        self._places: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._holds: dict[int, int] = {}

    def __reduce__(self) -> Any:
        raise EngineStateError(
            "pickling a model of zero.Init: its values are shared among the ranks",
            fix="hand it to initialize() and save a checkpoint",
        )

    def add(self, units: Iterable[ParamUnit]) -> None:
        """Takes units in; their parameters are found from now on."""
        for unit in units:
            number = next(self._order)
            self._units[number] = unit
            count = 0
            for buffer in unit.buffers:
                for index, param in enumerate(buffer.params):
                    self._places[param] = (unit, buffer, index, (self._number, number, count))
                    _KEEPERS[param] = self._own
                    if self.training is None:
                        vars(param)[_HELD] = self
                    count += 1
            self._left[number] = count

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        """Parameters that are somebody else's from now on; a unit without any is gone."""
        for param in params:
            place = self._places.pop(param, None)
            if place is not None:
                _, buffer, index, (_, number, _) = place
                buffer.drop_parameter(index)
                self._left[number] -= 1
                if not self._left[number]:
                    del self._units[number], self._left[number]
            if _KEEPERS.get(param) is self._own:
                del _KEEPERS[param]
                vars(param).pop(_HELD, None)

    def close(self) -> None:
        """Its parameters are found no longer."""
        for unit in self.units:
            for buffer in unit.buffers:
                for param in buffer.params:
                    if _KEEPERS.get(param) is self._own:
                        del _KEEPERS[param]
        self._units.clear()

    @property
    def units(self) -> tuple[ParamUnit, ...]:
        """In the order they came, which is the same on all ranks."""
        return tuple(self._units.values())

    def place(self, param: Tensor) -> ParamHandle | None:
        """Where a parameter lies; None if it is not here."""
        found = self._places.get(param)
        return None if found is None else ParamHandle(self, *found)

    @property
    def holding(self) -> bool:
        """Whether somebody needs a unit whole."""
        return bool(self._holds)

    def is_held(self, unit: ParamUnit) -> bool:
        """Whether somebody needs this one whole."""
        return id(unit) in self._holds

    def hold(self, units: Sequence[ParamUnit]) -> None:
        """Makes units whole until `release`; counted. (all ranks, with the same units in the same order)"""
        for unit in units:
            count = self._holds.get(id(unit), 0)
            if not count:
                self._pin(unit)
            self._holds[id(unit)] = count + 1

    def release(self, units: Sequence[ParamUnit]) -> None:
        """Takes one `hold` of each back."""
        for unit in units:
            left = self._holds.pop(id(unit)) - 1
            if left:
                self._holds[id(unit)] = left
            else:
                self._unpin(unit)

    def require_free(self, call: str) -> None:
        """Raises EngineStateError while somebody holds a unit whole, where `call` would change the weights."""
        if self._holds:
            raise EngineStateError(
                f"{call} while parameters are gathered",
                expected="no GatheredParameters or engine.gathered() around it",
                fix="leave their with-block first",
            )


def place_of(param: object) -> ParamHandle | None:
    """Where a parameter lies, whoever keeps it; None for anything that no engine or `zero.Init` keeps."""
    if not isinstance(param, torch.Tensor):
        return None
    reference = _KEEPERS.get(param)
    keeper = None if reference is None else reference()
    return None if keeper is None else keeper.place(param)
