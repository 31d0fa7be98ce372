"""The sections that say in which dtype things are kept and computed: `fp16`, `bf16`, `data_types`, `torch_autocast`.

One of the schema files that `schema` assembles. Dtypes are the words "fp32", "fp16" and "bf16"; whoever has torch at
hand turns them into torch's. Conflicts between these sections are found in `checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from zeroaccel.config.section import (
    AUTO,
    ConfigSection,
    Count,
    Dtype,
    Flag,
    MaybeDtype,
    NonNegativeNumber,
    PositiveCount,
    Texts,
    wrong,
)

__all__ = ["Bf16", "DataTypes", "Fp16", "TorchAutocast"]


class Fp16(ConfigSection):
    """Parameters in fp16, fp32 master weights, and a scaled loss."""

    is_open = True

    enabled: Flag = False
    """Train in fp16."""
    auto_cast: Flag = False
    """Cast floating-point inputs of forward to fp16."""
    loss_scale: NonNegativeNumber = 0.0
    """Factor on the loss; 0 finds it while training."""
    initial_scale_power: Count = 16
    """The search starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """Steps without overflow after which the factor doubles; above 0 when it is searched for."""
    hysteresis: PositiveCount = 2
    """Overflows, this one included, until the factor halves."""
    consecutive_hysteresis: Flag = False
    """Count the overflows anew after each good step, not only when the factor grows."""
    min_loss_scale: NonNegativeNumber = 1.0
    """Lowest factor; an overflow at it is an error. Above 0 when the factor is searched for."""
    fp16_master_weights_and_grads: Flag = False
    """Master weights and gradients in fp16."""
    opt_level: Any = None
    """Level of Apex's mixed precision."""


class Bf16(ConfigSection):
    """Parameters in bf16 and fp32 master weights."""

    is_open = True

    enabled: Flag = False
    """Train in bf16."""
    immediate_grad_update: Flag = False
    """Add each gradient to its fp32 sum as soon as it is there."""
    check_grad_overflow: Flag = True
    """Skip a step whose gradients are not finite."""
    bf16_master_weights_and_grads: Flag = False
    """Master weights and gradients in bf16."""
    bf16_optimizer_states: Flag = False
    """Optimizer states in bf16."""
    auto_cast: Any = None
    """A key of fp16."""
    loss_scale: Any = None
    """A key of fp16."""
    initial_scale_power: Any = None
    """A key of fp16."""
    loss_scale_window: Any = None
    """A key of fp16."""
    hysteresis: Any = None
    """A key of fp16."""
    consecutive_hysteresis: Any = None
    """A key of fp16."""
    min_loss_scale: Any = None
    """A key of fp16."""
    opt_level: Any = None
    """Level of Apex's mixed precision."""


def _modules(value: object) -> object:
    if value == AUTO:
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise wrong('"auto" or a list of module names')


class DataTypes(ConfigSection):
    """Dtypes of gradients, parameters and buffers."""

    is_open = True

    grad_accum_dtype: MaybeDtype = None
    """Dtype in which gradients are summed over micro-steps; absent, fp32 whatever the model's dtype."""
    param_dtype: MaybeDtype = None
    """Dtype of the parameters; it must be the one of the enabled precision. Absent, that one."""
    buffer_dtype: MaybeDtype = None
    """Dtype all floating-point buffers are cast to; absent, they follow the parameters of their module."""
    master_weights: Literal["fp32", "residual"] = "fp32"
    """"residual" keeps of a bf16 weight's fp32 master what rounding took: exact, in nearly 2 bytes fewer."""
    keep_in_fp32_modules: Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_modules)] = "auto"
    """Names of modules whose parameters and buffers stay fp32; "auto" takes the model's own list, if it has one."""


class TorchAutocast(ConfigSection):
    """Mixed precision by torch.autocast instead of parameters in 16 bits."""

    is_open = True

    enabled: Flag = False
    """Run forward under autocast."""
    dtype: Dtype = "bf16"
    """Dtype of autocast."""
    lower_precision_safe_modules: Texts | None = None
    """Module classes whose gradients may be reduced in that dtype."""
