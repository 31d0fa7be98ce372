"""An engine's states moved to host memory for a while, so that something else can use the device, and back.

A mixin of the engine. Storages are emptied in place, so every view of them, in parameters, masters and the optimizer,
is valid again after the return. What is in host memory already, as everything is on a CPU, stays where it is.
(Interface: DeepSpeed's `offload_states` and `reload_states`; here for every optimizer, and forward in between is an
error.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero.coordinator import ParamCoordinator
from zeroaccel.zero.grad_reducer import GradReducer
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.placement import TierSet

__all__ = ["KINDS", "OffloadedStates", "StateOffload"]

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""Moments and the like; masters; parameters; reduced gradients; gradients on their way."""


class OffloadedStates:
    """Storages whose bytes are in host memory; `put_back` undoes it.

    Args:
        tensors: of one device; of several views of a storage each may be there.
        pinned: page-lock the host memory.
    """

    def __init__(self, tensors: Iterable[Tensor], *, pinned: bool) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in storages.values():
            if storage.nbytes():
                source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                host.copy_(source)
                del source
                storage.resize_(0)
                self._held.append((storage, host))
        self.nbytes = sum(host.numel() for _, host in self._held)

    def put_back(self) -> None:
        """Gives every storage its memory and its bytes again."""
        for storage, host in self._held:
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)
        self._held.clear()


class _Parts(Protocol):
    """What the engine has."""

    units: Sequence[ParamUnit]
    _reducer: GradReducer
    _residency: ParamCoordinator
    _shard: ShardedOptimizer | None
    _tiers: TierSet | None
    _parked: OffloadedStates | None

    def finish_update(self) -> None: ...


class StateOffload:
    """Between steps: states to the host and back; and what is in tiers anyway."""

    @property
    def _all_parts(self) -> _Parts:
        return cast(_Parts, self)

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states from the device to host memory until `reload_states`; the engine cannot be used meanwhile.

        Args:
            include: of "optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer", as texts or
                as members of an enumeration with these values; None is all.
            device: "cpu".
            non_blocking: accepted; the memory is free when the call returns, so it always waits for the copies.

        Raises:
            UsageError: an unknown kind or device.
            EngineStateError: they are offloaded already.
        """
        parts = self._all_parts
        parts.finish_update()
        kinds = [_text(kind) for kind in include] if include is not None else list(KINDS)
        for kind in kinds:
            if kind not in KINDS:
                raise UsageError("engine.offload_states(include)", expected=f"some of {', '.join(KINDS)}", got=kind)
        if _text(device) != "cpu":
            fix = "offload to files is a setting of zero_optimization, for the whole run"
            raise UsageError("engine.offload_states(device)", expected='"cpu"', got=_text(device), fix=fix)
        parts._residency.end_step()
        chosen = [tensor for kind in kinds for tensor in self._tensors(kind) if tensor.device.type != "cpu"]
        parts._parked = OffloadedStates(chosen, pinned=pin_memory and bool(chosen))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the states back. Without `offload_states` before it does nothing."""
        parts = self._all_parts
        if parts._parked is not None:
            parts._parked.put_back()
            parts._parked = None

    def tier_nbytes(self) -> dict[str, int]:
        """Bytes of this rank in tiers other than its device: "params, host", "params, nvme", "optimizer, nvme".

        States in the host memory of a CPU run are where they always are, and counted by `model_state_nbytes`.
        """
        tiers = self._all_parts._tiers
        return {} if tiers is None else {name: tier.nbytes for name, tier in tiers.tiers.items()}

    def _require_states_here(self) -> None:
        if self._all_parts._parked is not None:
            raise EngineStateError("engine: its states are offloaded", fix="call engine.reload_states() first")

    def _tensors(self, kind: str) -> Iterator[Tensor]:
        parts = self._all_parts
        buffers = [buffer for unit in parts.units for buffer in unit.buffers]
        if kind == "optim_states" and parts._shard is not None:
            states: Iterable[Mapping[str, object]] = parts._shard.optimizer.state.values()
            yield from (value for state in states for value in state.values() if isinstance(value, Tensor))
        elif kind == "hp_params":
            yield from (tensor for buffer in buffers for tensor in buffer.masters.tensors())
        elif kind == "lp_params":
            for buffer in buffers:
                yield from (*buffer.shard.tensors(), *buffer.secondary.tensors())
        elif kind == "lp_grads":
            yield from (g for held in parts._reducer.gradients for g in (held.shard, held.full) if g is not None)
        elif kind == "contiguous_grad_buffer":
            yield from (held.flat for held in parts._reducer.gradients if held.flat is not None)


def _text(kind: object) -> str:
    value = getattr(kind, "value", kind)
    return str(value)
