"""The engine: parameters in units, gradients reduced to shards, an optimizer over flat masters.

`__all__` lists the public names; the package imports each one at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroaccel.zero.access.deferred_init import Init
    from zeroaccel.zero.access.full_params import GatheredParameters, register_external_parameter
    from zeroaccel.zero.access.load_safetensors import load_safetensors
    from zeroaccel.zero.access.safe_get_set import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
    )

__all__ = [
    "GatheredParameters",
    "Init",
    "load_safetensors",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]

_HOMES = {
    "GatheredParameters": "access.full_params",
    "Init": "access.deferred_init",
    "load_safetensors": "access.load_safetensors",
    "register_external_parameter": "access.full_params",
    **{name: "access.safe_get_set" for name in __all__ if name.startswith("safe_")},
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zeroaccel.zero' has no attribute {name!r}")
    value = getattr(import_module(f"zeroaccel.zero.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
