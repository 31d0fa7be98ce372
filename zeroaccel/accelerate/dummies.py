"""Stand-ins for objects that the config describes: `DummyOptim` and `DummyScheduler`.

A script passes them where it would pass the real ones; `prepare` gives back what the config's sections make, and
fills what is "auto" in them from the stand-ins' arguments. They train nothing themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from zeroaccel.config import Fact, Facts
from zeroaccel.errors import UsageError

__all__ = ["DummyOptim", "DummyScheduler"]

_DEFAULT_LR = 1e-3


class DummyOptim:
    """Stands for the optimizer of the config's `optimizer` section.

    Args:
        params: parameters or param groups, as for a torch optimizer.
        lr: fills `optimizer.params.lr` where that is "auto"; 0.001 unless given.
        weight_decay: likewise; 0 unless given.
        kwargs: `betas` and `eps`, likewise.

    Raises:
        UsageError: another keyword.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | None = None,
        weight_decay: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.params: list[Any] = [_materialized(item) for item in params]
        self.lr = _DEFAULT_LR if lr is None else lr
        self.weight_decay = 0.0 if weight_decay is None else weight_decay
        self.kwargs = kwargs
        if unknown := sorted(set(kwargs) - {"betas", "eps"}):
            raise UsageError(
                f"DummyOptim({unknown[0]}=...)",
                expected="lr, weight_decay, betas or eps",
                fix="write other settings into the config's optimizer.params",
            )
        self._given = {"lr": lr is not None, "weight_decay": weight_decay is not None}

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of every group."""
        return [param for item in self.params for param in (item["params"] if isinstance(item, dict) else [item])]

    def facts(self) -> Facts:
        """What fills "auto"; a value that somebody wrote is binding."""
        betas, eps = self.kwargs.get("betas"), self.kwargs.get("eps")
        return Facts(
            lr=Fact(self.lr, self._source("lr"), self._given["lr"]),
            weight_decay=Fact(self.weight_decay, self._source("weight_decay"), self._given["weight_decay"]),
            betas=None if betas is None else Fact(tuple(betas), f"DummyOptim(betas={tuple(betas)})"),
            eps=None if eps is None else Fact(eps, f"DummyOptim(eps={eps})"),
        )

    def _source(self, name: str) -> str:
        return f"DummyOptim({name}={getattr(self, name)})" if self._given[name] else f"DummyOptim's default {name}"


class DummyScheduler:
    """Stands for the schedule of the config's `scheduler` section, or of a callable.

    Args:
        optimizer: the optimizer, or its stand-in.
        total_num_steps: optimizer steps of the whole schedule; fills `scheduler.params.total_num_steps`.
        warmup_num_steps: optimizer steps of the warm-up; 0 unless given. Fills `scheduler.params.warmup_num_steps`.
        lr_scheduler_callable: makes the scheduler from the optimizer; then the config has no `scheduler` section.
        kwargs: kept for scripts that read them back.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int | None = None,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = 0 if warmup_num_steps is None else warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        self._warmup_given = warmup_num_steps is not None

    def facts(self, updates_per_step: int = 1) -> Facts:
        """What fills "auto"; a value that somebody wrote is binding.

        Args:
            updates_per_step: the numbers count steps of a schedule that moves this often per optimizer step.
        """
        total, warmup = self.total_num_steps, self.warmup_num_steps
        per = f" / {updates_per_step} processes" if updates_per_step > 1 else ""
        named = f"DummyScheduler(warmup_num_steps={warmup})" if self._warmup_given else "DummyScheduler's default"
        return Facts(
            warmup_num_steps=Fact(-(-warmup // updates_per_step), f"{named}{per}", self._warmup_given),
            total_num_steps=None
            if total is None
            else Fact(-(-total // updates_per_step), f"DummyScheduler(total_num_steps={total}){per}"),
        )


def _materialized(item: Any) -> Any:
    return {**item, "params": list(item["params"])} if isinstance(item, dict) else item
