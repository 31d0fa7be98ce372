"""Stand-in for accelerate's `LocalSGD`: it works on one process, where it has no effect on training."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn

from zeroaccel.errors import UsageError

__all__ = ["LocalSGD"]


class LocalSGD:
    """Local SGD: each process updates its weights alone, with averages every few steps. Supported on one process only.

    Args:
        accelerator: the accelerator that prepared the model.
        model: the prepared model.
        local_sgd_steps: number of updates between two averages.
        enabled: if False, the context has no effect.

    Raises:
        UsageError: it is enabled on several processes. An engine updates every weight once, from the gradients of all
            ranks, so ranks have no separate weights to average.

    Example:
        >>> import torch
        >>> from zeroaccel import Accelerator
        >>> from zeroaccel.local_sgd import LocalSGD
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     accelerator.backward(model(torch.ones(2, 4)).mean())
        ...     optimizer.step()
        ...     local_sgd.step()
    """

    def __init__(self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if enabled and accelerator.num_processes > 1:
            raise UsageError(
                "LocalSGD(enabled=True)",
                expected="one process: an engine updates every weight once, from the gradients of all ranks",
                got=f"{accelerator.num_processes} processes",
                fix="pass enabled=False; for less traffic between machines, accumulate over more micro-steps, or set "
                "zero_quantized_gradients",
            )
        self.enabled = enabled
        self.num_steps = 0
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps

    def __enter__(self) -> LocalSGD:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def step(self) -> None:
        """Counts an update. The average over one process changes nothing."""
        self.num_steps += 1
