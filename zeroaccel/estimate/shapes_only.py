"""Runs operations on shapes only: on tensors of the "meta" device, with cached layouts instead of computed results.

`simulate` runs steps of the engine this way, for every model. torch's FakeTensorMode does the same at three times the
processor time (docs/design.md). The rules here must agree with torch's own, which apply to all other operations; tests
compare the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
_CPU = torch.device("cpu")
_ATEN = torch.ops.aten
_ALL = (_ATEN.all.default, _ATEN.all.dim)
_SEQUENCES = (_ATEN.linspace.default, _ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step)
Layout = tuple[Sequence[int], Sequence[int], torch.dtype]
"""(size, stride, dtype)"""


class ShapesOnly:
    """Computes results of operations on tensors of the "meta" device, which have no values.

    It derives the layout of each kind of call once from the shapes of the arguments: by a rule below, or else by torch,
    which takes up to a millisecond and first imports the compiler.

    Constants of a program, such as those of `torch.tensor(2.0)` and of sequences for which it names the CPU, keep their
    values, and so do results of constants only. Together with tensors without values they count by their shapes.

    Example:
        >>> import torch
        >>> shapes, x = ShapesOnly(), torch.empty(2, 3, device="meta")
        >>> shapes.result(torch.ops.aten.mm.default, (x, x.t()), {}).shape
        torch.Size([2, 2])
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, ...]] = {}  # () for operations that must run each time
        self._of: dict[Any, _OperationFacts] = {}
        self._last_all: Callable[[], Any] = lambda: None

    def result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of `func(*args, **kwargs)`.

        Answers True to a model that asks for the value of `all`: batches have neither padding nor several sequences in
        a row.
        """
        if func in _ALL:
            result = func(*args, **kwargs)
            self._last_all = weakref.ref(result)
            return result
        if func is _ATEN._local_scalar_dense.default and args[0] is self._last_all():
            return True
        facts = self._of.get(func) or self._of.setdefault(func, _OperationFacts.of(func))
        if any(map(_has_constants, args)):
            if not any(tensor.is_meta for tensor in _tensors(args)):
                return func(*args, **kwargs)
            args = _on_meta(args)
        if facts.in_place:
            return args[0]
        if func in _SEQUENCES and kwargs.get("device") == _CPU:
            return func(*args, **kwargs)
        if facts.takes_device and (kwargs.get("device") is not None or not isinstance(args[0], Tensor)):
            kwargs = {**kwargs, "device": META, "pin_memory": False}
        if facts.is_view:
            return func(*args, **kwargs)
        key = func, _key(args), _key(tuple(kwargs.items())) if kwargs else None
        made = self._made.get(key)
        if made is None:
            made = _by_rule(func, args, kwargs)
            if made is None:
                result = func(*args, **kwargs)
                self._made[key] = _layouts(result)
                return result
            self._made[key] = made
        if not made:
            return func(*args, **kwargs)
        tensors = [
            None if layout is None else torch.empty_strided(layout[0], layout[1], dtype=layout[2], device=META)
            for layout in made
        ]
        return tuple(tensors) if facts.returns_tuple else tensors[0]


class WithoutValues(TorchDispatchMode):
    """Makes tensors on the "meta" device inside it, whatever device the program names, without memory for values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return SHAPES.result(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping dynamo would take longer than an operation


SHAPES = ShapesOnly()
"""Shared, because its cached results are valid for every model."""


def _has_constants(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_meta
    return type(value) is list and any(isinstance(item, Tensor) and not item.is_meta for item in value)


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for value in args:
        yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Tensor))


