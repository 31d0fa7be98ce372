"""The optimizer over flat fp32 masters: any elementwise `torch.optim` class steps on this rank's shard.

A buffer's shard is cut into pieces, one per run of parameters of one param group. The optimizer's `param_groups` keep
their dictionaries (schedulers and loggers that hold them go on working); only their `params` become the pieces.

[Note: equal pieces] A replicated optimizer (nothing sharded) steps W pieces of S elements where a sharded one steps
one of them, so that every kernel sees vectors of the same length with the same contents, and even an implementation
whose vector tail rounds differently gives the same bits.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import logger
from zeroaccel.ops.shard_step import ShardStep
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.reducer import GradientBuffer
from zeroaccel.zero.unit import FlatBuffer

__all__ = ["OptimizerShard", "Piece", "check_elementwise", "group_index"]


_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of one buffer's master that one param group updates.

    Attributes:
        master: (L,) fp32 leaf, a view into the buffer's master; of the parameter's shape for an optimizer that is
            not elementwise and therefore replicated.
        start, end: its place in the flat buffer, in elements.
    """

    buffer: FlatBuffer
    master: nn.Parameter
    start: int
    end: int
    group: int


def group_index(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, int]:
    """id(parameter) -> index of its param group.

    Args:
        names: id(parameter) -> fqn, for all of the model's parameters.

    Raises:
        ConfigError: a parameter is in two groups.
        UsageError: a parameter is not the model's.
    """
    found: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise UsageError(
                    f"optimizer.param_groups[{index}]['params'][{position}]",
                    expected="a parameter of the model that is prepared with it",
                    got=f"a tensor of shape {tuple(param.shape)}",
                    fix="create the optimizer from the same model object",
                )
            if id(param) in found:
                raise ConfigError(
                    f"parameter {names[id(param)]}",
                    expected="to be in one param group",
                    got=f"groups {found[id(param)]} and {index}",
                    fix="remove it from one of them",
                )
            found[id(param)] = index
    return found


def check_elementwise(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot step on shards, or None when it can.

    Found out by trying: two steps on a small matrix per param group, whole and as two flat halves, must agree.
    """
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(3, 6, 8, generator=generator)
    try:
        whole = _trial(optimizer, [start], [[g] for g in gradients])
        halves = _trial(optimizer, start.flatten().chunk(2), [g.flatten().chunk(2) for g in gradients])
    except Exception as error:
        return f"it cannot step on a flat piece of a parameter ({type(error).__name__}: {error})"
    pairs = zip(whole, halves, strict=True)
    if all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs):
        return None
    return (
        "its update of an element depends on other elements of the parameter, so pieces of it cannot be stepped alone"
    )


def _trial(optimizer: Optimizer, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Flat weights, per param group, after stepping a copy of `optimizer` on `starts`."""
    twin = _twin(optimizer)
    for group in twin.param_groups:
        group["params"] = [nn.Parameter(start.clone()) for start in starts]
        if "lr" in group:  # at the rate itself, which may be 0 during a warm-up, nothing might be seen to differ
            group["lr"] = torch.full_like(rate, 0.1) if isinstance(rate := group["lr"], Tensor) else 0.1
    if optimizer.state:
        _renew_state(twin)
    for step in gradients:
        for group in twin.param_groups:
            for value, grad in zip(group["params"], step, strict=True):
                value.grad = grad.clone()
        twin.step()
    return [torch.cat([value.detach().flatten() for value in group["params"]]) for group in twin.param_groups]


def _twin(optimizer: Optimizer) -> Optimizer:
    """A copy without state, and without copying the model.

    Made by hand: `Optimizer.__getstate__` would drop the attributes of a subclass. A `step` of the instance is a
    scheduler's wrapper, which steps the original.
    """
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    twin = object.__new__(type(optimizer))
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("state", "step")}
    vars(twin).update(copy.deepcopy(kept, params))
    twin.state = defaultdict(dict)
    return twin


def _has_stepped(optimizer: Optimizer) -> bool:
    """Whether its state comes from steps, rather than from its constructor, as that of torch's Adagrad does."""
    return any(bool(state.get("step", 1)) for state in optimizer.state.values())


