"""Classifies optimizers for sharding: they step flat ranges, full tensors, or all parameters; and in several calls.

This module lists known classes; a declared kind takes precedence. Any other class steps full tensors, which is correct
for elementwise rules too, unless steps of a copy show that parameters depend on each other.

[Note: several calls per step] A step calls `optimizer.step()` once per buffer, so that only one buffer's gradients are
in fp32, and only one sub-group is in memory, at a time. The engine restores per-call counters of a class (a
`group["step"]`, an attribute) before each call except the first: every call sees the values from the start of the step,
and the last call leaves them as a single call would. A coupled rule, which needs all parameters at once, gets one call.
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
from zeroaccel.optim.optimizer_copy import coupling, groups_out_of_reach, has_stepped

__all__ = [
    "OptimizerKind",
    "OptimizerKinds",
    "StepCounters",
    "batches",
    "check_steppable",
    "classify",
    "restricted",
]

_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)


class OptimizerKind(enum.Enum):
    """The values on which the update of one element of a parameter depends."""

    ELEMENTWISE = "elementwise"
    """Its own gradients, values and states, and step counters: steps flat shards."""
    PER_TENSOR = "per_tensor"
    """Its tensor's shape, norm or factors: steps full tensors."""
    COUPLED = "coupled"
    """Other parameters too: every rank needs all parameters, or the rule uses sums over all shards."""


@dataclass(frozen=True)
class OptimizerKinds:
    """The kinds of an optimizer's param groups, which determine its sharding.

    Attributes:
        groups: kind of each param group; all are COUPLED if one is.
        reason: reason that it is not elementwise, as a clause about "it"; "" if all groups are elementwise.
        source: "known", "declared" or "unknown".
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
_NORMS = "its trust ratio depends on the norms of whole parameters"
_PER_TENSOR = {  # not in every torch release
    "Adafactor": "its second moments are factored over the rows and columns of a matrix",
    "Muon": _MATRICES,
}
# Third-party classes as package.class; benchmarks/optimizer_table.py compares their bits with torch's.
_ELEMENTWISE_BY_NAME = frozenset(
    {
        "lion_pytorch.Lion",
        "schedulefree.AdamWScheduleFree",
        "schedulefree.RAdamScheduleFree",
        "schedulefree.SGDScheduleFree",
        "torch_optimizer.AdaBound",
        "torch_optimizer.AggMo",
        "torch_optimizer.DiffGrad",
        "torch_optimizer.QHAdam",
        "torch_optimizer.Yogi",
    }
)
_COUPLED_PACKAGES = ("dadaptation", "prodigyopt")
_COUPLED = "it estimates one step size from all parameters"
_UNKNOWN = 'its class is not known (if its rule is elementwise, set optimizer.kind to "elementwise")'


def check_steppable(optimizer: Optimizer) -> None:
    """Checks, before sharding, that an engine can step the optimizer and that it has no state yet.

    Raises:
        ConfigError: its `step` needs a closure, or it updates weights inside backward.
        UsageError: it has stepped already.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure", _OPTIONAL)
    reason = "its step() evaluates the model again through a closure" if closure.default is closure.empty else ""
    if hasattr(optimizer, "fused_backward"):  # LOMO
        reason = "it updates weights inside backward, before the ranks have added up their gradients"
    if reason:
        raise ConfigError(
            f"optimizer {name}: {reason}, which is not supported", fix="choose another optimizer, such as AdamW"
        )
    if has_stepped(optimizer):
        raise UsageError(
            f"optimizer {name}",
            expected="no state yet",
            got=f"state for {len(optimizer.state)} parameters",
            fix="call initialize() before the first step; to resume, use engine.load_checkpoint()",
        )


