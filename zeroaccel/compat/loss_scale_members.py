"""DeepSpeed's members of an engine's optimizer and loss scale: `cur_scale`, `loss_scaler`, `overflow` and others.

The objects remain the same. From `attach` until the engine is destroyed, a subclass of the same name replaces their
class and adds the members, which read the engine's current state.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable
from typing import Any

from zeroaccel.engine import EngineBase
from zeroaccel.errors import EngineStateError, UsageError


class _Extended:
    """Base of the subclasses: refers to the engine, and makes copies and pickles instances of the original class."""

    _extended: type
    _engine_reference: weakref.ref[EngineBase]

    @property
    def _engine(self) -> EngineBase:
        engine = self._engine_reference()
        assert engine is not None, "the engine no longer exists"
        return engine

    def __reduce_ex__(self, protocol: Any) -> Any:
        getstate = getattr(self, "__getstate__", None)
        state = getstate() if getstate is not None else dict(vars(self))
        return copyreg.__newobj__, (self._extended,), state  # type: ignore[attr-defined]


class DeepSpeedOptimizer(_Extended):
    """Members of the optimizer that `deepspeed.initialize` returns, in addition to those of its own class.

    Attributes:
        overflow: True if the last `engine.step()` skipped its update.
        parameter_offload: see `ParameterOffload`; None for inference.
    """

    overflow: bool = False
    parameter_offload: Any = None

    @property
    def optimizer(self) -> Any:
        """The optimizer itself: it has no wrapper."""
        return self

    @property
    def loss_scaler(self) -> Any:
        """The loss scale; see `DeepSpeedLossScale`."""
        return self._engine.loss_scale

    @property
    def cur_scale(self) -> float:
        """Factor of the loss in the next backward; 1 in bf16 and fp32."""
        return float(self._engine.loss_scale.value)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        _set_scale(self._engine, value, "optimizer.cur_scale")

    @property
    def loss_scale(self) -> float:
        """Alias of `cur_scale`."""
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        _set_scale(self._engine, value, "optimizer.loss_scale")

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale is dynamic."""
        return bool(self.loss_scaler.dynamic)

    def needs_scaler(self) -> bool:
        """True under fp16: a plain `loss.backward()` needs `engine.scale(loss)` first."""
        return bool(self._engine.loss_scale.scales)

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        """Calls `engine.backward` with a loss that is already divided by the accumulation steps."""
        self._engine.backward(loss, retain_graph, scale_wrt_gas=False)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Calls `engine.offload_states`; OpenRLHF calls it on the optimizer. (all ranks)"""
        self._engine.offload_states(*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Calls `engine.reload_states`. (all ranks)"""
        self._engine.reload_states(*args, **kwargs)


class DeepSpeedLossScale(_Extended):
    """Members of the loss scale, which serves as `engine.loss_scale()` and as `optimizer.loss_scaler`."""

    value: float

    def __call__(self) -> float:
        """Returns the config's `loss_scale`: 0 for a dynamic scale, and without fp16."""
        return float(self._engine.config.get("fp16", {}).get("loss_scale", 0.0))

    @property
    def cur_scale(self) -> float:
        """Factor of the loss in the next backward."""
        return float(self.value)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        _set_scale(self._engine, value, "optimizer.loss_scaler.cur_scale")

    @property
    def loss_scale(self) -> float:
        """Alias of `cur_scale`."""
        return self.cur_scale

    @property
    def dynamic(self) -> bool:
        """True if the scale is dynamic."""
        return hasattr(self, "window")

    def __getattr__(self, name: str) -> Any:
        attribute = _SCALE_NAMES.get(name)
        if attribute is None or not self.dynamic:
            raise AttributeError(f"optimizer.loss_scaler.{name}: zeroaccel's loss scale does not have this")
        return getattr(self, attribute)


# DeepSpeed's attribute of a dynamic scale -> attribute of `DynamicLossScale`.
_SCALE_NAMES = {
    "scale_window": "window",
    "min_scale": "minimum",
    "delayed_shift": "hysteresis",
    "cur_hysteresis": "tolerance",
    "cur_iter": "steps",
    "last_overflow_iter": "last_overflow",
}


def attach(engine: EngineBase) -> None:
    """Adds the members to the engine's loss scale and optimizer, if it has one, until the engine is destroyed."""
    for target, members in ((engine.loss_scale, DeepSpeedLossScale), (engine.optimizer, DeepSpeedOptimizer)):
        if target is not None:
            engine.at_destroy(_extend(target, members, engine))


def _extend(target: Any, members: type, engine: EngineBase) -> Callable[[], None]:
    """Replaces the class of `target` by a subclass with these members; returns a function that restores it."""
    original = type(target)
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_extended": original,
        "_engine_reference": weakref.ref(engine),
    }
    before = dict(vars(target))
    target.__class__ = type(original.__name__, (members, original), names)

    def restore() -> None:
        target.__class__ = original
        for name in ("overflow", "parameter_offload"):
            if name not in before:
                vars(target).pop(name, None)

    return restore


def _set_scale(engine: EngineBase, value: float, where: str) -> None:
    """Sets the scale of the next backward.

    Raises:
        UsageError: the precision has no loss scale, or the value is not a positive number.
        EngineStateError: gradients with the current scale await their step.
    """
    if not engine.loss_scale.scales:
        raise UsageError(where, expected="fp16, which has a loss scale", got=value, fix="do not set it")
    if not float(value) > 0:
        raise UsageError(where, expected="a positive number", got=value)
    if engine.has_gradients:
        raise EngineStateError(where, expected="an assignment between a step and the next backward")
    engine.loss_scale.value = float(value)
