"""Adapters on a frozen base model for estimates: LoRA on linear layers, and linear layers quantized by bitsandbytes.

The layers allocate the same memory as PEFT's and bitsandbytes' layers, without useful results. The engine's own
quantization (`zero_optimization.frozen_weights`) needs no substitute here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroaccel.errors import UsageError
from zeroaccel.estimate.workload import LIBRARY_CODES, Workload
from zeroaccel.zero.tensor_subclasses import mark_codes

_BLOCK, _NESTED_BLOCK = 64, 256  # number of values per scale, and of scales per nested scale


def adapt(model: nn.Module, workload: Workload, name: str) -> None:
    """Freezes the model's weights, adds adapters, and stores weights in a library's format, as the workload requests.

    Args:
        name: name of the model in errors.

    Raises:
        UsageError: the model has no suitable linear layer, or trains all of its matrices.
    """
    layers = list(_linear_layers(model))
    if workload.lora_rank:
        model.requires_grad_(False)
    elif workload.frozen_weights and all(param.requires_grad for param in model.parameters() if param.dim() > 1):
        raise UsageError(
            "Workload.frozen_weights",
            expected="frozen matrices, because quantized weights cannot be trained",
            got=f"{name}, which trains every matrix",
            fix="set Workload.lora_rank, for example to 16, or estimate a function that returns a model with adapters",
        )
    if workload.frozen_weights in LIBRARY_CODES:
        layers = [layer for layer in layers if not layer[2].weight.requires_grad]
    elif not workload.lora_rank:
        return
    if not layers:
        field = "lora_rank" if workload.lora_rank else "frozen_weights"
        raise UsageError(
            f"Workload.{field}",
            expected="linear layers besides the head, and frozen ones for quantized weights",
            got=f"{name}, which has no such layer",
            fix="estimate a function that returns the model with its adapters",
        )
    for parent, child, linear in layers:
        layer: nn.Module = linear
        if workload.frozen_weights in LIBRARY_CODES:
            layer = _Linear4bit(linear, nested=workload.frozen_weights.endswith("double"))
        if workload.lora_rank:
            layer = _Lora(layer, linear, workload.lora_rank)
        setattr(parent, child, layer)


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yields (parent, name, layer) of layers that PEFT's "all-linear" and bitsandbytes replace: all except the head."""
    of_transformers: Any = getattr(model, "get_output_embeddings", None)
    head = getattr(model, "head", None) if of_transformers is None else of_transformers()
    for parent in list(model.modules()):
        for child, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer is not head:
                yield parent, child, layer


class _Lora(nn.Module):
    """Like `peft.tuners.lora.Linear`, or PEFT's `Linear4bit`, which copies the output of its base layer."""

    def __init__(self, base: nn.Module, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.is_codes = base, base is not linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        if self.is_codes:
            result = result.clone()
        added: Tensor = self.up(self.down(x)) * 2.0
        return result + added


class _Linear4bit(nn.Module):
    """Like `bitsandbytes.nn.Linear4bit` (NF4): dequantizes the whole weight in forward and in backward."""

    def __init__(self, linear: nn.Linear, *, nested: bool) -> None:
        super().__init__()
        self.shape, numel = linear.weight.shape, linear.weight.numel()
        scales = -(-numel // _BLOCK)
        device = linear.weight.device
        self.weight = _frozen(torch.empty(-(-numel // 2), 1, dtype=torch.uint8, device=device))
        # Not a parameter of the module: scales are attributes of the codes.
        self.scales = [_frozen(torch.empty(scales, dtype=torch.uint8 if nested else torch.float32, device=device))]
        mark_codes(self.scales[0], {})
        mark_codes(self.weight, {"absmax": self.scales[0]})
        # Small tensors that every rank holds: nested scales and code books.
        small = (-(-scales // _NESTED_BLOCK) + 256 if nested else 0) + 16
        self.small, self.nested = [torch.empty(small, device=device)], nested
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _MatMul4bit.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the dequantized weight, (out, in), without values."""
        absmax: Tensor = self.scales[0]
        if self.nested:  # dequantized first, and the offset is added to a copy
            absmax = torch.empty(absmax.shape, device=absmax.device) + 0.0
        weight = torch.empty(self.shape, dtype=dtype, device=absmax.device)
        del absmax
        return weight


class _MatMul4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, layer: _Linear4bit) -> Tensor:
        ctx.codes, ctx.layer = codes, layer
        return F.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.matmul(grads[0], ctx.layer.dequantized(grads[0].dtype)), None, None


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
