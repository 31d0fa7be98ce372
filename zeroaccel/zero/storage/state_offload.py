"""`offload_states` and `reload_states`: move an engine's states to host memory while another model uses the device.

Storages are resized in place, so every view of them, in parameters, masters and the optimizer, is valid again after
`reload`. (Interface: DeepSpeed's; here it supports every optimizer, and a forward before `reload` is an error.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.offload.host_buffers import HostArena
from zeroaccel.ops.device_threads import CPU
from zeroaccel.zero.grad_reducer import GradReducer
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""Optimizer states such as moments; masters; parameters; reduced gradients; gradients before reduction."""


class OffloadedStates:
    """Storages whose bytes are in host memory until `restore`; the host waits once for each direction.

    Args:
        tensors: tensors on one device; several views of one storage are moved once.
        arena: the host memory; after `restore` it has room for the next ones.
    """

    def __init__(self, tensors: Iterable[Tensor], arena: HostArena) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._device = next((tensor.device for tensor in storages.values()), CPU)
        for storage in [tensor.untyped_storage() for tensor in storages.values()]:
            if storage.nbytes():
                host = arena.empty((storage.nbytes(),), torch.uint8)
                host.copy_(self._bytes_of(storage), non_blocking=True)
                self._copies.append((storage, host))
        self._await_copies()
        for storage, _ in self._copies:
            storage.resize_(0)
        if self._device.type != "cpu":  # another process or library may use the memory
            torch.get_device_module(self._device).empty_cache()
        self.nbytes = sum(host.numel() for _, host in self._copies)

    def restore(self) -> None:
        """Reallocates every storage and copies its bytes back."""
        for storage, host in self._copies:
            storage.resize_(host.numel())
            self._bytes_of(storage).copy_(host, non_blocking=True)
        self._await_copies()
        self._copies.clear()

    def _await_copies(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).current_stream(self._device).synchronize()

    def _bytes_of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


class StateOffload:
    """The states of one engine, in host memory between `offload` and `reload`, else on the device.

    Args:
        optimizer: None for inference.
    """

    def __init__(self, units: Sequence[ParamUnit], reducer: GradReducer, optimizer: ShardedOptimizer | None) -> None:
        self._units = units
        self._reducer = reducer
        self._optimizer = optimizer
        self._offloaded: OffloadedStates | None = None
        self._arena: HostArena | None = None  # page-locking takes longer than the copies, so it is kept

    def kinds(self, include: Iterable[object] | None, device: object) -> list[str]:
        """Checks the arguments of `Engine.offload_states`; returns the kinds to move."""
        kinds = [_text(kind) for kind in include] if include is not None else list(KINDS)
        for kind in kinds:
            if kind not in KINDS:
                raise UsageError("engine.offload_states(include)", expected=f"some of {', '.join(KINDS)}", got=kind)
        if _text(device) != "cpu":
            fix = "to offload to files for the whole run, set zero_optimization.offload_optimizer or offload_param"
            raise UsageError("engine.offload_states(device)", expected='"cpu"', got=_text(device), fix=fix)
        return kinds

    def offload(self, kinds: Iterable[str], *, pinned: bool) -> None:
        """Moves the states of these kinds from the device to host memory."""
        # Units are sharded at this point. Tensors in host memory stay there, which on a CPU are all.
        tensors = [tensor for kind in kinds for tensor in self._tensors(kind) if tensor.device.type != "cpu"]
        arena = self._arena
        if arena is None or not pinned:
            arena = HostArena(pinned=pinned and bool(tensors))
        self._arena = arena if pinned and tensors else self._arena
        self._offloaded = OffloadedStates(tensors, arena)

    def reload(self) -> None:
        """Moves the states back; does nothing without an earlier `offload`."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def require_loaded(self) -> None:
        """Raises EngineStateError between `offload` and `reload`."""
        if self._offloaded is not None:
            raise EngineStateError("engine: its states are offloaded", fix="call engine.reload_states() first")

    def _tensors(self, kind: str) -> Iterator[Tensor]:
        buffers = [buffer for unit in self._units for buffer in unit.buffers]
        if kind == "optim_states" and self._optimizer is not None:
            states: Iterable[Mapping[str, object]] = self._optimizer.optimizer.state.values()
            yield from (value for state in states for value in state.values() if isinstance(value, Tensor))
        elif kind == "hp_params":
            yield from (tensor for buffer in buffers for tensor in buffer.masters.tensors())
        elif kind == "lp_params":
            for buffer in buffers:
                yield from (*buffer.shard.tensors(), *buffer.shard.secondary.tensors())
        elif kind == "lp_grads":
            yield from (t for g in self._reducer.gradients for t in (g.shard, g.full) if t is not None)
        elif kind == "contiguous_grad_buffer":
            yield from (g.flat for g in self._reducer.gradients if g.flat is not None)


def _text(kind: object) -> str:
    value = getattr(kind, "value", kind)
    return str(value)
