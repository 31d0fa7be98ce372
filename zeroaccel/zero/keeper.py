"""Who keeps a parameter: from a bare `nn.Parameter` to the unit it lies in, for calls that are given nothing else.

A parameter gets no attribute for it (one would be pickled with the model); a process-wide weak table maps it to its
`Keeper`, which an engine or a `zero.Init` owns. A keeper counts who needs which unit whole. It moves nothing itself:
its owner says how a unit is pinned. Reading and writing values is `gathered.py`'s and `parameter_access.py`'s.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import EngineStateError
from zeroaccel.zero.layout import Slot
from zeroaccel.zero.optimizer_shard import OptimizerShard
from zeroaccel.zero.precision import LossScale
from zeroaccel.zero.reducer import Reducer
from zeroaccel.zero.unit import FlatBuffer, ParamUnit
from zeroaccel.zero.write_check import Prints

__all__ = ["Keeper", "Place", "Training", "place_of"]

_KEEPERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to its keeper
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Training:
    """What an engine has besides weights."""

    optimizer: OptimizerShard | None
    reducer: Reducer
    loss_scale: Callable[[], LossScale]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a parameter lies. `order` sorts places alike on all ranks."""

    keeper: Keeper
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

    def reach(self, rank: int) -> tuple[int, int]:
        """[start, end) of the parameter's elements in the flat buffer that are in the shard of `rank`; may be empty."""
        low, high = self.buffer.layout.bounds(rank)
        start = min(max(self.slot.start, low), self.slot.end)
        return start, max(start, min(self.slot.end, high))

    @property
    def replaced(self) -> bool:
        """Whether somebody gave the parameter other storage or another shape than the unit's."""
        data = self.param.data
        return data.shape != self.slot.shape or not self.buffer.owns(data)


class Keeper:
    """The parameters of one owner, and who needs which of their units whole.

    Args:
        pin: makes a unit whole and keeps it so, whatever forward and backward do.
        unpin: lets it go again.
        training: None where there is no engine yet.

    Attributes:
        units: in the order they came; the same on all ranks.
        prints: what whole parameters looked like, for `gathered.py`.
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
        self.units: list[ParamUnit] = []
        self.prints = Prints()
        self._pin, self._unpin = pin, unpin
        self._number = next(_NUMBERS)
        self._places: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._holds: dict[int, int] = {}

    def add(self, units: Iterable[ParamUnit]) -> None:
        """Takes units in; their parameters are found from now on."""
        own = weakref.ref(self)
        for unit in units:
            number = len(self.units)
            self.units.append(unit)
            count = 0
            for buffer in unit.buffers:
                for index, param in enumerate(buffer.params):
                    self._places[param] = (unit, buffer, index, (self._number, number, count))
                    _KEEPERS[param] = own
                    count += 1

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        """Parameters that are somebody else's from now on."""
        for param in params:
            self._places.pop(param, None)
            held = _KEEPERS.get(param)
            if held is not None and held() is self:
                del _KEEPERS[param]

    def close(self) -> None:
        """Its parameters are ordinary ones again."""
        for unit in self.units:
            for buffer in unit.buffers:
                self.drop(buffer.params)
        self.units.clear()

    def place(self, param: Tensor) -> Place | None:
        """Where a parameter lies; None if it is not here."""
        found = self._places.get(param)
        return None if found is None else Place(self, *found)

    @property
    def holding(self) -> bool:
        """Whether somebody needs a unit whole."""
        return bool(self._holds)

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


def place_of(param: object) -> Place | None:
    """Where a parameter lies, whoever keeps it; None for anything that no engine or `zero.Init` keeps."""
    if not isinstance(param, torch.Tensor):
        return None
    reference = _KEEPERS.get(param)
    keeper = None if reference is None else reference()
    return None if keeper is None else keeper.place(param)
