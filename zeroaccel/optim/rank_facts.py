"""What an optimizer and a scheduler go by, as lines of text that ranks can compare, and what to say where they differ.

A fact is an address and a text: `optimizer.param_groups[0]['lr']` and `0.1`. Equal settings have equal texts on every
rank: 0 and 0.0, two NaNs, a tensor and its value. Of what has no text of its own only the type is told, and functions
go by their names. Left out is what belongs to one rank: its shards of parameters, its number, who prints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from numbers import Complex, Real
from operator import is_, itemgetter
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hangs.hang_report import rank_list
from zeroaccel.errors import UsageError

__all__ = [
    "SAME_OPTIMIZER",
    "Difference",
    "HyperparameterCheck",
    "canonical",
    "difference",
    "optimizer_facts",
    "param_group_facts",
    "scheduler_facts",
    "settings",
    "training_facts",
]

SAME_OPTIMIZER = "make the optimizer and its scheduler from the same settings on every rank"
"""What to do where `difference` finds one in the facts of new optimizers."""

Facts = dict[str, str]

_MOST_NUMEL = 16  # elements of a tensor whose values count as settings
_MOST_DEPTH = 6
_MOST_VALUES = 8  # different values shown at a time
_ABSENT = "absent"
_SCRIPTS = ("__main__", "__mp_main__")
_OF_ONE_RANK = frozenset(
    {
        "device",
        "global_rank",
        "local_process_index",
        "local_rank",
        "log_every",
        "optimizer",
        "param_names",
        "params",
        "process_index",
        "rank",
        "verbose",
    }
)


# -- values


class _Text(str):
    """What stands for a value that is neither a text nor a number; shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def settings(group: Mapping[str, Any]) -> list[str]:
    """The names in a param group, or of an object's attributes, that are the same on every rank; sorted."""
    return sorted(name for name in group if isinstance(name, str) and name not in _OF_ONE_RANK)


def canonical(value: Any, depth: int = 0) -> Any:
    """Texts, floats, booleans, None and tuples of them: two settings are equal where their `repr` is.

    Numbers become floats, but for integers that no float is equal to. A tensor becomes its values; one of more than 16
    elements, or that is trained, its dtype and shape.
    """
    kind = type(value)
    if kind is float:  # the kinds of most settings first, as this is called in every step
        return value + 0.0  # no negative zero
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, (str, Real, numpy.generic)):
        return str(value) if isinstance(value, str) else _number(value)
    if depth > _MOST_DEPTH:
        return _kind(value)
    if isinstance(value, (tuple, list)):
        return tuple([canonical(item, depth + 1) for item in value])
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(repr(canonical(item, depth + 1)) for item in value))
    if isinstance(value, Mapping):
        return _with_names("", value, depth)
    if isinstance(value, (Tensor, numpy.ndarray)):
        # A trained tensor is a parameter and no setting: its values may be this rank's own.
        trained = isinstance(value, Tensor) and (value.requires_grad or value.is_meta)
        if trained or math.prod(value.shape) > _MOST_NUMEL:
            return _Text(f"{value.dtype} of shape {tuple(value.shape)}")
        return canonical(value.tolist(), depth + 1)
    return _named(value, depth)


def _number(value: Any) -> float | bool | str:
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, bool):
        return value
    try:
        number = float(value) + 0.0
    except (OverflowError, TypeError, ValueError):
        return str(value)
    return number if number == value or number != number else str(value)


def _named(value: Any, depth: int) -> _Text:
    """What is neither a number nor a text nor a container of them."""
    if isinstance(value, functools.partial):
        function, *args = (_shown(canonical(item, depth + 1)) for item in (value.func, *value.args))
        return _with_names(f"partial of {function}", value.keywords, depth, args)
    if isinstance(value, Enum):
        return _Text(f"{_kind(value)}.{value.name}")
    if isinstance(value, (torch.dtype, Complex)):
        return _Text(value)
    if isinstance(value, type):
        return _qualified(value)
    if is_dataclass(value):
        held = {item.name: getattr(value, item.name) for item in fields(value)}
        return _with_names(_kind(value), {name: held[name] for name in settings(held)}, depth)
    if callable(value) and not isinstance(value, torch.nn.Module):
        name = getattr(value, "__qualname__", None)
        if isinstance(name, str):
            return _Text(name)
        held = getattr(value, "__dict__", {})
        plain = {name: held[name] for name in settings(held) if isinstance(held[name], (Real, str, tuple, list))}
        return _with_names(_kind(value), plain, depth)
    return _kind(value)


def _with_names(head: str, named: Mapping[Any, Any], depth: int, args: Sequence[str] = ()) -> _Text:
    """`head(0.5, total=100)`."""
    parts = sorted(f"{name}={_shown(canonical(item, depth + 1))}" for name, item in named.items())
    return _Text(f"{head}({', '.join([*args, *parts])})")


def _kind(value: object) -> _Text:
    return _qualified(type(value))


