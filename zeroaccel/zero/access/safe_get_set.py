"""Masters, gradients and optimizer states of single parameters, at every stage.

The "full" calls are collective and deal in tensors of the parameter's shape, equal on all ranks; the "local" ones in
this rank's elements of it, (n,), in row-major order. All values are fp32, but for states of another dtype. A parameter
that no engine keeps gives None, and setting it is an error. (Interface: DeepSpeed's `deepspeed.utils.safe_*`, with
three differences: gradients come without the loss scale; setters renew the 16-bit copies too; there are local calls at
every stage.)

[Note: parts] A parameter's values of one kind lie in parts: (tensor, first element, one past the last) of this rank.
They are sharded, each rank having its own, or replicated, each having all. Everything here is written once over parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zeroaccel.comm.agree import agreed
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero.access.param_registry import ParamHandle, Training, place_of
from zeroaccel.zero.grad_reducer import GradientBuffer
from zeroaccel.zero.param_check import fingerprint

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]

_GATHERED_NUMEL = 1 << 22  # of each rank at a time


@dataclass(frozen=True)
class _Part:
    """Elements [start, end) of the flat buffer: a (end - start,) view, or a copy where `change` writes them."""

    values: Tensor
    start: int
    end: int
    change: Callable[[int, Tensor], None] | None = None


@dataclass(frozen=True)
class _Values:
    """One kind of values of a parameter on this rank.

    Attributes:
        replicated: the parts cover the whole parameter, on every rank.
        factor: a value that a caller sees is a stored one times this.
    """

    parts: tuple[_Part, ...]
    replicated: bool
    factor: float = 1.0


# -- masters


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The weights the optimizer works on, or of a frozen parameter its values. (all ranks)

    Example:
        >>> import torch
        >>> import zeroaccel
        >>> from zeroaccel.zero import safe_get_full_fp32_param
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
        >>> engine, *_ = zeroaccel.initialize(model, optimizer, config=config)
        >>> safe_get_full_fp32_param(model.weight).dtype
        torch.float32
    """
    place = place_of(param)
    return None if place is None else _full(place, _masters(place), "fp32 values of")


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replaces the master and the copies in the parameter's own dtype. (all ranks, with the same value)

    Raises:
        UsageError: no engine keeps the parameter; `value` has another shape, or differs between ranks.
    """
    place = _required(param, "safe_set_full_fp32_param")
    flat = _checked(place, value, "safe_set_full_fp32_param")
    _fill(place, _masters(place), flat, place.slot.start)
    with torch.no_grad():  # after the master: in fp32 that is part of these already
        own = place.reach(_rank(place))
        buffer, origin = place.buffer, place.slot.start
        buffer.set_shard(own[0], flat[own[0] - origin : own[1] - origin])
        place.unit.drop_second()
        if buffer.full.untyped_storage().nbytes():
            buffer.full[place.slot.start : place.slot.end].copy_(flat)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of the weights the optimizer works on."""
    place = place_of(param)
    return None if place is None else _local(place, _masters(place))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replaces this rank's elements of the master and of the copies in the parameter's dtype. (all ranks)

    Raises:
        UsageError: no engine keeps the parameter, or `value` has another number of elements.
    """
    place = _required(param, "safe_set_local_fp32_param")
    own = _checked_local(place, value, "safe_set_local_fp32_param")
    whole = _assembled(place, own, f"set {place.slot.fqn}")
    safe_set_full_fp32_param(param, whole.view(place.slot.shape))


# -- gradients


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The mean gradient over ranks, without loss scale, not clipped; None if there is none. (all ranks)

    Between a backward and the step. With accumulation it is what has come so far.

    Raises:
        EngineStateError: gradients are whole on each rank until the boundary, and not reduced yet.
    """
    place = place_of(param)
    values = None if place is None else _gradients(place, "safe_get_full_grad")
    return None if place is None or values is None else _full(place, values, "gradient of")


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replaces the gradient that the next step uses. (all ranks, with the same value)

    Raises:
        EngineStateError: there is no gradient to replace.
        UsageError: as `safe_set_full_fp32_param`.
    """
    place, values = _required_gradient(param, "safe_set_full_grad")
    _fill(place, values, _checked(place, value, "safe_set_full_grad"), place.slot.start)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of `safe_get_full_grad`."""
    place = place_of(param)
    values = None if place is None else _gradients(place, "safe_get_local_grad")
    return None if place is None or values is None else _local(place, values)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replaces this rank's elements of the gradient."""
    place, values = _required_gradient(param, "safe_set_local_grad")
    _fill(place, values, _checked_local(place, value, "safe_set_local_grad"), place.reach(_rank(place))[0])


