"""How an optimizer may be sharded: on flat pieces, on whole tensors, or not at all.

What is known by class is listed here; what is declared, counts; anything else is found out by `optimizer_probe`.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.ops.shard_step import ShardStep
from zeroaccel.ops.tensorwise import Lamb, Muon
from zeroaccel.optim.optimizer_probe import element_states, has_stepped, renew_state, try_out

__all__ = [
    "OptimizerKind",
    "OptimizerKinds",
    "StepCounters",
    "batches",
    "check_steppable",
    "classify",
    "element_states",
    "has_stepped",
    "renew_state",
    "restricted",
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


_T = TypeVar("_T")

_PLAIN = (bool, int, float, complex, str, type(None))


class StepCounters:
    """Entries of param groups, and attributes, that are plain values: as they are now, until `restore`.

    An entry that is no number, text or tensor, nor made of such (a module, a random generator), is left alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, _entries(group)) for group in optimizer.param_groups
        ]
        self._kept.append((vars(optimizer), _entries(vars(optimizer))))

    def restore(self) -> None:
        """Sets all of it back. A tensor keeps its identity: a scheduler may hold it."""
        for entries, kept in self._kept:
            for name in [name for name in _entries(entries) if name not in kept]:
                del entries[name]
            for name, value in kept.items():
                now = entries.get(name)
                if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
                    now.copy_(value)
                elif type(now) is not type(value) or not isinstance(value, _PLAIN) or now != value:
                    entries[name] = copy.deepcopy(value)


def _entries(source: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in source.items() if _is_counted(name) and _is_plain(value)}


def _is_counted(name: str) -> bool:
    """Not what is the engine's to change, nor torch's dictionaries of hooks, whose identity their handles know."""
    return name not in ("params", "state", "param_groups", "defaults") and not name.startswith("_optimizer_")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_is_plain(item) for item in value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


@contextmanager
def restricted(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Lets `optimizer.step` see only these of its parameters, in their groups and in the order there."""
    before = [group["params"] for group in optimizer.param_groups]
    chosen = {id(param) for param in params}
    try:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        yield
    finally:
        for group, params_before in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params_before


def batches(items: Iterable[_T], limit_numel: int, numel_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Consecutive items of at most `limit_numel` elements together; a larger one goes alone."""
    batch: list[_T] = []
    total = 0
    for item in items:
        numel = numel_of(item)
        if batch and total + numel > limit_numel:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += numel
    if batch:
        yield batch
