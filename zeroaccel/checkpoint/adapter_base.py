"""The base under adapters in the manner of PEFT: its name, and its parameters, which checkpoints leave out.

A frozen base with a name is loaded from there before a run resumes, so that a checkpoint of the adapters need not
repeat it. Frozen adapters, such as one that is not active, have no other place and are saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once

_HOLD_ADAPTERS = ("modules_to_save", "prompt_encoder")


def base_name(model: nn.Module) -> str:
    """Where the base of the model's adapters comes from; "" without adapters, or where the base has no name."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or not adapters:
        return ""
    names = [getattr(adapter, "base_model_name_or_path", None) for adapter in adapters.values()]
    names.append(getattr(getattr(model, "config", None), "_name_or_path", None))
    return next((str(name) for name in names if name), "")


def left_out(model: nn.Module, exclude_frozen: bool | None) -> tuple[frozenset[int], str]:
    """Ids of the parameters whose values a checkpoint leaves out, and the name of the base if they are those of a base.

    Args:
        exclude_frozen: all frozen ones, or none; None leaves out a base that has a name.

    Raises:
        UsageError: no flag.
    """
    if exclude_frozen is not None:
        if not isinstance(exclude_frozen, bool):
            raise UsageError(
                "save_checkpoint(exclude_frozen_parameters)", expected="True, False or None", got=exclude_frozen
            )
        frozen = frozenset(id(param) for param in model.parameters() if not param.requires_grad)
        return (frozen if exclude_frozen else frozenset()), base_name(model)
    name = base_name(model)
    if not name:
        return frozenset(), ""
    adapters = {id(param) for module in model.modules() for param in _adapters_of(module)}
    base = frozenset(id(p) for p in model.parameters() if not p.requires_grad and id(p) not in adapters)
    if base:
        log_once(
            logging.WARNING,
            f"save_checkpoint: the frozen base {name!r} is left out; load it before you resume. "
            'Set "checkpoint": {"exclude_frozen_parameters": false} to save it too',
        )
    return base, name


def _adapters_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that an adapter's layer adds to the module that it wraps."""
    wrapped = module._modules.get("base_layer")
    if wrapped is not None:
        inside = {id(param) for param in wrapped.parameters()}
        return [param for param in module.parameters() if id(param) not in inside]
    added = [child for name in _HOLD_ADAPTERS if (child := module._modules.get(name)) is not None]
    return [param for child in added for param in child.parameters()]
