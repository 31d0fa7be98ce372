"""`PreparedOptimizer`: the optimizer a script goes on calling, whose step is the engine's.

Steps and clears only where an accumulation ends, as the shared `GradientState` says. It subclasses torch's class for
schedulers that insist on one, and holds nothing of it: groups, state and defaults are the wrapped optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from zeroaccel.accelerate.accelerator_state import GradientState
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero.engine import Engine

__all__ = ["PreparedOptimizer"]


class PreparedOptimizer(Optimizer):
    """The optimizer of one prepared model.

    Attributes:
        optimizer: the one that was given, or that the config describes; its groups hold this rank's shards.
        engine: of the model it trains.
        gradient_state: of the accelerator.
    """

    def __init__(self, engine: Engine, gradient_state: GradientState) -> None:
        # Optimizer.__init__ would make groups of its own.
        self.engine = engine
        self.optimizer: Optimizer = engine.optimizer
        self.gradient_state = gradient_state
        self._skipped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups: reading and writing `lr` in them works as ever."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state, of this rank's shards."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The arguments the optimizer was made with."""
        return self.optimizer.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was left out because gradients were not finite."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the weights where an accumulation ends; elsewhere nothing.

        Raises:
            UsageError: there is a closure: the engine does not evaluate the model again.
            EngineStateError: no backward came before.
        """
        if closure is not None:
            raise UsageError("optimizer.step(closure)", expected="no closure", got=closure)
        if self.gradient_state.sync_gradients:
            self.engine.step()
            self._skipped = not self.engine.was_step_applied()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that no update has used, where an accumulation ends; elsewhere nothing."""
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, that is of this rank's shards; checkpoints hold the whole."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not to be called.

        Raises:
            EngineStateError: always: states are sharded.
        """
        raise EngineStateError(
            "optimizer.load_state_dict(): the states are sharded over the ranks",
            fix="use accelerator.load_state(folder), or engine.load_checkpoint(folder)",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not to be called.

        Raises:
            EngineStateError: always: what is trained is laid out by then.
        """
        raise EngineStateError(
            "optimizer.add_param_group(): the model is prepared and laid out",
            fix="add the group before prepare(); lr 0 keeps it still until its time",
        )

    def train(self) -> None:
        """For optimizers that train and evaluate with different weights."""
        self._switch("train")

    def eval(self) -> None:
        """For optimizers that train and evaluate with different weights."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise EngineStateError("a prepared optimizer cannot be pickled", fix="use accelerator.save_state(folder)")
