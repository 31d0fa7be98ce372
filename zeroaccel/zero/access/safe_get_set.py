"""Masters, gradients and optimizer states of single parameters, at every stage.

The "full" calls are collective; their tensors have the parameter's shape and are equal on all ranks. The "local" calls
use this rank's elements, (n,), in row-major order. All tensors are fp32, whatever the stored dtype, except the codes of
quantized weights, which keep dtype and bits. If no engine has the parameter, getters return None and setters raise.
(Interface: DeepSpeed's `deepspeed.utils.safe_*`, with three differences: gradients exclude the loss scale; setters
update the 16-bit copies too; local calls exist at every stage.)

This module reads and writes masters and states through `MasterStorage`, and gradients in the reducer's buffers, all by
ranges of the flat buffer; so it is independent of where the values are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroaccel.comm.agree import agreed
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.logs import log_once
from zeroaccel.ops.device_values import read_values
from zeroaccel.zero.access.param_registry import ParamHandle, handle_of
from zeroaccel.zero.grad_reducer import GradReducer
from zeroaccel.zero.layout import FlatRange, FlatTensor, whole_of
from zeroaccel.zero.param_check import fingerprint
from zeroaccel.zero.storage.masters import MasterPiece


@dataclass(frozen=True)
class _Values:
    """The masters, gradients or one state of a parameter, read and written by ranges of its flat buffer on this rank.

    Attributes:
        is_replicated: True if every rank has the values of the whole parameter, not only of its shard.
        factor: factor from the stored value to the value that a caller sees.
    """

    read: Callable[[FlatRange], Tensor]
    write: Callable[[FlatRange, Tensor], None]
    is_replicated: bool
    factor: float = 1.0


# -- masters


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns the fp32 master weights of a parameter, or the values of a frozen one. (all ranks)

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
    return _get(param, _masters, "fp32 values")


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replaces the master and the copies in the parameter's own dtype. (all ranks, with the same value)

    Raises:
        UsageError: no engine has the parameter; `value` has another shape, or differs between ranks.
    """
    handle = _required(param, "safe_set_full_fp32_param")
    _set_masters(handle, _checked(handle, value, "safe_set_full_fp32_param"))


def _set_masters(handle: ParamHandle, flat: Tensor) -> None:
    """Replaces the master and its copies by `flat`, (numel,) fp32."""
    values = FlatTensor(handle.slot.range, flat)
    _write(handle, _masters(handle), values)
    with torch.no_grad():  # after the master, which in fp32 shares memory with these
        buffer, shard = handle.buffer, _own(handle)
        buffer.note_written(shard)
        buffer.shard.write(shard, values[shard])
        handle.unit.drop_copies()
        if buffer.full.untyped_storage().nbytes():
            buffer.full[handle.slot.range.at(0)].copy_(flat)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns this rank's elements of the fp32 master weights."""
    return _get(param, _masters)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replaces this rank's elements of the master and of the copies in the parameter's dtype. (all ranks)

    Raises:
        UsageError: no engine has the parameter, or `value` has another number of elements.
    """
    handle = _required(param, "safe_set_local_fp32_param")
    shard = _checked_local(handle, value, "safe_set_local_fp32_param")
    full = _assembled(handle, shard, f"set {handle.slot.fqn}")
    _set_masters(handle, full)


# -- gradients


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Returns the mean gradient over ranks, without loss scale, before clipping; None if there is none. (all ranks)

    Call it between a backward and the step. With accumulation it returns the gradient so far; at stages that do not
    shard gradients, it reduces the parameter's whole buffer, and the boundary reduces it again.
    """
    return _get(param, partial(_gradients, call="safe_get_full_grad", so_far=True), "gradient")


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replaces the gradient that the next step uses. (all ranks, with the same value)

    Raises:
        EngineStateError: there is no gradient to replace.
        UsageError: see `safe_set_full_fp32_param`.
    """
    handle, values = _required_gradient(param, "safe_set_full_grad")
    _write(handle, values, FlatTensor(handle.slot.range, _checked(handle, value, "safe_set_full_grad")))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Returns this rank's elements of the gradient that `safe_get_full_grad` returns."""
    return _get(param, partial(_gradients, call="safe_get_local_grad"))


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replaces this rank's elements of the gradient. (all ranks)"""
    handle, values = _required_gradient(param, "safe_set_local_grad")
    _write(handle, values, FlatTensor(_own(handle), _checked_local(handle, value, "safe_set_local_grad")))