def _renew_state(optimizer: Optimizer) -> None:
    """Makes the state that the constructor makes, for the parameters that are in the groups now."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state = type(optimizer)(groups, **optimizer.defaults).state


class OptimizerShard:
    """Steps the optimizer on this rank's masters and writes the new weights to the parameters' shards.

    Args:
        optimizer: over the model's parameters; its `param_groups` are pointed at the pieces.
        groups: id(parameter) -> index of its param group, taken before the parameters were sharded.
        buffers: every trainable buffer, in a fixed order.
        replicated: every rank steps everything (stage 0) instead of its shard.
        sub_group_numel: fp32 gradients made at a time for optimizers without a kernel of their own, in elements.

    Attributes:
        pieces: id(buffer) -> its pieces that this rank steps.
        group_of: fqn -> index of its param group, of every trainable parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Mapping[int, int],
        buffers: Sequence[FlatBuffer],
        *,
        replicated: bool,
        sub_group_numel: int = 1_000_000_000,
    ) -> None:
        name = type(optimizer).__name__
        if inspect.signature(optimizer.step).parameters.get("closure", _OPTIONAL).default is inspect.Parameter.empty:
            raise ConfigError(
                f"optimizer {name}: its step() evaluates the model again through a closure, which an engine has not",
                fix="choose another, such as AdamW",
            )
        if _has_stepped(optimizer):
            raise UsageError(
                f"optimizer {name}",
                expected="no state yet",
                got=f"state for {len(optimizer.state)} parameters",
                fix="initialize before the first step; resume with engine.load_checkpoint",
            )
        reason = None if isinstance(optimizer, ShardStep) else check_elementwise(optimizer)
        if reason is not None and not replicated:
            raise ConfigError(
                f"optimizer {name} with sharded states: {reason}",
                fix="use stage 0, or an elementwise optimizer such as AdamW, SGD, Lion or Adagrad",
            )
        self.optimizer = optimizer
        self._sub_group_numel = sub_group_numel
        self.pieces: dict[int, list[Piece]] = {id(buffer): [] for buffer in buffers}
        self.group_of = {
            slot.fqn: groups[id(param)]
            for buffer in buffers
            for slot, param in zip(buffer.layout.slots, buffer.params, strict=True)
        }
        for buffer in buffers:
            cut = _by_parameter(buffer) if reason is not None else _by_run(buffer, groups, replicated=replicated)
            for start, end, shape, owner in cut:
                self._add(buffer, start, end, shape, groups[id(owner)], replicated=replicated)
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [p.master for cut in self.pieces.values() for p in cut if p.group == index]
        if optimizer.state:
            _renew_state(optimizer)

    def _add(
        self, buffer: FlatBuffer, start: int, end: int, shape: tuple[int, ...], group: int, *, replicated: bool
    ) -> None:
        assert buffer.master is not None, f"a trainable buffer without a master: {buffer.layout.slots[0].fqn}"
        origin = 0 if replicated else buffer.layout.bounds(buffer.rank)[0]
        master = nn.Parameter(buffer.master[start - origin : end - origin].view(shape))
        self.pieces[id(buffer)].append(Piece(buffer, master, start, end, group))

    def step(
        self,
        gradients: Sequence[GradientBuffer],
        grad_scale: float,
        done: Callable[[FlatBuffer], None] = lambda buffer: None,
    ) -> None:
        """One update of all masters and of the parameters' own copies.

        Args:
            gradients: the reduced gradients of every buffer.
            grad_scale: unscaling and clipping, multiplied into the gradients.
            done: called after each buffer, so that its gather can start while the next is stepped.
        """
        for held in gradients:
            grad = held.shard if held.full is None else held.full
            assert grad is not None, f"{held.name} is stepped without a gradient"
            origin = held.buffer.layout.bounds(held.buffer.rank)[0] if held.full is None else 0
            pieces = self.pieces[id(held.buffer)]
            if isinstance(self.optimizer, ShardStep):
                self._step_native(self.optimizer, pieces, grad, origin, grad_scale)
            else:
                self._step_generic(pieces, grad, origin, grad_scale)
            done(held.buffer)
        if isinstance(self.optimizer, ShardStep):
            self.optimizer.step()  # no gradients are left: only torch's schedulers and step hooks take note

    def _step_native(
        self, kernel: ShardStep, pieces: Sequence[Piece], grad: Tensor, origin: int, grad_scale: float
    ) -> None:
        for piece in pieces:
            group = self.optimizer.param_groups[piece.group]
            part = grad[piece.start - origin : piece.end - origin]
            kernel.step_shard(group, piece.master, part, grad_scale=grad_scale, out=_copy_target(piece))

    def _step_generic(self, pieces: Sequence[Piece], grad: Tensor, origin: int, grad_scale: float) -> None:
        for batch in _batches(pieces, self._sub_group_numel):
            for piece in batch:
                part = grad[piece.start - origin : piece.end - origin].to(torch.float32, copy=True)
                piece.master.grad = part.mul_(grad_scale).view(piece.master.shape)
            with _restricted(self.optimizer, batch):
                self.optimizer.step()
            for piece in batch:
                piece.master.grad = None
                target = _copy_target(piece)
                if target is not None:
                    target.copy_(piece.master.detach().flatten())

    def nbytes(self) -> int:
        """Bytes of masters that are not the parameters themselves, and of the optimizer's state tensors."""
        masters = sum(
            piece.master.numel() * 4
            for pieces in self.pieces.values()
            for piece in pieces
            if piece.buffer.dtype is not torch.float32
        )
        states = sum(
            value.numel() * value.itemsize
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )
        return masters + states


