"""Whether the ranks' optimizers go by the same settings each step: learning rates, betas, all that is in param groups.

Every rank sums its groups up as one number, which travels in the collective that looks at the gradients (`clip.py`).
Only where these numbers differ are the groups exchanged, and every rank raises one error, before anything is updated.

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
from zeroaccel.zero.rank_facts import canonical, difference, param_group_facts, settings

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
        self._compared = b""
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
        return (
            int.from_bytes(_hashed(self._compared + repr(self._told).encode() if self._told else self._compared)) >> 12
        )

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
            dict(zip(known.names, values, strict=False)) for known, values in zip(self._groups, self._used, strict=True)
        ]
        own = _Told(self._facts(), self._told or param_group_facts(used, self._names), bool(self._told))
        everyone: list[_Told] = self._collectives.gather_objects(own, "compare param groups")
        was_late = any(told.late for told in everyone)
        found = difference([told.before if was_late else told.now for told in everyone])
        assert found is not None, "param groups with different digests and the same settings"
        when = f"the update in step {step - 1}" if was_late else f"step {step}"
        scheduled = any(f"['{name}']" in found.address for name in _SCHEDULED)
        raise UsageError(f"{when}: {found}", expected="one value on all ranks", fix=_FIX + _METRIC * scheduled)

    def _facts(self) -> dict[str, str]:
        return param_group_facts(self._optimizer.param_groups, self._names)

    def _summed_up(self) -> bytes:
        groups = self._optimizer.param_groups
        while len(self._names) < len(groups):
            self._names.append(settings(groups[len(self._names)]))
            self._groups.append(_Group(self._names[-1]))
        return b"".join([known.digest(group) for known, group in zip(self._groups, groups, strict=False)])


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
    """One param group's settings, hashed again only when one has changed.

    Values of types that cannot change in place are compared by identity: a schedule writes new objects.
    """

    __slots__ = ("_digest", "_frozen", "_values_of", "names", "values")

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._values_of: Callable[[Mapping[str, Any]], Any] = itemgetter(*names, names[-1]) if names else lambda _: ()
        self.values: tuple[Any, ...] = ()
        self._frozen = False
        self._digest = b""

    def digest(self, group: Mapping[str, Any]) -> bytes:
        try:
            values: tuple[Any, ...] = self._values_of(group)
        except KeyError:
            values = tuple(group.get(name, _Group) for name in self.names)
        if self._frozen and len(values) == len(self.values) and all(map(is_, values, self.values)):
            return self._digest
        self.values = values
        self._frozen = all(map(_is_frozen, values))
        self._digest = _hashed(repr([canonical(value) for value in values]).encode())
        return self._digest


def _is_frozen(value: Any) -> bool:
    kind = type(value)
    return kind in _FROZEN or (kind is tuple and all(type(item) in _FROZEN for item in value))


def _hashed(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
