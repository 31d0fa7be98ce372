"""DeepSpeed functions without a task here: each does nothing, or returns the only possible answer.

Collectives are not logged; only a mesh divides layers and experts, whatever parameters or groups are marked; and the
engine detects parameters that are read outside their modules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroaccel.compat.deepspeed_comm import NO_LOG
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Does nothing; warns if logging of collectives is requested, since zeroaccel does not log them."""
    if enabled or prof_all or prof_ops:
        log_once(logging.WARNING, NO_LOG)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Warns that no collective was logged; with `return_dict`, returns a summary without entries."""
    log_once(logging.WARNING, NO_LOG)
    return {"summary": {}, "straggler_analysis": None} if return_dict else None


def has_coalesced() -> bool:
    """Returns True: the installed torch has the collectives that DeepSpeed tests for."""
    return True


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, like `register_external_parameter`: the engine detects parameters read outside their module."""


def get_model_parallel_rank() -> int:
    """Returns 0: a model split over ranks needs a mesh, which has its own ranks."""
    return 0


def get_model_parallel_world_size() -> int:
    """Returns 1."""
    return 1


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Returns (False, 0): no layer is DeepSpeed's MoE. Experts divided by `expert_parallel` do not count."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """True if DeepSpeed would reduce the gradient among some ranks only: `param.allreduce` is False."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """True if a param group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def check_expert_marks(model: nn.Module) -> None:
    """Refuses parameters that only some ranks would reduce: here all ranks have the values of rank 0.

    Raises:
        UsageError: a parameter is marked as an expert on some ranks (`param.allreduce` is False).
    """
    for name, param in model.named_parameters():
        if is_moe_param(param):
            raise UsageError(
                f"deepspeed.initialize: parameter {name}",
                expected="a parameter with the same values on all ranks",
                got="allreduce=False, the mark of expert-parallel layers",
                fix='remove the mark; to divide experts of transformers, set "expert_parallel": {"enabled": true, '
                '"autoep_size": N}',
            )


def note_expert_groups(optimizer: Any) -> None:
    """Logs that marks of param groups have no effect."""
    if any(map(is_moe_param_group, getattr(optimizer, "param_groups", ()))):
        log_once(logging.INFO, "param group: moe has no effect; expert_parallel in the config divides experts")


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: int | float = 178_956_971
) -> list[dict[str, Any]]:
    """Returns the param groups as a list, undivided, since all ranks hold all parameters.

    Args:
        param_groups: one param group or several; "params" may be any iterable of parameters.
        max_group_size: no effect.

    Raises:
        UsageError: a parameter is marked as an expert on some ranks (`param.allreduce` is False).
    """
    several = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    groups = [{**group, "params": list(group["params"])} for group in several]
    for number, group in enumerate(groups):
        if any(map(is_moe_param, group["params"])):
            raise UsageError(
                f"split_params_into_different_moe_groups_for_optimizer, group {number}",
                expected="parameters whose gradients all ranks reduce",
                got="one with allreduce=False, the mark of expert-parallel layers",
                fix="remove the mark: expert layers train without it",
            )
    return groups
