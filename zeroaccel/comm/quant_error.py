"""How far codes are off, measured while training: now and then a gather and a reduction are made exactly, too.

Asked for by `zeropp.watch_interval`. It costs the exact traffic of one unit in each of those steps, and changes
nothing: the engine goes on with what the codes say. `hierarchical.py` asks when; what is found is logged and kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zeroaccel.comm.collective_tracker import Work
from zeroaccel.logs import logger

__all__ = ["MeasuredWork", "QuantError", "QuantErrorMonitor"]

Kind = Literal["gather", "reduction"]

_lines = logger.getChild("watch")
_lines.setLevel(logging.INFO)  # somebody asked for them


@dataclass(frozen=True)
class QuantError:
    """What one comparison showed on this rank.

    Attributes:
        step: of the engine.
        kind: of weights, or of gradients.
        label: of the collective: "unshard layers.0".
        relative_error: norm of the difference over the norm of the exact result; NaN where that is not finite.
    """

    step: int
    kind: Kind
    label: str
    relative_error: float


class QuantErrorMonitor:
    """When to look, and what was seen.

    Args:
        interval: steps between two looks.
        logs: whether this rank tells what it finds.

    Attributes:
        seen: every comparison, in order.
    """

    def __init__(self, interval: int, *, logs: bool) -> None:
        self._interval = interval
        self._logs = logs
        self._looked: dict[Kind, int] = {}
        self.seen: list[QuantError] = []

    def due(self, kind: Kind, step: int) -> bool:
        """Whether to look at this one: the first of its kind in a step whose number the interval divides."""
        if step < 0 or step % self._interval or self._looked.get(kind) == step:
            return False
        self._looked[kind] = step
        return True

    def compare(self, kind: Kind, step: int, label: str, coded: Tensor, exact: Tensor) -> None:
        """Takes note of two results of one collective."""
        reference = exact.float()
        error = float(torch.linalg.vector_norm(coded.float() - reference) / torch.linalg.vector_norm(reference))
        self.seen.append(QuantError(step, kind, label, error))
        if self._logs:
            _lines.info('step %d: the quantised %s "%s" is off by %.3g %%', step, kind, label, 100 * error)


class MeasuredWork:
    """A coded collective and the exact one beside it.

    Args:
        compare: called once, when both are done.
    """

    def __init__(self, coded: Work, exact: Work, compare: Callable[[], None]) -> None:
        self._coded, self._exact = coded, exact
        self._compare: Callable[[], None] | None = compare

    def wait(self) -> None:
        """See `Work`."""
        self._coded.wait()
        self._exact.wait()
        if self._compare is not None:
            compare, self._compare = self._compare, None
            compare()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._coded.is_completed() and self._exact.is_completed()
