"""What an optimizer and a scheduler go by, as lines of text that ranks can compare, and what to say where they differ.

A fact is an address and a text: `optimizer.param_groups[0]['lr']` and `0.1`. Equal settings have equal texts on every
rank: 0 and 0.0, two NaNs, a tensor and its value. Of what has no text of its own only the type is told, and functions
go by their names. Left out is what belongs to one rank: its shards of parameters, its number, who prints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from numbers import Complex, Real
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroaccel.comm.hangs.hang_report import rank_list

__all__ = [
    "SAME_OPTIMIZER",
    "Difference",
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
