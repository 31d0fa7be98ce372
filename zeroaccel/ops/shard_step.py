"""Stepping one shard at a time: the protocol the engine uses, and its implementation by the native optimizers.

`ShardStep` is the protocol: advance one flat master shard, not the entire model, so that the caller decides when each
shard is swapped in. `ShardOptimizer` implements it over a kernel of `updates` (CPU) or over torch operations (any other
device), and is an ordinary torch.optim.Optimizer besides. Nothing here knows of ranks, stages or tiers, and no step
communicates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops import moments
from zeroaccel.ops.dispatch import array_of, in_spans
from zeroaccel.ops.hybrid_update import HybridUpdate
from zeroaccel.ops.number_formats import Array
from zeroaccel.ops.updates import BLOCK_NUMEL

Hyperparameters = dict[str, Any]

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE_NUMEL = 1 << 25  # bounds the float32 copy of a 16-bit gradient off the CPU: 128 MiB
_ROUNDED_TILE_NUMEL = 1 << 22  # the same for moments that are rounded, which takes some int64 temporaries


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


class NativeOptimizer(torch.optim.Optimizer):
    """The `step(closure)` of torch.optim; a subclass implements `_step_group`."""

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
            self._step_group(group, [param for param in group["params"] if param.grad is not None])
        return loss

    @abstractmethod
    def _step_group(self, group: Hyperparameters, params: list[Tensor]) -> None:
        """Advances the parameters of a group that have a gradient."""


class ShardOptimizer(NativeOptimizer):
    """An elementwise optimizer that reads the gradient once, updates state and master, and writes a rounded copy.

    A result does not depend on how the elements are divided into parameters, nor on the number of threads. Elsewhere
    than on the CPU the same formula runs as torch operations, in several passes. Each of them rounds once, by IEEE 754,
    so that a device which follows that standard gives the same bits. Two rules ensure it: no operation that a backend
    may contract (lerp, addcmul, addcdiv, add with alpha), and no division by a scalar, which CUDA turns into a product
    with its reciprocal.

    A subclass names its kernels, its state, its coefficients, and that formula.

    Attributes:
        moments_dtype: "fp32", "bf16" or "int8", the format of the moments; see the notes in `updates`. A loaded state
            is converted to it.
    """

    kernel: ClassVar[Callable[..., None]]
    block_kernel: ClassVar[Callable[..., None] | None] = None
    """The kernel for moments in 8-bit blocks."""
    hybrid: HybridUpdate | None = None
    """Splits updates of host memory with a device; for Adam with float32 moments."""
    moments: ClassVar[Mapping[str, bool]] = {}
    """Name in the state -> whether it has signs, of each moment that may have fewer bits."""

    def __init__(self, params: ParamsT, defaults: Hyperparameters, moments_dtype: str = "fp32") -> None:
        where = f"{type(self).__name__}, moments_dtype"
        require(
            moments_dtype in self.moments_dtypes(),
            where,
            " or ".join(f'"{name}"' for name in self.moments_dtypes()),
            moments_dtype,
        )
        self.moments_dtype = moments_dtype
        super().__init__(params, defaults)

    @classmethod
    def moments_dtypes(cls) -> tuple[str, ...]:
        """What `moments_dtype` may be."""
        if not cls.moments:
            return ("fp32",)
        return ("fp32", "bf16") if cls.block_kernel is None else ("fp32", "bf16", "int8")

    @abstractmethod
    def _advance(self, group: Hyperparameters, param: Tensor) -> tuple[list[Tensor | None], list[float | np.uint32]]:
        """Counts a step of `param`; returns the kernel's buffers, made if need be, and its coefficients.

        With moments in blocks the buffers are codes and exponents in turn. The key of a kernel
        that rounds stochastically is its first coefficient.
        """

    @abstractmethod
    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        """The kernel's formula, in place on the flat master `x` and the buffers.

        `d` is the scaled float32 gradient, free to be overwritten; `coefficients` are already rounded to float32, and
        have no key.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moments_dtype": self.moments_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state_dict of torch's counterpart lacks our switches
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        # The saved moments may be in another format (torch's are float32): they are converted once, here.
        dtype = moments.MOMENT_DTYPES[self.moments_dtype]
        for entries in self.state.values():
            for name, signed in self.moments.items():
                if name in entries and entries[name].dtype is not dtype:
                    plain = moments.per_element(entries, name, signed=signed)
                    entries.pop(moments.exponents_name(name), None)
                    entries.update(moments.to_format(plain, name, dtype, signed=signed))

    def state_dict(self) -> dict[str, Any]:
        """As torch's; moments in 8-bit blocks are decoded, so that any format can load them."""
        packed = super().state_dict()
        return {**packed, "state": {key: self.portable(entries) for key, entries in packed["state"].items()}}

    def portable(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state with one number per element, whatever the format of its moments; loses nothing."""
        exponents = {moments.exponents_name(name) for name in self.moments}
        plain = {name: value for name, value in entries.items() if name not in exponents}
        for name, signed in self.moments.items():
            if name in plain:
                plain[name] = moments.per_element(entries, name, signed=signed)
        return plain

    def _make_moments(self, param: Tensor, fill: float = 0.0) -> None:
        """Makes the moments of `param` in their format, if it has none yet."""
        state = self.state[param]
        dtype = moments.MOMENT_DTYPES[self.moments_dtype]
        for name, signed in self.moments.items():
            if name in state:
                continue
            if dtype is torch.uint8:
                one = moments.to_format(torch.full((1,), fill, device=param.device), name, dtype, signed=signed)
                blocks = -(-param.numel() // BLOCK_NUMEL)
                state[name] = one[name].expand(param.shape).contiguous()
                state[moments.exponents_name(name)] = one[moments.exponents_name(name)].expand(blocks).contiguous()
            else:
                state[name] = torch.full_like(param, fill, dtype=dtype, memory_format=torch.contiguous_format)

    def _moments_of(self, param: Tensor) -> list[Tensor | None]:
        """The kernel's buffers."""
        state = self.state[param]
        if self.moments_dtype != "int8":
            return [state[name] for name in self.moments]
        return [state[entry] for name in self.moments for entry in (name, moments.exponents_name(name))]

    def _key(self, step: int) -> np.uint32:
        """The key of the stochastic rounding of one step: another for each step."""
        return np.uint32((step * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF)

    def _step_group(self, group: Hyperparameters, params: list[Tensor]) -> None:
        for param in params:
            assert param.grad is not None, "only parameters with a gradient are stepped"
            self.step_shard(group, param, param.grad, grad_scale=1.0, out=None)

    @torch.no_grad()
    def step_shard(
        self, group: Hyperparameters, param: Tensor, grad: Tensor, *, grad_scale: float, out: Tensor | None
    ) -> None:
        """See `ShardStep.step_shard`."""
        self._check(param, grad, out)
        buffers, coefficients = self._advance(group, param)
        self._check_buffers(param, buffers)
        # Kernels need flat contiguous memory. Of a tensor that is not, `flats` has a copy, which is written back below.
        written = [param, *buffers, out]
        flats = [_flat(tensor) for tensor in written]
        update = self._update_in_tiles
        if param.device.type == "cpu":
            update = self._update_on_cpu if self.hybrid is None else self._update_hybrid
        scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (grad_scale, *coefficients)]
        update(flats, grad.detach().contiguous().view(-1), scalars)
        for tensor, flat in zip(written, flats, strict=True):
            if tensor is None or flat is None:
                continue
            if tensor.is_contiguous():
                torch.autograd.graph.increment_version(tensor)  # autograd does not see what a kernel writes
            else:
                tensor.copy_(flat.view(tensor.shape))

    def _update_on_cpu(self, written: Sequence[Tensor | None], grad: Tensor, scalars: Sequence[np.generic]) -> None:
        *state, out = [None if flat is None else array_of(flat) for flat in written]
        arrays = [*state, array_of(grad), out]
        kernel = type(self).block_kernel if self._in_blocks(written) else type(self).kernel
        assert kernel is not None, f"{type(self).__name__} has no kernel for moments in blocks"

        def update(start: int, stop: int) -> None:
            kernel(*[None if array is None else _span(array, grad.numel(), start, stop) for array in arrays], *scalars)

        in_spans(grad.numel(), update)

    def _update_hybrid(self, written: Sequence[Tensor | None], grad: Tensor, scalars: Sequence[np.generic]) -> None:
        assert self.hybrid is not None, "there is no device to split the update with"

        def on_host(parts: Sequence[Tensor], part: Tensor) -> None:
            self._update_on_cpu([*parts, *[None] * (len(written) - len(parts))], part, scalars)

        self.hybrid.run([flat for flat in written if flat is not None], grad, scalars, on_host)

    def _update_in_tiles(self, written: Sequence[Tensor | None], grad: Tensor, scalars: Sequence[np.generic]) -> None:
        keys = [int(value) for value in scalars if isinstance(value, np.uint32)]
        grad_scale, *coefficients = [float(value) for value in scalars if isinstance(value, np.float32)]
        rounded = any(flat is not None and flat.dtype in (torch.uint8, torch.bfloat16) for flat in written[1:-1])
        # In tiles, so that the float32 copy of a 16-bit gradient never is as large as the shard.
        length = _ROUNDED_TILE_NUMEL if rounded else _TILE_NUMEL
        for start in range(0, grad.numel(), length):
            stop = min(start + length, grad.numel())
            *state, out = [None if flat is None else _span(flat, grad.numel(), start, stop) for flat in written]
            master, *buffers = [flat for flat in state if flat is not None]
            d = grad[start:stop].to(torch.float32) * grad_scale
            if rounded:
                self._update_rounded_tile(master, buffers, d, keys[0], coefficients)
            else:
                self._update_tile(master, buffers, d, coefficients)
            if out is not None:
                out.copy_(master)

    def _update_rounded_tile(
        self, x: Tensor, stored: Sequence[Tensor], d: Tensor, key: int, coefficients: Sequence[float]
    ) -> None:
        """`_update_tile` on float32 copies of the moments, which are then rounded stochastically."""
        signs, before = list(self.moments.values()), x.clone()
        if self._in_blocks(stored):
            pairs = list(zip(stored[::2], stored[1::2], strict=True))
            values = [moments.decode(*pair, signed=signed) for pair, signed in zip(pairs, signs, strict=True)]
        else:
            values = [value.to(torch.float32) for value in stored]
        self._update_tile(x, values, d, coefficients)
        # The kernel's hash: of the weight before the step and the new moment, never of a position. One moment rounds by
        # the low half of the bits, the other by the high half.
        random = moments.random_bits(before, values[0], key)
        for index, (value, signed) in enumerate(zip(values, signs, strict=True)):
            bits = random >> 16 if index else random
            if self._in_blocks(stored):
                codes, exponents = moments.encode(value, signed=signed, random=bits)
                pairs[index][0].copy_(codes)
                pairs[index][1].copy_(exponents)
            else:
                moments.write_rounded(stored[index], value, bits)

    def _in_blocks(self, buffers: Sequence[Tensor | None]) -> bool:
        return any(buffer is not None and buffer.dtype is torch.uint8 for buffer in buffers)

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

    def _check_buffers(self, param: Tensor, buffers: Sequence[Tensor | None]) -> None:
        dtype = moments.MOMENT_DTYPES[self.moments_dtype]
        for index, buffer in enumerate(buffers):
            is_exponents = dtype is torch.uint8 and index % 2
            numel = -(-param.numel() // BLOCK_NUMEL) if is_exponents else param.numel()
            if buffer is None or (buffer.dtype, buffer.numel(), buffer.device) == (dtype, numel, param.device):
                continue
            raise UsageError(
                f"{type(self).__name__}, state of the parameter of shape {tuple(param.shape)}",
                expected=f"{numel} {dtype} elements on {param.device}",
                got=f"{buffer.numel()} {buffer.dtype} elements on {buffer.device}",
                fix="load a state that was saved for this parameter",
            )


_Flat = TypeVar("_Flat", Array, Tensor)


def _span(flat: _Flat, numel: int, start: int, stop: int) -> _Flat:
    """Elements [start, stop) of `numel`, or the exponents of the blocks that these make up."""
    if len(flat) == numel:
        return flat[start:stop]
    return flat[start // BLOCK_NUMEL : -(-stop // BLOCK_NUMEL)]


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
