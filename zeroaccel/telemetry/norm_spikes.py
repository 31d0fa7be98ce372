"""Finds spikes of the gradient norm, and says which units, rank and samples they come from.

A spike is a norm far above the recent ones, by their median and their median absolute deviation, which a few earlier
spikes do not move.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol

from torch import Tensor

from zeroaccel.logs import logger

WINDOW: Final = 20
"""Steps whose norms are compared: few, since norms fall at the start of a run."""

_LEAST_STEPS: Final = 10
_DEVIATIONS: Final = 5.0
_LEAST_RATIO: Final = 3.0


class NormSpikes:
    """The norms of the last steps.

    Example:
        >>> spikes = NormSpikes()
        >>> [spikes.is_spike(norm) for norm in [1.0, 1.1, 0.9, 1.0] * 4 + [9.0, 1.2]][-2:]
        [True, False]
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=WINDOW)

    @property
    def median(self) -> float:
        """Median of the last norms; NaN before the first."""
        return median(self._norms) if self._norms else math.nan

    def is_spike(self, norm: float | None) -> bool:
        """Takes the norm of a step, and returns True if it stands out; the same on all ranks for equal norms."""
        if norm is None or not math.isfinite(norm):
            return False
        spikes = False
        if len(self._norms) >= _LEAST_STEPS:
            middle = self.median
            deviation = 1.4826 * median(abs(earlier - middle) for earlier in self._norms)
            spikes = norm > max(middle + _DEVIATIONS * deviation, _LEAST_RATIO * middle)
        self._norms.append(norm)
        return spikes


def describe_spike(
    step: int,
    norm: float,
    usual: float,
    units: Mapping[str, float],
    losses: Sequence[Sequence[float]],
    samples: range,
) -> str:
    """Returns a line about a spike.

    Args:
        usual: median norm of the steps before.
        units: name -> norm of the unit's gradients; may be empty.
        losses: the losses of each rank's micro-batches, by rank; may be empty.
        samples: numbers of the step's samples since the start of the run, from 0.

    Example:
        >>> for part in describe_spike(7, 9.0, 1.0, {"layers.0": 8.9}, [[2.0], [7.5]], range(96, 128)).split("; "):
        ...     print(part)
        step 7: gradient norm 9, usually 1
        by unit: layers.0 8.9
        largest loss 7.5 on rank 1, micro-batch 0, median 4.75
        samples 96 to 127 of this run
    """
    parts = [f"step {step}: gradient norm {norm:.4g}, usually {usual:.4g}"]
    if units:
        largest = sorted(((name, value) for name, value in units.items() if value), key=lambda unit: -unit[1])[:4]
        parts.append("by unit: " + ", ".join(f"{name or 'root'} {value:.3g}" for name, value in largest))
    found = [(loss, rank, index) for rank, batch in enumerate(losses) for index, loss in enumerate(batch)]
    if found:
        loss, rank, index = max(found)
        middle = median(each for each, _, _ in found)
        parts.append(f"largest loss {loss:.4g} on rank {rank}, micro-batch {index}, median {middle:.4g}")
    if samples:
        parts.append(f"samples {samples.start} to {samples.stop - 1} of this run")
    return "; ".join(parts)


class Outcome(Protocol):
    """The norms of a step; `StepOutcome` of `zero/step_boundary.py` has them."""

    def norm(self) -> float | None:
        """Returns the norm over all ranks."""

    def unit_norms(self) -> dict[str, float]:
        """Returns the norm of each unit, or nothing."""


@dataclass(frozen=True)
class _WatchedStep:
    number: int
    samples: range
    losses: Sequence[Tensor]
    outcome: Outcome


class SpikeWatch:
    """Warns about spikes in a run. 1. `loss` after each backward. 2. `step` after each optimizer step. (all ranks)

    Args:
        gather: returns the losses of all ranks, by rank. (all ranks)
        warns: True on the rank that logs.
        late: look at the step before the last one, because the host would wait for the last one.
    """

    def __init__(
        self, gather: Callable[[tuple[float, ...]], Sequence[Sequence[float]]], *, warns: bool, late: bool
    ) -> None:
        self._gather, self._warns, self._late = gather, warns, late
        self._norms = NormSpikes()
        self._losses: list[Tensor] = []
        self._before: _WatchedStep | None = None
        self._samples = 0

    def loss(self, loss: Tensor) -> None:
        """Takes the loss of a micro-batch."""
        self._losses.append(loss.detach())

    def step(self, number: int, samples: int, outcome: Outcome) -> None:
        """Takes a step with its number, and the number of samples so far over all ranks."""
        step: _WatchedStep | None = _WatchedStep(number, range(self._samples, samples), self._losses, outcome)
        self._losses, self._samples = [], samples
        if self._late:
            step, self._before = self._before, step
        if step is None:
            return
        usual, norm = self._norms.median, step.outcome.norm()
        if norm is None or not self._norms.is_spike(norm):
            return
        units = step.outcome.unit_norms()
        losses = self._gather(tuple(float(loss) for loss in step.losses))
        if self._warns:
            logger.warning("%s", describe_spike(step.number, norm, usual, units, losses, step.samples))
