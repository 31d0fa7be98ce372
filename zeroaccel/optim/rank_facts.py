"""Comparison of optimizers and schedulers across ranks: as lines of text at the start, as a digest at every step.

A fact is an address and a text: `optimizer.param_groups[0]['lr']` and `0.1`. Equal settings have equal texts on every
rank: 0 and 0.0, two NaNs, a tensor and its value. For a value without a text of its own the type stands, and functions
go by their names. Left out is what belongs to one rank: its shards of parameters, its number, which rank prints.

At every step each rank reduces the settings of its param groups to one number, which travels in the collective of the
gradient norm (`zero/grad_reducer.py`). Only where these numbers differ are the groups exchanged, and every rank raises
the same error, before anything is updated.

[Note: numbers that change late] A loop may take the gradient norm, with which the groups are compared, and set a
learning rate afterwards, before `step()`. Settings that an update used without a comparison are compared at the next
step.
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
from zeroaccel.comm.hangs.hang_report import Names, rank_list
from zeroaccel.errors import UsageError

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
    """The text for a value that is neither a string nor a number; shown without quotes."""

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
    # No id() and no default repr anywhere below: addresses differ from rank to rank.
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
        attributes = {item.name: getattr(value, item.name) for item in fields(value)}
        return _with_names(_kind(value), {name: attributes[name] for name in settings(attributes)}, depth)
    if callable(value) and not isinstance(value, torch.nn.Module):
        name = getattr(value, "__qualname__", None)
        if isinstance(name, str):
            return _Text(name)
        attributes = getattr(value, "__dict__", {})
        plain = {
            name: attributes[name]
            for name in settings(attributes)
            if isinstance(attributes[name], (Real, str, tuple, list))
        }
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
    """A canonical value in readable form; equal texts for equal values only."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)


# -- facts


def param_group_facts(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]] | None = None) -> Facts:
    """The settings of all param groups.

    Args:
        names: the settings of each group to include; by default all that do not belong to one rank.
    """
    facts = {}
    for index, group in enumerate(groups):
        for name in settings(group) if names is None or index >= len(names) else names[index]:
            text = _shown(canonical(group[name])) if name in group else _ABSENT
            facts[f"optimizer.param_groups[{index}]['{name}']"] = text
    return facts


def optimizer_facts(optimizer: Optimizer | None) -> Facts:
    """Class, defaults and param groups."""
    if optimizer is None:
        return {"optimizer": "none"}
    facts = {"optimizer": str(_kind(optimizer)), "len(optimizer.param_groups)": str(len(optimizer.param_groups))}
    defaults = getattr(optimizer, "defaults", {})
    facts |= {f"optimizer.defaults['{name}']": _shown(canonical(defaults[name])) for name in settings(defaults)}
    return facts | param_group_facts(optimizer.param_groups)


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
    facts = {where: str(_kind(scheduler))}
    attributes = getattr(scheduler, "__dict__", {})
    for name in sorted(settings(attributes), key=_is_derived):
        value = attributes[name]
        parts = list(_schedulers(value))
        if not parts:
            facts[f"{where}.{name}"] = _shown(canonical(value))
        for place, part in parts:
            facts |= scheduler_facts(part, f"{where}.{name}{place}")
    return facts


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


def require_same(where: str, everyone: Sequence[Mapping[str, str]], names: Names = rank_list) -> None:
    """Raises UsageError at the first difference, as `difference` finds it.

    Args:
        where: the call that compares.
    """
    if (differs := difference(everyone, names)) is not None:
        fix = "make the optimizer and its scheduler from the same settings on every rank"
        raise UsageError(f"{where}: {differs}", expected="one value on all ranks", fix=fix)