def _qualified(kind: type) -> _Text:
    # A script's own classes: its module has another name in a process that another one has started.
    return _Text(kind.__qualname__ if kind.__module__ in _SCRIPTS else f"{kind.__module__}.{kind.__qualname__}")


def _shown(value: Any) -> str:
    """A canonical value as people write it; equal texts for equal values only."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)


# -- facts


def param_group_facts(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]] | None = None) -> Facts:
    """The settings of all param groups.

    Args:
        names: those to tell of each group; by default all that do not belong to one rank.
    """
    found = {}
    for index, group in enumerate(groups):
        for name in settings(group) if names is None or index >= len(names) else names[index]:
            text = _shown(canonical(group[name])) if name in group else _ABSENT
            found[f"optimizer.param_groups[{index}]['{name}']"] = text
    return found


def optimizer_facts(optimizer: Optimizer | None) -> Facts:
    """Class, defaults and param groups."""
    if optimizer is None:
        return {"optimizer": "none"}
    found = {"optimizer": str(_kind(optimizer)), "len(optimizer.param_groups)": str(len(optimizer.param_groups))}
    defaults = getattr(optimizer, "defaults", {})
    found |= {f"optimizer.defaults['{name}']": _shown(canonical(defaults[name])) for name in settings(defaults)}
    return found | param_group_facts(optimizer.param_groups)


def training_facts(optimizer: Optimizer | None, scheduler: Any) -> Facts:
    """Of both: classes first, then arguments, and last what a scheduler writes or takes from the optimizer."""
    optimizers, schedulers = optimizer_facts(optimizer), scheduler_facts(scheduler)
    classes = {"optimizer": optimizers["optimizer"], "lr_scheduler": schedulers["lr_scheduler"]}
    defaults = {address: text for address, text in optimizers.items() if ".param_groups" not in address}
    arguments = {address: text for address, text in schedulers.items() if not _is_derived(address)}
    return classes | defaults | arguments | optimizers | schedulers


def _is_derived(address: str) -> bool:
    """Whether a scheduler's attribute follows from its arguments and the rates of the groups."""
    name = address.rpartition(".")[2]
    return name == "base_lrs" or (name.startswith("_") and "lr" in name)


def scheduler_facts(scheduler: Any, where: str = "lr_scheduler") -> Facts:
    """Class and attributes of a scheduler, and of the schedulers that it is made of."""
    if scheduler is None:
        return {where: "none"}
    found = {where: str(_kind(scheduler))}
    attributes = getattr(scheduler, "__dict__", {})
    for name in sorted(settings(attributes), key=_is_derived):
        value = attributes[name]
        parts = list(_schedulers(value))
        if not parts:
            found[f"{where}.{name}"] = _shown(canonical(value))
        for place, part in parts:
            found |= scheduler_facts(part, f"{where}.{name}{place}")
    return found


def _schedulers(value: Any) -> Iterator[tuple[str, Any]]:
    """The schedulers in an attribute, each with its place."""
    items = enumerate(value) if isinstance(value, (list, tuple)) else [("", value)]
    for index, item in items:
        if hasattr(item, "step") and hasattr(item, "state_dict") and not isinstance(item, (type, Optimizer)):
            yield f"[{index}]" if index != "" else "", item


# -- differences


@dataclass(frozen=True)
class Difference:
    """The first fact that is not the same on all ranks.

    Attributes:
        address: of the fact.
        values: "0.1 on ranks 0, 2 and 0.05 on rank 1".
        others: how many more facts differ.
    """

    address: str
    values: str
    others: int

    def __str__(self) -> str:
        others = f" ({self.others} more {'setting differs' if self.others == 1 else 'settings differ'})"
        return f"{self.address} is {self.values}" + (others if self.others else "")


def difference(everyone: Sequence[Mapping[str, str]]) -> Difference | None:
    """Where the facts of the ranks differ; None where they do not.

    Args:
        everyone: the facts of each rank, by rank.
    """
    addresses = list(dict.fromkeys(address for facts in everyone for address in facts))
    differing = [address for address in addresses if len({facts.get(address, _ABSENT) for facts in everyone}) > 1]
    if not differing:
        return None
    address = differing[0]
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        ranks.setdefault(facts.get(address, _ABSENT), []).append(rank)
    texts = [f"{_short(value)} on {rank_list(where)}" for value, where in ranks.items()]
    if len(texts) > _MOST_VALUES:
        texts = [*texts[:_MOST_VALUES], f"{len(texts) - _MOST_VALUES} more values on the others"]
    return Difference(
        address + _group_name(address, everyone[0]), f"{', '.join(texts[:-1])} and {texts[-1]}", len(differing) - 1
    )


def _group_name(address: str, facts: Mapping[str, str]) -> str:
    """` of the group 'decay'`, for an address in a param group that has a name."""
    group, bracket, name = address.rpartition("['")
    named = facts.get(f"{group}['name']", "None") if bracket and name != "name']" else "None"
    return "" if named in ("None", _ABSENT) else f" of the group {named}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


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
