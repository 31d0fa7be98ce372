"""Frozen weights that consist of codes and scales as in their files, and that compute with decoded values.

A `CodedWeight` has the shape and dtype of a decoded weight. One tensor of bytes contains the codes and scales of the
files, and a decoder, which is a `LazyTensor`, computes values from these bytes, by the functions that a library applied
while loading. So the values have the bits of the library's own dequantization. The engine treats it as any wrapper
(`quantized_weights.py`): it shards, gathers and stores the bytes.

Views stay codes. Every other operation decodes what it reads, and frees that afterwards: autograd saves the codes, and
backward decodes again.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroaccel.errors import UsageError
from zeroaccel.logs import logger
from zeroaccel.zero.access.lazy_tensors import Box, LazyTensor, Loaded, Node, Stored, is_pure, raw_bytes, read_into
from zeroaccel.zero.tensor_subclasses import is_watched, mark_codes

CODES = "codes"
_MOST = 0.75  # codes of more than this fraction of the decoded bytes are decoded while loading


class CodedWeight(Tensor):
    """A weight, or a view of one, that decodes its values whenever they are read.

    Args:
        fqn: name of the weight, for error messages.
        decoder: (shape of the weight) computes the values from the codes.
        codes: (B,) uint8.
        place: on the meta device: the view; None for all of the weight.
    """

    decoder: LazyTensor
    place: Tensor
    fqn: str
    codes: Any

    @staticmethod
    def __new__(
        cls, fqn: str, decoder: LazyTensor, codes: Tensor, device: torch.device, place: Tensor | None = None
    ) -> CodedWeight:
        if place is None:
            place = torch.empty(decoder.shape, dtype=decoder.dtype, device="meta")
        made: CodedWeight = torch.Tensor._make_wrapper_subclass(
            cls, place.shape, place.stride(), int(place.storage_offset()), dtype=place.dtype, device=device
        )
        made.fqn, made.decoder, made.codes, made.place = fqn, decoder, codes, place
        return made

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CodedWeight({self.fqn}, {tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [CODES], (self.fqn, self.decoder, self.device, self.place)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], facts: Any, *_: Any) -> CodedWeight:
        name, decoder, device, place = facts
        return CodedWeight(name, decoder, inner[CODES], device, place)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self._with(codes=copy.deepcopy(self.codes, memo))
            memo[id(self)] = nn.Parameter(copied, requires_grad=False) if isinstance(self, nn.Parameter) else copied
        result: Tensor = memo[id(self)]
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func._schema.is_mutable:
            _refuse_writes(func, args, kwargs)
        elif isinstance(first, CodedWeight):
            returned = func._schema.returns[0].alias_info
            if returned is not None and not returned.is_write:
                made = func(first.place, *args[1:], **kwargs)
                return tree_map(lambda each: first._with(place=each), made)
            if func.overloadpacket is torch.ops.aten._to_copy and (moved := first._moved(**kwargs)) is not None:
                return moved
        decoded: dict[int, Tensor] = {}

        def values(each: Any) -> Any:
            if not isinstance(each, CodedWeight):
                return each
            if id(each) not in decoded:
                decoded[id(each)] = each.decoded_values()
            return decoded[id(each)]

        args, kwargs = tree_map(values, (args, kwargs))
        return func(*args, **kwargs)

    def decoded_values(self) -> Tensor:
        """Returns the values, with the strides of this view."""
        if self.codes.is_meta:
            return self.place
        spans = zip(self.place.shape, self.place.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in spans) if self.place.numel() else 0
        codes = self.codes.detach()
        if is_watched(self.codes):  # the engine, or `zero.Init`, gathers it for this read
            with torch._C._EnableTorchFunction():
                codes = self.codes.clone()
        flat = torch.empty(span, dtype=self.dtype, device=codes.device)
        _SOURCE.codes = codes
        try:
            read_into(self.decoder, int(self.place.storage_offset()), flat)
        finally:
            del _SOURCE.codes
        return flat.as_strided(self.place.shape, self.place.stride(), 0)

    def _with(self, *, codes: Tensor | None = None, place: Tensor | None = None) -> CodedWeight:
        return CodedWeight(
            self.fqn,
            self.decoder,
            self.codes if codes is None else codes,
            self.device,
            self.place if place is None else place,
        )

    def _moved(
        self, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
    ) -> CodedWeight | None:
        """Returns the weight in another 16-bit or wider dtype, or on another device; None if it has to be decoded."""
        dtype = dtype or self.dtype
        if not self.place.is_contiguous() or self.place.shape != self.decoder.shape or dtype.itemsize < 2:
            return None
        device = self.device if device is None else torch.device(device)
        codes = self.codes if device == self.device else self.codes.detach().to(device)
        return CodedWeight(self.fqn, self.decoder.to(dtype), codes, device)


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, CodedWeight):
            raise UsageError(
                f"parameter {value.fqn}: {func}",
                expected="a read, because its values are codes of the checkpoint",
                got="a write",
                fix='to change or merge weights, load the model without "frozen_weights": "codes", which decodes them',
            )


_SOURCE = threading.local()


class _Held(Node):
    """A tensor within the bytes of the weight that this thread decodes.

    Args:
        offset: its first byte.
    """

    def __init__(self, node: Node, offset: int) -> None:
        super().__init__(node.shape, node.dtype)
        self.extent = slice(offset, offset + _nbytes(node))

    def fill(self, box: Box, out: Tensor) -> None:
        values = _SOURCE.codes[self.extent].view(self.dtype).view(self.shape)
        out.copy_(values[tuple(slice(*ends) for ends in box)])


class Decoded(Node):
    """The values of a weight whose codes are gathered for each read.

    Args:
        ask: returns the weight's codes.
    """

    def __init__(self, weight: CodedWeight, ask: Callable[[], Tensor]) -> None:
        super().__init__(tuple(weight.shape), weight.dtype)
        self._weight, self._ask = weight, ask

    def fill(self, box: Box, out: Tensor) -> None:
        _SOURCE.codes = self._ask()
        try:
            self._weight.decoder.fill(box, out)
        finally:
            del _SOURCE.codes


def as_codes(name: str, value: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[nn.Parameter, Tensor] | None:
    """Returns a weight without codes, on the meta device, and the bytes for them; None if it must be decoded.

    Args:
        value: the decoded values, read from files.
        dtype: dtype of the weight.
        device: device that computes with it.
    """
    nodes = list(value.nodes()) if isinstance(value, LazyTensor) else []
    sources = [each for each in nodes if isinstance(each, Stored) or (isinstance(each, Loaded) and _nbytes(each) > 256)]
    total = sum(map(_nbytes, sources))
    is_coded = any(node.dtype.itemsize == 1 for node in sources)
    if not is_coded:
        return None
    if total > _MOST * value.numel() * dtype.itemsize or not all(map(is_pure, nodes)):
        logger.warning("%s is decoded while loading: its values come from %d bytes of codes", name, total)
        return None
    sources.sort(key=lambda node: -node.dtype.itemsize)  # aligns each to its own item size
    replacements: dict[int, Node] = {}
    offset = 0
    for node in sources:
        replacements[id(node)] = _Held(node, offset)
        offset += _nbytes(node)
    whole: Any = value.to(dtype) if value.dtype is not dtype else value.clone()
    codes = nn.Parameter(torch.empty(offset, dtype=torch.uint8, device="meta"), requires_grad=False)
    mark_codes(codes, {})
    weight = nn.Parameter(CodedWeight(name, _rebuilt(whole, replacements), codes, device), requires_grad=False)
    mark_codes(weight, {CODES: codes})
    return weight, torch.cat([LazyTensor(raw_bytes(node)) for node in sources])


def _rebuilt(tensor: LazyTensor, made: dict[int, Node]) -> LazyTensor:
    """Returns the same computation, on the nodes that `made` has in place of others."""
    node = made.get(id(tensor.node))
    if node is None:
        node = made[id(tensor.node)] = copy.copy(tensor.node)
        node.sources = tree_map(
            lambda each: _rebuilt(each, made) if isinstance(each, LazyTensor) else each, node.sources
        )
    return LazyTensor(node, tensor.place)


def _nbytes(node: Node) -> int:
    return math.prod(node.shape) * node.dtype.itemsize
