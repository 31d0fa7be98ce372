"""DeepSpeed's optimizer classes, as scripts and libraries construct them; the steps are those of `zeroaccel.ops`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops.adagrad import Adagrad
from zeroaccel.ops.adam import Adam
from zeroaccel.ops.lion import Lion

__all__ = ["DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion"]

_FOREIGN = {"momentum": "SGD", "nesterov": "SGD", "rho": "Adadelta", "alpha": "RMSprop", "lambd": "ASGD"}


def _refuse_replacement(name: str, params: Iterable[Any]) -> None:
    """accelerate makes this optimizer of any other when optimizer states are offloaded; then say so instead."""
    for group in params:
        if isinstance(group, Mapping) and "betas" not in group:
            for key, owner in _FOREIGN.items():
                if key in group:
                    raise UsageError(
                        f"{name}: made of the param groups of another optimizer ({owner}, by its {key!r})",
                        expected="the optimizer of the script to be the one that runs",
                        got="accelerate replaces it where optimizer states are offloaded",
                        fix='write "zero_force_ds_cpu_optimizer": false into the config; '
                        "any elementwise torch optimizer can be offloaded",
                    )


class DeepSpeedCPUAdam(Adam):
    """`zeroaccel.ops.Adam` under the name and with the arguments of DeepSpeed's.

    Args:
        fp32_optimizer_states: must be True.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        groups: list[Any] = list(model_params)
        _refuse_replacement(type(self).__name__, groups)
        if not fp32_optimizer_states:
            raise UsageError(f"{type(self).__name__}, fp32_optimizer_states", expected="True", got=False)
        super().__init__(groups, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)


class FusedAdam(Adam):
    """`zeroaccel.ops.Adam` under the name and with the arguments of DeepSpeed's."""

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
        if not set_grad_none:
            raise UsageError("FusedAdam, set_grad_none", expected="True", got=False, fix="the engine drops gradients")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdagrad(Adagrad):
    """`zeroaccel.ops.Adagrad` under DeepSpeed's name."""


class DeepSpeedCPULion(Lion):
    """`zeroaccel.ops.Lion` under DeepSpeed's name."""


class FusedLion(Lion):
    """`zeroaccel.ops.Lion` under DeepSpeed's name."""
