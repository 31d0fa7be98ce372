"""Whether an optimizer can step on flat pieces of parameters: `optimizer_kinds`, for callers that know two kinds."""

from __future__ import annotations

from torch.optim import Optimizer

from zeroaccel.zero.optimizer_kinds import classify
from zeroaccel.zero.optimizer_twin import has_stepped, renew_state, state_dtypes

__all__ = ["check_elementwise", "has_stepped", "renew_state", "state_dtypes"]


def check_elementwise(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot step on shards, or None when it can."""
    return classify(optimizer).reason or None
