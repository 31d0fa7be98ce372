"""Learning-rate schedules: the five of DeepSpeed's `scheduler` section, and torch's by name.

The five give the same rates as DeepSpeed 0.19 at every step, so that a migrated run keeps them. Each is a function of
one counter, `n = last_batch_iteration`: -1 at the start, incremented at every `step()`. They write `lr` (and OneCycle
`betas[0]`) into `param_groups` of any object that has them, and change nothing else. Differences from DeepSpeed: a
group with its own learning rate keeps it, beta2 is not written, a warm-up may have 0 steps, and loading a state also
writes its rates.

[Note: first steps of a warm-up] The rate written at creation applies to the first optimizer step, and the warm-up
fraction at n = 0 is still 0. So the first *two* optimizer steps run at `warmup_min_lr`; with the default of 0 they
change nothing. A warm-up of 1 step counts as 2. A warm-up of 0 steps starts at the peak.

[Note: rates of a group's own] A group has its own rate if the program or its config sets one for it, of any value. The
factory of a config's optimizer notes that (`note_written_lrs`), and so does Muon. In other optimizers torch has put the
object `defaults["lr"]` itself into the groups without a rate, so that any other object was written. (Without
`defaults`, a group has its own rate if it differs from the first group's.) A scalar peak applies to the other groups; a
list has one value per group and applies to all. As in torch, the group stores its first rate as `initial_lr`, so that a
second schedule for the same optimizer starts from it and not from the last rate of the first schedule.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from zeroaccel.config.diagnostics import hint
from zeroaccel.config.section import as_integer
from zeroaccel.errors import CheckpointError, ConfigError, UsageError, ZeroAccelError
from zeroaccel.logs import log_once


class ParamGroups(Protocol):
    """The attribute of an optimizer that a schedule needs; it also uses `defaults["lr"]` if present."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Param groups, each with `lr`."""


def address(name: str) -> str:
    """Returns the path of a setting in the config."""
    return f"scheduler.params.{name}"


def number(name: str, value: object, low: float = 0.0, below: float = math.inf) -> float:
    """Checks a setting that must be a finite number in [low, below); returns it."""
    if not isinstance(value, bool) and isinstance(value, Real) and low <= float(value) < below:
        return float(value)
    limit = "" if below == math.inf else f" and less than {below:g}"
    raise ConfigError(address(name), expected=f"a number of at least {low:g}{limit}", got=value)


def integer(name: str, value: object, low: int) -> int:
    """Checks a setting that must be an integer, such as 1e3; returns it."""
    checked = as_integer(value)
    if checked is not None and checked >= low:
        return checked
    raise ConfigError(address(name), expected=f"a whole number of at least {low}", got=value)


def flag(name: str, value: object) -> bool:
    """Checks a setting that must be a boolean; returns it."""
    if isinstance(value, bool):
        return value
    raise ConfigError(address(name), expected="true or false", got=value)