# -- optimizer states


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns one tensor of the optimizer's state, such as "exp_avg". (all ranks)

    Raises:
        UsageError: no state has that name, or no step has run yet; on every rank.

    Example:
        >>> import zeroaccel
        >>> model = nn.Linear(2, 1, bias=False)
        >>> config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        >>> engine, *_ = zeroaccel.initialize(model, config=config)
        >>> loss = engine.backward(engine(torch.ones(1, 2)).sum())
        >>> safe_get_full_grad(model.weight)  # reduced over the ranks, until the step
        tensor([[1., 1.]])
        >>> engine.step()
        >>> safe_get_full_optimizer_state(model.weight, "exp_avg")
        tensor([[0.1000, 0.1000]])
        >>> engine.destroy()
    """
    return _get(param, partial(_states, key=optim_state_key), optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replaces one tensor of the optimizer's state. (all ranks, with the same value)"""
    handle = _required(param, "safe_set_full_optimizer_state")
    flat = _checked(handle, value, "safe_set_full_optimizer_state")
    _write(handle, _states(handle, optim_state_key), FlatTensor(handle.slot.range, flat))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns this rank's elements of one tensor of the optimizer's state. (all ranks)"""
    return _get(param, partial(_states, key=optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replaces this rank's elements of one tensor of the optimizer's state. (all ranks)"""
    handle = _required(param, "safe_set_local_optimizer_state")
    shard = _checked_local(handle, value, "safe_set_local_optimizer_state")
    values = _states(handle, optim_state_key)
    if values.is_replicated:
        full = _assembled(handle, shard, f"set {optim_state_key} of {handle.slot.fqn}")
        _write(handle, values, FlatTensor(handle.slot.range, full))
    else:
        _write(handle, values, FlatTensor(_own(handle), shard))


# -- finding values


def _own(handle: ParamHandle) -> FlatRange:
    """Returns the range of the parameter's elements in this rank's shard; may be empty."""
    return handle.slot.range & handle.buffer.own


def _masters(handle: ParamHandle) -> _Values:
    handle.require_settled("the master")
    masters = handle.buffer.masters
    return _Values(masters.read, masters.write, masters.is_replicated)


def _gradients(handle: ParamHandle, call: str, *, so_far: bool = False) -> _Values | None:
    """Returns the gradients of the next step, or with `so_far` a reduced copy of the accumulated ones (all ranks)."""
    training = handle.registry.training
    if training is None:
        return None
    gradient = next((gradient for gradient in training.reducer.gradients if gradient.buffer is handle.buffer), None)
    if gradient is None:
        return None
    shard = training.reducer.mean_so_far(gradient) if so_far else None
    if shard is None:
        if gradient.shard is None and gradient.flat is None:
            _warn_if_dropped(training.reducer, call)
            return None
        if gradient.shard is None or gradient.flat is not None:
            raise EngineStateError(
                f"{call}({handle.slot.fqn}): the ranks' gradients are not summed before the accumulation boundary",
                fix="call it between the last backward of a step and engine.step()",
            )
        # In fp32, so that a value from a setter keeps its bits.
        shard = gradient.shard = gradient.shard.float()
    reduced = FlatTensor(handle.buffer.own, shard)

    def write(interval: FlatRange, values: Tensor) -> None:
        reduced[interval].copy_(values)

    # Reduced gradients include the loss scale until the step; `factor` removes it for the caller.
    alone = handle.buffer.holders(handle.registry.collectives).world_size == 1
    return _Values(reduced.__getitem__, write, alone, 1.0 / training.loss_scale().value)


def _warn_if_dropped(reducer: GradReducer, call: str) -> None:
    """Warns once if a call reads gradients while there are none at all, before the first backward or after a step."""
    if all(gradient.shard is None and gradient.flat is None for gradient in reducer.gradients):
        log_once(
            logging.WARNING,
            f"{call}: expected a call between the last backward of a step and its update, got one without gradients, "
            "and returns None; in callbacks of transformers' Trainer, call it in on_pre_optimizer_step",
        )


def _states(handle: ParamHandle, key: str) -> _Values:
    handle.require_settled(f"state {key!r}")
    masters = handle.buffer.masters
    optimizer = None if handle.registry.training is None else handle.registry.training.optimizer
    # A rank without elements of the parameter has no state to check: the ranks agree, so that all raise or all go on.
    with agreed(handle.registry.everyone, f"optimizer state {key} of {handle.slot.fqn}"):
        if optimizer is None or handle.slot.fqn not in optimizer.group_of:
            raise UsageError(f"parameter {handle.slot.fqn}", expected="one that an optimizer updates", got="frozen")
        for piece in masters.pieces:
            if piece.range & handle.slot.range:
                _check_state(piece, key, optimizer.optimizer, handle.slot.fqn)
    return _Values(partial(masters.read, state=key), partial(masters.write, state=key), masters.is_replicated)


def _check_state(piece: MasterPiece, key: str, optimizer: Optimizer, fqn: str) -> None:
    """Raises UsageError if a state is missing, or does not have one value per element."""
    state = optimizer.state.get(piece.param, {})
    value = state.get(key)
    if isinstance(value, Tensor) and value.dtype is torch.uint8:
        raise UsageError(
            f"{type(optimizer).__name__}, state {key!r} of {fqn}",
            expected="one number per element",
            got='8-bit blocks (moments_dtype "int8")',
            fix='set moments_dtype to "bf16" or "fp32", or read the state from a checkpoint',
        )
    if not isinstance(value, Tensor) or value.numel() != piece.param.numel():
        names = [n for n, v in state.items() if isinstance(v, Tensor) and v.numel() == piece.param.numel()]
        raise UsageError(
            f"{type(optimizer).__name__}, state {key!r} of {fqn}",
            expected=f"one of {names}" if names else "a step before this call: there is no state yet",
        )


