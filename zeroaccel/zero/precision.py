"""Which parameters stay fp32, the dtype of inputs, and the fp16 loss scale. Buffers are `module_buffers.py`'s.

The scale that unscales a step's gradients is the one their backward used; it changes only afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.errors import EngineStateError
from zeroaccel.logs import logger

__all__ = ["DynamicLossScale", "LossScale", "StaticLossScale", "cast_floats", "kept_in_fp32"]


class LossScale:
    """What the loss is multiplied with before backward; this one is 1 and never changes."""

    value: float = 1.0

    def update(self, *, overflow: bool) -> None:
        """Tells the scale how the step went."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers to resume from."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes."""
        for name, value in state.items():
            setattr(self, name, value)


class StaticLossScale(LossScale):
    """A fixed scale; a step that overflows is skipped and said."""

    def __init__(self, value: float) -> None:
        self.value = float(value)

    def update(self, *, overflow: bool) -> None:
        """Warns about a skipped step."""
        if overflow:
            logger.warning("gradients overflowed at the static loss scale %g; the step is skipped", self.value)


@dataclass
class DynamicLossScale(LossScale):
    """Halves after overflows, doubles after `window` steps without one.

    Attributes:
        value: the current scale.
        window: good steps before it doubles.
        hysteresis: overflows tolerated before it halves.
        consecutive_hysteresis: refill that tolerance after every good step, not only when the scale grows.
        minimum: it never goes below; an overflow there ends the run.
    """

    value: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    tolerance: int = -1
    steps: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            self.tolerance = self.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Counts the step and moves the scale.

        Raises:
            EngineStateError: an overflow at the minimum scale.
        """
        if overflow:
            self._lower()
            self.last_overflow = self.steps
        else:
            if self.consecutive_hysteresis:
                self.tolerance = self.hysteresis
            good = self.steps - self.last_overflow - 1
            if good > 0 and good % self.window == 0:
                self.tolerance = self.hysteresis
                self.value *= 2.0
        self.steps += 1

    def _lower(self) -> None:
        if self.tolerance > 1:
            self.tolerance -= 1
            logger.log(logging.INFO, "gradients overflowed at loss scale %g; step skipped, scale kept", self.value)
            return
        if self.value <= self.minimum:
            raise EngineStateError(
                f"fp16.min_loss_scale: gradients overflow even at the smallest loss scale {self.value:g}",
                fix="look for infinities in the model or data, train in bf16, or lower fp16.min_loss_scale",
            )
        self.value = max(self.value / 2.0, self.minimum)
        logger.log(logging.INFO, "gradients overflowed; step skipped, loss scale lowered to %g", self.value)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers to resume from; the limits come from the config of the resuming run."""
        return {
            "value": self.value,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "last_overflow": self.last_overflow,
        }


def kept_in_fp32(model: nn.Module, setting: str | Iterable[str] | None) -> set[str]:
    """Names of parameters and buffers that stay fp32 whatever the training dtype.

    Args:
        setting: parts of module names; "auto" takes the model's own `_keep_in_fp32_modules[_strict]`.
    """
    if setting == "auto":
        parts = {
            name
            for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
            for name in (getattr(model, attribute, None) or ())
        }
    else:
        parts = {setting} if isinstance(setting, str) else set(setting or ())
    if not parts:
        return set()
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    return {name for name in names if any(_contains(name, part) for part in parts)}


def _contains(name: str, part: str) -> bool:
    return f".{part}." in f".{name}."


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in nested tuples, lists and dictionaries; everything else is as given."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast_floats(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    return value
