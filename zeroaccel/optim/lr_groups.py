"""One learning rate per param group: read from settings, written into the groups, moved on by one counter.

The ground under `lr_schedules`, whose classes say what the rate is at each step; this module knows no formula. It
checks the values of `scheduler.params`, decides which groups a scalar is for, and alone writes `lr`.

[Note: rates of a group's own] A group whose rate differs from `optimizer.defaults["lr"]` has one of its own (without
`defaults`, the first group's rate stands for it). A scalar peak applies to the other groups; a list has one value per
group and applies to all. As in torch, the rate a group had first is kept in it as `initial_lr`, so that a second
schedule over the same optimizer starts from that and not from wherever the first one left it.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Protocol

from torch import Tensor

from zeroaccel.errors import CheckpointError, ConfigError, UsageError
from zeroaccel.logs import log_once

__all__ = ["GroupSchedule", "ParamGroups", "address", "flag", "number", "whole"]


class ParamGroups(Protocol):
    """What a schedule needs of an optimizer; `defaults["lr"]` is used where there is one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups; each has `lr`."""


def address(name: str) -> str:
    """Where a setting stands in the config."""
    return f"scheduler.params.{name}"


def number(name: str, value: object, low: float = 0.0, below: float = math.inf) -> float:
    """A finite number in [low, below)."""
    if not isinstance(value, bool) and isinstance(value, Real) and low <= float(value) < below:
        return float(value)
    limit = "" if below == math.inf else f" and less than {below:g}"
    raise ConfigError(address(name), expected=f"a number of at least {low:g}{limit}", got=value)


def whole(name: str, value: object, low: int) -> int:
    """A whole number; 1e3 is one."""
    if not isinstance(value, bool) and isinstance(value, Real) and float(value).is_integer() and float(value) >= low:
        return int(float(value))
    raise ConfigError(address(name), expected=f"a whole number of at least {low}", got=value)


def flag(name: str, value: object) -> bool:
    """True or false, and nothing that merely counts as one."""
    if isinstance(value, bool):
        return value
    raise ConfigError(address(name), expected="true or false", got=value)


class GroupSchedule(ABC):
    """A function of `last_batch_iteration` that is written into param groups.

    1. A subclass reads its settings, one value per group.
    2. `_start` sets the counter and writes the first rates.
    3. `step` and `load_state_dict` move the counter and write again.
    """

    def __init__(self, optimizer: ParamGroups) -> None:
        groups = optimizer.param_groups
        if not groups:
            raise UsageError(type(self).__name__, expected="an optimizer with at least one param group", got=groups)
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        default = getattr(optimizer, "defaults", {}).get("lr")
        _separate(groups, default)
        self._own_lrs = [_first_lr(group) for group in groups]
        self._default_lr = self._own_lrs[0] if default is None else float(default)
        self._last_lr: list[float] = []

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """The rates last written, one per group; from the start on, as the first are written then."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Moves on by one optimizer step, or to a given one, and writes its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The counter; everything else comes from the settings."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes at the saved counter and writes the rates that belong to it.

        Raises:
            CheckpointError: the state is not one of these schedules'.
        """
        counter = state_dict.get("last_batch_iteration")
        if not isinstance(counter, int) or counter < -1:
            raise CheckpointError(
                f"state of the lr scheduler {type(self).__name__}",
                expected="last_batch_iteration, a whole number of at least -1",
                got=dict(state_dict),
                fix="resume with the scheduler that was saved, or without scheduler state",
            )
        self.last_batch_iteration = counter
        self._write()

    def _start(self, last_batch_iteration: object) -> None:
        self.last_batch_iteration = whole("last_batch_iteration", last_batch_iteration, low=-1)
        self._write()

    def _groups(self) -> list[dict[str, Any]]:
        """The groups as they are now: an optimizer that loads its state replaces them."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._own_lrs):
            raise UsageError(
                f"lr scheduler {type(self).__name__}",
                expected=f"the {len(self._own_lrs)} param groups it was made for",
                got=len(groups),
                fix="add param groups before the scheduler is made",
            )
        return groups

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self._groups(), self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # a compiled or captured step holds this very tensor
            else:
                group["lr"] = lr

    # -- one value per group

    def _spread(self, name: str, value: object, check: Callable[[str, object], float] = number) -> list[float]:
        """A scalar for every group, or a list with one value each."""
        if not isinstance(value, (list, tuple)):
            return [check(name, value)] * len(self._own_lrs)
        if len(value) != len(self._own_lrs):
            raise ConfigError(
                address(name), expected=f"a number, or {len(self._own_lrs)} of them, one per param group", got=value
            )
        return [check(name, item) for item in value]

    def _own_groups(self, name: str, value: object) -> list[int]:
        """The groups whose own rate stands against the setting; none where it gives one value per group."""
        if isinstance(value, (list, tuple)):
            return []
        own = [index for index, lr in enumerate(self._own_lrs) if lr != self._default_lr]
        if own:
            shown = ", ".join(f"{index} (lr {self._own_lrs[index]:g})" for index in own)
            log_once(
                logging.WARNING,
                f"{address(name)} = {value} is for param groups with the optimizer's lr of {self._default_lr:g}; "
                f"groups with their own keep it: {shown}. A list sets one value per group.",
            )
        return own

    def _scaled(self, name: str, values: list[float], own: list[int], reference: list[float]) -> list[float]:
        """`values`, where a group with its own rate gets as much less or more as its rate is of the reference."""
        for index in own:
            if reference[index] == 0:
                raise ConfigError(
                    address(name),
                    expected="one value per param group, as a rate of 0 gives no scale for groups with their own lr",
                    got=values[index],
                )
            values[index] *= self._own_lrs[index] / reference[index]
        return values


def _first_lr(group: dict[str, Any]) -> float:
    """The rate the group had before any schedule, kept in the group. See [Note: rates of a group's own]."""
    return float(group.setdefault("initial_lr", float(group["lr"])))


def _separate(groups: list[dict[str, Any]], default: object) -> None:
    """Gives each group a rate tensor of its own: torch lets all groups and `defaults` share one."""
    taken = {id(default)}
    for group in groups:
        if isinstance(group["lr"], Tensor) and id(group["lr"]) in taken:
            group["lr"] = group["lr"].clone()
        taken.add(id(group["lr"]))
