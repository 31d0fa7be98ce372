"""`Init`: models larger than one rank's memory, sharded while their constructors run.

A module's parameters are sharded when it becomes part of another module, when another module gets its first parameter,
or at the end: by then its constructor has filled them. Torch tells that by its registration hooks, so no class is
patched. A constructor that comes back to a sharded parameter, to initialise it or to compute with it, finds it whole
(`module_shards.py`). The ranks must run the same constructors; the values that count are those of rank 0, as always.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config import Config, load_config
from zeroaccel.errors import UsageError
from zeroaccel.zero.access.module_shards import ModuleShards, ShardTarget
from zeroaccel.zero.access.param_registry import place_of
from zeroaccel.zero.from_config import DTYPES
from zeroaccel.zero.hooks import watch_construction

__all__ = ["Init", "destination"]

RemoteDevice = Literal["cpu", "nvme"]

_ACTIVE: list[Init] = []


class Init:
    """Modules that are built inside are sharded as they are built. (all ranks)

    After the block, hand the model to `initialize()`, which gives the same as for a model built without it; until then
    its values are read and written inside `GatheredParameters`. May be nested: the innermost counts. On one rank it
    only casts. Buffers stay whole; parameters on the meta device stay there; so do parameters of subclasses.

    Args:
        module: a model that is there already, sharded at once, before the block.
        config_dict_or_path: a config, for what is not given otherwise: the dtype of its precision, and its
            `offload_param` for `remote_device`.
        dtype: of floating-point parameters.
        remote_device: "cpu" keeps shards in host memory, "nvme" in files, which are gone when the process is.
        nvme_path: a folder for those; by default the config's `offload_param.nvme_path`.
        pin_memory: accepted; shards are copied once, when the engine is made.
        enabled: False makes it do nothing.
        collectives: how ranks talk.

    Raises:
        ConfigError: the config is wrong, or the ranks cannot find each other.
        UsageError: `remote_device` or `dtype` is none that there is.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        remote_device: RemoteDevice | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        pin_memory: bool = False,
        enabled: bool = True,
        collectives: Collectives | None = None,
    ) -> None:
        self._shards: ModuleShards | None = None
        self._unsettled: dict[int, weakref.ref[nn.Module]] = {}
        self._undo = ExitStack()
        if enabled:
            topology = init_process_group()
            settings = None if config_dict_or_path is None else load_config(config_dict_or_path)
            where = destination(
                settings, topology.device, dtype=dtype, remote_device=remote_device, nvme_path=nvme_path
            )
            self._shards = ModuleShards(collectives or Collectives(topology), where)
            for part in module.modules() if module is not None else ():
                self._shards.shard(part)

    def __enter__(self) -> Init:
        if self._shards is None:
            return self
        if not _ACTIVE:
            for handle in watch_construction(_parameter_registered, _module_registered):
                self._undo.callback(handle.remove)
            self._undo.enter_context(_Uses())
        _ACTIVE.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shards is None:
            return
        _ACTIVE.remove(self)
        self._undo.close()
        if error is None:  # else the other ranks may not come here
            self.finish_all()
            self._shards.settle()

    def note(self, module: nn.Module) -> None:
        """A parameter is being registered in `module`. (all ranks)"""
        if id(module) not in self._unsettled:
            self.finish_all()
            self._unsettled[id(module)] = weakref.ref(module)

    def finish_all(self) -> None:
        """The constructors of all modules so far are over, or past their parameters. (all ranks)"""
        unsettled, self._unsettled = self._unsettled, {}
        for reference in unsettled.values():
            module = reference()
            if module is not None and self._shards is not None:
                self._shards.shard(module)

    def finish(self, module: nn.Module) -> None:
        """The module is built. (all ranks)"""
        if self._shards is not None and self._unsettled.pop(id(module), None) is not None:
            self._shards.shard(module)

    def use(self, params: Sequence[nn.Parameter]) -> None:
        """Parameters are used while models are built. (all ranks)"""
        if self._shards is not None:
            self._shards.touch(params)


def destination(
    settings: Config | None,
    device: torch.device,
    *,
    dtype: torch.dtype | None,
    remote_device: str | None,
    nvme_path: str | os.PathLike[str] | None = None,
) -> ShardTarget:
    """Where shards go; arguments before the config. Arguments as of `Init`."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError("zero.Init(dtype)", expected="a floating-point torch.dtype", got=dtype)
    if remote_device not in (None, "none", "cpu", "nvme", device.type):
        raise UsageError("zero.Init(remote_device)", expected='"cpu" or "nvme"', got=remote_device)
    offload = None if settings is None else settings.zero_optimization.offload_param
    place = remote_device or (None if offload is None else offload.device)
    folder = None
    if place == "nvme":
        given = nvme_path or (None if offload is None else offload.nvme_path)
        if given is None:
            raise UsageError('zero.Init(remote_device="nvme")', expected="an nvme_path, here or in offload_param")
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
    from_precision = dtype is None and settings is not None
    if dtype is None and settings is not None:
        dtype = DTYPES[settings.precision]
    return ShardTarget(dtype, torch.device("cpu") if place in ("cpu", "nvme") else device, folder, from_precision)


# -- what torch tells; the outermost Init listens for all


def _parameter_registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _ACTIVE[-1].note(module)


def _module_registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is not None:
        for active in _ACTIVE:  # built inside an inner one, or before it
            active.finish(module)


class _Uses(TorchFunctionMode):
    """Makes sharded parameters whole before any function of torch gets them, but for those that only ask for facts."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _name(func) not in _FACTS:
            params = list(_parameters_in([*args, *kwargs.values()]))
            if params:
                for active in _ACTIVE:
                    active.use(params)
        return func(*args, **kwargs)


_FACT_NAMES = """
    shape dtype device layout ndim is_meta is_cuda is_cpu is_sparse is_quantized requires_grad requires_grad_
    is_leaf grad grad_fn _version names itemsize nbytes size dim numel nelement element_size is_floating_point
    is_complex get_device __len__ __hash__ __reduce_ex__ is_contiguous stride storage_offset register_hook
    _backward_hooks is_same_size retains_grad output_nr is_nested is_inference is_mkldnn is_xla is_vulkan
"""
_FACTS = frozenset(_FACT_NAMES.split())


def _name(func: Callable[..., Any]) -> str:
    """Of a function, or of the attribute that a getter or setter is for."""
    name = getattr(func, "__name__", "")
    return str(func.__self__.__name__) if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def _parameters_in(values: Iterable[Any]) -> Iterable[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            if place_of(value) is not None:
                yield value
        elif type(value) in (list, tuple):
            yield from _parameters_in(value)
