"""Parameters sharded module by module before there is an engine: a unit per module, values but no gradients.

`deferred_init.py` feeds it modules as they are built, `load_safetensors.py` modules whose values come from files.
`build.py` takes the parameters over into the units of an engine. At one rank nothing is sharded, only cast and moved.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import ConfigError
from zeroaccel.zero.access.param_registry import ParamRegistry, place_of
from zeroaccel.zero.build import float64_error, initial_values
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.module_buffers import dtype_before, note_cast
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.storage.shards import MemoryShard

__all__ = ["ModuleShards", "ShardTarget"]

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