class GroupSchedule(ABC):
    """A schedule as a function of `last_batch_iteration`, which it writes into param groups.

    1. A subclass reads its settings, one value per group.
    2. `_start` sets the counter and writes the first rates.
    3. `step` and `load_state_dict` set the counter and write again.
    """

    def __init__(self, optimizer: ParamGroups) -> None:
        groups = optimizer.param_groups
        if not groups:
            raise UsageError(type(self).__name__, expected="an optimizer with at least one param group", got=groups)
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        default = getattr(optimizer, "defaults", {}).get("lr")
        self._is_own = _written_lrs(optimizer, default)
        _separate(groups, default)
        self._own_lrs = [_first_lr(group) for group in groups]
        self._last_lr: list[float] = []

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Returns the rate of each group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """Returns the last rates written, one per group; the constructor writes the first."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advances by one optimizer step, or to the given one, and writes its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Returns the counter; all other values come from the settings."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the saved counter and writes its rates.

        Raises:
            CheckpointError: the state is not from one of these schedules.
        """
        counter = state_dict.get("last_batch_iteration")
        if not isinstance(counter, int) or counter < -1:
            raise CheckpointError(
                f"state of the lr scheduler {type(self).__name__}",
                expected="last_batch_iteration, a whole number of at least -1",
                got=dict(state_dict),
                fix="resume with the scheduler of the saved run, or without scheduler state",
            )
        self.last_batch_iteration = counter
        self._write()

    def _start(self, last_batch_iteration: object) -> None:
        self.last_batch_iteration = integer("last_batch_iteration", last_batch_iteration, low=-1)
        self._write()

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the current groups; an optimizer that loads its state replaces them."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._own_lrs):
            raise UsageError(
                f"lr scheduler {type(self).__name__}",
                expected=f"the {len(self._own_lrs)} param groups it was created with",
                got=len(groups),
                fix="add param groups before you create the scheduler",
            )
        return groups

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self._groups(), self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # a compiled or captured step refers to this tensor
            else:
                group["lr"] = lr

    # -- one value per group

    def _spread(self, name: str, value: object, check: Callable[[str, object], float] = number) -> list[float]:
        """Returns one checked value per group, from a scalar for all groups or a list."""
        if not isinstance(value, (list, tuple)):
            return [check(name, value)] * len(self._own_lrs)
        if len(value) != len(self._own_lrs):
            raise ConfigError(
                address(name), expected=f"a number, or {len(self._own_lrs)} of them, one per param group", got=value
            )
        return [check(name, item) for item in value]

    def _own_groups(self, name: str, value: object) -> list[int]:
        """Returns the groups whose own rate overrides the setting; none if it is a list with one value per group."""
        if isinstance(value, (list, tuple)):
            return []
        at = [index for index, is_own in enumerate(self._is_own) if is_own]
        shown = ", ".join(f"{index} (lr {self._own_lrs[index]:g})" for index in at if self._own_lrs[index] != value)
        if shown:
            log_once(
                logging.WARNING,
                f"{address(name)} = {value} applies to param groups without their own lr; "
                f"groups with one keep it: {shown}. A list sets one value per group.",
            )
        return at

    def _scaled(self, name: str, values: list[float], indices: list[int], reference: list[float]) -> list[float]:
        """Multiplies the value of each group with its own rate by the ratio of this rate to the reference."""
        for index in indices:
            if reference[index] == 0:
                raise ConfigError(
                    address(name),
                    expected="one value per param group: a rate of 0 gives no scale for groups with their own lr",
                    got=values[index],
                )
            values[index] *= self._own_lrs[index] / reference[index]
        return values


def note_written_lrs(optimizer: Optimizer, written: Sequence[bool]) -> None:
    """Notes on an optimizer which of its groups have a rate of their own; [Note: rates of a group's own]."""
    vars(optimizer)["written_lrs"] = list(written)


def _written_lrs(optimizer: ParamGroups, default: object) -> list[bool]:
    """Returns for each group whether it has its own rate; see [Note: rates of a group's own]."""
    groups = optimizer.param_groups
    noted: list[bool] = list(getattr(optimizer, "written_lrs", ()))
    if not noted and default is None:
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        return [rate != rates[0] for rate in rates]
    # A second schedule, and groups that were added after the note.
    written = noted + [group.get("initial_lr", group["lr"]) is not default for group in groups[len(noted) :]]
    if isinstance(optimizer, Optimizer):
        note_written_lrs(optimizer, written)
    return written


def _written_default(optimizer: ParamGroups) -> float | None:
    """Returns the rate that an argument of the optimizer sets; None for its class's default."""
    rate = getattr(optimizer, "defaults", {}).get("lr")
    usual = inspect.signature(type(optimizer)).parameters.get("lr") if isinstance(optimizer, Optimizer) else None
    return None if rate is None or (usual is not None and usual.default is rate) else float(rate)


def _first_lr(group: dict[str, Any]) -> float:
    """Returns the group's rate before any schedule, stored in the group. See [Note: rates of a group's own]."""
    return float(group.setdefault("initial_lr", float(group["lr"])))


def _separate(groups: list[dict[str, Any]], default: object) -> None:
    """Gives each group its own rate tensor, because in torch all groups and `defaults` may share one."""
    seen = {id(default)}
    for group in groups:
        if isinstance(group["lr"], Tensor) and id(group["lr"]) in seen:
            group["lr"] = group["lr"].clone()
        seen.add(id(group["lr"]))


