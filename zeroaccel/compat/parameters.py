"""What DeepSpeed keeps on parameters and modules (`ds_id`, `ds_shape`, ...), read from the unit a parameter lies in.

The only file that adds to torch's classes: properties of `nn.Parameter` that exist for parameters of models at stage 3
and for nobody else, from the first such model on until `detach()`. Nothing is stored on a parameter, so nothing is
saved or copied with it.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry, handle_of
from zeroaccel.zero.param_unit import ShardState

__all__ = ["ParameterOffload", "ZeroParamStatus", "attach", "detach"]


class ZeroParamStatus(enum.Enum):
    """Where a parameter's values are, in DeepSpeed's words."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {
    ShardState.UNSHARDED: ZeroParamStatus.AVAILABLE,
    ShardState.SHARDED: ZeroParamStatus.NOT_AVAILABLE,
    ShardState.GATHERING: ZeroParamStatus.INFLIGHT,
}
_KEEPERS: weakref.WeakSet[ParamRegistry] = weakref.WeakSet()


def attach(registry: ParamRegistry) -> None:
    """Shows the members on the parameters of this registry."""
    _KEEPERS.add(registry)
    for name, read in _MEMBERS.items():
        setattr(nn.Parameter, name, property(_member(name, read)))
    nn.Module.ds_external_parameters = _no_parameters  # type: ignore[attr-defined]


def detach() -> None:
    """Takes the members away from torch's classes."""
    _KEEPERS.clear()
    for name in _MEMBERS:
        if name in nn.Parameter.__dict__:
            delattr(nn.Parameter, name)
    if "ds_external_parameters" in nn.Module.__dict__:
        del nn.Module.ds_external_parameters  # type: ignore[attr-defined]


class ParameterOffload:
    """What TRL takes apart before it generates with all parameters gathered, and puts together again.

    There is nothing to take apart: a hook that finds a unit pinned leaves it as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Nothing was taken apart."""


def _member(name: str, read: Callable[[ParamHandle], Any]) -> Callable[[nn.Parameter], Any]:
    def member(param: nn.Parameter) -> Any:
        place = handle_of(param)
        if place is None or place.registry not in _KEEPERS:
            raise AttributeError(f"{name}: not a parameter of a model at stage 3")
        return read(place)

    return member


def _own_part(place: ParamHandle) -> Tensor:
    """This rank's elements of the parameter, (n,); empty where it has none."""
    return place.buffer.shard.read(place.reach(place.buffer.rank))


def _identity(place: ParamHandle) -> int:
    registry, unit, index = place.order
    return (registry << 40) + (unit << 20) + index


def _status(place: ParamHandle) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if place.buffer.persistent else _STATUS[place.unit.state]


_MEMBERS: dict[str, Callable[[ParamHandle], Any]] = {
    "ds_active_sub_modules": lambda place: set(),
    "ds_id": _identity,
    "ds_numel": lambda place: place.slot.numel,
    "ds_process_group": lambda place: torch.distributed.group.WORLD,
    "ds_shape": lambda place: torch.Size(place.slot.shape),
    "ds_status": _status,
    "ds_tensor": _own_part,
}


def _no_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters read outside their module need no list: they are noticed."""
    return iter(())
