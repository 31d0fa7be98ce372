"""`PreparedScheduler`: the schedule a script goes on calling, which moves once per update of the weights."""

from __future__ import annotations

from typing import Any

from zeroaccel.accelerate.accelerator_state import GradientState
from zeroaccel.accelerate.prepared_optimizer import PreparedOptimizer

__all__ = ["PreparedScheduler"]


class PreparedScheduler:
    """A schedule of one prepared optimizer; attributes it does not have are the wrapped schedule's.

    It counts optimizer steps: calls within an accumulation and after a skipped update do nothing.

    Attributes:
        scheduler: the one that was given, or that the config or a callable made.
        optimizer: whose learning rates it writes.
        engine_driven: the engine moves it at every update, so that `step` has nothing left to do.
        with_optimizer: False makes every call of `step` count.
        per_update: how often it moves per update; the number of processes where scripts count by samples.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: PreparedOptimizer,
        gradient_state: GradientState,
        *,
        engine_driven: bool = False,
        with_optimizer: bool = True,
        per_update: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer
        self.gradient_state = gradient_state
        self.engine_driven = engine_driven
        self.with_optimizer = with_optimizer
        self.per_update = per_update

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Moves on, if this micro-step updated the weights; arguments are the wrapped schedule's."""
        if self.engine_driven:
            return
        if not self.with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self.gradient_state.sync_gradients and not self.optimizer.step_was_skipped:
            for _ in range(self.per_update):
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """The rates last written, one per group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped schedule's."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped schedule's."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({type(self.scheduler).__name__})"