# -- the five native schedules


@dataclass(frozen=True)
class _WarmUp:
    """A fraction that rises from 0 at the first steps to 1 after `num_steps`; [Note: first steps of a warm-up]."""

    num_steps: int
    linear: bool

    @staticmethod
    def of(num_steps: object, kind: object) -> _WarmUp:
        """Creates a warm-up from `warmup_num_steps` and `warmup_type`."""
        if kind not in ("log", "linear"):
            raise ConfigError(address("warmup_type"), expected='"log" or "linear"', got=kind)
        steps = integer("warmup_num_steps", num_steps, low=0)
        return _WarmUp(2 if steps == 1 else steps, kind == "linear")

    def covers(self, n: int) -> bool:
        return self.num_steps > 0 and n < self.num_steps

    def fraction(self, n: int) -> float:
        """Returns ln(n + 1) / ln(N) or n / N, for an n that the warm-up covers."""
        if n < 0:
            return 0.0
        return n / self.num_steps if self.linear else 1.0 / math.log(self.num_steps) * math.log(n + 1)

    def total(self, total_num_steps: object) -> int:
        """Checks `total_num_steps`, which includes the warm-up; returns it."""
        total = integer("total_num_steps", total_num_steps, low=1)
        if total < self.num_steps:
            log_once(
                logging.WARNING,
                f"{address('total_num_steps')} = {total} is less than warmup_num_steps = {self.num_steps}: "
                "the peak is never reached",
            )
        return total


