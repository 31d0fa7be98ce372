"""`DummyOptim` and `DummyScheduler`: placeholders for the optimizer and the scheduler that a config describes.

A script passes them to `prepare`, which builds the real ones from the config's sections, fills "auto" in these from
the placeholders' arguments, and returns the real ones.
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
        lr: fills `optimizer.params.lr` where that is "auto"; 0.001 by default.
        weight_decay: fills the same key of `params`; 0 by default.
        kwargs: `betas` and `eps`, for the keys of these names.

    Raises:
        UsageError: another keyword.

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
                fix="write other settings into the config's optimizer.params",
            )
        self._explicit = {"lr": lr is not None, "weight_decay": weight_decay is not None}

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of every group."""
        return [param for item in self.params for param in (item["params"] if isinstance(item, dict) else [item])]

    def facts(self) -> Facts:
        """Facts that fill "auto"; a value that the script has passed is explicit."""
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
    """Placeholder for the scheduler of the config's `scheduler` section, or of a callable.

    Args:
        optimizer: the optimizer, or its placeholder.
        total_num_steps: optimizer steps of the entire schedule; fills `scheduler.params.total_num_steps`.
        warmup_num_steps: optimizer steps of the warm-up, 0 by default; fills `scheduler.params.warmup_num_steps`.
        lr_scheduler_callable: makes the scheduler from the optimizer; then the config has no `scheduler` section.
        kwargs: for scripts that read them back.

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
        """Facts that fill "auto"; a value that the script has passed is explicit.

        Args:
            updates_per_step: the numbers count scheduler steps, of which there are so many per optimizer step.
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
