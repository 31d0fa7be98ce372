"""Which of the objects given to `prepare` belong together: each optimizer to its model, each schedule to its optimizer.

Found out by identity of parameters and optimizers, so that order and number do not matter. Looks at the objects, makes
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from zeroaccel.accelerate.dummies import DummyOptim, DummyScheduler
from zeroaccel.accelerate.prepared_optimizer import PreparedOptimizer
from zeroaccel.accelerate.prepared_scheduler import PreparedScheduler
from zeroaccel.errors import UsageError
from zeroaccel.zero.engine import Engine

__all__ = ["PrepareGroup", "Sorted", "pair", "sort"]


@dataclass
class Sorted:
    """Objects by kind, each with its position among the arguments; what is prepared already is in none of them."""

    models: list[tuple[int, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[int, Optimizer | DummyOptim]] = field(default_factory=list)
    schedulers: list[tuple[int, Any]] = field(default_factory=list)
    loaders: list[tuple[int, Any]] = field(default_factory=list)


@dataclass
class PrepareGroup:
    """One model with what trains it; without an optimizer it is for inference.

    Attributes:
        schedulers: each with its position among the arguments.
        model_at, optimizer_at: positions of the two.
    """

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None = None
    schedulers: list[tuple[int, Any]] = field(default_factory=list)
    model_at: int = 0
    optimizer_at: int = 0


def sort(objects: Sequence[Any]) -> Sorted:
    """The objects by kind; anything else is left to the caller as it is."""
    found = Sorted()
    for index, value in enumerate(objects):
        if isinstance(value, (Engine, PreparedOptimizer, PreparedScheduler)):
            continue
        if isinstance(value, DataLoader):
            found.loaders.append((index, value))
        elif isinstance(value, nn.Module):
            found.models.append((index, value))
        elif isinstance(value, (Optimizer, DummyOptim)):
            found.optimizers.append((index, value))
        elif isinstance(value, DummyScheduler) or _is_scheduler(value):
            found.schedulers.append((index, value))
    return found


def _is_scheduler(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("step", "state_dict", "get_last_lr"))


def pair(found: Sorted, engines: Iterable[Engine]) -> tuple[list[PrepareGroup], list[tuple[int, Any]]]:
    """What belongs together, and the schedules whose optimizer was prepared before.

    Args:
        engines: what was prepared before.

    Raises:
        UsageError: an optimizer without its model, two for one model, or one for several; a schedule without its
            optimizer; a model that is prepared already.
    """
    earlier = {id(engine.module): engine for engine in engines}
    for index, model in found.models:
        if id(model) in earlier:
            raise UsageError(
                f"prepare: argument {index}, {type(model).__name__}, is prepared already",
                fix="go on with what the first prepare() returned for it",
            )
    jobs = [PrepareGroup(model, model_at=index) for index, model in found.models]
    for index, optimizer in found.optimizers:
        job = _model_of(index, optimizer, jobs, earlier.values())
        if job.optimizer is not None:
            raise UsageError(
                f"prepare: argument {index}, {_named(optimizer)}",
                expected=f"one optimizer for {type(job.model).__name__}",
                got=f"a second one beside {_named(job.optimizer)}, argument {job.optimizer_at}",
                fix="make one optimizer with a param group for each part of the model",
            )
        job.optimizer, job.optimizer_at = optimizer, index
    late: list[tuple[int, Any]] = []
    for index, scheduler in found.schedulers:
        owner = _optimizer_of(index, scheduler, jobs, earlier.values())
        (owner.schedulers if owner is not None else late).append((index, scheduler))
    return jobs, late


def _model_of(
    index: int, optimizer: Optimizer | DummyOptim, jobs: list[PrepareGroup], engines: Iterable[Engine]
) -> PrepareGroup:
    if isinstance(optimizer, DummyOptim):
        held = {id(param) for param in optimizer.parameters()}
    else:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    where = f"prepare: argument {index}, {_named(optimizer)}"
    owners = [job for job in jobs if any(id(param) in held for param in job.model.parameters())]
    if len(owners) == 1:
        return owners[0]
    if len(owners) > 1:
        raise UsageError(
            where,
            expected="an optimizer of one model",
            got=f"parameters of {', '.join(type(job.model).__name__ for job in owners)}",
            fix="make one optimizer for each model",
        )
    if any(id(param) in held for engine in engines for param in engine.module.parameters()):
        fix = "prepare the two in one call: what is trained is laid out when the model is prepared"
        raise UsageError(where, expected="its model in the same prepare()", got="a model prepared before", fix=fix)
    raise UsageError(
        where,
        expected="its model in the same prepare()",
        got=", ".join(type(job.model).__name__ for job in jobs) or "no model",
        fix="pass the model whose parameters it was made from",
    )


def _optimizer_of(
    index: int, scheduler: Any, jobs: list[PrepareGroup], engines: Iterable[Engine]
) -> PrepareGroup | None:
    """The job whose optimizer it schedules; None if that was prepared before."""
    wanted = getattr(scheduler, "optimizer", None)
    inner = wanted.optimizer if isinstance(wanted, PreparedOptimizer) else wanted
    trained = [job for job in jobs if job.optimizer is not None]
    for job in trained:
        if job.optimizer is inner:
            return job
    if any(engine.optimizer is inner for engine in engines if engine.optimizer is not None):
        if not isinstance(scheduler, DummyScheduler):
            return None
        fix = "prepare the two in one call: the config's schedule is made with its optimizer"
        raise UsageError(f"prepare: argument {index}, DummyScheduler of an optimizer prepared before", fix=fix)
    if inner is None and len(trained) == 1:
        return trained[0]
    raise UsageError(
        f"prepare: argument {index}, {type(scheduler).__name__}",
        expected="its optimizer in the same prepare(), or one prepared before",
        got=", ".join(_named(job.optimizer) for job in trained) or "no optimizer",
        fix="pass the optimizer it was made from",
    )


def _named(value: Any) -> str:
    return type(value).__name__
