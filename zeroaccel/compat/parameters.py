"""DeepSpeed's members of parameters and modules: `ds_id`, `ds_shape`, `ds_status`, ...

The only file that adds to torch's classes: properties of `nn.Parameter` that work for parameters of models at stage 3
only, from the first such model on until `detach()`. They are read from the unit of the parameter. Nothing is stored on
a parameter, so nothing is saved or copied with it.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry, handle_of
from zeroaccel.zero.param_unit import ShardState


class ZeroParamStatus(enum.Enum):
    """State of a parameter's values, in DeepSpeed's words."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {
    ShardState.UNSHARDED: ZeroParamStatus.AVAILABLE,
    ShardState.SHARDED: ZeroParamStatus.NOT_AVAILABLE,
    ShardState.GATHERING: ZeroParamStatus.INFLIGHT,
}
_REGISTRIES: weakref.WeakSet[ParamRegistry] = weakref.WeakSet()
_WHOLE: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter of a `zero.Init` on one rank -> its number
_NUMBERS = itertools.count()


def attach(registry: ParamRegistry) -> None:
    """Makes the members work on the parameters of this registry."""
    _REGISTRIES.add(registry)
    _add_members()


def attach_whole(params: Iterable[nn.Parameter]) -> None:
    """Makes the members work on parameters that a `zero.Init` on one rank does not shard."""
    for param in params:
        _WHOLE.setdefault(param, next(_NUMBERS))
    _add_members()


def _add_members() -> None:
    for name, read in _MEMBERS.items():
        setattr(nn.Parameter, name, property(_member(name, read)))
    nn.Module.ds_external_parameters = _no_parameters  # type: ignore[attr-defined]


def detach() -> None:
    """Removes the members from torch's classes."""
    _REGISTRIES.clear()
    _WHOLE.clear()
    for name in _MEMBERS:
        if name in nn.Parameter.__dict__:
            delattr(nn.Parameter, name)
    if "ds_external_parameters" in nn.Module.__dict__:
        del nn.Module.ds_external_parameters  # type: ignore[attr-defined]


class ParameterOffload:
    """The object whose hooks TRL removes before it generates with all parameters gathered, and adds again.

    There is nothing to remove: hooks do not reshard a unit that is gathered explicitly.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Does nothing, as nothing was removed."""


def _member(name: str, read: Callable[[ParamHandle], Any]) -> Callable[[nn.Parameter], Any]:
    def member(param: nn.Parameter) -> Any:
        handle = handle_of(param)
        if handle is not None and handle.registry in _REGISTRIES:
            return read(handle)
        if param in _WHOLE:
            return _WHOLE_MEMBERS[name](param)
        raise AttributeError(f"{name}: not a parameter of a model at stage 3")

    return member


def _own_part(handle: ParamHandle) -> Tensor:
    """This rank's elements of the parameter, (n,); empty where it has none."""
    return handle.buffer.shard.read(handle.reach(handle.buffer.rank))


def _identity(handle: ParamHandle) -> int:
    registry, unit, index = handle.order
    return (registry << 40) + (unit << 20) + index


def _own_numel(handle: ParamHandle) -> Callable[[], int]:
    """DeepSpeed's method: the number of elements of the parameter on this rank, without padding."""
    return lambda: handle.reach(handle.buffer.rank).numel


def _status(handle: ParamHandle) -> ZeroParamStatus:
    is_present = handle.buffer.persistent or handle.index in handle.buffer.shown
    return ZeroParamStatus.AVAILABLE if is_present else _STATUS[handle.unit.state]


_MEMBERS: dict[str, Callable[[ParamHandle], Any]] = {
    "ds_active_sub_modules": lambda handle: set(),
    "ds_id": _identity,
    "ds_numel": lambda handle: handle.slot.whole_numel,
    "ds_process_group": lambda handle: torch.distributed.group.WORLD,
    "ds_shape": lambda handle: torch.Size(handle.slot.whole_shape),
    "ds_status": _status,
    "ds_tensor": _own_part,
    "partition_numel": _own_numel,
}


# The same of a parameter that is not sharded: there is one rank, which has all of it.
_WHOLE_MEMBERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "ds_active_sub_modules": lambda param: set(),
    "ds_id": lambda param: _WHOLE[param],
    "ds_numel": lambda param: param.numel(),
    "ds_process_group": lambda param: torch.distributed.group.WORLD,
    "ds_shape": lambda param: param.shape,
    "ds_status": lambda param: ZeroParamStatus.AVAILABLE,
    "ds_tensor": lambda param: param.detach().flatten(),
    "partition_numel": lambda param: param.numel,
}


def _no_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """None: parameters that are read outside their module are detected without a list."""
    return iter(())
