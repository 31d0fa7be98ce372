"""Learning-rate schedules: the five of DeepSpeed's `scheduler` section, and torch's by name.

The five give, step for step, the rates that DeepSpeed 0.19 gives, so that a migrated run keeps them. Each is a function
of one counter, `n = last_batch_iteration`: -1 when made, one more at every `step()`. They write `lr` (and OneCycle
`betas[0]`) into `param_groups`, of any object that has them, and touch nothing else. Differences from DeepSpeed: a
group with a learning rate of its own keeps it, beta2 is not written, a warm-up may have 0 steps, and loading a state
also writes its rates.

[Note: first steps of a warm-up] The rate written when the schedule is made serves the first optimizer step, and the
warm-up fraction at n = 0 is still 0. So the first *two* optimizer steps run at `warmup_min_lr`; with the default of 0
they change nothing. A warm-up of 1 step counts as 2. A warm-up of 0 steps has neither rule: it is at the peak at once.

[Note: rates of a group's own] A group whose rate differs from `optimizer.defaults["lr"]` has one of its own (without
`defaults`, the first group's rate stands for it). A scalar peak applies to the other groups; a list has one value per
group and applies to all. As in torch, the rate a group had first is kept in it as `initial_lr`, so that a second
schedule over the same optimizer starts from that and not from where the first one stopped.
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


def integer(name: str, value: object, low: int) -> int:
    """An integer; 1e3 is one."""
    checked = as_integer(value)
    if checked is not None and checked >= low:
        return checked
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
        self.last_batch_iteration = integer("last_batch_iteration", last_batch_iteration, low=-1)
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
    seen = {id(default)}
    for group in groups:
        if isinstance(group["lr"], Tensor) and id(group["lr"]) in seen:
            group["lr"] = group["lr"].clone()
        seen.add(id(group["lr"]))


# -- the five


@dataclass(frozen=True)
class _WarmUp:
    """The way from 0 at the first steps to 1 after `num_steps`. See [Note: first steps of a warm-up]."""

    num_steps: int
    linear: bool

    @staticmethod
    def of(num_steps: object, kind: object) -> _WarmUp:
        """From `warmup_num_steps` and `warmup_type`."""
        if kind not in ("log", "linear"):
            raise ConfigError(address("warmup_type"), expected='"log" or "linear"', got=kind)
        steps = integer("warmup_num_steps", num_steps, low=0)
        return _WarmUp(2 if steps == 1 else steps, kind == "linear")

    def covers(self, n: int) -> bool:
        return self.num_steps > 0 and n < self.num_steps

    def fraction(self, n: int) -> float:
        """ln(n + 1) / ln(N) or n / N, where the warm-up covers n."""
        if n < 0:
            return 0.0
        return n / self.num_steps if self.linear else 1.0 / math.log(self.num_steps) * math.log(n + 1)

    def total(self, total_num_steps: object) -> int:
        """Checks `total_num_steps`, of which the warm-up is the beginning."""
        total = integer("total_num_steps", total_num_steps, low=1)
        if total < self.num_steps:
            log_once(
                logging.WARNING,
                f"{address('total_num_steps')} = {total} is less than warmup_num_steps = {self.num_steps}: "
                "the peak is never reached",
            )
        return total


class WarmupLR(GroupSchedule):
    """From `warmup_min_lr` up to `warmup_max_lr` in `warmup_num_steps` steps, constant after.

    ``min + (max - min) * f`` with f = ln(n + 1) / ln(N) ("log") or n / N ("linear") for n < N, then 1.

    Args:
        optimizer: has `param_groups`.
        warmup_min_lr: start, a number or one per group.
        warmup_max_lr: peak, a number or one per group; None takes each group's own lr.
            A number leaves groups with their own lr as they are.
        warmup_num_steps: N; 0 begins at the peak, and 1 counts as 2.
        warmup_type: "log" or "linear".
        last_batch_iteration: n to begin at; -1 is the start.

    Raises:
        ConfigError: a value is of the wrong kind, or a list does not fit the groups.

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
        """The rate of each group at `last_batch_iteration`."""
        n = self.last_batch_iteration
        fraction = self._warm_up.fraction(n) if self._warm_up.covers(n) else self._after(n)
        return [low + (high - low) * fraction for low, high in zip(self._min_lrs, self._max_lrs, strict=True)]

    def _after(self, n: int) -> float:
        """The fraction of the way from min to max once the warm-up is over."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line back to `warmup_min_lr` at `total_num_steps`.

    After the warm-up ``f = max(0, (T - n) / max(1, T - N))``.

    Args:
        optimizer, warmup_min_lr, warmup_num_steps, warmup_type, last_batch_iteration: as for `WarmupLR`.
        total_num_steps: T, steps of the run.
        warmup_max_lr: as for `WarmupLR`, but 0.001 where it is not given.

    Raises:
        ConfigError: as for `WarmupLR`.
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
        # n is -1 here only when there is no warm-up: the first step, at the peak like the one at n = 0.
        return max(0.0, (self._total - max(n, 0)) / max(1, self._total - self._warm_up.num_steps))


class WarmupCosineLR(GroupSchedule):
    """Each group's lr times a ratio: up from `warmup_min_ratio` to 1, then half a cosine down to `cos_min_ratio`.

    The ratio is 0 at n = -1, ``min + (1 - min) * f`` during the warm-up (f as for `WarmupLR`), and then
    ``c + (1 - c) * (1 + cos(pi * p)) / 2`` with ``p = min(1, (n - N + 1) / max(1, T - N))`` and c = `cos_min_ratio`.

    Args:
        optimizer, warmup_num_steps, warmup_type, last_batch_iteration: as for `WarmupLR`.
        total_num_steps: T, steps of the run.
        warmup_min_ratio: ratio at n = 0.
        cos_min_ratio: ratio at the end.

    Raises:
        ConfigError: a value is of the wrong kind.
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
        """The rate of each group at `last_batch_iteration`."""
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
    """One triangle of the rate up and down, beta1 opposite to it, then a slow decay (arXiv:1803.09820).

    With b = n + 1 and the cycle's halves of F and S steps, the height is b / F going up and (F + S - b) / S coming
    down; ``lr = min + (max - min) * height`` and ``beta1 = max_mom - (max_mom - min_mom) * height``. After the cycle,
    with ``k = (n - F - S + 1) / decay_step_size``: ``lr = min / (1 + decay_lr_rate * k)`` and
    ``beta1 = max_mom * (1 + decay_mom_rate * k)``. The first optimizer step runs at `cycle_min_mom`, as in DeepSpeed.

    Args:
        optimizer: has `param_groups`; without `betas` in them, no momentum is cycled.
        cycle_min_lr, cycle_max_lr: foot and peak, a number or one per group. A numeric peak leaves groups with their
            own lr that as their peak, and their foot is in proportion.
        decay_lr_rate, decay_mom_rate: speed of the decay.
        cycle_first_step_size, cycle_second_step_size: F and S; S is F where it is None.
        cycle_first_stair_count, cycle_second_stair_count: stairs in each half; 0 is a slope. None takes the first's.
        decay_step_size: steps per unit of decay; 0 does not decay.
        cycle_momentum: whether beta1 follows. beta2 never does.
        cycle_min_mom, cycle_max_mom: range of beta1, a number or one per group.
        last_batch_iteration: n to begin at; -1 is the start.

    Raises:
        ConfigError: a value is of the wrong kind; or, at the step where it happens, beta1 has grown to 1.
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
        # A group with its own rate keeps it as its peak; its minimum is scaled alike, so its cycle has the same shape.
        own = self._own_groups("cycle_max_lr", cycle_max_lr)
        if not isinstance(cycle_min_lr, (list, tuple)):
            self._min_lrs = self._scaled("cycle_min_lr", self._min_lrs, own, self._max_lrs)
        for index in own:
            self._max_lrs[index] = self._own_lrs[index]
        self._min_moms = self._spread("cycle_min_mom", cycle_min_mom, _momentum)
        self._max_moms = self._spread("cycle_max_mom", cycle_max_mom, _momentum)
        self._cycles_momentum = flag("cycle_momentum", cycle_momentum)
        if self._cycles_momentum and not any("betas" in group for group in optimizer.param_groups):
            self._cycles_momentum = False
            log_once(logging.WARNING, "OneCycle cycles no momentum: the optimizer has no betas")
        self._start(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""
        n = self.last_batch_iteration
        if n < self._first + self._second:
            height = self._height(n + 1)
            return [low + (high - low) * height for low, high in zip(self._min_lrs, self._max_lrs, strict=True)]
        return [low / (1.0 + self._decay_lr_rate * self._decay(n)) for low in self._min_lrs]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """The betas of each group at `last_batch_iteration`; None where no momentum is cycled.

        Before the first `step()` the top of the range, while the groups have `cycle_min_mom`; both as in DeepSpeed.
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
        """0 at the foot, 1 at the peak."""
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
                    expected="beta1 to stay below 1",
                    got=f"{beta1:g} at step {self.last_batch_iteration + 1}",
                    fix="lower it, or raise decay_step_size",
                )
            if "betas" in group:
                group["betas"] = (beta1, *group["betas"][1:])