def difference(everyone: Sequence[Mapping[str, str]], names: Names = rank_list) -> Difference | None:
    """Where the facts of the ranks differ; None where they do not.

    Args:
        everyone: the facts of each rank, by rank.
        names: puts ranks into words.
    """
    addresses = list(dict.fromkeys(address for facts in everyone for address in facts))
    differing = [address for address in addresses if len({facts.get(address, _ABSENT) for facts in everyone}) > 1]
    if not differing:
        return None
    address = differing[0]
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        ranks.setdefault(facts.get(address, _ABSENT), []).append(rank)
    texts = [f"{_short(value)} on {names(where)}" for value, where in ranks.items()]
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
        self._compared = self._digest = 0
        self._count = -1  # of groups in the digest
        self._used: list[tuple[Any, ...]] = []
        self._late: dict[str, str] = {}
        self._uncompared: dict[str, str] = {}

    def digest(self) -> int:
        """A hash below 2^52 of all settings, which a float64 carries exactly through the collective."""
        if self._collectives.world_size == 1:
            return 0
        self._used = [group.values for group in self._groups]
        self._compared = self._current_digest()
        self._uncompared, self._late = self._late, {}
        return _hashed(f"{self._compared} {self._uncompared}") if self._uncompared else self._compared

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
        """An update uses the settings as they are now. See [Note: numbers that change late]."""
        if self._collectives.world_size > 1 and self._current_digest() != self._compared:
            self._late = self._facts()

    def refuse(self, step: int) -> None:
        """Exchanges the settings and raises at the first difference. (all ranks)

        Args:
            step: the number of the step, from 0.

        Raises:
            UsageError: always; the same on every rank.
        """
        used = [
            dict(zip(group.names, values, strict=True)) for group, values in zip(self._groups, self._used, strict=False)
        ]
        own = _RankSettings(
            self._facts(), self._uncompared or param_group_facts(used, self._names), bool(self._uncompared)
        )
        ranks: list[_RankSettings] = self._collectives.gather_objects(own, "compare param groups")
        named, used_now = self._collectives.named, [rank.used for rank in ranks]
        late = difference(used_now, named) if any(rank.is_late for rank in ranks) else None
        # On an accelerator the difference may be known a step late, when the settings are equal again.
        differs = late or difference([rank.now for rank in ranks], named) or difference(used_now, named)
        assert differs is not None, "param groups with different digests and the same settings"
        when = f"the update in step {step - 1}" if late else f"step {step}"
        scheduled = any(f"['{name}']" in differs.address for name in _SCHEDULED)
        raise UsageError(f"{when}: {differs}", expected="one value on all ranks", fix=_FIX + _METRIC * scheduled)

    def _facts(self) -> dict[str, str]:
        return param_group_facts(self._optimizer.param_groups, self._names)

    def _current_digest(self) -> int:
        """The hash of the settings as they are now; cached, as this runs every step."""
        groups = self._optimizer.param_groups
        while len(self._names) < len(groups):
            self._names.append(settings(groups[len(self._names)]))
            self._groups.append(_Group(self._names[-1]))
        changed = [cached.read(group) for cached, group in zip(self._groups, groups, strict=False)]
        if len(changed) != self._count or any(changed):
            self._count = len(changed)
            self._digest = _hashed("\n".join([cached.text for cached in self._groups[: self._count]]))
        return self._digest


_FIX = "set it from what is the same on every rank"
_METRIC = (
    "; a schedule that follows a loss, such as ReduceLROnPlateau, has to be given the same loss everywhere: "
    'scheduler.step(accelerator.reduce(loss.detach(), "mean")), or zeroaccel.operations.reduce without an Accelerator'
)


@dataclass(frozen=True)
class _RankSettings:
    """The param groups of one rank: now, and as the last update used them; whether that was without a comparison."""

    now: dict[str, str]
    used: dict[str, str]
    is_late: bool


class _Group:
    """The settings of one param group as a text, which is formatted anew only where a setting has changed.

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
        # itemgetter of a single name returns no tuple.
        self._values_of: Callable[[Mapping[str, Any]], Any] = itemgetter(*names) if len(names) > 1 else self._one_by_one
        self._texts = [""] * len(names)
        self._frozen = [False] * len(names)

    def read(self, group: Mapping[str, Any]) -> bool:
        """Reads the values of a group; returns whether the text has changed."""
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
