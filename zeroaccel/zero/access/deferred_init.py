"""`Init`: models larger than one rank's memory, sharded while their constructors run.

A module's parameters are sharded when it becomes part of another module, when another module gets its first parameter,
or at the end: by then its constructor has filled them. Torch tells that by its registration hooks, so no class is
patched. A constructor that comes back to a sharded parameter, to initialise it or to compute with it, finds it whole
(`deferred_init.py`). The ranks must run the same constructors; the values that count are those of rank 0, as always.
"""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config import Config, load_config
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.zero.access.param_registry import ParamRegistry, place_of
from zeroaccel.zero.build import float64_error, initial_values
from zeroaccel.zero.from_config import DTYPES
from zeroaccel.zero.hooks import watch_construction
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.precision import dtype_before, note_cast
from zeroaccel.zero.storage.shards import MemoryShard

__all__ = ["Init", "ModuleShards", "ShardTarget", "destination"]

P = ParamSpec("P")
R = TypeVar("R")

_WHOLE_NBYTES = 64 << 20  # of modules that stay whole while a constructor works on them


def _unnoticed(method: Callable[P, R]) -> Callable[P, R]:
    """Runs a method with torch's function modes off: what shards parameters must not count as a use of them."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


@dataclass(frozen=True)
class ShardTarget:
    """Where shards go.

    Attributes:
        dtype: what floating-point parameters become; None leaves each as it is.
        device: of the shards.
        folder: for shards in files, which are gone when the process is; None for memory.
        from_precision: `dtype` is that of a config's precision, rather than one that was asked for by itself.
    """

    dtype: torch.dtype | None
    device: torch.device
    folder: Path | None = None
    from_precision: bool = False

    def dtype_of(self, name: str, param: nn.Parameter) -> torch.dtype:
        """What a parameter's dtype becomes.

        Raises:
            UsageError: as the engine for the precision would: the parameter has 64 bits, and the precision 32.
        """
        if self.from_precision and self.dtype is torch.float32 and param.dtype is torch.float64:
            raise float64_error(name)
        return self.dtype if self.dtype is not None and param.is_floating_point() else param.dtype

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of anything, where shards live."""
        if self.folder is None or not numel:
            return torch.empty(numel, dtype=dtype, device=self.device)
        try:
            handle, name = tempfile.mkstemp(prefix="zeroaccel-shard-", dir=self.folder)
            os.close(handle)
            try:
                return torch.from_file(name, shared=True, size=numel, dtype=dtype)
            finally:
                os.unlink(name)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"offload_param.nvme_path {self.folder}: no room for a shard of {numel} elements ({error})"
            ) from error


