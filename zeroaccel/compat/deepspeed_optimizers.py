"""DeepSpeed's optimizer classes, as scripts and libraries construct them; the steps are those of `zeroaccel.ops`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops.elementwise import Adagrad, Adam, Lion

# Keys that no Adam has, in groups without Adam's.
_FOREIGN = ("momentum", "nesterov", "rho", "alpha", "lambd", "etas", "beta2_decay", "clip_threshold", "decay_rate")


def _foreign_key(group: Mapping[str, Any]) -> str | None:
    """What shows that torch or a library made a param group for an optimizer that is not Adam; None for nothing."""
    if "betas" not in group:
        return next((f"they have {key!r}" for key in _FOREIGN if key in group), None)
    made_by_torch = "foreach" in group and "differentiable" in group
    return "they have 'betas' but no 'amsgrad'" if made_by_torch and "amsgrad" not in group else None


def _refuse_replacement(name: str, params: Iterable[Any]) -> None:
    """accelerate makes this optimizer of any other when optimizer states are offloaded; then say so instead."""
    for group in params:
        sign = _foreign_key(group) if isinstance(group, Mapping) else None
        if sign is not None:
            raise UsageError(
                f"{name}: made of the param groups of another optimizer ({sign})",
                expected="the optimizer of the script to be the one that runs",
                got="accelerate replaces it where optimizer states are offloaded",
                fix='write "zero_force_ds_cpu_optimizer": false into the config; '
                "any elementwise torch optimizer can be offloaded",
            )


def _require(name: str, argument: str, value: object, expected: object, fix: str = "") -> None:
    if value != expected:
        raise UsageError(f"{name}, {argument}", expected=str(expected), got=value, fix=fix)


_STATES_FIX = "states are fp32 here, or what the config's moments_dtype says"
_GRADIENTS_FIX = "leave it out: the engine drops gradients"


class DeepSpeedCPUAdam(Adam):
    """`zeroaccel.ops.Adam` under the name of DeepSpeed's, which has the same arguments but for the last.

    Args:
        fp32_optimizer_states: must be True.
    """

    def __init__(self, model_params: ParamsT, *args: Any, fp32_optimizer_states: bool = True, **kwargs: Any) -> None:
        groups: list[Any] = list(model_params)
        _refuse_replacement(type(self).__name__, groups)
        _require(type(self).__name__, "fp32_optimizer_states", fp32_optimizer_states, True, _STATES_FIX)
        super().__init__(groups, *args, **kwargs)


class FusedAdam(Adam):
    """`zeroaccel.ops.Adam` under the name and with the arguments of DeepSpeed's; `set_grad_none` must be True."""

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
    """`zeroaccel.ops.Adagrad` under the name and with the arguments of DeepSpeed's.

    Args:
        amsgrad: must be False: no Adagrad has it.
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
    """`zeroaccel.ops.Lion` under the name of DeepSpeed's; `fp32_optimizer_states` must be True."""

    def __init__(self, model_params: ParamsT, *args: Any, fp32_optimizer_states: bool = True, **kwargs: Any) -> None:
        _require("DeepSpeedCPULion", "fp32_optimizer_states", fp32_optimizer_states, True, _STATES_FIX)
        super().__init__(model_params, *args, **kwargs)


class FusedLion(Lion):
    """`zeroaccel.ops.Lion` under the name of DeepSpeed's; `set_grad_none` must be True."""

    def __init__(self, params: ParamsT, *args: Any, set_grad_none: bool = True, **kwargs: Any) -> None:
        _require("FusedLion", "set_grad_none", set_grad_none, True, _GRADIENTS_FIX)
        super().__init__(params, *args, **kwargs)
