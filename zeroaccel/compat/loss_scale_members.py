"""DeepSpeed's members of an engine's optimizer and loss scale: `cur_scale`, `loss_scaler`, `overflow` and others.

The objects stay what they are. Their class is replaced by a subclass of the same name that has the members besides its
own, from `attach` until the engine is destroyed; so every member reads the engine's state when it is asked for.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable
from typing import Any

from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero.engine_base import EngineBase


class _Extended:
    """What the subclasses share: their engine; and they are copied and pickled as objects of the class they extend."""

    _extended: type
    _engine_reference: weakref.ref[EngineBase]

    @property
    def _engine(self) -> EngineBase:
        engine = self._engine_reference()
        assert engine is not None, "members of an engine that is gone"
        return engine

    def __reduce_ex__(self, protocol: Any) -> Any:
        getstate = getattr(self, "__getstate__", None)
        state = getstate() if getstate is not None else dict(vars(self))
        return copyreg.__newobj__, (self._extended,), state  # type: ignore[attr-defined]


class DeepSpeedOptimizer(_Extended):
    """Members of the optimizer that `deepspeed.initialize` returns, besides those of its own class.

    Attributes:
        overflow: whether the last `engine.step()` skipped its update.
        parameter_offload: see `ParameterOffload`; None for inference.
    """

    overflow: bool = False
    parameter_offload: Any = None

    @property
    def optimizer(self) -> Any:
        """The optimizer itself: there is no wrapper around it."""
        return self

    @property
    def loss_scaler(self) -> Any:
        """The loss scale; see `DeepSpeedLossScale`."""
        return self._engine.loss_scale

    @property
    def cur_scale(self) -> float:
        """The factor of the loss in the next backward; 1 in bf16 and fp32."""
        return float(self._engine.loss_scale.value)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        _set_scale(self._engine, value, "optimizer.cur_scale")

    @property
    def loss_scale(self) -> float:
        """The same as `cur_scale`."""
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        _set_scale(self._engine, value, "optimizer.loss_scale")

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes by itself."""
        return bool(self.loss_scaler.dynamic)

    def needs_scaler(self) -> bool:
        """Whether a plain `loss.backward()` needs `engine.scale(loss)` first: under fp16."""
        return bool(self._engine.loss_scale.scales)

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        """`engine.backward` of a loss that is divided by the accumulation steps already."""
        self._engine.backward(loss, retain_graph, scale_wrt_gas=False)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """`engine.offload_states`, which OpenRLHF calls on the optimizer. (all ranks)"""
        self._engine.offload_states(*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """`engine.reload_states`. (all ranks)"""
        self._engine.reload_states(*args, **kwargs)


class DeepSpeedLossScale(_Extended):
    """Members of the loss scale: it is `engine.loss_scale()`, and `optimizer.loss_scaler` with its numbers."""

    value: float

    def __call__(self) -> float:
        """The config's `loss_scale`: 0 where the scale is dynamic, and without fp16."""
        return float(self._engine.config.get("fp16", {}).get("loss_scale", 0.0))

    @property
    def cur_scale(self) -> float:
        """The factor of the loss in the next backward."""
        return float(self.value)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        _set_scale(self._engine, value, "optimizer.loss_scaler.cur_scale")

    @property
    def loss_scale(self) -> float:
        """The same as `cur_scale`."""
        return self.cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it changes by itself."""
        return hasattr(self, "window")

    def __getattr__(self, name: str) -> Any:
        own = _SCALE_NAMES.get(name)
        if own is None or not self.dynamic:
            raise AttributeError(f"optimizer.loss_scaler.{name}: zeroaccel's loss scale does not have this")
        return getattr(self, own)


# DeepSpeed's names of a dynamic scale's numbers -> those of `DynamicLossScale`.
_SCALE_NAMES = {
    "scale_window": "window",
    "min_scale": "minimum",
    "delayed_shift": "hysteresis",
    "cur_hysteresis": "tolerance",
    "cur_iter": "steps",
    "last_overflow_iter": "last_overflow",
}


def attach(engine: EngineBase) -> None:
    """Gives the members to the engine's loss scale and, where it has one, its optimizer, until it is destroyed."""
    for part, members in ((engine.loss_scale, DeepSpeedLossScale), (engine.optimizer, DeepSpeedOptimizer)):
        if part is not None:
            engine.at_destroy(_extend(part, members, engine))


def _extend(part: Any, members: type, engine: EngineBase) -> Callable[[], None]:
    """Replaces the class of `part` by a subclass with these members; the result restores it."""
    own = type(part)
    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "_extended": own,
        "_engine_reference": weakref.ref(engine),
    }
    before = dict(vars(part))
    part.__class__ = type(own.__name__, (members, own), names)

    def restore() -> None:
        part.__class__ = own
        for name in ("overflow", "parameter_offload"):
            if name not in before:
                vars(part).pop(name, None)

    return restore


def _set_scale(engine: EngineBase, value: float, where: str) -> None:
    """Sets the scale of the next backward.

    Raises:
        UsageError: the precision has no loss scale, or the value is not a positive number.
        EngineStateError: gradients with the present scale wait for their step.
    """
    if not engine.loss_scale.scales:
        raise UsageError(where, expected="fp16, which has a loss scale", got=value, fix="leave it as it is")
    if not float(value) > 0:
        raise UsageError(where, expected="a positive number", got=value)
    if engine.has_gradients:
        raise EngineStateError(where, expected="to be set between a step and the next backward")
    engine.loss_scale.value = float(value)
