"""DeepSpeed's members of parameters and modules: `ds_id`, `ds_shape`, `ds_status`, ...

Only this file adds members to torch's classes: properties of `nn.Parameter`, from the first stage-3 model until
`detach()`. They work only for parameters of stage-3 models, and read from the parameter's unit. Parameters store
nothing, so saves and copies contain nothing extra. From the first engine on, `nn.Parameter.grad` logs an error if a
program reads None because the engine has the gradient.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroaccel.logs import log_once
from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry, handle_of, parameter_of
from zeroaccel.zero.param_unit import ShardState


class ZeroParamStatus(enum.Enum):
    """State of a parameter's values, with DeepSpeed's names."""

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
    """Makes the members work for the parameters of this registry."""
    _REGISTRIES.add(registry)
    _add_members()


def attach_whole(params: Iterable[nn.Parameter]) -> None:
    """Makes the members work for parameters that a `zero.Init` on one rank does not shard."""
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
    if "grad" in nn.Parameter.__dict__:
        del nn.Parameter.grad
    if "ds_external_parameters" in nn.Module.__dict__:
        del nn.Module.ds_external_parameters  # type: ignore[attr-defined]


def watch_gradients() -> None:
    """Makes `param.grad` log an error, once per line, if a program reads None and an engine trains the parameter."""
    stored: Any = Tensor.grad

    def read(param: nn.Parameter) -> Tensor | None:
        grad: Tensor | None = stored.__get__(param)
        if grad is None:
            _report_none(param, sys._getframe(1))
        return grad

    if "grad" not in nn.Parameter.__dict__:
        nn.Parameter.grad = property(read, stored.__set__, stored.__delete__)  # type: ignore[assignment]


# Libraries that handle a missing gradient themselves; torch.nn.utils clips gradients for the program.
_READERS = frozenset({"accelerate", "torch", "transformers", "zeroaccel"})


def _report_none(param: nn.Parameter, reader: FrameType) -> None:
    module = str(reader.f_globals.get("__name__", ""))
    if module.partition(".")[0] in _READERS and not module.startswith("torch.nn.utils"):
        return
    handle = handle_of(param)
    training = None if handle is None else handle.registry.training
    if training is None or training.optimizer is None or not param.requires_grad:
        return
    while reader.f_back is not None and str(reader.f_globals.get("__name__", "")).startswith("torch."):
        reader = reader.f_back
    log_once(
        logging.ERROR,
        f"{reader.f_code.co_filename}:{reader.f_lineno}: expected a gradient in param.grad, got None, as for every "
        "parameter of an engine, which has the gradients. Between the last backward of a step and its update (in "
        "Trainer: on_pre_optimizer_step), read deepspeed.utils.safe_get_full_grad(param) on all ranks and change it "
        "with safe_set_full_grad; gradient_clipping clips",
    )


class ParameterOffload:
    """Object whose hooks TRL removes before it generates with gathered parameters, and adds again afterwards.

    It has no hooks: the engine's hooks do not reshard units that were gathered explicitly.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Does nothing, since TRL removed nothing."""


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
    """Returns this rank's elements of the parameter, (n,); empty if it has no elements."""
    training = handle.registry.training
    if training is not None and training.updates is not None:
        training.updates.complete()
    return handle.buffer.shard.read(handle.reach(handle.buffer.rank))


def _identity(handle: ParamHandle) -> int:
    registry, unit, index = handle.order
    return (registry << 40) + (unit << 20) + index


def _own_numel(handle: ParamHandle) -> Callable[[], int]:
    """Returns DeepSpeed's method for the number of the parameter's elements on this rank, without padding."""
    return lambda: handle.reach(handle.buffer.rank).numel


def _status(handle: ParamHandle) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if handle.buffer.persistent else _STATUS[handle.unit.state]


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


# The same members for an unsharded parameter: the only rank holds all of it.
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


# -- TRL's calls, which recognise weights by their parameters and by addresses of before they were sharded


def gathering_saved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `maybe_gather_lm_head_ctx`: finds the weights of views that autograd saved; copies have their values."""

    @functools.wraps(original)
    def gather(*params: Tensor | None) -> Any:
        weights = [parameter_of(param) for param in params if param is not None]
        return original(*[weight for weight in weights if isinstance(weight, nn.Parameter)])

    return gather


def sparing_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `OffloadActivations.__enter__`: gathered weights stay, since backward gathers them again."""

    @functools.wraps(original)
    def enter(context: Any) -> Any:
        buffers = [buffer for registry in _REGISTRIES for unit in registry.units for buffer in unit.buffers]
        weights = {buffer.full.untyped_storage()._cdata for buffer in buffers}
        pack, unpack = vars(context).setdefault("_zeroaccel_hooks", (context.pack_hook, context.unpack_hook))
        context.pack_hook = lambda saved: saved if saved.untyped_storage()._cdata in weights else pack(saved)
        context.unpack_hook = lambda saved: saved if isinstance(saved, Tensor) else unpack(saved)
        return original(context)

    return enter


def _no_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Returns an empty iterator: parameters read outside their module are detected without a list."""
    return iter(())
