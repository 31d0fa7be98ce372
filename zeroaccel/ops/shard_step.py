"""What the engine asks of an optimizer with a native step, and the part of it that all of ours share.

`ShardStep` is the protocol: advance one flat master shard, not the whole model, so that the caller decides when each
shard's memory is at hand. `ShardOptimizer` implements it over a kernel of `kernels` (CPU) or over torch operations
(any other device), and is an ordinary torch.optim.Optimizer besides. Nothing here knows of ranks, stages or tiers,
and no step communicates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from zeroaccel.errors import UsageError
from zeroaccel.ops.dispatch import array_of, in_spans

__all__ = ["Hyperparameters", "ShardOptimizer", "ShardStep", "require", "require_unit_interval"]

Hyperparameters = dict[str, Any]

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE_NUMEL = 1 << 25  # bounds the float32 copy of a 16-bit gradient off the CPU: 128 MiB


@runtime_checkable
class ShardStep(Protocol):
    """An optimizer that can advance one parameter at a time."""

    def step_shard(
        self, group: Hyperparameters, param: Tensor, grad: Tensor, *, grad_scale: float, out: Tensor | None
    ) -> None:
        """Advances `param` in place by one step; its state is ``self.state[param]``, made at its first step.

        Args:
            group: the hyperparameters: the entry of `param_groups` that holds `param`.
            param: float32, any shape: the master weights, or any piece of them.
            grad: float32, bfloat16 or float16, of as many elements, on the same device. Left unchanged.
            grad_scale: every gradient is multiplied by it first (1 / loss scale, times the clipping factor).
            out: gets `param` rounded to its dtype (nearest, ties to even; overflow to inf, NaN kept), if given.

        Raises:
            UsageError: for a dtype, size or device that does not fit.
        """
        ...


class ShardOptimizer(torch.optim.Optimizer):
    """An elementwise optimizer whose step is one pass over memory: gradient in, state and master on, rounded copy out.

    A result does not depend on how the elements are cut into parameters, nor on the number of threads. Elsewhere than
    on the CPU the same formula runs as torch operations, in several passes. Each of them rounds once, by IEEE 754, so
    that a device which keeps that standard gives the same bits. Two rules keep it so: no operation that a
    backend may contract (lerp, addcmul, addcdiv, add with alpha), and no division by a scalar, which CUDA turns into
    a product with its reciprocal.

    A subclass names its kernel, its state, its coefficients, and that formula.
    """

    kernel: ClassVar[Callable[..., None]]

    @abstractmethod
    def _advance(self, group: Hyperparameters, param: Tensor) -> tuple[list[Tensor | None], list[float]]:
        """Counts a step of `param`; returns the kernel's buffers, made if need be, and its coefficients."""

    @abstractmethod
    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        """The kernel's formula, in place on the flat master `x` and the buffers.

        `d` is the scaled float32 gradient, free to be overwritten; `coefficients` are already rounded to float32.
        """

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state_dict of torch's counterpart lacks our switches
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Advances every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.step_shard(group, param, param.grad, grad_scale=1.0, out=None)
        return loss

    @torch.no_grad()
    def step_shard(
        self, group: Hyperparameters, param: Tensor, grad: Tensor, *, grad_scale: float, out: Tensor | None
    ) -> None:
        """See `ShardStep.step_shard`."""
        self._check(param, grad, out)
        buffers, coefficients = self._advance(group, param)
        for buffer in buffers:
            self._check_buffer(param, buffer)
        written = [param, *buffers, out]
        flats = [_flat(tensor) for tensor in written]
        update = self._update_on_cpu if param.device.type == "cpu" else self._update_in_tiles
        update(flats, grad.detach().contiguous().view(-1), [np.float32(value) for value in (grad_scale, *coefficients)])
        for tensor, flat in zip(written, flats, strict=True):
            if tensor is None or flat is None:
                continue
            if tensor.is_contiguous():
                torch.autograd.graph.increment_version(tensor)  # the kernel wrote behind autograd's back
            else:
                tensor.copy_(flat.view(tensor.shape))

    def _update_on_cpu(self, written: Sequence[Tensor | None], grad: Tensor, scalars: Sequence[np.float32]) -> None:
        *state, out = [None if flat is None else array_of(flat) for flat in written]
        arrays = [*state, array_of(grad), out]

        def update(start: int, stop: int) -> None:
            type(self).kernel(*[None if array is None else array[start:stop] for array in arrays], *scalars)

        in_spans(grad.numel(), update)

    def _update_in_tiles(self, written: Sequence[Tensor | None], grad: Tensor, scalars: Sequence[np.float32]) -> None:
        grad_scale, *coefficients = [float(value) for value in scalars]
        for start in range(0, grad.numel(), _TILE_NUMEL):
            tile = slice(start, start + _TILE_NUMEL)
            *state, out = [None if flat is None else flat[tile] for flat in written]
            master, *buffers = [flat for flat in state if flat is not None]
            self._update_tile(master, buffers, grad[tile].to(torch.float32) * grad_scale, coefficients)
            if out is not None:
                out.copy_(master)

    def _check(self, param: Tensor, grad: Tensor, out: Tensor | None) -> None:
        where = f"{type(self).__name__}, parameter of shape {tuple(param.shape)}"
        if param.dtype is not torch.float32:
            raise UsageError(
                where, expected="float32 (the master weights)", got=param.dtype, fix="keep a float32 copy and step that"
            )
        for name, tensor in (("gradient", grad), ("out", out)):
            if tensor is None:
                continue
            if tensor.layout is not torch.strided or tensor.dtype not in _GRAD_DTYPES:
                kind = f"{tensor.dtype}, {tensor.layout}"
                raise UsageError(f"{where}, {name}", expected="a dense float32, bfloat16 or float16 tensor", got=kind)
            if tensor.numel() != param.numel() or tensor.device != param.device:
                kind = f"{tensor.numel()} elements on {tensor.device}"
                raise UsageError(f"{where}, {name}", expected=f"{param.numel()} elements on {param.device}", got=kind)

    def _check_buffer(self, param: Tensor, buffer: Tensor | None) -> None:
        if buffer is None:
            return
        if buffer.dtype is not torch.float32 or buffer.numel() != param.numel() or buffer.device != param.device:
            raise UsageError(
                f"{type(self).__name__}, state of the parameter of shape {tuple(param.shape)}",
                expected=f"{param.numel()} float32 elements on {param.device}",
                got=f"{buffer.numel()} {buffer.dtype} elements on {buffer.device}",
                fix="load a state that was saved for this parameter",
            )


def _flat(tensor: Tensor | None) -> Tensor | None:
    """The elements in a row: a view where the memory allows, else a copy."""
    return None if tensor is None else tensor.detach().contiguous().view(-1)


def require(condition: bool, where: str, expected: str, got: object) -> None:
    """Raises UsageError unless `condition` (which a NaN makes false) holds for a hyperparameter."""
    if not condition:
        raise UsageError(where, expected=expected, got=got)


def require_unit_interval(where: str, betas: tuple[float, float]) -> None:
    """Raises UsageError unless both `betas` are in [0, 1)."""
    require(len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas), where, "two numbers in [0, 1)", betas)
