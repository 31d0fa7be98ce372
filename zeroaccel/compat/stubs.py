"""Names of DeepSpeed that have nothing to do here: each does nothing, or answers with the one thing that can be.

Nothing logs collectives, layers and experts are divided by a mesh only, which no mark of a parameter or group decides,
and the engine detects parameters that are read outside their modules.
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
    """Does nothing, with a warning where logging of collectives is asked for: nothing logs them here."""
    if enabled or prof_all or prof_ops:
        log_once(logging.WARNING, NO_LOG)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Says that no collective was logged; with `return_dict` returns a summary without entries."""
    log_once(logging.WARNING, NO_LOG)
    return {"summary": {}, "straggler_analysis": None} if return_dict else None


def has_coalesced() -> bool:
    """True: this torch has the calls that DeepSpeed asks for."""
    return True


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, as `register_external_parameter`: parameters that are read outside their module are detected."""


def get_model_parallel_rank() -> int:
    """0: a model that is split over ranks needs a mesh, whose ranks it names itself."""
    return 0


def get_model_parallel_world_size() -> int:
    """1."""
    return 1


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): no layer is DeepSpeed's MoE. Those that `expert_parallel` of the config divides do not count."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether DeepSpeed would reduce its gradient among some ranks only: `param.allreduce` is False."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether a param group is marked as experts'."""
    return bool(param_group.get("moe", False))


def check_expert_marks(model: nn.Module) -> None:
    """Refuses parameters that only some ranks would reduce: here all ranks have the values of rank 0.

    Raises:
        UsageError: a parameter is marked as an expert's of some ranks (`param.allreduce` is False).
    """
    for name, param in model.named_parameters():
        if is_moe_param(param):
            raise UsageError(
                f"deepspeed.initialize: parameter {name}",
                expected="a parameter that all ranks have alike",
                got="one with allreduce False, as of expert-parallel layers",
                fix='leave the mark out, and divide experts of transformers by "expert_parallel": {"enabled": true, '
                '"autoep_size": N}',
            )


def note_expert_groups(optimizer: Any) -> None:
    """Says that marks of param groups decide nothing."""
    if any(map(is_moe_param_group, getattr(optimizer, "param_groups", ()))):
        log_once(logging.INFO, "param group: moe: does nothing: expert_parallel of the config divides experts")


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: int | float = 178_956_971
) -> list[dict[str, Any]]:
    """The param groups as a list; nothing is divided, as no parameter is an expert's of some ranks only.

    Args:
        param_groups: one param group or several; "params" may be any iterable of parameters.
        max_group_size: of no effect: it divides experts' groups.

    Raises:
        UsageError: a parameter is marked as an expert's of some ranks (`param.allreduce` is False).
    """
    several = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    groups = [{**group, "params": list(group["params"])} for group in several]
    for number, group in enumerate(groups):
        if any(map(is_moe_param, group["params"])):
            raise UsageError(
                f"split_params_into_different_moe_groups_for_optimizer, group {number}",
                expected="parameters whose gradients all ranks reduce",
                got="one with allreduce False, as of expert-parallel layers",
                fix="leave the mark out: expert layers of a model train as they are",
            )
    return groups