# -- reading and writing values


def _get(param: nn.Parameter, locate: Callable[[ParamHandle], _Values | None], what: str = "") -> Tensor | None:
    """Returns the values of the whole parameter, or without `what`, their name in messages, this rank's elements.

    Returns None if there are no values.
    """
    handle = handle_of(param)
    values = None if handle is None else locate(handle)
    if handle is None or values is None:
        return None
    return _full(handle, values, f"{what} of") if what else _local(handle, values)


def _local(handle: ParamHandle, values: _Values) -> Tensor:
    """Returns a copy of this rank's elements, (n,)."""
    return _copied(handle, values, _own(handle))


def _full(handle: ParamHandle, values: _Values, what: str) -> Tensor:
    """Returns a copy of the whole parameter in its shape, equal on all ranks."""
    if values.is_replicated:
        full = _copied(handle, values, handle.slot.range)
    else:
        full = _assembled(handle, _local(handle, values), f"{what} {handle.slot.fqn}")
    return whole_of(handle.slot, full.view(handle.slot.shape), handle.registry.collectives)


def _dtype(handle: ParamHandle) -> torch.dtype:
    return handle.buffer.dtype if handle.buffer.is_code else torch.float32


def _copied(handle: ParamHandle, values: _Values, interval: FlatRange) -> Tensor:
    out = torch.empty(interval.numel, dtype=_dtype(handle), device=handle.buffer.full.device)
    if interval:
        out.copy_(values.read(interval))
    return out.mul_(values.factor) if values.factor != 1.0 else out


def _assembled(handle: ParamHandle, shard: Tensor, label: str) -> Tensor:
    """Returns (numel,), all-gathered from each rank's elements without padding."""
    numels = [handle.reach(rank).numel for rank in range(handle.buffer.layout.world_size)]
    out = torch.empty(handle.slot.numel, dtype=shard.dtype, device=shard.device)
    handle.buffer.holders(handle.registry.collectives).all_gather(out, shard, label, numels).wait()
    return out


def _write(handle: ParamHandle, values: _Values, new: FlatTensor) -> None:
    """Writes the elements of `new` that this rank has."""
    rank_range = new.range if values.is_replicated else new.range & _own(handle)
    handle.registry.before_write()
    with torch.no_grad():
        if rank_range:
            values.write(rank_range, new[rank_range] / values.factor)


# -- checks of arguments


def _required(param: nn.Parameter, call: str) -> ParamHandle:
    handle = handle_of(param)
    if handle is None:
        raise UsageError(f"{call}(param)", expected="a parameter of an engine", got=f"shape {tuple(param.shape)}")
    if handle.buffer.is_code:
        raise UsageError(
            f"{call}({handle.slot.fqn})",
            expected="a parameter of numbers, since the call casts its value",
            got=f"codes in {handle.buffer.dtype}",
            fix="copy codes of that dtype into it within zero.GatheredParameters(param, modifier_rank=0)",
        )
    return handle


def _required_gradient(param: nn.Parameter, call: str) -> tuple[ParamHandle, _Values]:
    handle = _required(param, call)
    values = _gradients(handle, call)
    if values is None:
        raise EngineStateError(f"{call}({handle.slot.fqn}): it has no gradient", fix="call it after a backward")
    training = handle.registry.training
    if training is not None:  # also on ranks without an element: all examine the gradients again
        training.reducer.changed()
    return handle, values


def _checked(handle: ParamHandle, value: Tensor, call: str) -> Tensor:
    """Returns the value as (numel,) fp32, or this rank's part of it if the parameter is split.

    Raises UsageError on every rank if the shape does not match or the ranks pass different values.
    """
    collectives, slot = handle.registry.everyone, handle.slot
    where = f"{call}({slot.fqn})"
    flat = torch.empty(0)
    with agreed(collectives, f"{where}: shape"):
        if tuple(value.shape) != slot.whole_shape:
            raise UsageError(f"{where}: the value", expected=f"shape {slot.whole_shape}", got=tuple(value.shape))
        flat = value.detach().to(device=handle.buffer.full.device, dtype=torch.float32).contiguous().view(-1)
    # Different values would make shards, masters and persistent copies differ between ranks; no later check detects it.
    (digest,) = read_values(fingerprint(torch.cat([flat, flat.new_zeros(flat.numel() % 2)])))
    if len(set(collectives.gather_objects(digest, f"{where}: value"))) > 1:
        raise UsageError(f"{where}: the value", expected="the same on all ranks", got="different ones")
    return flat if slot.split is None else slot.split.part(flat.view(slot.whole_shape)).reshape(-1)


def _checked_local(handle: ParamHandle, value: Tensor, call: str) -> Tensor:
    shard, where = _own(handle), f"{call}({handle.slot.fqn})"
    with agreed(handle.registry.everyone, f"{where}: shape"):
        if value.numel() != shard.numel:
            raise UsageError(f"{where}: the value", expected=f"{shard.numel} elements on this rank", got=value.numel())
    return value.detach().to(device=handle.buffer.full.device, dtype=torch.float32).contiguous().view(-1)
