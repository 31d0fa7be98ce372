"""DeepSpeed's members of parameters and modules: `ds_id`, `ds_shape`, `ds_status`, ..., and the marks of leaf modules.

The only file that adds to torch's classes: properties of `nn.Parameter` that work for parameters of models at stage 3
only, from the first such model on until `detach()`. They are read from the unit of the parameter. Nothing is stored on
a parameter, so nothing is saved or copied with it.

A leaf module is one whose parameters are gathered together. The marks that DeepSpeed's calls set on modules are read
when an engine is made.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.errors import UsageError
from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry, handle_of
from zeroaccel.zero.param_unit import ShardState

_LEAF_MARK = "_z3_leaf"  # libraries and their tests read this attribute


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


def attach(registry: ParamRegistry) -> None:
    """Makes the members work on the parameters of this registry."""
    _REGISTRIES.add(registry)
    for name, read in _MEMBERS.items():
        setattr(nn.Parameter, name, property(_member(name, read)))
    nn.Module.ds_external_parameters = _no_parameters  # type: ignore[attr-defined]


def detach() -> None:
    """Removes the members from torch's classes."""
    _REGISTRIES.clear()
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
        if handle is None or handle.registry not in _REGISTRIES:
            raise AttributeError(f"{name}: not a parameter of a model at stage 3")
        return read(handle)

    return member


def _own_part(handle: ParamHandle) -> Tensor:
    """This rank's elements of the parameter, (n,); empty where it has none."""
    return handle.buffer.shard.read(handle.reach(handle.buffer.rank))


def _identity(handle: ParamHandle) -> int:
    registry, unit, index = handle.order
    return (registry << 40) + (unit << 20) + index


def _status(handle: ParamHandle) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if handle.buffer.persistent else _STATUS[handle.unit.state]


_MEMBERS: dict[str, Callable[[ParamHandle], Any]] = {
    "ds_active_sub_modules": lambda handle: set(),
    "ds_id": _identity,
    "ds_numel": lambda handle: handle.slot.numel,
    "ds_process_group": lambda handle: torch.distributed.group.WORLD,
    "ds_shape": lambda handle: torch.Size(handle.slot.shape),
    "ds_status": _status,
    "ds_tensor": _own_part,
}


def _no_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """None: parameters that are read outside their module are detected without a list."""
    return iter(())


# -- leaf modules


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Marks every module of these classes. Returns them.

    Args:
        leaf_module_classes: classes, or their names.

    Raises:
        UsageError: none is in the model.
    """
    return list(_mark(model, leaf_module_classes, value=True))


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Unmarks them. Returns the modules."""
    return list(_mark(model, leaf_module_classes, value=False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(module.__dict__.get(_LEAF_MARK, False))


def marked_names(model: nn.Module) -> list[str]:
    """Names of the marked modules in the model."""
    return [name for name, module in model.named_modules() if z3_leaf_module(module)]


def _mark(model: nn.Module, classes: Iterable[type[nn.Module] | str], *, value: bool) -> Iterator[nn.Module]:
    kinds = list(classes)
    modules = [
        module
        for module in model.modules()
        if any(type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind) for kind in kinds)
    ]
    if not modules:
        names = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(
            "set_z3_leaf_modules",
            expected=f"classes of modules of the model ({', '.join(names)})",
            got=", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in kinds),
        )
    for module in modules:
        module.__dict__[_LEAF_MARK] = value
    yield from modules