def classify(optimizer: Optimizer, declared: OptimizerKind | str | None = None) -> OptimizerKinds:
    """Returns the kinds of the optimizer's param groups. Ranks with the same optimizer get the same result.

    The table has the exact classes of zeroaccel, torch and some packages; a subclass may have another rule. An unknown
    class counts as per tensor, which is correct for elementwise rules too, or as coupled if twelve steps of a copy show
    it; the check changes neither the optimizer nor random states.

    Args:
        optimizer: an optimizer before its first step.
        declared: kind of all its groups, an `OptimizerKind` or its value, which overrides the table.

    Raises:
        ConfigError: `declared` is not a kind, or is known to be wrong; or the optimizer needs sparse gradients, or
            steps the parameters of its constructor instead of those in its groups.

    Example:
        >>> import torch
        >>> classify(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))])).groups
        (<OptimizerKind.ELEMENTWISE: 'elementwise'>,)
    """
    name, count = type(optimizer).__name__, len(optimizer.param_groups)
    if type(optimizer) is torch.optim.SparseAdam:
        raise ConfigError(
            f"optimizer {name}: it needs sparse gradients, but gradients reduced over ranks are dense",
            fix="use Adam",
        )
    # A declaration overrides the table, except if it would silently change the training: a rule that is known to need
    # full tensors gives different updates on flat shards, without any error.
    known = _known(optimizer)
    if known is None and (out_of_reach := groups_out_of_reach(optimizer)):
        raise ConfigError(
            f"optimizer {name}",
            expected="a step() that updates the parameters in param_groups, which the engine replaces by its shards",
            got=f"no update of those in group{'s' if out_of_reach[1:] else ''} {', '.join(map(str, out_of_reach))}: "
            "an attribute refers to the parameters that it was created with",
            fix="let it share the groups of its inner optimizers (self.param_groups = inner.param_groups), "
            "or pass one optimizer with a group for each setting",
        )
    if declared is not None:
        kind = _declared(declared)
        if kind is OptimizerKind.ELEMENTWISE and known is not None and known.reason:
            raise ConfigError(
                f"kind of optimizer {name}",
                expected=f'"{max(known.groups, key=list(OptimizerKind).index).value}", because {known.reason}',
                got=kind.value,
                fix="remove optimizer.kind or the argument optimizer_kind",
            )
        reason = "" if kind is OptimizerKind.ELEMENTWISE else f'its kind is declared as "{kind.value}"'
        return OptimizerKinds((kind,) * count, reason, "declared")
    if known is not None:
        return known
    if reason := coupling(optimizer):
        return OptimizerKinds((OptimizerKind.COUPLED,) * count, reason, "unknown")
    return OptimizerKinds((OptimizerKind.PER_TENSOR,) * count, _UNKNOWN, "unknown")


def _known(optimizer: Optimizer) -> OptimizerKinds | None:
    count = len(optimizer.param_groups)
    if isinstance(optimizer, ShardStep) or type(optimizer) in _ELEMENTWISE:
        return OptimizerKinds((OptimizerKind.ELEMENTWISE,) * count, "", "known")
    if type(optimizer) is Muon:
        of_groups = [group["use_muon"] for group in optimizer.param_groups]
        kinds = tuple(OptimizerKind.PER_TENSOR if use_muon else OptimizerKind.ELEMENTWISE for use_muon in of_groups)
        return OptimizerKinds(kinds, _MATRICES if any(of_groups) else "", "known")
    if type(optimizer) is Lamb:
        return OptimizerKinds((OptimizerKind.PER_TENSOR,) * count, _NORMS, "known")
    for name, reason in _PER_TENSOR.items():
        if type(optimizer) is getattr(torch.optim, name, None):
            return OptimizerKinds((OptimizerKind.PER_TENSOR,) * count, reason, "known")
    package = type(optimizer).__module__.partition(".")[0]
    if f"{package}.{type(optimizer).__name__}" in _ELEMENTWISE_BY_NAME:
        return OptimizerKinds((OptimizerKind.ELEMENTWISE,) * count, "", "known")
    if package in _COUPLED_PACKAGES:
        return OptimizerKinds((OptimizerKind.COUPLED,) * count, _COUPLED, "known")
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
    """A copy of the plain values in an optimizer's param groups and attributes; `restore` writes them back.

    Plain values are numbers, strings, tensors and containers of these. Others, such as a module or a random generator,
    are not copied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, _entries(group)) for group in optimizer.param_groups
        ]
        self._saved.append((vars(optimizer), _entries(vars(optimizer))))

    def restore(self) -> None:
        """Restores the values. A tensor keeps its identity: a scheduler may refer to it."""
        for entries, saved in self._saved:
            for name in [name for name in _entries(entries) if name not in saved]:
                del entries[name]
            for name, value in saved.items():
                now = entries.get(name)
                if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
                    now.copy_(value)
                elif type(now) is not type(value) or not isinstance(value, _PLAIN) or now != value:
                    entries[name] = copy.deepcopy(value)


def _entries(source: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in source.items() if _is_counted(name) and _is_plain(value)}


def _is_counted(name: str) -> bool:
    """Returns False for entries that the engine changes, and for torch's hook dictionaries, which handles refer to."""
    return name not in ("params", "state", "param_groups", "defaults") and not name.startswith("_optimizer_")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_is_plain(item) for item in value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


@contextmanager
def restricted(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restricts `optimizer.step` to some of its parameters, in the order of their groups, inside the block."""
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
    """Yields batches of consecutive items with at most `limit_numel` elements; a larger item gets its own batch."""
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
