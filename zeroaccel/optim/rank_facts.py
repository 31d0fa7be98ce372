"""Compares optimizers and schedulers across ranks: as text at the start, as a digest at every step.

A fact is an address and a text: `optimizer.param_groups[0]['lr']` and `0.1`. Equal settings have equal texts on every
rank: 0 and 0.0, two NaNs, a tensor and its value. A value without a stable text is represented by its type, a function
by its name. Facts exclude settings of a single rank: its shards of parameters, its number, which rank prints.

At every step each rank reduces the settings of its param groups to one number, and the collective of the gradient norm
(`zero/grad_norm.py`) compares these numbers. Only if they differ, the ranks exchange the groups, and every rank
raises the same error before any update.

[Note: numbers that change late] A loop may compute the gradient norm, which compares the groups, and then set a
learning rate before `step()`. The next step compares the settings that such an update used without a comparison.
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

_MOST_NUMEL = 16  # maximum number of elements of a tensor whose values are compared
_MOST_DEPTH = 6
_MOST_VALUES = 8  # maximum number of different values in a message
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
    """The text of a value that is neither a string nor a number; shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def settings(group: Mapping[str, Any]) -> list[str]:
    """Returns the sorted names of a param group's entries, or of attributes, that must be equal on every rank."""
    return sorted(name for name in group if isinstance(name, str) and name not in _OF_ONE_RANK)


def canonical(value: Any, depth: int = 0) -> Any:
    """Converts a setting to strings, floats, booleans, None or tuples; two settings are equal if their `repr` is.

    Numbers become floats, except integers that no float equals. A tensor becomes its values, or its dtype and shape if
    it has more than 16 elements or is trained.
    """
    kind = type(value)
    if kind is float:  # the most common types first, because this runs in every step
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
        # A trained tensor is a parameter and not a setting: its values may differ between ranks.
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
    """Converts a value that is neither a number, a string nor a container."""
    # Uses neither id() nor the default repr: addresses differ from rank to rank.
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
    """Returns a text such as `head(0.5, total=100)`."""
    parts = sorted(f"{name}={_shown(canonical(item, depth + 1))}" for name, item in named.items())
    return _Text(f"{head}({', '.join([*args, *parts])})")


def _kind(value: object) -> _Text:
    return _qualified(type(value))


def _qualified(kind: type) -> _Text:
    # For a script's own classes: the module's name differs in a process that another process has started.
    return _Text(kind.__qualname__ if kind.__module__ in _SCRIPTS else f"{kind.__module__}.{kind.__qualname__}")


def _shown(value: Any) -> str:
    """Returns a canonical value in readable form; different values have different texts."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)


# -- facts


def param_group_facts(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]] | None = None) -> Facts:
    """Returns the settings of all param groups.

    Args:
        names: settings of each group to include; default: all except those of a single rank.
    """
    facts = {}
    for index, group in enumerate(groups):
        for name in settings(group) if names is None or index >= len(names) else names[index]:
            text = _shown(canonical(group[name])) if name in group else _ABSENT
            facts[f"optimizer.param_groups[{index}]['{name}']"] = text
    return facts


def optimizer_facts(optimizer: Optimizer | None) -> Facts:
    """Returns class, defaults and param groups of an optimizer."""
    if optimizer is None:
        return {"optimizer": "none"}
    facts = {"optimizer": str(_kind(optimizer)), "len(optimizer.param_groups)": str(len(optimizer.param_groups))}
    defaults = getattr(optimizer, "defaults", {})
    facts |= {f"optimizer.defaults['{name}']": _shown(canonical(defaults[name])) for name in settings(defaults)}
    return facts | param_group_facts(optimizer.param_groups)


def training_facts(optimizer: Optimizer | None, scheduler: Any) -> Facts:
    """Returns the facts of both: classes, then arguments, then values that a scheduler writes or derives."""
    optimizers, schedulers = optimizer_facts(optimizer), scheduler_facts(scheduler)
    classes = {"optimizer": optimizers["optimizer"], "lr_scheduler": schedulers["lr_scheduler"]}
    defaults = {address: text for address, text in optimizers.items() if ".param_groups" not in address}
    arguments = {address: text for address, text in schedulers.items() if not _is_derived(address)}
    return classes | defaults | arguments | optimizers | schedulers


def _is_derived(address: str) -> bool:
    """Returns True if a scheduler derives the attribute from its arguments and the groups' rates."""
    name = address.rpartition(".")[2]
    return name == "base_lrs" or (name.startswith("_") and "lr" in name)