def _by_run(
    buffer: FlatBuffer, groups: Mapping[int, int], *, replicated: bool
) -> Iterator[tuple[int, int, tuple[int, ...], nn.Parameter]]:
    """(start, end, shape, a parameter of it) of each run of one group inside each shard that this rank steps."""
    layout = buffer.layout
    for rank in range(layout.world_size) if replicated else (buffer.rank,):
        low, high = layout.bounds(rank)
        runs: list[tuple[int, int, nn.Parameter]] = []
        for index, param in enumerate(buffer.params):
            start, end = _reach(layout, index, low, high)
            if start >= end:
                continue
            if runs and groups[id(runs[-1][2])] == groups[id(param)]:
                runs[-1] = (runs[-1][0], end, param)
            else:
                runs.append((start, end, param))
        for start, end, param in runs:
            yield start, end, (end - start,), param


def _reach(layout: FlatLayout, index: int, low: int, high: int) -> tuple[int, int]:
    """A slot with the padding behind it, cut to [low, high): runs then start and end at aligned places."""
    following = layout.slots[index + 1].start if index + 1 < len(layout.slots) else layout.numel
    return max(layout.slots[index].start, low), min(following, high)


def _by_parameter(buffer: FlatBuffer) -> Iterator[tuple[int, int, tuple[int, ...], nn.Parameter]]:
    """Whole parameters in their own shapes, for optimizers that look at the shape."""
    for slot, param in zip(buffer.layout.slots, buffer.params, strict=True):
        yield slot.start, slot.end, slot.shape, param


def _copy_target(piece: Piece) -> Tensor | None:
    """Where the new weights go besides the master: the parameters' own flat storage, unless that is the master."""
    buffer = piece.buffer
    if buffer.dtype is torch.float32:
        return None
    whole = buffer.master is not None and buffer.master.numel() == buffer.layout.numel
    if whole:
        return buffer.full[piece.start : piece.end]
    low = buffer.layout.bounds(buffer.rank)[0]
    return buffer.shard[piece.start - low : piece.end - low]


def _batches(pieces: Sequence[Piece], limit_numel: int) -> Iterator[list[Piece]]:
    """Consecutive pieces of at most `limit_numel` elements together; a larger one goes alone."""
    batch: list[Piece] = []
    total = 0
    for piece in pieces:
        if batch and total + piece.master.numel() > limit_numel:
            yield batch
            batch, total = [], 0
        batch.append(piece)
        total += piece.master.numel()
    if batch:
        yield batch


@contextmanager
def _restricted(optimizer: Optimizer, pieces: Sequence[Piece]) -> Iterator[None]:
    """Lets `optimizer.step` see only these pieces, in their groups."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [piece.master for piece in pieces if piece.group == index]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


def warn_unoptimized(fqns: Sequence[str]) -> None:
    """Says which trainable parameters no optimizer updates."""
    if fqns:
        shown = ", ".join(fqns[:5]) + (f" and {len(fqns) - 5} more" if len(fqns) > 5 else "")
        logger.log(
            logging.WARNING,
            "%d trainable parameters are in no param group of the optimizer, so they stay as they are: %s",
            len(fqns),
            shown,
        )
