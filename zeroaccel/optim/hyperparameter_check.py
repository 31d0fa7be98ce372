"""Whether the ranks' optimizers go by the same settings each step: learning rates, betas, all that is in param groups.

Every rank sums its groups up as one number, which travels in the collective that looks at the gradients
(`grad_norm.py`). Only where these numbers differ are the groups exchanged, and every rank raises one error, before
anything is updated.

[Note: numbers that change late] A loop may take the gradients' norm, with which the groups are compared, and set a
learning rate afterwards, before `step()`. What an update went by and was not compared is compared with the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import is_, itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import UsageError
from zeroaccel.optim.rank_facts import canonical, difference, param_group_facts, settings

__all__ = ["HyperparameterCheck"]

_FROZEN = frozenset({float, int, bool, str, type(None)})
_SCHEDULED = ("lr", "betas", "momentum", "weight_decay")


class HyperparameterCheck:
    """Compares an optimizer's param groups with those of the other ranks.

    Each step: 1. `digest` is compared in a collective of the caller's, 2. where it differs, all ranks call `refuse`,
    3. `note_update` where the update comes later than the comparison.

    What is compared are the settings that the groups had when this was made, so that a counter which an optimizer
    adds to those groups that have elements on this rank stays its own. One process alone has nothing to compare.

    Args:
        collectives: over the ranks that are to agree.
    """

    def __init__(self, optimizer: Optimizer, collectives: Collectives) -> None:
        self._optimizer = optimizer
        self._collectives = collectives
        self._names = [settings(group) for group in optimizer.param_groups]
        self._groups = [_Group(names) for names in self._names]
        self._compared = self._sum = 0
        self._count = -1  # of groups that are in the sum
        self._used: list[tuple[Any, ...]] = []
        self._late: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def digest(self) -> int:
        """All settings as a number below 2^52: the same on ranks that have the same, and on no others but by chance."""
        if self._collectives.world_size == 1:
            return 0
        self._used = [known.values for known in self._groups]
        self._compared = self._summed_up()
        self._told, self._late = self._late, {}
        return _hashed(f"{self._compared} {self._told}") if self._told else self._compared

    def compare(self, step: int) -> None:
        """Compares at once, with a collective of its own. (all ranks)

        Raises:
            UsageError: as `refuse`.
        """
        if self._collectives.world_size == 1:
            return
        digest = float(self.digest())
        extremes = torch.tensor([digest, -digest], dtype=torch.float64)
        self._collectives.all_reduce(extremes, "max", "hyperparameters")
        if extremes[0] != -extremes[1]:
            self.refuse(step)

    def note_update(self) -> None:
        """An update goes by the settings as they are now. See [Note: numbers that change late]."""
        if self._collectives.world_size > 1 and self._summed_up() != self._compared:
            self._late = self._facts()

    def refuse(self, step: int) -> None:
        """Says where the ranks' settings differ. (all ranks)

        Args:
            step: the number of the step, from 0.

        Raises:
            UsageError: always; the same on every rank.
        """
        used = [
            dict(zip(known.names, values, strict=True)) for known, values in zip(self._groups, self._used, strict=False)
        ]
        own = _Told(self._facts(), self._told or param_group_facts(used, self._names), bool(self._told))
        everyone: list[_Told] = self._collectives.gather_objects(own, "compare param groups")
        late = difference([told.before for told in everyone]) if any(told.late for told in everyone) else None
        found = late or difference([told.now for told in everyone])
        assert found is not None, "param groups with different digests and the same settings"
        when = f"the update in step {step - 1}" if late else f"step {step}"
        scheduled = any(f"['{name}']" in found.address for name in _SCHEDULED)
        raise UsageError(f"{when}: {found}", expected="one value on all ranks", fix=_FIX + _METRIC * scheduled)

    def _facts(self) -> dict[str, str]:
        return param_group_facts(self._optimizer.param_groups, self._names)

    def _summed_up(self) -> int:
        """The settings as they are now, below 2^52, which a float64 holds."""
        groups = self._optimizer.param_groups
        while len(self._names) < len(groups):
            self._names.append(settings(groups[len(self._names)]))
            self._groups.append(_Group(self._names[-1]))
        changed = [known.read(group) for known, group in zip(self._groups, groups, strict=False)]
        if len(changed) != self._count or any(changed):
            self._count = len(changed)
            self._sum = _hashed("\n".join([known.text for known in self._groups[: self._count]]))
        return self._sum


_FIX = "set it from what is the same on every rank"
_METRIC = (
    "; a schedule that follows a loss, such as ReduceLROnPlateau, has to be given the same loss everywhere: "
    'scheduler.step(accelerator.reduce(loss.detach(), "mean")), or zeroaccel.operations.reduce without an Accelerator'
)


@dataclass(frozen=True)
class _Told:
    """What a rank tells of its param groups: as they are, and as the update before went by; whether that was late."""

    now: dict[str, str]
    before: dict[str, str]
    late: bool


class _Group:
    """One param group's settings as a text, written again only where one has changed.

    Values of types that cannot change in place are compared by identity: a schedule writes new objects.

    Attributes:
        names: of the settings.
        values: of the settings when they were read last, as they stood in the group.
        text: of the values.
    """

    __slots__ = ("_frozen", "_texts", "_values_of", "names", "text", "values")

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.text = ""
        self.values: tuple[Any, ...] = (_Group,) * len(names)
        # With one name alone it would not return a tuple.
        self._values_of: Callable[[Mapping[str, Any]], Any] = itemgetter(*names) if len(names) > 1 else self._one_by_one
        self._texts = [""] * len(names)
        self._frozen = [False] * len(names)

    def read(self, group: Mapping[str, Any]) -> bool:
        """Takes the values of a group; whether the text is another now."""
        try:
            values: tuple[Any, ...] = self._values_of(group)
        except KeyError:
            values = self._one_by_one(group)
        if all(map(is_, values, self.values)) and all(self._frozen):
            return False
        for index, value in enumerate(values):
            if value is not self.values[index] or not self._frozen[index]:
                self._texts[index] = repr(canonical(value))
                self._frozen[index] = _is_frozen(value)
        before, self.text, self.values = self.text, "\t".join(self._texts), values
        return self.text != before

    def _one_by_one(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple([group.get(name, _Group) for name in self.names])


def _is_frozen(value: Any) -> bool:
    kind = type(value)
    return kind in _FROZEN or (kind is tuple and all(type(item) in _FROZEN for item in value))


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 12