class WarmupLR(GroupSchedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps; then it is constant.

    ``min + (max - min) * f`` with f = ln(n + 1) / ln(N) ("log") or n / N ("linear") for n < N, then 1.

    Args:
        optimizer: has `param_groups`.
        warmup_min_lr: start, a number or one per group.
        warmup_max_lr: peak, a number or one per group; None uses each group's lr. A number does not apply to groups
            with their own lr.
        warmup_num_steps: N; 0 starts at the peak, and 1 counts as 2.
        warmup_type: "log" or "linear".
        last_batch_iteration: first value of n; -1 is the start.

    Raises:
        ConfigError: a value has the wrong type or range, or a list has not one value per group.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
        >>> rates = []
        >>> for _ in range(5):
        ...     schedule.step()
        ...     rates.append(round(schedule.get_last_lr()[0], 3))
        >>> rates
        [0.0, 0.025, 0.05, 0.075, 0.1]
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self._warm_up = _WarmUp.of(warmup_num_steps, warmup_type)
        self._min_lrs = self._spread("warmup_min_lr", warmup_min_lr)
        self._max_lrs = list(self._own_lrs)
        if warmup_max_lr is not None:
            self._max_lrs = self._spread("warmup_max_lr", warmup_max_lr)
            for index in self._own_groups("warmup_max_lr", warmup_max_lr):
                self._max_lrs[index] = self._own_lrs[index]
        self._start(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Returns the rate of each group at `last_batch_iteration`."""
        n = self.last_batch_iteration
        fraction = self._warm_up.fraction(n) if self._warm_up.covers(n) else self._after(n)
        return [low + (high - low) * fraction for low, high in zip(self._min_lrs, self._max_lrs, strict=True)]

    def _after(self, n: int) -> float:
        """Returns the fraction between min and max after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linear decay to `warmup_min_lr` at `total_num_steps`.

    After the warm-up ``f = max(0, (T - n) / max(1, T - N))``.

    Args:
        optimizer, warmup_min_lr, warmup_num_steps, warmup_type, last_batch_iteration: see `WarmupLR`.
        total_num_steps: T, number of steps of the run.
        warmup_max_lr: see `WarmupLR`; the default is 0.001.

    Raises:
        ConfigError: see `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = _WarmUp.of(warmup_num_steps, warmup_type).total(total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self, n: int) -> float:
        # n is -1 here only without a warm-up: this is the first step, at the peak, as at n = 0.
        return max(0.0, (self._total - max(n, 0)) / max(1, self._total - self._warm_up.num_steps))


class WarmupCosineLR(GroupSchedule):
    """Each group's lr times a ratio: from `warmup_min_ratio` up to 1, then by half a cosine down to `cos_min_ratio`.

    The ratio is 0 at n = -1, ``min + (1 - min) * f`` during the warm-up (f as in `WarmupLR`), and then
    ``c + (1 - c) * (1 + cos(pi * p)) / 2`` with ``p = min(1, (n - N + 1) / max(1, T - N))`` and c = `cos_min_ratio`.

    Args:
        optimizer, warmup_num_steps, warmup_type, last_batch_iteration: see `WarmupLR`.
        total_num_steps: T, number of steps of the run.
        warmup_min_ratio: ratio at n = 0.
        cos_min_ratio: ratio at the end.

    Raises:
        ConfigError: a value has the wrong type or range.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self._warm_up = _WarmUp.of(warmup_num_steps, warmup_type)
        self._total = self._warm_up.total(total_num_steps)
        self._min_ratio = number("warmup_min_ratio", warmup_min_ratio)
        self._end_ratio = number("cos_min_ratio", cos_min_ratio)
        self._start(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Returns the rate of each group at `last_batch_iteration`."""
        ratio = self._ratio(self.last_batch_iteration)
        return [lr * ratio for lr in self._own_lrs]

    def _ratio(self, n: int) -> float:
        if self._warm_up.covers(n):
            return 0.0 if n < 0 else self._min_ratio + (1.0 - self._min_ratio) * self._warm_up.fraction(n)
        num_steps = self._warm_up.num_steps
        progress = min(1.0, (n - num_steps + 1) / max(1, self._total - num_steps))
        return self._end_ratio + (1.0 - self._end_ratio) * (1.0 + math.cos(math.pi * progress)) / 2


def _momentum(name: str, value: object) -> float:
    return number(name, value, below=1.0)


class OneCycle(GroupSchedule):
    """One triangular cycle of the rate, with beta1 in the opposite direction, then a slow decay (arXiv:1803.09820).

    With b = n + 1 and halves of F and S steps, the height is b / F in the first half and (F + S - b) / S in the second;
    ``lr = min + (max - min) * height`` and ``beta1 = max_mom - (max_mom - min_mom) * height``. After the cycle, with
    ``k = (n - F - S + 1) / decay_step_size``: ``lr = min / (1 + decay_lr_rate * k)`` and
    ``beta1 = max_mom * (1 + decay_mom_rate * k)``. The first optimizer step runs at `cycle_min_mom`, as in DeepSpeed.

    Args:
        optimizer: has `param_groups`; without `betas` in them, the momentum does not change.
        cycle_min_lr, cycle_max_lr: minimum and peak, a number or one per group. If the peak is a number, groups with
            their own lr keep it as their peak, with a proportional minimum.
        decay_lr_rate, decay_mom_rate: speed of the decay.
        cycle_first_step_size, cycle_second_step_size: F and S; None sets S to F.
        cycle_first_stair_count, cycle_second_stair_count: stairs in each half; 0 for a slope. None repeats the first.
        decay_step_size: steps per unit of decay; 0 for no decay.
        cycle_momentum: True to change beta1 in the cycle. beta2 never changes.
        cycle_min_mom, cycle_max_mom: range of beta1, a number or one per group.
        last_batch_iteration: first value of n; -1 is the start.

    Raises:
        ConfigError: a value has the wrong type or range; or beta1 reaches 1 at a step.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        self._first = number("cycle_first_step_size", cycle_first_step_size)
        if self._first == 0:
            raise ConfigError(address("cycle_first_step_size"), expected="a number above 0", got=cycle_first_step_size)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self._second = number("cycle_second_step_size", second)
        self._first_stairs = integer("cycle_first_stair_count", cycle_first_stair_count, low=0)
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._second_stairs = integer("cycle_second_stair_count", stairs, low=0)
        self._decay_steps = number("decay_step_size", decay_step_size)
        self._decay_lr_rate = number("decay_lr_rate", decay_lr_rate)
        self._decay_mom_rate = number("decay_mom_rate", decay_mom_rate)
        self._max_lrs = self._spread("cycle_max_lr", cycle_max_lr)
        self._min_lrs = self._spread("cycle_min_lr", cycle_min_lr)
        # A group with its own rate keeps it as its peak, and its minimum is scaled by the same factor.
        indices = self._own_groups("cycle_max_lr", cycle_max_lr)
        if not isinstance(cycle_min_lr, (list, tuple)):
            self._min_lrs = self._scaled("cycle_min_lr", self._min_lrs, indices, self._max_lrs)
        for index in indices:
            self._max_lrs[index] = self._own_lrs[index]
        self._min_moms = self._spread("cycle_min_mom", cycle_min_mom, _momentum)
        self._max_moms = self._spread("cycle_max_mom", cycle_max_mom, _momentum)
        self._cycles_momentum = flag("cycle_momentum", cycle_momentum)
        if self._cycles_momentum and not any("betas" in group for group in optimizer.param_groups):
            self._cycles_momentum = False
            log_once(logging.WARNING, "OneCycle: cycle_momentum has no effect, because the optimizer has no betas")
        self._start(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Returns the rate of each group at `last_batch_iteration`."""
        n = self.last_batch_iteration
        if n < self._first + self._second:
            height = self._height(n + 1)
            return [low + (high - low) * height for low, high in zip(self._min_lrs, self._max_lrs, strict=True)]
        return [low / (1.0 + self._decay_lr_rate * self._decay(n)) for low in self._min_lrs]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Returns the betas of each group at `last_batch_iteration`; None if the momentum does not change.

        Before the first `step()` it returns `cycle_max_mom`, while the groups have `cycle_min_mom`, as in DeepSpeed.
        """
        if not self._cycles_momentum:
            return None
        pairs = zip(self._groups(), self._beta1s(), strict=True)
        return [(beta1, *group.get("betas", ())[1:]) for group, beta1 in pairs]

    def _beta1s(self) -> list[float]:
        n = self.last_batch_iteration
        if n < self._first + self._second:
            height = self._height(n + 1)
            return [high - (high - low) * height for low, high in zip(self._min_moms, self._max_moms, strict=True)]
        return [high * (1.0 + self._decay_mom_rate * self._decay(n)) for high in self._max_moms]

    def _height(self, b: int) -> float:
        """Returns the height in the cycle, 0 at the minimum and 1 at the peak."""
        at = b % (self._first + self._second)
        rising = at <= self._first
        remaining = at if rising else self._first + self._second - at
        size, stairs = (self._first, self._first_stairs) if rising else (self._second, self._second_stairs)
        return math.floor(remaining * stairs / size) / stairs if stairs else remaining / size

    def _decay(self, n: int) -> float:
        return (n - self._first - self._second + 1) / self._decay_steps if self._decay_steps else 0.0

    def _write(self) -> None:
        super()._write()
        if not self._cycles_momentum:
            return
        beta1s = self._min_moms if self.last_batch_iteration < 0 else self._beta1s()
        for group, beta1 in zip(self._groups(), beta1s, strict=True):
            if beta1 >= 1:
                raise ConfigError(
                    address("decay_mom_rate"),
                    expected="a rate that keeps beta1 below 1",
                    got=f"{beta1:g} at step {self.last_batch_iteration + 1}",
                    fix="lower it, or raise decay_step_size",
                )
            if "betas" in group:
                group["betas"] = (beta1, *group["betas"][1:])


class LRRangeTest(GroupSchedule):
    """A rate that grows without limit, to find the largest usable one (arXiv:1803.09820).

    ``min * (1 + rate * (n + 1) / size)``, with the fraction rounded down if `lr_range_test_staircase` is set.

    Args:
        optimizer: has `param_groups`.
        lr_range_test_min_lr: start, a number or one per group. A number applies to groups without their own lr. For a
            group with its own, it is scaled by the ratio to the optimizer's lr, or if that is its class's default, the
            group starts at its own.
        lr_range_test_step_size: number of steps in which the rate grows by `lr_range_test_step_rate` times the start.
        lr_range_test_step_rate: see above.
        lr_range_test_staircase: grow once per `lr_range_test_step_size` steps.
        last_batch_iteration: first value of n; -1 is the start.

    Raises:
        ConfigError: a value has the wrong type or range, or a list has not one value per group.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer)
        name = "lr_range_test_min_lr"
        indices = self._own_groups(name, lr_range_test_min_lr)
        self._min_lrs = self._spread(name, lr_range_test_min_lr)
        default = _written_default(optimizer)
        if default is not None:
            self._min_lrs = self._scaled(name, self._min_lrs, indices, [default] * len(self._own_lrs))
        else:
            for index in indices:
                self._min_lrs[index] = self._own_lrs[index]
        self._size = integer("lr_range_test_step_size", lr_range_test_step_size, low=1)
        self._rate = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self._staircase = flag("lr_range_test_staircase", lr_range_test_staircase)
        self._start(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Returns the rate of each group at `last_batch_iteration`."""
        grown = (self.last_batch_iteration + 1) / self._size
        factor = 1.0 + self._rate * (math.floor(grown) if self._staircase else grown)
        return [low * factor for low in self._min_lrs]


# -- by name

Schedule = GroupSchedule | lr_scheduler.LRScheduler
_OWN: Mapping[str, Callable[..., Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
_TORCH: Mapping[str, Callable[..., Schedule]] = {
    name: kind
    for name, kind in vars(lr_scheduler).items()
    if inspect.isclass(kind)
    and issubclass(kind, lr_scheduler.LRScheduler)
    and kind is not lr_scheduler.LRScheduler
    and not name.startswith("_")
}
_REFUSED = {
    "ReduceLROnPlateau": "it needs a metric at each step, which the engine does not have; step it in the training loop"
}

VALID_LR_SCHEDULES: list[str] = list(_OWN)
"""Names of the native schedules."""


def build_scheduler(type: str, params: Mapping[str, Any], optimizer: ParamGroups) -> Schedule:
    """Creates the scheduler of a config's `scheduler` section.

    Args:
        type: one of `VALID_LR_SCHEDULES`, or the exact name of a class of `torch.optim.lr_scheduler`.
        params: its arguments without the optimizer.
        optimizer: any object with `param_groups`; for torch's schedulers a `torch.optim.Optimizer`.

    Raises:
        ConfigError: the type is unknown, or an argument is unknown, missing or wrong.
        UsageError: torch's schedulers need a torch optimizer.
    """
    kind = _OWN.get(type) or _TORCH.get(type)
    if kind is None or type in _REFUSED:
        raise _unknown(type)
    if type in _TORCH and not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"scheduler.type {type}",
            expected="a torch.optim.Optimizer to schedule",
            got=optimizer,
            fix=f"use one of {', '.join(VALID_LR_SCHEDULES)}, which support any object with param_groups",
        )
    _check_arguments(type, kind, params)
    try:
        return kind(optimizer=optimizer, **params)
    except ZeroAccelError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # from torch's constructors
        raise ConfigError(f"scheduler.params of {type}: {error}") from error


def _unknown(name: str) -> ConfigError:
    if name in _REFUSED:
        return ConfigError(f"scheduler.type {name} is not supported: {_REFUSED[name]}")
    names = [*_OWN, *(kind for kind in _TORCH if kind not in _REFUSED)]
    fix = hint(name, names, f"choose one of {', '.join(names)}", shown=repr)
    return ConfigError("scheduler.type", expected="a known scheduler", got=name, fix=fix)


def _check_arguments(name: str, kind: Callable[..., Schedule], params: Mapping[str, Any]) -> None:
    signature = inspect.signature(kind).parameters
    allowed = {key: parameter for key, parameter in signature.items() if key != "optimizer"}
    for key in params:
        if key not in allowed:
            fix = hint(key, allowed, f"it takes {', '.join(allowed)}", shown=repr)
            raise ConfigError(address(key), expected=f"an argument of {name}", got=params[key], fix=fix)
    for key, parameter in allowed.items():
        if parameter.default is parameter.empty and key not in params:
            raise ConfigError(address(key), expected=f"a value, which {name} requires")
