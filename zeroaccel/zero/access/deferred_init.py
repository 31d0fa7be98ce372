"""`zero.Init`: models larger than one rank's memory, sharded module by module while their constructors run.

`Init` shards a module's parameters when the module is registered in another one, when another module registers its
first parameter, or at the end of the block: by then the module's constructor has filled them. torch's registration
hooks report both events, so no class is patched. If a constructor uses a sharded parameter again, to initialize it or
to compute with it, the parameter is unsharded first. All ranks must run the same constructors; rank 0's values count.

`load_safetensors.py` also uses `ModuleShards`, for modules whose values come from files. `build.py` moves the
parameters into the units of an engine. With one rank, parameters are only cast and moved.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config import Config, load_config
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.offload.file_io import nameless_file
from zeroaccel.zero.access.full_params import store, take_assigned
from zeroaccel.zero.access.param_registry import ParamHandle, ParamRegistry, handle_of
from zeroaccel.zero.build_units import initial_values
from zeroaccel.zero.from_config import DTYPES
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.model_check import float64_error
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.precision import made_as, note_cast
from zeroaccel.zero.quantized_weights import attach_codes
from zeroaccel.zero.storage.placement import BufferPlan
from zeroaccel.zero.storage.shards import MemoryShard
from zeroaccel.zero.tensor_subclasses import (
    METADATA,
    carriers,
    function_name,
    local,
    mark_small_floats,
    scales_of,
    tensors_of,
)

P = ParamSpec("P")
R = TypeVar("R")

_UNSHARDED_NBYTES = 64 << 20  # limit for the modules that stay unsharded while constructors use them


def _without_modes(method: Callable[P, R]) -> Callable[P, R]:
    """Disables torch's function modes in a method: `_UseMode` must not treat sharding as a use of the parameters."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