def _on_meta(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments with each constant of one dimension or more on the "meta" device."""

    def without(value: Any) -> Any:
        if type(value) is list:
            return [without(item) for item in value]
        if not isinstance(value, Tensor) or value.is_meta or not value.dim():
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)

    return tuple(map(without, args))


@dataclass(frozen=True)
class _OperationFacts:
    in_place: bool
    is_view: bool
    takes_device: bool
    returns_tuple: bool

    @classmethod
    def of(cls, func: Any) -> _OperationFacts:
        schema = func._schema
        writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        first = bool(writes) and writes[0] is not None and writes[0].name == schema.arguments[0].name
        keeps_shape = torch.Tag.inplace_view not in func.tags
        in_place = first and len(writes) == 1 and keeps_shape and len(schema.returns) == 1
        # All other operations that write or share memory run themselves.
        aliases = bool(writes) or any(returned.alias_info for returned in schema.returns)
        takes_device = any(argument.name == "device" for argument in schema.arguments)
        return cls(in_place, aliases and not in_place, takes_device, len(schema.returns) > 1)


def _key(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple([(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else _key(t) for t in value])
    return type(value), value  # 1, 1.0 and True are equal, but give results of different types


def _layouts(result: Any) -> tuple[Any, ...]:
    """Returns (size, stride, dtype) of each tensor; () for other results, including lists of tensors."""
    results = result if isinstance(result, tuple) else (result,)
    if not all(t is None or isinstance(t, Tensor) for t in results):
        return ()
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in results)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Runs attention on tensors of the "meta" device by the kernel that torch chooses on a CPU, inside a block.

    For meta tensors torch itself would choose the kernel that allocates the matrix of all scores.
    """
    functions: Any = F
    before, functions.scaled_dot_product_attention = F.scaled_dot_product_attention, _attend
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = before


_by_torch: Callable[..., Tensor] = F.scaled_dot_product_attention


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **more: Any,
) -> Tensor:
    tensors = query, key, value
    is_fused = (
        query.is_meta
        and not dropout_p
        and not (attn_mask is not None and attn_mask.requires_grad)
        and {tensor.dim() for tensor in tensors} == {4}
        and len({tensor.shape[-1] for tensor in tensors}) == 1
        and all(tensor.stride(-1) == 1 for tensor in tensors)
    )
    if not is_fused:
        settings = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, **more}
        return _by_torch(*tensors, **settings)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = kernel(*tensors, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


# -- rules for the operations in decoders


def _by_rule(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    rule = RULES.get(func)
    unimportant = {"device", "pin_memory"}
    if kwargs.get("memory_format") in (None, torch.preserve_format):
        unimportant.add("memory_format")
    return None if rule is None or not kwargs.keys() <= unimportant else rule(*args)


def _pointwise(*args: Any) -> tuple[Layout, ...] | None:
    tensors = [t for t in args if isinstance(t, Tensor)]
    # With zero-dimensional or integer tensors, the dtype follows other rules.
    if not all(t.dim() and t.is_floating_point() for t in tensors) or any(type(t) is complex for t in args):
        return None
    dtype = reduce(torch.promote_types, [t.dtype for t in tensors])
    if all(t.is_contiguous() for t in tensors):
        aligned = zip_longest(*(reversed(t.shape) for t in tensors), fillvalue=1)
        shape = [next((size for size in sizes if size != 1), 1) for sizes in aligned]
        return (_contiguous(shape[::-1], dtype),)
    first = tensors[0]
    if len(tensors) == 1 and 0 in first.stride():  # an expanded tensor; its result is not expanded
        others = [stride for stride in first.stride() if stride]
        return (_contiguous(first.shape, dtype),) if others == sorted(others, reverse=True) else None
    if any((t.shape, t.stride()) != (first.shape, first.stride()) for t in tensors[1:]) or 1 in first.shape[1:]:
        return None
    # The result has the same permutation as a permuted contiguous tensor.
    strides = first.stride()
    order = sorted(range(first.dim()), key=lambda dim: -strides[dim])
    return ((first.shape, first.stride(), dtype),) if first.permute(order).is_contiguous() else None


def _like(tensor: Tensor) -> tuple[Layout, ...] | None:
    return (_contiguous(tensor.shape, tensor.dtype),) if tensor.is_contiguous() else None


def _reduction(values: Tensor, dims: Sequence[int], keep: bool = False) -> tuple[Layout, ...] | None:
    if not keep or not dims or not values.is_contiguous() or not values.is_floating_point():
        return None
    reduced = {dim % values.dim() for dim in dims}
    return (_contiguous([1 if dim in reduced else size for dim, size in enumerate(values.shape)], values.dtype),)


def _embedding(weight: Tensor, ids: Tensor, *_: Any) -> tuple[Layout, ...]:
    return (_contiguous((*ids.shape, weight.shape[1]), weight.dtype),)


def _embedding_backward(grad: Tensor, ids: Tensor, rows: int, *_: Any) -> tuple[Layout, ...]:
    return (_contiguous((rows, grad.shape[-1]), grad.dtype),)


def _product(left: Tensor, right: Tensor) -> tuple[Layout, ...]:
    return (_contiguous((left.shape[0], right.shape[1]), left.dtype),)


def _softmax(values: Tensor, dim: int, half_to_float: bool) -> tuple[Layout, ...] | None:
    return (_contiguous(values.shape, values.dtype),) if values.is_contiguous() and not half_to_float else None


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> tuple[Layout, ...] | None:
    return (_contiguous(grad.shape, dtype),) if grad.is_contiguous() and grad.dtype == dtype else None


def _loss(values: Tensor, ids: Tensor, weight: None, reduction: int, ignored: int) -> tuple[Layout, ...] | None:
    return (_contiguous((), values.dtype), _contiguous((), values.dtype)) if reduction else None


def _loss_backward(grad: Tensor, values: Tensor, *_: Any) -> tuple[Layout, ...]:
    return (_contiguous(values.shape, values.dtype),)


def _attention(query: Tensor, *_: Any) -> tuple[Layout, ...] | None:
    same = _pointwise(query)
    batch, heads, length = query.shape[:3]
    sums = (batch, heads, length), (heads * length, 1, heads), torch.promote_types(query.dtype, torch.float32)
    return None if same is None else (*same, sums)


def _attention_backward(_: Tensor, *tensors: Any) -> tuple[Layout, ...]:
    layouts = []
    for tensor in tensors[:3]:
        _batch, heads, length, width = tensor.shape
        layouts.append((tensor.shape, (length * heads * width, width, heads * width, 1), tensor.dtype))
    return tuple(layouts)


def _contiguous(shape: Sequence[int], dtype: torch.dtype) -> Layout:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return shape, strides[: len(shape)][::-1], dtype


RULES: dict[Any, Callable[..., tuple[Layout, ...] | None]] = {
    _ATEN.add.Tensor: _pointwise,
    _ATEN.div.Scalar: _pointwise,
    _ATEN.mul.Scalar: _pointwise,
    _ATEN.mul.Tensor: _pointwise,
    _ATEN.pow.Tensor_Scalar: _pointwise,
    _ATEN.rsqrt.default: _pointwise,
    _ATEN.silu.default: _pointwise,
    _ATEN.silu_backward.default: _pointwise,
    _ATEN.clone.default: _like,
    _ATEN.empty_like.default: _like,
    _ATEN.ones_like.default: _like,
    _ATEN.zeros_like.default: _like,
    _ATEN.mean.dim: _reduction,
    _ATEN.sum.dim_IntList: _reduction,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _ATEN.embedding.default: _embedding,
    _ATEN.embedding_dense_backward.default: _embedding_backward,
    _ATEN.mm.default: _product,
    _ATEN._log_softmax.default: _softmax,
    _ATEN._log_softmax_backward_data.default: _softmax_backward,
    _ATEN.nll_loss_forward.default: _loss,
    _ATEN.nll_loss_backward.default: _loss_backward,
}
