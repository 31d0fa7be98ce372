"""Prepared optimizer and scheduler, which a script calls as before, and the accumulation state that they follow.

Like accelerate's AcceleratedOptimizer and AcceleratedScheduler, `PreparedOptimizer.step` runs the engine's step and
`PreparedScheduler.step` the scheduler's step only in the micro-step that ends an accumulation
(`GradientState.sync_gradients`).

`DummyOptim` and `DummyScheduler` are placeholders for the optimizer and the scheduler that a config describes. A script
passes them to `prepare`, which takes the real objects from the config's sections, and fills "auto" there with the
placeholders' arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from zeroaccel.config import Fact, Facts
from zeroaccel.data.metric_samples import RealSamples
from zeroaccel.engine import EngineBase
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.seeds import synchronize_rng_states


class GradientState:
    """Position within an accumulation. The accelerator and its loaders write it; optimizer and scheduler read it.

    Without arguments it is the state of the newest accelerator.

    Attributes:
        sync_gradients: True if the current micro-step ends with an optimizer step.
        num_steps: micro-steps per optimizer step.
        adjust_scheduler: no effect, kept for scripts that read it; schedulers count optimizer steps.
        sync_with_dataloader: end the accumulation at the last batch of a loader, even if it is incomplete.
        sync_each_batch: reduce gradients in every micro-step.
        shared_generators: random generators that are synchronized with rank 0 when an iteration over a loader begins.
        at_next_batch: function that is called before a loader reads its next batch; it may raise.
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
        """Loaders whose iteration is in progress, the innermost last."""
        return list(self._loaders)

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Settings of gradient accumulation, with the names of `GradientAccumulationPlugin`."""
        names = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
        return {name: getattr(self, name) for name in names}

    @property
    def active_dataloader(self) -> Any:
        """Innermost loader whose iteration is in progress, or None."""
        return self._loaders[-1] if self._loaders else None

    @property
    def in_dataloader(self) -> bool:
        """True during an iteration over a prepared loader."""
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch is the last one of the active loader."""
        return bool(getattr(self.active_dataloader, "end_of_dataloader", False))

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are not repetitions; -1 without repetitions or without a loader."""
        return int(getattr(self.active_dataloader, "remainder", -1))

    @property
    def real_samples(self) -> RealSamples | None:
        """Samples of this process's batch that are not repetitions; None without repetitions or without a loader."""
        return getattr(self.active_dataloader, "real_samples", None)

    def add_dataloader(self, loader: Any) -> None:
        """Adds a loader with `end_of_dataloader` and `remainder`; the loader calls it when its iteration starts."""
        if self.shared_generators:
            synchronize_rng_states(self.shared_generators)
        self._loaders.append(loader)

    def next_batch(self) -> None:
        """Runs `at_next_batch`; a loader calls it before it reads a batch, and not after the last batch."""
        if self.at_next_batch is not None:
            self.at_next_batch()

    def remove_dataloader(self, loader: Any) -> None:
        """Removes a loader; the loader calls it when its iteration ends or is abandoned."""
        self._loaders = [other for other in self._loaders if other is not loader]

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation steps: {self.num_steps}\n"
        )


class PreparedOptimizer(Optimizer):
    """The optimizer of one prepared model; its step runs the engine's step.

    It is a subclass of torch's class because LR schedulers require one. Param groups, state and defaults are those of
    the wrapped optimizer.

    Attributes:
        optimizer: the script's optimizer, or the one built from the config; its groups have this rank's shards.
        engine: engine of the model that it trains.
        gradient_state: gradient state of the accelerator.
    """

    def __init__(self, engine: EngineBase, gradient_state: GradientState) -> None:
        # No super().__init__: it would create its own param groups.
        self.engine = engine
        self.optimizer: Optimizer = engine.optimizer
        self.gradient_state = gradient_state
        self._skipped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Param groups of the wrapped optimizer; scripts may read and write their `lr`."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the wrapped optimizer for this rank's shards."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default hyperparameters of the wrapped optimizer."""
        return self.optimizer.defaults

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients were not finite."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Steps the engine at the end of an accumulation; otherwise does nothing.

        Raises:
            UsageError: a closure was passed; the engine does not evaluate the model again.
            EngineStateError: no backward has run since the last step.
        """
        if closure is not None:
            raise UsageError("optimizer.step(closure)", expected="no closure", got=closure)
        if self.gradient_state.sync_gradients:
            self.engine.step()
            self._skipped = not self.engine.was_step_applied()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops unused gradients at the end of an accumulation; otherwise does nothing."""
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict for this rank's shards; checkpoints have the full state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises an error: the optimizer states are sharded.

        Raises:
            EngineStateError: always.
        """
        raise EngineStateError(
            "optimizer.load_state_dict(): the states are sharded over the ranks",
            fix="use accelerator.load_state(folder), or engine.load_checkpoint(folder)",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises an error: the flat buffers of trained parameters already exist.

        Raises:
            EngineStateError: always.
        """
        raise EngineStateError(
            "optimizer.add_param_group(): prepare() has already sharded the parameters",
            fix="add the group before prepare(), with lr 0 if it should not train until you raise its rate",
        )

    def train(self) -> None:
        """Calls `train` of the wrapped optimizer if it has one, like schedule-free optimizers."""
        self._switch("train")

    def eval(self) -> None:
        """Calls `eval` of the wrapped optimizer if it has one, like schedule-free optimizers."""
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
    """The LR scheduler of one prepared optimizer; other attributes are those of the wrapped scheduler.

    It counts optimizer steps: calls within an accumulation and after a skipped step do nothing.

    Attributes:
        scheduler: the script's scheduler, or the one built from the config or by a callable.
        optimizer: optimizer whose learning rates it sets.
        engine_driven: True if the engine steps the scheduler; `step` then does nothing.
        with_optimizer: False steps the scheduler at every call of `step`.
        steps_per_update: scheduler steps per optimizer step; the number of ranks for scripts that count the batches of
            all ranks.
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
        """Steps the scheduler if this micro-step has updated the weights; passes its arguments on."""
        if self.engine_driven:
            return
        if not self.with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self.gradient_state.sync_gradients and not self.optimizer.step_was_skipped:
            for _ in range(self.steps_per_update):
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """Returns the last learning rates, one per group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({type(self.scheduler).__name__})"


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
