"""DeepSpeed's optimizer classes, with the constructors that scripts and libraries use; `zeroaccel.ops` computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops.elementwise import Adagrad, Adam, Lion

# Keys that Adam does not have, tested in groups without betas.
_FOREIGN = ("momentum", "nesterov", "rho", "alpha", "lambd", "etas", "beta2_decay", "clip_threshold", "decay_rate")


def _foreign_key(group: Mapping[str, Any]) -> str | None:
    """Returns a sign that torch or a library built a param group for an optimizer other than Adam; None for no sign."""
    if "betas" not in group:
        return next((f"they have {key!r}" for key in _FOREIGN if key in group), None)
    made_by_torch = "foreach" in group and "differentiable" in group
    return "they have 'betas' but no 'amsgrad'" if made_by_torch and "amsgrad" not in group else None


def _refuse_replacement(name: str, params: Iterable[Any]) -> None:
    """Refuses to replace another optimizer, as accelerate does when optimizer states are offloaded."""
    for group in params:
        sign = _foreign_key(group) if isinstance(group, Mapping) else None
        if sign is not None:
            raise UsageError(
                f"{name}: created with the param groups of another optimizer ({sign})",
                expected="the optimizer that the script created",
                got="a replacement by accelerate, since optimizer states are offloaded",
                fix='set "zero_force_ds_cpu_optimizer": false in the config; '
                "zeroaccel can offload any elementwise torch optimizer",
            )


def _require(name: str, argument: str, value: object, expected: object, fix: str = "") -> None:
    if value != expected:
        raise UsageError(f"{name}, {argument}", expected=str(expected), got=value, fix=fix)


_STATES_FIX = "states are fp32, or have the config's moments_dtype"
_GRADIENTS_FIX = "remove it: the engine drops gradients"


class DeepSpeedCPUAdam(Adam):
    """`zeroaccel.ops.Adam` under DeepSpeed's name; it has the same arguments, except the last one.

    Args:
        fp32_optimizer_states: must be True.
    """

    def __init__(self, model_params: ParamsT, *args: Any, fp32_optimizer_states: bool = True, **kwargs: Any) -> None:
        groups: list[Any] = list(model_params)
        _refuse_replacement(type(self).__name__, groups)
        _require(type(self).__name__, "fp32_optimizer_states", fp32_optimizer_states, True, _STATES_FIX)
        super().__init__(groups, *args, **kwargs)


class FusedAdam(Adam):
    """`zeroaccel.ops.Adam` with DeepSpeed's name and arguments; `set_grad_none` must be True."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _require("FusedAdam", "set_grad_none", set_grad_none, True, _GRADIENTS_FIX)
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdagrad(Adagrad):
    """`zeroaccel.ops.Adagrad` with DeepSpeed's name and arguments.

    Args:
        amsgrad: must be False: Adagrad has no such variant.
        fp32_optimizer_states: must be True.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _require("DeepSpeedCPUAdagrad", "amsgrad", amsgrad, False)
        _require("DeepSpeedCPUAdagrad", "fp32_optimizer_states", fp32_optimizer_states, True, _STATES_FIX)
        super().__init__(model_params, lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """`zeroaccel.ops.Lion` under DeepSpeed's name; `fp32_optimizer_states` must be True."""

    def __init__(self, model_params: ParamsT, *args: Any, fp32_optimizer_states: bool = True, **kwargs: Any) -> None:
        _require("DeepSpeedCPULion", "fp32_optimizer_states", fp32_optimizer_states, True, _STATES_FIX)
        super().__init__(model_params, *args, **kwargs)


class FusedLion(Lion):
    """`zeroaccel.ops.Lion` under DeepSpeed's name; `set_grad_none` must be True."""

    def __init__(self, params: ParamsT, *args: Any, set_grad_none: bool = True, **kwargs: Any) -> None:
        _require("FusedLion", "set_grad_none", set_grad_none, True, _GRADIENTS_FIX)
        super().__init__(params, *args, **kwargs)
