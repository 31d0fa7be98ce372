"""Stepping one shard at a time: the protocol that the engine uses, and its implementation in the native optimizers.

`ShardStep` is the protocol: it advances one flat master shard, not the entire model, so that the caller decides when
each shard is swapped in. `ShardOptimizer` implements it with a kernel of `updates` (CPU), of `device_kernels` (CUDA) or
with torch operations (any other device), and is also an ordinary torch.optim.Optimizer. This module does not depend on
ranks, stages or tiers, and steps do not communicate.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zeroaccel.errors import UsageError
from zeroaccel.ops import moments
from zeroaccel.ops.device_kernels import MANY, DeviceKernels, kernels_for
from zeroaccel.ops.dispatch import array_of, launch
from zeroaccel.ops.number_formats import Array
from zeroaccel.ops.residual import SplitMasters
from zeroaccel.ops.updates import BLOCK_NUMEL

Hyperparameters = dict[str, Any]
HostMemory = Callable[[Sequence[int], torch.dtype], Tensor]
"""(shape, dtype) -> tensor of zeros in host memory."""

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE_NUMEL = 1 << 25  # limits the float32 copy of a 16-bit gradient on devices other than the CPU to 128 MiB
_ROUNDED_TILE_NUMEL = 1 << 22  # the limit for moments with rounding, which needs some int64 temporaries
_COPIED_NUMEL = 1 << 15  # elements of an update out of place that are copied at a time: they stay in a core's cache


@runtime_checkable
class ShardStep(Protocol):
    """An optimizer that can advance one parameter at a time."""

    def step_shard(
        self, group: Hyperparameters, param: Tensor, grad: Tensor, *, grad_scale: float | Tensor, out: Tensor | None
    ) -> None:
        """Advances `param` in place by one step; the first step creates its state, ``self.state[param]``.

        Args:
            group: the hyperparameters: the entry of `param_groups` that contains `param`.
            param: float32, any shape: the master weights, or any piece of them.
            grad: float32, bfloat16 or float16, with as many elements, on the same device. Not modified.
            grad_scale: factor of every gradient (1 / loss scale, times the clipping factor). A tensor is a `control` of
                `step_control.py`: (2,) float32 on the same device, with the factor and a flag for whether the update
                applies. If not, `param`, its state and `out` do not change, but the step counts (see
                `ShardOptimizer.undo_count`).
            out: gets `param` rounded to its dtype (nearest, ties to even; overflow to inf, NaN kept), if given.

        Raises:
            UsageError: a dtype, size or device does not match.
        """
        ...


class TensorStep(NamedTuple):
    """The tensors of one whole parameter's step.

    Attributes:
        param: float32, the master weights in their shape.
        grad: (numel,) float32, bfloat16 or float16.
        out: (numel,) gets the new weights rounded to its dtype; None for no copy.
    """

    param: Tensor
    grad: Tensor
    out: Tensor | None


@runtime_checkable
class ManyStep(Protocol):
    """An optimizer of whole tensors that steps many tensors in few kernel launches."""

    def step_many(
        self, group: Hyperparameters, steps: Sequence[TensorStep], *, grad_scale: float, kernels: DeviceKernels
    ) -> None:
        """Advances tensors of one param group, on the device of the kernels, by the same formulas as `step`."""


def batches_alike(
    steps: Iterable[TensorStep], key: Callable[[TensorStep], object], most_numel: int
) -> Iterator[list[TensorStep]]:
    """Yields batches of steps with equal keys and dtypes, for one launch each.

    A batch has at most `MANY` steps and `most_numel` elements; a larger tensor gets its own batch.
    """
    alike: dict[object, list[list[TensorStep]]] = {}
    for step in steps:
        dtypes = step.grad.dtype, None if step.out is None else step.out.dtype
        batches = alike.setdefault((dtypes, key(step)), [[]])
        numel = sum(other.param.numel() for other in batches[-1]) + step.param.numel()
        if batches[-1] and (len(batches[-1]) == MANY or numel > most_numel):
            batches.append([])
        batches[-1].append(step)
    for batches in alike.values():
        yield from batches


class NativeOptimizer(torch.optim.Optimizer):
    """The `step(closure)` of torch.optim; a subclass implements `_step_group`."""

    # torch hides these methods from torch.compile, for which it imports its compiler at the first call: 1.5 seconds
    # in each process. The engine's optimizers run outside of compiled code.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

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
            self._step_group(group, [(param, param.grad) for param in group["params"] if param.grad is not None])
        return loss

    @abstractmethod
    def _step_group(self, group: Hyperparameters, stepped: list[tuple[Tensor, Tensor]]) -> None:
        """Advances parameters of a group; `stepped` has (parameter, gradient) pairs."""


class ShardOptimizer(NativeOptimizer):
    """An elementwise optimizer that reads the gradient once, updates state and master, and writes a rounded copy.

    A result depends neither on how the elements are divided into parameters nor on the number of threads. On CUDA, a
    kernel computes the same as the CPU's. If it cannot be compiled, and on other devices, torch operations compute the
    same formula in several passes. Each operation rounds once, by IEEE 754, so that a device that follows the standard
    gives the same bits. Two rules ensure this: no operations that a backend may contract (lerp, addcmul, addcdiv, add
    with alpha), and no division by a scalar, which CUDA replaces by a product with its reciprocal.

    A subclass defines its kernels, its state, its coefficients, and that formula.

    Attributes:
        moments_dtype: "fp32", "bf16" or "int8", the format of the moments; see the notes in `updates`. A loaded state
            is converted to it.
    """

    kernel: ClassVar[Callable[..., None]]
    block_kernel: ClassVar[Callable[..., None] | None] = None
    """The kernel for moments in 8-bit blocks."""
    host_memory: HostMemory | None = None
    """Allocates states of parameters in host memory; None for torch's allocator."""
    moments: ClassVar[Mapping[str, bool]] = {}
    """Name in the state of each moment that `moments_dtype` applies to -> True if the moment has signs."""

    def __init__(self, params: ParamsT, defaults: Hyperparameters, moments_dtype: str = "fp32") -> None:
        expected = " or ".join(f'"{name}"' for name in self.moments_dtypes())
        is_supported = moments_dtype in self.moments_dtypes()
        require(is_supported, f"{type(self).__name__}, moments_dtype", expected, moments_dtype)
        self.moments_dtype = moments_dtype
        self._new_states: set[int] = set()  # ids of the parameters whose last step created their state
        super().__init__(params, defaults)

    @classmethod
    def moments_dtypes(cls) -> tuple[str, ...]:
        """Returns the supported values of `moments_dtype`."""
        if not cls.moments:
            return ("fp32",)
        return ("fp32", "bf16") if cls.block_kernel is None else ("fp32", "bf16", "int8")

    def _advance(self, group: Hyperparameters, param: Tensor) -> tuple[list[Tensor | None], list[float | np.uint32]]:
        """Counts a step of `param`; returns the kernel's buffers, created if necessary, and its coefficients.

        For a kernel with stochastic rounding, the buffers are its moments (8-bit blocks: codes and exponents
        alternately), and the coefficients are a key, which differs at each step, and `_coefficients`.
        """
        self._make_moments(param, fill=group.get("initial_accumulator_value", 0.0))
        state = self.state[param]
        state["step"] = step = int(state.get("step", 0)) + 1
        names = list(self.moments)
        if self.moments_dtype == "int8":
            names = [entry for name in names for entry in (name, moments.exponents_name(name))]
        key = np.uint32((step * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF)
        return [state[name] for name in names], [key, *self._coefficients(group, step)]

    def _coefficients(self, group: Hyperparameters, step: int) -> list[float]:
        """Returns the coefficients after the key, for a kernel with stochastic rounding."""
        raise NotImplementedError

    @abstractmethod
    def _update_tile(self, x: Tensor, buffers: Sequence[Tensor], d: Tensor, coefficients: Sequence[float]) -> None:
        """Applies the kernel's formula in place to the flat master `x` and the buffers.

        `d` is the scaled float32 gradient, which may be overwritten; `coefficients` are already rounded to float32, and
        exclude the key.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moments_dtype": self.moments_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = dict(state.get("defaults") or self.defaults)
        super().__setstate__(state)
        self.defaults = defaults  # torch adds `differentiable`, which these optimizers do not have
        self._new_states = set()
        for group in self.param_groups:  # a state_dict of torch's own class lacks this class's additional settings
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        # Converts saved moments in another format (torch's are float32).
        dtype = moments.MOMENT_DTYPES[self.moments_dtype]
        for entries in self.state.values():
            for name, signed in self.moments.items():
                if name in entries and entries[name].dtype is not dtype:
                    plain = moments.per_element(entries, name, signed=signed)
                    entries.pop(moments.exponents_name(name), None)
                    entries.update(moments.to_format(plain, name, dtype, signed=signed))
            if self.host_memory is not None:
                self._move_states(entries)

    def _move_states(self, entries: dict[str, Any]) -> None:
        """Moves a parameter's loaded states into memory from `host_memory`."""
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.device.type == "cpu":
                entries[name] = self._new_state(value, value.shape, value.dtype).copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state_dict, with 8-bit blocks decoded, so that any format can load it."""
        packed = super().state_dict()
        return {**packed, "state": {key: self.portable(entries) for key, entries in packed["state"].items()}}

    def portable(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a parameter's state with one number per element for any format of its moments; lossless."""
        exponents = {moments.exponents_name(name) for name in self.moments}
        plain = {name: value for name, value in entries.items() if name not in exponents}
        for name, signed in self.moments.items():
            if name in plain:
                plain[name] = moments.per_element(entries, name, signed=signed)
        return plain

    def _make_moments(self, param: Tensor, fill: float = 0.0) -> None:
        """Creates missing moments of `param` in their format."""
        state = self.state[param]
        dtype = moments.MOMENT_DTYPES[self.moments_dtype]
        for name, signed in self.moments.items():
            if name in state:
                continue
            if dtype is torch.uint8:
                sample = moments.to_format(torch.full((1,), fill), name, dtype, signed=signed)
                blocks = -(-param.numel() // BLOCK_NUMEL)
                for entry, shape in ((name, param.shape), (moments.exponents_name(name), (blocks,))):
                    state[entry] = self._new_state(param, shape, dtype, int(sample[entry]))
            else:
                state[name] = self._new_state(param, param.shape, dtype, fill)

    def _new_state(self, param: Tensor, shape: Sequence[int], dtype: torch.dtype, fill: float = 0.0) -> Tensor:
        if self.host_memory is None or param.device.type != "cpu":
            return param.new_full(tuple(shape), fill, dtype=dtype)
        # Its zeros are not written again: that would be a second pass over all states.
        return self.host_memory(shape, dtype).fill_(fill) if fill else self.host_memory(shape, dtype)

    def _step_group(self, group: Hyperparameters, stepped: list[tuple[Tensor, Tensor]]) -> None:
        for param, grad in stepped:
            self.step_shard(group, param, grad, grad_scale=1.0, out=None)

    @torch.no_grad()
    def step_shard(
        self,
        group: Hyperparameters,
        param: Tensor,
        grad: Tensor,
        *,
        grad_scale: float | Tensor,
        out: Tensor | None,
        parts: SplitMasters | None = None,
        sources: Mapping[int, Tensor] | None = None,
    ) -> None:
        """See `ShardStep.step_shard`.

        Args:
            parts: the masters in their parts, in host memory; `param` then has their shape and state, but no values.
            sources: for an update out of place, in host memory: id of `param` or of a state -> the tensor that has its
                values before the step.
        """
        self._check(param, grad, out)
        control = grad_scale if isinstance(grad_scale, Tensor) else None
        if control is not None:
            self._check_control(param, control)
        self._note_state(param)
        buffers, coefficients = self._advance(group, param)
        self._check_buffers(param, buffers)
        if control is not None and control.device.type == "cpu":
            grad_scale, applies = control.tolist()
            if not applies:
                return
            control = None
        # Kernels need flat contiguous memory. For other tensors, `flats` has a copy, which is written back below.
        written = [None if parts is not None else param, *buffers, out]
        flats = [_flat(tensor) for tensor in written]
        factor = 1.0 if isinstance(grad_scale, Tensor) else grad_scale
        scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (factor, *coefficients)]
        flat_grad = grad.detach().contiguous().view(-1)
        if param.device.type != "cpu":
            self._update_on_device(flats, flat_grad, scalars, control)
        else:
            olds = [None if tensor is None else (sources or {}).get(id(tensor)) for tensor in written[:-1]]
            self._update_on_cpu(flats, flat_grad, scalars, parts, [_flat(old) for old in olds])
        for tensor, flat in zip(written, flats, strict=True):
            if tensor is None or flat is None:
                continue
            if tensor.is_contiguous():
                torch.autograd.graph.increment_version(tensor)  # autograd does not see a kernel's writes
            else:
                tensor.copy_(flat.view(tensor.shape))

    def undo_count(self, params: Iterable[Tensor]) -> None:
        """Decrements the step count of `params`, after a step whose control said that the update does not apply.

        Removes a state that this step has created.

        Args:
            params: parameters that were each stepped once since their steps were last known to apply.
        """
        for param in params:
            if id(param) in self._new_states:
                self._new_states.remove(id(param))
                self.state.pop(param, None)
            elif "step" in self.state.get(param, {}):
                self.state[param]["step"] -= 1

    def _note_state(self, param: Tensor) -> None:
        """Records before a step whether it will create the state."""
        if self.state.get(param):
            self._new_states.discard(id(param))
        else:
            self._new_states.add(id(param))

    def _update_on_cpu(
        self,
        written: Sequence[Tensor | None],
        grad: Tensor,
        scalars: Sequence[np.generic],
        parts: SplitMasters | None = None,
        olds: Sequence[Tensor | None] = (),
    ) -> None:
        kernel = type(self).block_kernel if self._in_blocks(written) else type(self).kernel
        assert kernel is not None, f"{type(self).__name__} has no kernel for moments in blocks"
        numel = grad.numel()
        olds = olds or [None] * (len(written) - 1)

        def bind() -> Callable[[int, int], None]:
            master, *states, out = [None if flat is None else array_of(flat) for flat in written]
            arrays = [*states, array_of(grad), out]

            def update(x: Array, start: int, stop: int) -> None:
                others = [None if array is None else _span(array, numel, start, stop) for array in arrays]
                kernel(x, *others, tuple(scalars))

            if parts is not None:
                return parts.bind(update)
            assert master is not None, "a master in memory, or its parts"
            pairs = zip([master, *states], olds, strict=True)
            copies = [(new, array_of(old)) for new, old in pairs if new is not None and old is not None]
            if not copies:
                return lambda start, stop: update(master[start:stop], start, stop)

            def update_copy(start: int, stop: int) -> None:
                for first in range(start, stop, _COPIED_NUMEL):
                    last = min(first + _COPIED_NUMEL, stop)
                    for new, old in copies:
                        _span(new, numel, first, last)[:] = _span(old, numel, first, last)
                    update(master[first:last], first, last)

            return update_copy

        *state, out = written
        states = [flat for flat in state if flat is not None]
        pairs = zip(state, olds, strict=True)
        reads = [grad, *(flat if old is None else old for flat, old in pairs if flat is not None)]
        if parts is not None:
            states += [parts.residuals, parts.ties]
            reads += [parts.weights, parts.residuals, parts.ties]
        launch("update", numel, bind, reads=reads, writes=states if out is None else [*states, out])

    def _update_on_device(
        self, written: Sequence[Tensor | None], grad: Tensor, scalars: Sequence[np.generic], control: Tensor | None
    ) -> None:
        kernels = kernels_for(grad.device)
        if kernels is None:
            self._update_in_tiles(written, grad, scalars, control)
        else:
            kernels.update(self.kernel_name(), written[:-1], grad, written[-1], control, scalars)

    def kernel_name(self) -> str:
        """Returns the name of the kernel for the moments' format, both in `updates` and on a CUDA device."""
        kernel = type(self).block_kernel if self.moments_dtype == "int8" else type(self).kernel
        assert kernel is not None, f"{type(self).__name__} has no kernel for moments in blocks"
        return kernel.__name__

    def _update_in_tiles(
        self, written: Sequence[Tensor | None], grad: Tensor, scalars: Sequence[np.generic], control: Tensor | None
    ) -> None:
        keys = [int(value) for value in scalars if isinstance(value, np.uint32)]
        grad_scale, *coefficients = [float(value) for value in scalars if isinstance(value, np.float32)]
        rounded = any(flat is not None and flat.dtype in (torch.uint8, torch.bfloat16) for flat in written[1:-1])
        # In tiles, so that the float32 copy of a 16-bit gradient is smaller than the shard.
        length = _ROUNDED_TILE_NUMEL if rounded else _TILE_NUMEL
        for start in range(0, grad.numel(), length):
            stop = min(start + length, grad.numel())
            *state, out = [None if flat is None else _span(flat, grad.numel(), start, stop) for flat in written]
            master, *buffers = tile = [flat for flat in state if flat is not None]
            before = [] if control is None else [flat.clone() for flat in tile]
            d = grad[start:stop].to(torch.float32) * (grad_scale if control is None else control[0])
            if rounded:
                self._update_rounded_tile(master, buffers, d, keys[0], coefficients)
            else:
                self._update_tile(master, buffers, d, coefficients)
            if control is not None:
                # The host does not know whether the update applies; if not, this restores the old values.
                applies = control[1] != 0
                for flat, old in zip(tile, before, strict=True):
                    flat.copy_(torch.where(applies, flat, old))
                if out is not None:
                    out.copy_(torch.where(applies, master.to(out.dtype), out))
            elif out is not None:
                out.copy_(master)

    def _update_rounded_tile(
        self, x: Tensor, stored: Sequence[Tensor], d: Tensor, key: int, coefficients: Sequence[float]
    ) -> None:
        """Runs `_update_tile` on float32 copies of the moments, and rounds these stochastically."""
        signs, before = list(self.moments.values()), x.clone()
        if self._in_blocks(stored):
            pairs = list(zip(stored[::2], stored[1::2], strict=True))
            values = [moments.decode(*pair, signed=signed) for pair, signed in zip(pairs, signs, strict=True)]
        else:
            values = [value.to(torch.float32) for value in stored]
        self._update_tile(x, values, d, coefficients)
        # The kernel's hash of the weight before the step and the new moment, never of a position. The first moment
        # rounds with the low half of the bits, the second with the high half.
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
                where, expected="float32 (the master weights)", got=param.dtype, fix="step a float32 copy instead"
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

    def _check_control(self, param: Tensor, control: Tensor) -> None:
        if (control.dtype, control.numel(), control.device) != (torch.float32, 2, param.device):
            raise UsageError(
                f"{type(self).__name__}, grad_scale as a tensor",
                expected=f"2 torch.float32 elements on {param.device}: the factor, and whether the update applies",
                got=f"{control.numel()} {control.dtype} elements on {control.device}",
                fix="pass the control of zeroaccel.ops.step_control on the device of the master",
            )

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
    """Returns elements [start, stop) of `numel`, or the exponents of the blocks that contain them."""
    if len(flat) == numel:
        return flat[start:stop]
    return flat[start // BLOCK_NUMEL : -(-stop // BLOCK_NUMEL)]


def _flat(tensor: Tensor | None) -> Tensor | None:
    """Returns the elements as a flat tensor: a view if the memory is contiguous, else a copy."""
    return None if tensor is None else tensor.detach().contiguous().view(-1)


def require(condition: bool, where: str, expected: str, got: object) -> None:
    """Raises UsageError unless `condition` holds for a hyperparameter; write it so that a NaN makes it false."""
    if not condition:
        raise UsageError(where, expected=expected, got=got)


def require_not_negative(owner: str, **values: float) -> None:
    """Raises UsageError unless each hyperparameter is at least 0."""
    for name, value in values.items():
        require(value >= 0, f"{owner}, {name}", "a number of at least 0", value)


def require_unit_interval(where: str, betas: tuple[float, float]) -> None:
    """Raises UsageError unless both `betas` are in [0, 1)."""
    require(len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas), where, "two numbers in [0, 1)", betas)
