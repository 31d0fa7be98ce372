"""`offload_states` and `reload_states`: move an engine's states to host memory while another model uses the device.

Storages are resized in place, so every view of them, in parameters, masters and the optimizer, is valid again after
`reload`. (Interface: DeepSpeed's; here it supports every optimizer, and a forward before `reload` is an error.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.offload.host_buffers import empty_on_host
from zeroaccel.zero.grad_reducer import GradReducer
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""Optimizer states such as moments; masters; parameters; reduced gradients; gradients before reduction."""


class OffloadedStates:
    """Storages whose bytes are in host memory until `restore`.

    Args:
        tensors: tensors on one device; several views of one storage are moved once.
        pinned: page-lock the host memory.
    """

    def __init__(self, tensors: Iterable[Tensor], *, pinned: bool) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in storages.values():
            if storage.nbytes():
                source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                host = empty_on_host((storage.nbytes(),), torch.uint8, pinned=pinned)
                host.copy_(source)
                del source
                storage.resize_(0)
                self._copies.append((storage, host))
        self.nbytes = sum(host.numel() for _, host in self._copies)

    def restore(self) -> None:
        """Reallocates every storage and copies its bytes back."""
        for storage, host in self._copies:
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)
        self._copies.clear()


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
        self._offloaded = OffloadedStates(tensors, pinned=pinned and bool(tensors))

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