@dataclass(frozen=True)
class ShardTarget:
    """Dtype and storage of the shards.

    Attributes:
        dtype: dtype to which floating-point parameters are cast; None keeps each parameter's dtype.
        device: device of the shards.
        folder: folder for shards in files, which disappear with the process; None for shards in memory.
        from_precision: True if `dtype` comes from a config's precision and not from an argument.
    """

    dtype: torch.dtype | None
    device: torch.device
    folder: Path | None = None
    from_precision: bool = False

    def dtype_of(self, name: str, param: nn.Parameter) -> torch.dtype:
        """Returns the dtype of a parameter's shard.

        Raises:
            UsageError: the parameter is float64 and the config's precision is fp32, which the engine refuses too.
        """
        if scales_of(param) is not None:
            return param.dtype
        if self.from_precision and self.dtype is torch.float32 and param.dtype is torch.float64:
            raise float64_error(name)
        return self.dtype if self.dtype is not None and param.is_floating_point() else param.dtype

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor (numel,), in memory or mapped from a file without a name."""
        if self.folder is None or not numel:
            return torch.empty(numel, dtype=dtype, device=self.device)
        try:
            handle = nameless_file(self.folder)
            try:
                # A write to a mapped page that the disk has no room for would end the process.
                os.posix_fallocate(handle, 0, numel * dtype.itemsize)
                return torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=numel, dtype=dtype)
            finally:
                os.close(handle)  # the mapping keeps the file's blocks; they are freed however the process ends
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"offload_param.nvme_path {self.folder}: no room for a shard of {numel} elements ({error})"
            ) from error


class ModuleShards:
    """The sharded parameters of one `zero.Init`, or of one load.

    Life of a module: 1. `shard` after its constructor (or `reserve` for values to be read later), 2. `unshard_for_use`
    whenever a constructor uses one of its parameters again, 3. `reshard_all` and `watch_uses` at the end. From then
    until an engine takes over the parameters, each operation that needs or writes their values is a use (`using`).
    """

    def __init__(self, collectives: Collectives, destination: ShardTarget) -> None:
        self.destination = destination
        self.collectives = collectives
        self.registry = ParamRegistry(collectives, pin=self._pin, unpin=self._unpin, on_empty=self._forget)
        self._unsharded: OrderedDict[int, ParamUnit] = OrderedDict()
        self._recent: ParamUnit | None = None  # the last unit that was unpinned and still has its values
        self._count = 0

    @_without_modes
    def shard(self, module: nn.Module) -> None:
        """Shards the module's own parameters with rank 0's values. (all ranks)"""
        named = _to_shard(module)
        if not named:
            return
        if self.collectives.world_size == 1:
            for name, param in named:
                note_cast(param, param.dtype, param.device)
                dtype = self.destination.dtype_of(self._name(module, name), param)
                # One after the other: torch casts a copy from a device to the host on the host, in new memory.
                param.data = param.data.to(dtype).to(self.destination.device)
            return
        if _OVERWRITTEN:
            self._divide(module, named)
            return
        buffers = []
        # One buffer per dtype, as in the units of an engine. Memory holds only this module's parameters in full, and
        # shards of all earlier modules.
        for dtype, same in self._by_dtype(module, named).items():
            params = [param for _, param in same]
            before = [made_as(param) for param in params]
            layout = self._lay_out(module, same)
            device, label = self.destination.device, self._label(module)
            source = initial_values(layout, params, device, self.collectives, label)
            for param, made in zip(params, before, strict=True):
                note_cast(param, *made)
            buffer = self._buffer(layout, params, dtype)
            buffer.adopt(source, self._storage(buffer))
            buffers.append(buffer)
        self._take(ParamUnit(self._label(module), [module], buffers, self.collectives, sharded=True))

    @_without_modes
    def reserve(self, module: nn.Module, names: Sequence[str]) -> None:
        """Creates shards, without values, for those of the module's own parameters `names` that are on meta."""
        self._divide(module, [(name, param) for name, param in _to_shard(module, meta=True) if name in names])

    def _divide(self, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Shards parameters without a full copy: each rank has what its constructor wrote, until files are read.

        Memory that no constructor wrote is not touched: its first write allocates it, which takes longer than a read.
        """
        buffers: list[FlatBuffer] = []
        for dtype, same in self._by_dtype(module, named).items():
            layout, values = self._lay_out(module, same), [local(param).detach() for _, param in same]
            for _, param in same:
                if param.is_meta:
                    leave_meta(param, torch.empty(0, dtype=dtype, device=self.destination.device))
                else:
                    note_cast(param, *made_as(param))
            buffer = self._buffer(layout, [param for _, param in same], dtype)
            buffer.store_in(self._storage(buffer))
            shard = buffer.shard.stage()
            for slot, value in zip(layout.slots, values, strict=True):
                reach = slot.range & buffer.own
                if not value.is_meta and not _is_unwritten(value):
                    shard[reach].copy_(value.reshape(-1)[reach.start - slot.start : reach.end - slot.start])
            buffers.append(buffer)
        if buffers:
            self._take(ParamUnit(self._label(module), [module], buffers, self.collectives, sharded=True))

    @_without_modes
    def unshard_for_use(self, params: Sequence[nn.Parameter]) -> None:
        """Unshards the units of these parameters before they are used. (all ranks)"""
        units: dict[int, ParamUnit] = {}
        for param in params:
            handle = handle_of(param)
            if handle is not None and handle.registry is self.registry and not self.registry.is_acquired(handle.unit):
                units[id(handle.unit)] = handle.unit
        for key, unit in units.items():
            unit.unshard()
            unit.wait()
            self._unsharded[key] = unit
            self._unsharded.move_to_end(key)
        # Initializers use one module several times in a row (weights, bias, a norm of both), so the most recent units
        # stay unsharded; the limit prevents a constructor that walks the model from unsharding all of it.
        while len(self._unsharded) > len(units) and _nbytes(self._unsharded.values()) > _UNSHARDED_NBYTES:
            self._reshard_one(next(iter(self._unsharded.values())))

    @_without_modes
    def reshard_all(self) -> None:
        """Reshards all unsharded units with rank 0's values. (all ranks)"""
        for unit in list(self._unsharded.values()):
            self._reshard_one(unit)

    @_without_modes
    def watch_uses(self) -> None:
        """Makes any later operation on a sharded parameter a use of it; see [Note: sharded parameters]."""
        for unit in self.registry.units:
            self._watch(unit)

    def _watch(self, unit: ParamUnit) -> None:
        (module,) = unit.modules
        names = {
            id(each): key
            for attribute, param in module._parameters.items()
            if param is not None
            for key, each in tensors_of(attribute, param)
        }
        prefix = _fqn_of(module)
        unit.name = prefix.rstrip(".") or unit.name
        unit.watch_uses(self, lambda param, name: prefix + names[id(param)] if id(param) in names else name)

    def has(self, param: nn.Parameter) -> bool:
        """Returns False if an engine has taken the parameter over."""
        return self.registry.handle(param) is not None

    @contextmanager
    def using(self, params: Sequence[nn.Parameter], call: str, *, writes: bool) -> Iterator[Callable[[Tensor], bool]]:
        """See `BuiltOwner.using`. (all ranks)"""
        versions = [param._version for param in params]
        with torch._C.DisableTorchFunction():
            handles = sorted((self._handle(param) for param in params), key=lambda handle: handle.order)
            units = list({id(handle.unit): handle.unit for handle in handles}.values())
            if not writes:
                self.registry.acquire(units)
            else:
                self.unshard_for_use(params)
        storages = {buffer.full.untyped_storage()._cdata for unit in units for buffer in unit.buffers}
        try:
            yield lambda tensor: tensor.untyped_storage()._cdata in storages
        finally:
            with torch._C.DisableTorchFunction():
                changed = any(param._version != before for param, before in zip(params, versions, strict=True))
                if not writes:
                    # A lookup with max_norm changes the weight that it reads.
                    for handle in handles if changed else ():
                        view = handle.buffer.view(handle.index).detach()
                        self.collectives.everyone.broadcast(view.view(-1), 0, f"{call} of {handle.slot.fqn}")
                        store(handle)
                    self.registry.release(units, keep_values=not changed)
                else:
                    for handle in handles:
                        take_assigned(handle)
                    for unit in units:
                        self._reshard_one(unit)
                    for param in params:
                        self._watch(self._handle(param).unit)

    def copy(self, param: nn.Parameter) -> nn.Parameter:
        """See `BuiltOwner.copy`. (all ranks)"""
        handle = self._handle(param)
        holder = nn.Module()
        with self.using([param], "deepcopy", writes=False), torch._C.DisableTorchFunction():
            copied = nn.Parameter(local(param).clone(), requires_grad=param.requires_grad)
        with torch._C.DisableTorchFunction():
            holder._parameters[f"copy of {handle.slot.fqn}"] = copied
            self.shard(holder)
            self._watch(self._handle(copied).unit)
        return copied

    def _handle(self, param: nn.Parameter) -> ParamHandle:
        handle = self.registry.handle(param)
        assert handle is not None, "a parameter of another owner"
        return handle

    def _reshard_one(self, unit: ParamUnit) -> None:
        del self._unsharded[id(unit)]
        replaced = [p for b in unit.buffers for p in b.params if (h := handle_of(p)) is not None and h.replaced]
        self.registry.drop(replaced)
        # The ranks' random numbers may differ in a constructor. Rank 0's values equal those of a model that is built
        # without `zero.Init` and broadcast.
        for buffer in unit.buffers:
            self.collectives.broadcast(buffer.full, 0, f"values of {unit.name}")
            buffer.shard.replace(buffer.full[buffer.own.at(0)])
        # Parameters whose storage or shape the constructor replaced go into a new unit.
        new_data = [(param, param.data) for param in replaced]
        unit.reshard(keep_views=True)
        for param, data in new_data:
            param.data = data
        if new_data:
            self.shard(unit.modules[0])

    @_without_modes
    def _pin(self, unit: ParamUnit) -> None:
        if id(unit) in self._unsharded:
            self._reshard_one(unit)
        if unit is not self._recent:
            self._drop_recent()
        unit.unshard()
        unit.wait()

    @_without_modes
    def _unpin(self, unit: ParamUnit, *, keep_values: bool = False) -> None:
        unit.reshard(keep_views=True, keep_values=keep_values)
        if keep_values:
            self._recent = unit

    def _drop_recent(self) -> None:
        if self._recent is not None:
            self._recent.drop_values()
            self._recent = None

    def _by_dtype(
        self, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]
    ) -> dict[torch.dtype, list[tuple[str, nn.Parameter]]]:
        groups: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, param in named:
            groups.setdefault(self.destination.dtype_of(self._name(module, name), param), []).append((name, param))
        return groups

    def _lay_out(self, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> FlatLayout:
        entries = [(self._name(module, name), tuple(param.shape)) for name, param in named]
        return FlatLayout.build(entries, self.collectives.world_size)

    def _buffer(self, layout: FlatLayout, params: Sequence[nn.Parameter], dtype: torch.dtype) -> FlatBuffer:
        plan = BufferPlan("", self.collectives.rank, layout, tuple(params), dtype, (), persistent=False)
        return FlatBuffer(plan, self.destination.device, sharded=True)

    def _storage(self, buffer: FlatBuffer) -> MemoryShard:
        return MemoryShard(buffer.place(), self.destination.empty(buffer.own.numel, buffer.dtype))

    def _take(self, unit: ParamUnit) -> None:
        self.registry.add([unit])
        self._count += 1

    def _forget(self, unit: ParamUnit) -> None:
        if unit is self._recent:
            self._drop_recent()

    def _label(self, module: nn.Module) -> str:
        return f"{type(module).__name__} number {self._count}"

    def _name(self, module: nn.Module, name: str) -> str:
        return f"{name} of {self._label(module)}"


def _to_shard(module: nn.Module, *, meta: bool = False) -> list[tuple[str, nn.Parameter]]:
    """Returns the module's own unsharded parameters of type `nn.Parameter` or with codes, each once."""
    if meta:
        mark_small_floats(module)
    else:
        attach_codes(module, recurse=False)
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in module._parameters.items():
        # A tensor subclass cannot be split at an arbitrary element, except one that stores codes.
        if param is None or handle_of(param) is not None:
            continue
        if scales_of(param) is None and type(param) not in _PLAIN:
            continue
        for key, each in tensors_of(name, param):
            if each.is_meta == meta and handle_of(each) is None:
                named.setdefault(id(each), (key, each))
    return list(named.values())


def leave_meta(param: nn.Parameter, data: Tensor) -> None:
    """Gives a meta parameter a real tensor; the object stays, because optimizers and tied modules refer to it."""
    real = nn.Parameter(data, requires_grad=param.requires_grad)
    vars(real).update(vars(param))
    made = param.dtype, param.device
    torch.utils.swap_tensors(param, real)
    note_cast(param, *made)


def _nbytes(units: Iterable[ParamUnit]) -> int:
    return sum(buffer.nbytes for unit in units for buffer in unit.buffers)


RemoteDevice = Literal["cpu", "nvme"]

_ACTIVE: list[Init] = []
_OVERWRITTEN: list[str] = []  # reasons why the values of constructors will not be used
_UNWRITTEN: dict[int, Tensor] = {}  # storage -> a result of `torch.empty` that no function has used since
_DRAWS = frozenset({"normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_"})  # they replace all elements
_PLAIN: list[type] = [nn.Parameter]
_RAW_MEMORY = frozenset({"data_ptr", "storage", "untyped_storage"})
_PARENTS: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = weakref.WeakKeyDictionary()


@contextmanager
def values_from_files() -> Iterator[None]:
    """Makes `Init` leave out the broadcast of constructors' values, which files or initializers replace."""
    _OVERWRITTEN.append("files")
    # A collection of garbage would look at all objects of the imported libraries: 0.2 s each time.
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        _OVERWRITTEN.pop()
        _UNWRITTEN.clear()
        if freezes:
            gc.unfreeze()


def _is_unwritten(value: Tensor) -> bool:
    """Returns True for a parameter's values if `torch.empty` made their memory and nothing has written to it."""
    return _UNWRITTEN.pop(value.untyped_storage()._cdata, None) is not None and value._version == 0


def note_places(model: nn.Module) -> None:
    """Records the names of a model's modules, for messages about their parameters."""
    for parent in model.modules():
        for name, module in parent.named_children():
            _PARENTS[module] = weakref.ref(parent), name


def _fqn_of(module: nn.Module) -> str:
    """Returns the prefix of the module's names in the model that a `zero.Init` built, for messages."""
    name, seen = "", {id(module)}
    while (place := _PARENTS.get(module)) is not None and (parent := place[0]()) is not None and id(parent) not in seen:
        name = f"{place[1]}.{name}"
        seen.add(id(parent))
        module = parent
    return name


class Init:
    """Shards each module at the end of its constructor, inside the block. (all ranks)

    After the block, pass the model to `initialize()`; training is bitwise identical to that of a model built without
    the block. Until then, every operation that reads or writes a parameter gathers it, so all ranks must run it; they
    get rank 0's values of a write. `GatheredParameters` gathers once for several operations.
    Blocks may be nested: the innermost one applies. On one rank parameters are only cast. `Init` shards bitsandbytes
    codes with their scales, but no buffers, parameters on the meta device or parameters of other subclasses.

    Args:
        module: an existing model, sharded at once, before the block.
        config_dict_or_path: a config with defaults: its precision for `dtype`, its `offload_param` for
            `remote_device`.
        dtype: dtype of floating-point parameters.
        remote_device: "cpu" keeps shards in host memory, "nvme" in files, which disappear with the process.
        nvme_path: folder for these files; default: the config's `offload_param.nvme_path`.
        pin_memory: has no effect; the engine copies shards once, at the start.
        enabled: False turns sharding off.
        collectives: the communication backend.

    Raises:
        ConfigError: the config is invalid, or the rendezvous of the ranks failed.
        UsageError: `remote_device` or `dtype` is unknown.

    Example:
        >>> import torch
        >>> with Init(dtype=torch.bfloat16):
        ...     model = torch.nn.Linear(4, 2)
        >>> model.weight.dtype
        torch.bfloat16
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
        self._under_construction: dict[int, weakref.ref[nn.Module]] = {}
        self._undo = ExitStack()
        if enabled:
            topology = init_process_group()
            settings = None if config_dict_or_path is None else load_config(config_dict_or_path)
            where = destination(
                settings, topology.device, dtype=dtype, remote_device=remote_device, nvme_path=nvme_path
            )
            self._shards = ModuleShards(collectives or Collectives(topology), where)
            # An existing model is sharded module by module as well, so that memory never holds it twice.
            if module is not None:
                note_places(module)
                for submodule in module.modules():
                    self._shards.shard(submodule)
            self._shards.watch_uses()

    def __enter__(self) -> Init:
        if self._shards is None:
            return self
        if not _ACTIVE:
            # For every registration in any module of the process: of a parameter before it happens, and of a module
            # that is initialized and becomes part of another.
            self._undo.callback(register_module_parameter_registration_hook(_parameter_registered).remove)
            self._undo.callback(register_module_module_registration_hook(_module_registered).remove)
            self._undo.enter_context(_UseMode())
            if _OVERWRITTEN:  # a load without shards constructs on the meta device, which draws no random numbers
                self._undo.callback(torch.set_rng_state, torch.get_rng_state())
        _ACTIVE.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shards is None:
            return
        _ACTIVE.remove(self)
        self._undo.close()
        if error is None:  # after an error the other ranks may not reach this point
            self.finish_all()
            self._shards.reshard_all()
            self._shards.watch_uses()

    @property
    def shards(self) -> ModuleShards | None:
        """The sharded parameters; None if disabled."""
        return self._shards

    def note(self, module: nn.Module) -> None:
        """Records that `module` registers a parameter. (all ranks)"""
        # The first parameter of another module: constructors nest, so all earlier modules have their own parameters.
        if id(module) not in self._under_construction:
            self.finish_all()
            self._under_construction[id(module)] = weakref.ref(module)

    def finish_all(self) -> None:
        """Shards all modules under construction, whose own parameters are complete. (all ranks)"""
        modules, self._under_construction = self._under_construction, {}
        for reference in modules.values():
            module = reference()
            if module is not None and self._shards is not None:
                self._shards.shard(module)

    def finish(self, module: nn.Module) -> None:
        """Shards a module whose constructor has returned. (all ranks)"""
        if self._shards is not None and self._under_construction.pop(id(module), None) is not None:
            self._shards.shard(module)

    def use(self, params: Sequence[nn.Parameter]) -> None:
        """Unshards parameters that a constructor uses again. (all ranks)"""
        if self._shards is not None:
            self._shards.unshard_for_use(params)


def destination(
    settings: Config | None,
    device: torch.device,
    *,
    dtype: torch.dtype | None,
    remote_device: str | None,
    nvme_path: str | os.PathLike[str] | None = None,
) -> ShardTarget:
    """Returns dtype and storage of the shards; arguments, which are those of `Init`, override the config."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError("zero.Init(dtype)", expected="a floating-point torch.dtype", got=dtype)
    if remote_device not in (None, "none", "cpu", "nvme", device.type):
        raise UsageError("zero.Init(remote_device)", expected='"cpu" or "nvme"', got=remote_device)
    offload = None if settings is None else settings.zero_optimization.offload_param
    place = remote_device or (None if offload is None else offload.device)
    # Files are only mapped memory here: the engine moves the shards to its own tiers, which have their own files.
    folder = None
    if place == "nvme":
        path = nvme_path or (None if offload is None else offload.nvme_path)
        if path is None:
            raise UsageError('zero.Init(remote_device="nvme")', expected="an nvme_path, here or in offload_param")
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
    from_precision = dtype is None and settings is not None
    if dtype is None and settings is not None:
        dtype = DTYPES[settings.precision]
    return ShardTarget(dtype, torch.device("cpu") if place in ("cpu", "nvme") else device, folder, from_precision)


# -- torch's callbacks; the outermost Init registers them for all blocks


def _parameter_registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _ACTIVE[-1].note(module)


def _module_registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is not None:
        _PARENTS[module] = weakref.ref(parent), name
        for active in _ACTIVE:  # an inner block, or an outer one, may have recorded the module
            active.finish(module)


class _UseMode(TorchFunctionMode):
    """Unshards parameters before they reach a torch function, except functions that read only metadata."""

    # A mode rather than a parameter subclass: it sees the calls on plain `nn.Parameter`s of third-party classes, such
    # as `torch.nn.init.normal_(self.weight)` after the module was registered.
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name not in METADATA:
            params = list(_parameters_in([*args, *kwargs.values()]))
            if params:
                for active in _ACTIVE:
                    active.use(params)
        if _UNWRITTEN and (name not in METADATA or name in _RAW_MEMORY):
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor):
                    _UNWRITTEN.pop(each.untyped_storage()._cdata, None)
        made = _draw(func, args, kwargs) if name in _DRAWS else func(*args, **kwargs)
        if _OVERWRITTEN and func is torch.empty and kwargs.get("out") is None:
            _UNWRITTEN[made.untyped_storage()._cdata] = made
        return made


def _draw(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Fills a tensor with random numbers, on the device of the constructor if it is a parameter that left it.

    The values are then those of a constructor without `Init`; and the CPU draws one number at a time.
    """
    target = args[0] if args else kwargs.get("tensor")
    if isinstance(target, nn.Parameter) and kwargs.get("generator") is None:
        _, device = made_as(target)
        if device.type != "meta" and device != target.device:
            with torch.no_grad():
                others = {name: value for name, value in kwargs.items() if name != "tensor"}
                target.copy_(func(torch.empty_like(target, device=device), *args[1:], **others))
            return target
    return func(*args, **kwargs)


def _parameters_in(values: Iterable[Any]) -> Iterable[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield from (each for each in carriers(value) if handle_of(each) is not None)
        elif type(value) in (list, tuple):
            yield from _parameters_in(value)
