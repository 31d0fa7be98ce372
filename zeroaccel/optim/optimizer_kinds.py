"""How an optimizer may be sharded: on flat pieces, on whole tensors, or not at all.

What is known by class is listed here; what is declared, counts; anything else is found out by `optimizer_probe`.
"""

from __future__ import annotations

import enum
import inspect
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.ops.shard_step import ShardStep
from zeroaccel.ops.tensorwise import Lamb, Muon
from zeroaccel.optim.optimizer_copy import element_states, has_stepped, renew_state
from zeroaccel.optim.optimizer_probe import try_out

__all__ = [
    "OptimizerKind",
    "OptimizerKinds",
    "check_steppable",
    "classify",
    "element_states",
    "has_stepped",
    "renew_state",
]


_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)


class OptimizerKind(enum.Enum):
    """What the update of one element of a parameter depends on."""

    ELEMENTWISE = "elementwise"
    """On its own gradients, values and states, and on counters of steps: runs on flat shards."""
    PER_TENSOR = "per_tensor"
    """On its whole tensor, by shape, norm or factors: runs on whole tensors."""
    COUPLED = "coupled"
    """On other parameters too: runs where every rank has everything."""


@dataclass(frozen=True)
class OptimizerKinds:
    """How an optimizer may be sharded.

    Attributes:
        groups: of each param group; all COUPLED where one is.
        reason: why it is not elementwise, as a clause about "it"; "" where all groups are elementwise.
        source: "known", "declared" or "probed".
    """

    groups: tuple[OptimizerKind, ...]
    reason: str
    source: str


_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
_MATRICES = "it orthogonalises whole matrices"
_NORMS = "its trust ratio is of the norms of whole parameters"
_PER_TENSOR = {  # not in every release of torch
    "Adafactor": "its second moments are factored over the rows and columns of a matrix",
    "Muon": _MATRICES,
}


def check_steppable(optimizer: Optimizer) -> None:
    """Whether an engine can step it, and from the beginning; before its parameters are sharded.

    Raises:
        ConfigError: its `step` needs a closure.
        UsageError: it has stepped already.
    """
    name = type(optimizer).__name__
    if inspect.signature(optimizer.step).parameters.get("closure", _OPTIONAL).default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {name}: its step() evaluates the model again through a closure, which an engine has not",
            fix="choose another, such as AdamW",
        )
    if has_stepped(optimizer):
        raise UsageError(
            f"optimizer {name}",
            expected="no state yet",
            got=f"state for {len(optimizer.state)} parameters",
            fix="initialize before the first step; resume with engine.load_checkpoint",
        )


def classify(optimizer: Optimizer, declared: OptimizerKind | str | None = None) -> OptimizerKinds:
    """How `optimizer` may be sharded. Every rank gets the same answer, if every rank has the same optimizer.

    zeroaccel's own optimizers and torch's are known, by their exact classes. Any other has to prove that it is
    elementwise, see [Note: trial of an optimizer]; neither the optimizer nor a random state is changed by that. One
    that draws random numbers, or fails in the trial, is taken for a rule per tensor.

    Args:
        optimizer: before its first step.
        declared: the kind of all its groups, for sure: an `OptimizerKind` or its value.

    Raises:
        ConfigError: `declared` is no kind, or is known to be wrong, or the optimizer takes sparse gradients only.
    """
    name, count = type(optimizer).__name__, len(optimizer.param_groups)
    if type(optimizer) is torch.optim.SparseAdam:
        raise ConfigError(
            f"optimizer {name}: it takes sparse gradients only, and gradients that are reduced over ranks are dense",
            fix="use Adam",
        )
    known = _known(optimizer)
    if declared is not None:
        kind = _declared(declared)
        if kind is OptimizerKind.ELEMENTWISE and known is not None and known.reason:
            raise ConfigError(
                f"kind of optimizer {name}",
                expected=f'"per_tensor", since {known.reason}',
                got=kind.value,
                fix="remove optimizer.kind or the argument optimizer_kind",
            )
        reason = "" if kind is OptimizerKind.ELEMENTWISE else f'its kind is declared to be "{kind.value}"'
        return OptimizerKinds((kind,) * count, reason, "declared")
    if known is not None:
        return known
    findings = try_out(optimizer)
    if findings.coupled:
        return OptimizerKinds((OptimizerKind.COUPLED,) * count, findings.coupled, "probed")
    kinds = (OptimizerKind.PER_TENSOR if reason else OptimizerKind.ELEMENTWISE for reason in findings.groups)
    return OptimizerKinds(tuple(kinds), next((reason for reason in findings.groups if reason), ""), "probed")


def _known(optimizer: Optimizer) -> OptimizerKinds | None:
    count = len(optimizer.param_groups)
    if isinstance(optimizer, ShardStep) or type(optimizer) in _ELEMENTWISE:
        return OptimizerKinds((OptimizerKind.ELEMENTWISE,) * count, "", "known")
    if type(optimizer) is Muon:
        of_groups = [group["use_muon"] for group in optimizer.param_groups]
        kinds = tuple(OptimizerKind.PER_TENSOR if whole else OptimizerKind.ELEMENTWISE for whole in of_groups)
        return OptimizerKinds(kinds, _MATRICES if any(of_groups) else "", "known")
    if type(optimizer) is Lamb:
        return OptimizerKinds((OptimizerKind.PER_TENSOR,) * count, _NORMS, "known")
    for name, reason in _PER_TENSOR.items():
        if type(optimizer) is getattr(torch.optim, name, None):
            return OptimizerKinds((OptimizerKind.PER_TENSOR,) * count, reason, "known")
    return None


def _declared(declared: OptimizerKind | str) -> OptimizerKind:
    try:
        return OptimizerKind(declared)
    except ValueError:
        *others, last = [repr(kind.value) for kind in OptimizerKind]
        expected = f"{', '.join(others)} or {last}"
        raise ConfigError("optimizer.kind or optimizer_kind", expected=expected, got=declared) from None