class ModuleShards:
    """The sharded parameters of one `zero.Init`, or of one load.

    Life of a module: 1. `shard` when it is built (or `reserve` where its values come later), 2. `touch` whenever one of
    its parameters is used after all, 3. `settle` when that is over.
    """

    def __init__(self, collectives: Collectives, destination: ShardTarget) -> None:
        self.destination = destination
        self.collectives = collectives
        self.keeper = ParamRegistry(collectives, pin=self._pin, unpin=self._unpin)
        self._touched: OrderedDict[int, ParamUnit] = OrderedDict()
        self._count = 0

    @_unnoticed
    def shard(self, module: nn.Module) -> None:
        """Shards the module's own parameters, with the values they have on rank 0. (all ranks)"""
        named = _to_shard(module)
        if not named:
            return
        if self.collectives.world_size == 1:
            for name, param in named:
                note_cast(param, param.dtype)
                wanted = self.destination.dtype_of(self._name(module, name), param)
                param.data = param.data.to(self.destination.device, wanted)
            return
        kinds: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, param in named:
            kinds.setdefault(self.destination.dtype_of(self._name(module, name), param), []).append((name, param))
        buffers = []
        for dtype, same in kinds.items():
            params = [param for _, param in same]
            built_as = [dtype_before(param) for param in params]
            layout = self._lay_out(module, same)
            source = initial_values(layout, params, self.destination.device, self.collectives, self._label(module))
            for param, before in zip(params, built_as, strict=True):
                note_cast(param, before)
            buffer = self._buffer(layout, params, dtype)
            buffer.adopt(source, self._storage(buffer))
            buffers.append(buffer)
        unit = ParamUnit(self._label(module), [module], buffers, self.collectives)
        unit.reshard()
        self._take(unit)

    @_unnoticed
    def reserve(self, module: nn.Module, names: Sequence[str]) -> None:
        """Shards the module's own parameters of these names that are on the meta device; the values are zeros."""
        buffers: list[FlatBuffer] = []
        kinds: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, param in _to_shard(module, meta=True):
            if name in names:
                kinds.setdefault(self.destination.dtype_of(self._name(module, name), param), []).append((name, param))
        for dtype, same in kinds.items():
            layout = self._lay_out(module, same)
            for _, param in same:
                _leave_meta(param, dtype, self.destination.device)
            buffer = self._buffer(layout, [param for _, param in same], dtype)
            buffer.free()  # nobody has touched its pages: they were never memory
            buffer.store_in(self._storage(buffer))
            buffer.shard.stage().values.zero_()
            buffers.append(buffer)
        if buffers:
            self._take(ParamUnit(self._label(module), [module], buffers, self.collectives, sharded=True))

    @_unnoticed
    def touch(self, params: Sequence[nn.Parameter]) -> None:
        """Makes parameters of its units whole, as somebody is about to use them. (all ranks)"""
        wanted: dict[int, ParamUnit] = {}
        for param in params:
            place = place_of(param)
            if place is not None and place.keeper is self.keeper and not self.keeper.is_held(place.unit):
                wanted[id(place.unit)] = place.unit
        for key, unit in wanted.items():
            unit.unshard()
            unit.wait()
            self._touched[key] = unit
            self._touched.move_to_end(key)
        while len(self._touched) > len(wanted) and _nbytes(self._touched.values()) > _WHOLE_NBYTES:
            self._settle_one(next(iter(self._touched.values())))

    @_unnoticed
    def settle(self) -> None:
        """Shards again what was touched, with the values of rank 0. (all ranks)"""
        for unit in list(self._touched.values()):
            self._settle_one(unit)

    def _settle_one(self, unit: ParamUnit) -> None:
        del self._touched[id(unit)]
        replaced = [p for b in unit.buffers for p in b.params if (place := place_of(p)) is not None and place.replaced]
        self.keeper.drop(replaced)
        for buffer in unit.buffers:
            self.collectives.broadcast(buffer.full, 0, f"values of {unit.name}")
            buffer.shard.replace(buffer.full[buffer.own.at(0)])
        given = [(param, param.data) for param in replaced]
        unit.reshard(keep_views=True)
        for param, data in given:
            param.data = data
        if given:  # into a unit of their own, as they may have another shape
            self.shard(unit.modules[0])

    @_unnoticed
    def _pin(self, unit: ParamUnit) -> None:
        if id(unit) in self._touched:
            self._settle_one(unit)
        unit.unshard()
        unit.wait()

    @_unnoticed
    def _unpin(self, unit: ParamUnit) -> None:
        unit.reshard(keep_views=True)

    def _lay_out(self, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> FlatLayout:
        entries = [(self._name(module, name), tuple(param.shape)) for name, param in named]
        return FlatLayout.build(entries, self.collectives.world_size)

    def _buffer(self, layout: FlatLayout, params: Sequence[nn.Parameter], dtype: torch.dtype) -> FlatBuffer:
        device, rank = self.destination.device, self.collectives.rank
        return FlatBuffer(layout, params, dtype=dtype, device=device, rank=rank, trainable=False, persistent=False)

    def _storage(self, buffer: FlatBuffer) -> MemoryShard:
        return MemoryShard(buffer.place(), self.destination.empty(buffer.own.numel, buffer.dtype))

    def _take(self, unit: ParamUnit) -> None:
        self.keeper.add([unit])
        self._count += 1

    def _label(self, module: nn.Module) -> str:
        return f"{type(module).__name__} number {self._count}"

    def _name(self, module: nn.Module, name: str) -> str:
        return f"{name} of {self._label(module)}"


def _to_shard(module: nn.Module, *, meta: bool = False) -> list[tuple[str, nn.Parameter]]:
    """The module's own parameters that are ordinary and not sharded yet, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in module._parameters.items():
        # a subclass, such as a quantised weight, knows more of its values than that they can be cut
        if param is None or type(param) is not nn.Parameter or param.is_meta != meta or place_of(param) is not None:
            continue
        found.setdefault(id(param), (name, param))
    return list(found.values())


def _leave_meta(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Gives the same Python object a real, empty tensor inside."""
    real = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=param.requires_grad)
    vars(real).update(vars(param))
    built_as = param.dtype
    torch.utils.swap_tensors(param, real)
    note_cast(param, built_as)


def _nbytes(units: Iterable[ParamUnit]) -> int:
    return sum(buffer.nbytes for unit in units for buffer in unit.buffers)


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