# -- optimizer states


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One tensor of the optimizer's state, such as "exp_avg". (all ranks)

    Raises:
        UsageError: there is no state of that name, or not before the first step; on every rank.
    """
    place = place_of(param)
    return None if place is None else _full(place, _states(place, optim_state_key), f"{optim_state_key} of")


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replaces one tensor of the optimizer's state. (all ranks, with the same value)"""
    place = _required(param, "safe_set_full_optimizer_state")
    flat = _checked(place, value, "safe_set_full_optimizer_state")
    _fill(place, _states(place, optim_state_key), flat, place.slot.start)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's elements of one tensor of the optimizer's state. (all ranks)"""
    place = place_of(param)
    return None if place is None else _local(place, _states(place, optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replaces this rank's elements of one tensor of the optimizer's state. (all ranks)"""
    place = _required(param, "safe_set_local_optimizer_state")
    own = _checked_local(place, value, "safe_set_local_optimizer_state")
    values = _states(place, optim_state_key)
    if values.replicated:
        _fill(place, values, _assembled(place, own, f"set {optim_state_key} of {place.slot.fqn}"), place.slot.start)
    else:
        _fill(place, values, own, place.reach(_rank(place))[0])


# -- where values are


def _masters(place: ParamHandle) -> _Values:
    buffer, slot = place.buffer, place.slot
    low, _ = buffer.layout.bounds(_rank(place))
    start, end = place.reach(_rank(place))
    optimizer = None if place.keeper.training is None else place.keeper.training.optimizer
    _require_settled(place, "the master")
    if optimizer is not None and optimizer.is_away(buffer):
        away = optimizer.stored(buffer, None, start, end).copy()
        return _Values((_Part(away, start, end, partial(optimizer.change, buffer, None)),), replicated=False)
    if buffer.master is None and buffer.home is not None:
        return _Values((_Part(buffer.home.stored(start - low, end - low).copy(), start, end),), replicated=False)
    if buffer.master is not None:
        source, origin = buffer.master, 0 if buffer.master_is_replicated else low
    elif buffer.resident:
        source, origin = buffer.full, 0
    else:
        source, origin = buffer.values(), low
    replicated = buffer.layout.world_size == 1 or (
        buffer.resident if buffer.master is None else buffer.master_is_replicated
    )
    if replicated:
        start, end = slot.start, slot.end
    return _Values((_Part(source[start - origin : end - origin], start, end),), replicated)


def _require_settled(place: ParamHandle, what: str) -> None:
    training = place.keeper.training
    if training is not None and training.updates is not None:
        training.updates.require_settled(f"{what} of {place.slot.fqn}")


def _gradients(place: ParamHandle, call: str) -> _Values | None:
    training = place.keeper.training
    held = None if training is None else _held(place, training)
    if training is None or held is None or (held.shard is None and held.flat is None):
        return None
    if held.shard is None or held.flat is not None:
        raise EngineStateError(
            f"{call}({place.slot.fqn}): gradients are not summed over the ranks before the accumulation boundary",
            fix="call it between the last backward of a step and engine.step()",
        )
    if held.shard.dtype is not torch.float32:  # so that a value that is set keeps its bits
        held.shard = held.shard.float()
    low, _ = place.buffer.layout.bounds(_rank(place))
    start, end = place.reach(_rank(place))
    scale = training.loss_scale().value
    return _Values(
        (_Part(held.shard[start - low : end - low], start, end),), place.keeper.collectives.world_size == 1, 1.0 / scale
    )


def _held(place: ParamHandle, training: Training) -> GradientBuffer | None:
    return next((held for held in training.reducer.gradients if held.buffer is place.buffer), None)


def _states(place: ParamHandle, key: str) -> _Values:
    collectives, slot = place.keeper.collectives, place.slot
    parts: list[_Part] = []
    _require_settled(place, f"state {key!r}")
    optimizer = None if place.keeper.training is None else place.keeper.training.optimizer
    replicated = place.buffer.master is not None and (
        place.buffer.master_is_replicated or place.buffer.layout.world_size == 1
    )
    with agreed(collectives, f"optimizer state {key} of {slot.fqn}"):
        if optimizer is None or slot.fqn not in optimizer.group_of:
            raise UsageError(f"parameter {slot.fqn}", expected="one that an optimizer updates", got="none does")
        for piece in optimizer.pieces[id(place.buffer)]:
            start, end = max(slot.start, piece.start), min(slot.end, piece.end)
            if start >= end:
                continue
            state = optimizer.optimizer.state.get(piece.master, {})
            value = state.get(key)
            if isinstance(value, Tensor) and value.dtype is torch.uint8:
                raise UsageError(
                    f"{type(optimizer.optimizer).__name__}, state {key!r} of {slot.fqn}",
                    expected="one number per element",
                    got='8-bit blocks (moments_dtype "int8")',
                    fix='set moments_dtype to "bf16" or "fp32", or read it from a checkpoint',
                )
            if not isinstance(value, Tensor) or value.numel() != piece.master.numel():
                names = [n for n, v in state.items() if isinstance(v, Tensor) and v.numel() == piece.master.numel()]
                raise UsageError(
                    f"{type(optimizer.optimizer).__name__}, state {key!r} of {slot.fqn}",
                    expected=f"one of {names}" if names else "a step before it: there is no state yet",
                )
            if optimizer.is_away(place.buffer):
                away = optimizer.stored(place.buffer, key, start, end).copy()
                parts.append(_Part(away, start, end, partial(optimizer.change, place.buffer, key)))
                continue
            parts.append(_Part(value.detach().view(-1)[start - piece.start : end - piece.start], start, end))
    return _Values(tuple(parts), replicated)


