"""`deepspeed.utils.groups` and `deepspeed.moe.utils`: the data-parallel group is that of all ranks.

So no parameter is an expert's of some ranks only, and param groups are not divided by that. The groups of sequences are
those of `parallel_state_sp.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zeroaccel.errors import UsageError


def get_data_parallel_group() -> Any:
    """The group of all ranks."""
    return torch.distributed.group.WORLD


def get_data_parallel_rank() -> int:
    return torch.distributed.get_rank()


def get_data_parallel_world_size() -> int:
    return torch.distributed.get_world_size()


def get_model_parallel_rank() -> int:
    """0: a model that is split over ranks needs a mesh, whose ranks it names itself."""
    return 0


def get_model_parallel_world_size() -> int:
    """1."""
    return 1


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): there are no expert-parallel layers."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether DeepSpeed would reduce its gradient among some ranks only: `param.allreduce` is False."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether a param group is marked as experts'."""
    return bool(param_group.get("moe", False))


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
