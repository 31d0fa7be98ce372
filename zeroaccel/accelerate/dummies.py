"""`DummyOptim` and `DummyScheduler`: placeholders for the optimizer and the scheduler that a config describes.

A script passes them to `prepare`, which builds and returns the real objects. It takes them from the config's sections
and fills "auto" there with the placeholders' arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from zeroaccel.config import Fact, Facts
from zeroaccel.errors import UsageError

_DEFAULT_LR = 1e-3


class DummyOptim:
    """Placeholder for the optimizer of the config's `optimizer` section.

    Args:
        params: parameters or param groups, as for a torch optimizer.
        lr: fills `optimizer.params.lr` if it is "auto". Defaults to 0.001.
        weight_decay: fills `optimizer.params.weight_decay` if it is "auto". Defaults to 0.
        kwargs: `betas` and `eps`, which fill the keys of the same names.

    Raises:
        UsageError: another keyword was passed.

    Example:
        >>> import torch
        >>> from zeroaccel import Accelerator, DummyOptim, ZeroPlugin
        >>> optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}}
        >>> plugin = ZeroPlugin({"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer})
        >>> accelerator = Accelerator(zero_plugin=plugin)
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters(), lr=3e-4))
        >>> optimizer.param_groups[0]["lr"]
        0.0003
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | None = None,
        weight_decay: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.params: list[Any] = [
            {**item, "params": list(item["params"])} if isinstance(item, dict) else item for item in params
        ]
        self.lr = _DEFAULT_LR if lr is None else lr
        self.weight_decay = 0.0 if weight_decay is None else weight_decay
        self.kwargs = kwargs
        if unknown := sorted(set(kwargs) - {"betas", "eps"}):
            raise UsageError(
                f"DummyOptim({unknown[0]}=...)",
                expected="lr, weight_decay, betas or eps",
                fix="set other values in optimizer.params of the config",
            )
        self._explicit = {"lr": lr is not None, "weight_decay": weight_decay is not None}

    def parameters(self) -> list[nn.Parameter]:
        """Returns all parameters of all groups."""
        return [param for item in self.params for param in (item["params"] if isinstance(item, dict) else [item])]

    def facts(self) -> Facts:
        """Returns the facts that fill "auto"; values that the script has passed are explicit."""
        betas, eps = self.kwargs.get("betas"), self.kwargs.get("eps")
        return Facts(
            lr=Fact(self.lr, self._source("lr"), self._explicit["lr"]),
            weight_decay=Fact(self.weight_decay, self._source("weight_decay"), self._explicit["weight_decay"]),
            betas=None if betas is None else Fact(tuple(betas), f"DummyOptim(betas={tuple(betas)})"),
            eps=None if eps is None else Fact(eps, f"DummyOptim(eps={eps})"),
        )

    def _source(self, name: str) -> str:
        return f"DummyOptim({name}={getattr(self, name)})" if self._explicit[name] else f"DummyOptim's default {name}"


class DummyScheduler:
    """Placeholder for the scheduler of the config's `scheduler` section, or for one that a callable creates.

    Args:
        optimizer: the optimizer, or its placeholder.
        total_num_steps: number of optimizer steps of the schedule; fills `scheduler.params.total_num_steps`.
        warmup_num_steps: number of optimizer steps of the warm-up; fills `scheduler.params.warmup_num_steps`. Defaults
            to 0.
        lr_scheduler_callable: function that creates the scheduler from the optimizer; the config must not have a
            `scheduler` section.
        kwargs: no effect, kept for scripts that read them.

    Example:
        >>> import torch
        >>> from zeroaccel import Accelerator, DummyOptim, DummyScheduler, ZeroPlugin
        >>> scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
        >>> config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, "scheduler": scheduler}
        >>> accelerator = Accelerator(zero_plugin=ZeroPlugin(config))
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = DummyOptim(model.parameters())
        >>> scheduler = DummyScheduler(optimizer, warmup_num_steps=100)
        >>> model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
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
        self._warmup_is_explicit = warmup_num_steps is not None

    def facts(self, updates_per_step: int = 1) -> Facts:
        """Returns the facts that fill "auto"; values that the script has passed are explicit.

        Args:
            updates_per_step: scheduler steps per optimizer step; the script's numbers count scheduler steps.
        """
        total, warmup = self.total_num_steps, self.warmup_num_steps
        per = f" / {updates_per_step} processes" if updates_per_step > 1 else ""
        named = f"DummyScheduler(warmup_num_steps={warmup})" if self._warmup_is_explicit else "DummyScheduler's default"
        return Facts(
            warmup_num_steps=Fact(-(-warmup // updates_per_step), f"{named}{per}", self._warmup_is_explicit),
            total_num_steps=None
            if total is None
            else Fact(-(-total // updates_per_step), f"DummyScheduler(total_num_steps={total}){per}"),
        )