# -- reading and writing them


def _local(place: ParamHandle, values: _Values) -> Tensor:
    """(n,) fp32: a copy of this rank's elements."""
    start, end = place.reach(_rank(place))
    out = torch.empty(end - start, dtype=torch.float32, device=place.buffer.full.device)
    for part, low, high in _within(values.parts, start, end):
        out[low - start : high - start].copy_(part.values[low - part.start : high - part.start])
    return out.mul_(values.factor) if values.factor != 1.0 else out


def _full(place: ParamHandle, values: _Values, what: str) -> Tensor:
    """fp32, of the parameter's shape: a copy, equal on all ranks."""
    if not values.replicated:
        return _assembled(place, _local(place, values), f"{what} {place.slot.fqn}").view(place.slot.shape)
    out = torch.empty(place.slot.numel, dtype=torch.float32, device=place.buffer.full.device)
    for part in values.parts:
        out[part.start - place.slot.start : part.end - place.slot.start].copy_(part.values)
    return (out.mul_(values.factor) if values.factor != 1.0 else out).view(place.slot.shape)


def _assembled(place: ParamHandle, own: Tensor, label: str) -> Tensor:
    """(numel,) fp32 from each rank's elements. Sends as many as the rank with most of them has, to each other rank."""
    slot, ranks = place.slot, place.buffer.layout.world_size
    reaches = [place.reach(rank) for rank in range(ranks)]
    longest = max(end - start for start, end in reaches)
    out = torch.empty(slot.numel, dtype=torch.float32, device=own.device)
    for first in range(0, longest, _GATHERED_NUMEL):
        count = min(_GATHERED_NUMEL, longest - first)
        mine, rows = own.new_zeros(count), own.new_empty(ranks * count)
        part = own[first : first + count]
        mine[: part.numel()] = part
        place.keeper.collectives.all_gather(rows, mine, label).wait()
        for rank, (start, end) in enumerate(reaches):
            found = rows[rank * count : rank * count + max(0, min(count, end - start - first))]
            at = start + first - slot.start
            out[at : at + found.numel()] = found
    return out


def _fill(place: ParamHandle, values: _Values, flat: Tensor, start: int) -> None:
    """Writes `flat`, which are the elements from `start` of the flat buffer on, wherever this rank keeps them."""
    with torch.no_grad():
        for part, low, high in _within(values.parts, start, start + flat.numel()):
            new = flat[low - start : high - start] / values.factor
            if part.change is not None:
                part.change(low, new)
            else:
                part.values[low - part.start : high - part.start].copy_(new)


def _within(parts: Sequence[_Part], start: int, end: int) -> Iterator[tuple[_Part, int, int]]:
    for part in parts:
        low, high = max(part.start, start), min(part.end, end)
        if low < high:
            yield part, low, high


# -- what a caller may ask for


def _rank(place: ParamHandle) -> int:
    return place.buffer.rank


def _required(param: nn.Parameter, call: str) -> ParamHandle:
    place = place_of(param)
    if place is None:
        raise UsageError(f"{call}(param)", expected="a parameter of an engine", got=f"shape {tuple(param.shape)}")
    return place


def _required_gradient(param: nn.Parameter, call: str) -> tuple[ParamHandle, _Values]:
    place = _required(param, call)
    values = _gradients(place, call)
    if values is None:
        raise EngineStateError(f"{call}({place.slot.fqn}): it has no gradient", fix="call it after a backward")
    training = place.keeper.training
    if training is not None and training.updates is not None:
        training.updates.require_own_step(f"{call}({place.slot.fqn})")
    return place, values


def _checked(place: ParamHandle, value: Tensor, call: str) -> Tensor:
    """(numel,) fp32; the same on all ranks."""
    collectives = place.keeper.collectives
    where = f"{call}({place.slot.fqn})"
    flat = torch.empty(0)
    with agreed(collectives, f"{where}: shape"):
        if tuple(value.shape) != place.slot.shape:
            raise UsageError(f"{where}: the value", expected=f"shape {place.slot.shape}", got=tuple(value.shape))
        flat = value.detach().to(device=place.buffer.full.device, dtype=torch.float32).contiguous().view(-1)
    digest = fingerprint(torch.cat([flat, flat.new_zeros(flat.numel() % 2)]))
    if len(set(collectives.gather_objects(digest, f"{where}: value"))) > 1:
        raise UsageError(f"{where}: the value", expected="the same on all ranks", got="different ones")
    return flat


def _checked_local(place: ParamHandle, value: Tensor, call: str) -> Tensor:
    start, end = place.reach(_rank(place))
    where = f"{call}({place.slot.fqn})"
    with agreed(place.keeper.collectives, f"{where}: shape"):
        if value.numel() != end - start:
            raise UsageError(f"{where}: the value", expected=f"{end - start} elements on this rank", got=value.numel())
    return value.detach().to(device=place.buffer.full.device, dtype=torch.float32).contiguous().view(-1)