def scheduler_facts(scheduler: Any, where: str = "lr_scheduler") -> Facts:
    """Returns class and attributes of a scheduler, and of its inner schedulers."""
    if scheduler is None:
        return {where: "none"}
    facts = {where: str(_kind(scheduler))}
    attributes = getattr(scheduler, "__dict__", {})
    for name in sorted(settings(attributes), key=_is_derived):
        value = attributes[name]
        parts = list(_schedulers(value))
        if not parts:
            facts[f"{where}.{name}"] = _shown(canonical(value))
        for place, child in parts:
            facts |= scheduler_facts(child, f"{where}.{name}{place}")
    return facts


def _schedulers(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the schedulers in an attribute, each with its index."""
    items = enumerate(value) if isinstance(value, (list, tuple)) else [("", value)]
    for index, item in items:
        if hasattr(item, "step") and hasattr(item, "state_dict") and not isinstance(item, (type, Optimizer)):
            yield f"[{index}]" if index != "" else "", item


# -- differences


@dataclass(frozen=True)
class Difference:
    """The first fact that differs between ranks.

    Attributes:
        address: address of the fact.
        values: its values, such as "0.1 on ranks 0, 2 and 0.05 on rank 1".
        others: number of other facts that differ.
    """

    address: str
    values: str
    others: int

    def __str__(self) -> str:
        others = f" ({self.others} more {'setting differs' if self.others == 1 else 'settings differ'})"
        return f"{self.address} is {self.values}" + (others if self.others else "")


def require_same(where: str, everyone: Sequence[Mapping[str, str]], names: Names = rank_list) -> None:
    """Raises UsageError at the first difference that `difference` finds.

    Args:
        where: name of the call that compares, for the message.
    """
    if (differs := difference(everyone, names)) is not None:
        fix = "create the optimizer and its scheduler with the same settings on every rank"
        raise UsageError(f"{where}: {differs}", expected="one value on all ranks", fix=fix)


def difference(everyone: Sequence[Mapping[str, str]], names: Names = rank_list) -> Difference | None:
    """Returns the first difference between the ranks' facts, or None.

    Args:
        everyone: facts of each rank, by rank.
        names: converts ranks to text.
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
    """Returns a text such as ` of the group 'decay'` if the address is in a param group with a name, else ""."""
    group, bracket, name = address.rpartition("['")
    named = facts.get(f"{group}['name']", "None") if bracket and name != "name']" else "None"
    return "" if named in ("None", _ABSENT) else f" of the group {named}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


_FROZEN = frozenset({float, int, bool, str, type(None)})
_SCHEDULED = ("lr", "betas", "momentum", "weight_decay")


class HyperparameterCheck:
    """Compares an optimizer's param groups with those of the other ranks.

    Each step: 1. the caller compares `digest` in its own collective; 2. if it differs, all ranks call `refuse`;
    3. `note_update`, if the update runs later than the comparison.

    The check compares the settings that the groups had at its creation, and so ignores a counter that an optimizer adds
    later only to groups with elements on this rank. With one process it does nothing.

    Args:
        collectives: collectives over the ranks that must agree.
    """

    def __init__(self, optimizer: Optimizer, collectives: Collectives) -> None:
        self._optimizer = optimizer
        self._collectives = collectives
        self._names = [settings(group) for group in optimizer.param_groups]
        self._groups = [_Group(names) for names in self._names]
        self._compared = self._digest = 0
        self._count = -1  # number of groups in the digest
        self._used: list[tuple[Any, ...]] = []
        self._late: dict[str, str] = {}
        self._uncompared: dict[str, str] = {}

    def digest(self) -> int:
        """Returns a hash of all settings below 2^52, which float64, the collective's dtype, represents exactly."""
        if self._collectives.world_size == 1:
            return 0
        self._used = [group.values for group in self._groups]
        self._compared = self._current_digest()
        self._uncompared, self._late = self._late, {}
        return _hashed(f"{self._compared} {self._uncompared}") if self._uncompared else self._compared

    def note_update(self) -> None:
        """Records the current settings, which an update uses. See [Note: numbers that change late]."""
        if self._collectives.world_size > 1 and self._current_digest() != self._compared:
            self._late = self._facts()

    def refuse(self, step: int) -> None:
        """Exchanges the settings and raises at the first difference. (all ranks)

        Args:
            step: number of the step, starting with 0.

        Raises:
            UsageError: always, the same on every rank.
        """
        used = [
            dict(zip(group.names, values, strict=True)) for group, values in zip(self._groups, self._used, strict=False)
        ]
        settings = _RankSettings(
            self._facts(), self._uncompared or param_group_facts(used, self._names), bool(self._uncompared)
        )
        ranks: list[_RankSettings] = self._collectives.gather_objects(settings, "compare param groups")
        named, used_now = self._collectives.named, [rank.used for rank in ranks]
        late = difference(used_now, named) if any(rank.is_late for rank in ranks) else None
        # On an accelerator the host may detect the difference a step late, when the settings are equal again.
        differs = late or difference([rank.now for rank in ranks], named) or difference(used_now, named)
        assert differs is not None, "param groups have different digests but the same settings"
        when = f"the update in step {step - 1}" if late else f"step {step}"
        scheduled = any(f"['{name}']" in differs.address for name in _SCHEDULED)
        raise UsageError(f"{when}: {differs}", expected="one value on all ranks", fix=_FIX + _METRIC * scheduled)

    def _facts(self) -> dict[str, str]:
        return param_group_facts(self._optimizer.param_groups, self._names)

    def _current_digest(self) -> int:
        """Returns the hash of the current settings; cached, because this runs at every step."""
        groups = self._optimizer.param_groups
        while len(self._names) < len(groups):
            self._names.append(settings(groups[len(self._names)]))
            self._groups.append(_Group(self._names[-1]))
        changed = [cached.read(group) for cached, group in zip(self._groups, groups, strict=False)]
        if len(changed) != self._count or any(changed):
            self._count = len(changed)
            self._digest = _hashed("\n".join([cached.text for cached in self._groups[: self._count]]))
        return self._digest


_FIX = "set it from values that are equal on every rank"
_METRIC = (
    "; a schedule that follows a loss, such as ReduceLROnPlateau, needs the same loss on every rank: "
    'scheduler.step(accelerator.reduce(loss.detach(), "mean")), or zeroaccel.operations.reduce without an Accelerator'
)


@dataclass(frozen=True)
class _RankSettings:
    """One rank's current param groups, those that the last update used, and if this was without a comparison."""

    now: dict[str, str]
    used: dict[str, str]
    is_late: bool


class _Group:
    """The settings of one param group as a text; only changed settings are formatted again.

    Values of immutable types are compared by identity: a schedule writes new objects.

    Attributes:
        names: names of the settings.
        values: their values in the group at the last read.
        text: text of the values.
    """

    __slots__ = ("_frozen", "_texts", "_values_of", "names", "text", "values")

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.text = ""
        self.values: tuple[Any, ...] = (_Group,) * len(names)
        # itemgetter with a single name does not return a tuple.
        self._values_of: Callable[[Mapping[str, Any]], Any] = itemgetter(*names) if len(names) > 1 else self._one_by_one
        self._texts = [""] * len(names)
        self._frozen = [False] * len(names)

    def read(self, group: Mapping[str, Any]) -> bool:
        """Reads the values of a group; returns True if the text has changed."""
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