class LRRangeTest(GroupSchedule):
    """A rate that grows without end, to find the largest that trains (arXiv:1803.09820).

    ``min * (1 + rate * (n + 1) / size)``, the fraction rounded down with `lr_range_test_staircase`.

    Args:
        optimizer: has `param_groups`.
        lr_range_test_min_lr: start, a number or one per group. A number is for groups with the optimizer's lr; a
            group with its own starts as many times above or below it.
        lr_range_test_step_size: steps in which the rate grows by `lr_range_test_step_rate` times the start.
        lr_range_test_step_rate: see above.
        lr_range_test_staircase: grow once per `lr_range_test_step_size` steps.
        last_batch_iteration: n to begin at; -1 is the start.

    Raises:
        ConfigError: a value is of the wrong kind, or a list does not fit the groups.
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
        own = self._own_groups(name, lr_range_test_min_lr)
        reference = [self._default_lr] * len(self._own_lrs)
        self._min_lrs = self._scaled(name, self._spread(name, lr_range_test_min_lr), own, reference)
        self._size = integer("lr_range_test_step_size", lr_range_test_step_size, low=1)
        self._rate = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self._staircase = flag("lr_range_test_staircase", lr_range_test_staircase)
        self._start(last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""
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
    "ReduceLROnPlateau": "it needs a metric at each step, which the engine does not have; step one in the training loop"
}

VALID_LR_SCHEDULES: list[str] = list(_OWN)
"""Names of the schedules that are not torch's."""


def build_scheduler(type: str, params: Mapping[str, Any], optimizer: ParamGroups) -> Schedule:
    """The scheduler that a config's `scheduler` section names.

    Args:
        type: one of `VALID_LR_SCHEDULES`, or the exact name of a class of `torch.optim.lr_scheduler`.
        params: its arguments without the optimizer.
        optimizer: anything with `param_groups`; a `torch.optim.Optimizer` where the scheduler is torch's.

    Raises:
        ConfigError: the type is unknown, or an argument is unknown, missing or wrong.
        UsageError: a scheduler of torch's over something that is not a torch optimizer.
    """
    kind = _OWN.get(type) or _TORCH.get(type)
    if kind is None or type in _REFUSED:
        raise _unknown(type)
    if type in _TORCH and not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"scheduler.type {type}",
            expected="a torch.optim.Optimizer to schedule",
            got=optimizer,
            fix=f"use one of {', '.join(VALID_LR_SCHEDULES)}, which take anything with param_groups",
        )
    _check_arguments(type, kind, params)
    try:
        return kind(optimizer=optimizer, **params)
    except ZeroAccelError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # whatever torch's constructors make of it
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
            raise ConfigError(address(key), expected=f"a value, which {name} cannot do without")
