"""Optimizer and scheduler as a script goes on calling them, and the accumulation state that decides when they act.

`PreparedOptimizer.step` runs the engine's step, and `PreparedScheduler.step` the scheduler's, only in the micro-step
that ends an accumulation (`GradientState.sync_gradients`), as accelerate's AcceleratedOptimizer and
AcceleratedScheduler do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer

from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.seeds import synchronize_rng_states
from zeroaccel.zero.engine_base import EngineBase


class GradientState:
    """Position within an accumulation. The accelerator and its loaders write it; optimizer and scheduler read it.

    Without arguments it is that of the newest accelerator.

    Attributes:
        sync_gradients: the current micro-step ends with an optimizer step.
        num_steps: micro-steps per optimizer step.
        adjust_scheduler: for scripts that read it; schedulers here count optimizer steps.
        sync_with_dataloader: the last batch of a loader ends the accumulation, full or not.
        sync_each_batch: reduce gradients in every micro-step.
        shared_generators: random generators that become rank 0's whenever an iteration over a loader begins.
        at_next_batch: called before a loader reads its next batch; may raise.
    """

    _newest: ClassVar[dict[str, Any] | None] = None

    def __init__(
        self,
        num_steps: int | None = None,
        *,
        adjust_scheduler: bool = True,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        shared_generators: Sequence[str] = (),
    ) -> None:
        if num_steps is None and GradientState._newest is not None:
            self.__dict__ = GradientState._newest
            return
        GradientState._newest = self.__dict__
        self.sync_gradients = True
        self.shared_generators = tuple(shared_generators)
        self.num_steps = 1 if num_steps is None else num_steps
        self.adjust_scheduler = adjust_scheduler
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.at_next_batch: Callable[[], None] | None = None
        self._loaders: list[Any] = []

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, the innermost last."""
        return list(self._loaders)

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """How gradients are accumulated, as a `GradientAccumulationPlugin` says it."""
        names = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
        return {name: getattr(self, name) for name in names}

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated, or None."""
        return self._loaders[-1] if self._loaders else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of the loader that is being iterated."""
        return bool(getattr(self.active_dataloader, "end_of_dataloader", False))

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are not repetitions; -1 where none is, or without a loader."""
        return int(getattr(self.active_dataloader, "remainder", -1))

    def add_dataloader(self, loader: Any) -> None:
        """Called by a loader, which has `end_of_dataloader` and `remainder`, when its iteration starts."""
        if self.shared_generators:
            synchronize_rng_states(self.shared_generators)
        self._loaders.append(loader)

    def next_batch(self) -> None:
        """Called by a loader before it reads a batch; not between the last batch and the end of an iteration."""
        if self.at_next_batch is not None:
            self.at_next_batch()

    def remove_dataloader(self, loader: Any) -> None:
        """Called by a loader when its iteration ends, or is abandoned."""
        self._loaders = [other for other in self._loaders if other is not loader]

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation steps: {self.num_steps}\n"
        )


class PreparedOptimizer(Optimizer):
    """The optimizer of one prepared model, whose step is the engine's.

    A subclass of torch's class because LR schedulers insist on one; param groups, state and defaults are those of the
    wrapped optimizer.

    Attributes:
        optimizer: the script's, or built from the config; its groups have this rank's shards.
        engine: of the model it trains.
        gradient_state: of the accelerator.
    """

    def __init__(self, engine: EngineBase, gradient_state: GradientState) -> None:
        # No super().__init__: it would make param groups of its own.
        self.engine = engine
        self.optimizer: Optimizer = engine.optimizer
        self.gradient_state = gradient_state
        self._skipped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups; `lr` may be read and written in them."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, of this rank's shards."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's default hyperparameters."""
        return self.optimizer.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Steps the engine at the end of an accumulation; elsewhere does nothing.

        Raises:
            UsageError: there is a closure: the engine does not evaluate the model again.
            EngineStateError: there was no backward since the last step.
        """
        if closure is not None:
            raise UsageError("optimizer.step(closure)", expected="no closure", got=closure)
        if self.gradient_state.sync_gradients:
            self.engine.step()
            self._skipped = not self.engine.was_step_applied()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops unused gradients at the end of an accumulation; elsewhere does nothing."""
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, of this rank's shards only; checkpoints have the full state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused.

        Raises:
            EngineStateError: always: states are sharded.
        """
        raise EngineStateError(
            "optimizer.load_state_dict(): the states are sharded over the ranks",
            fix="use accelerator.load_state(folder), or engine.load_checkpoint(folder)",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused.

        Raises:
            EngineStateError: always: the flat buffers of trained parameters exist already.
        """
        raise EngineStateError(
            "optimizer.add_param_group(): prepare() has sharded the parameters already",
            fix="add the group before prepare(); with lr 0 it stays unchanged until you raise its rate",
        )

    def train(self) -> None:
        """Calls the wrapped optimizer's, as schedule-free optimizers have one; else does nothing."""
        self._switch("train")

    def eval(self) -> None:
        """Calls the wrapped optimizer's, as schedule-free optimizers have one; else does nothing."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise EngineStateError("a prepared optimizer cannot be pickled", fix="use accelerator.save_state(folder)")


class PreparedScheduler:
    """The LR scheduler of one prepared optimizer; other attributes are the wrapped scheduler's.

    It counts optimizer steps: calls within an accumulation and after a skipped step do nothing.

    Attributes:
        scheduler: the script's, or built from the config or by a callable.
        optimizer: whose learning rates it writes.
        engine_driven: the engine steps it, so that `step` does nothing.
        with_optimizer: False makes every call of `step` count.
        steps_per_update: scheduler steps per optimizer step; W for scripts that count the batches of all ranks.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: PreparedOptimizer,
        gradient_state: GradientState,
        *,
        engine_driven: bool = False,
        with_optimizer: bool = True,
        steps_per_update: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer
        self.gradient_state = gradient_state
        self.engine_driven = engine_driven
        self.with_optimizer = with_optimizer
        self.steps_per_update = steps_per_update

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the schedule if this micro-step updated the weights; arguments are the wrapped scheduler's."""
        if self.engine_driven:
            return
        if not self.with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self.gradient_state.sync_gradients and not self.optimizer.step_was_skipped:
            for _ in range(self.steps_per_update):
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """The learning rates last written, one per group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped scheduler's."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({type(self.scheduler).__name__})"
