"""A decoder of a given number of parameters, for estimates without a model at hand.

The shape is that of today's open models: gated MLP, grouped heads of 128, RMS norms, a head tied to nothing. Only its
sizes matter; it is never trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Decoder", "Shape", "shape_of"]

# Parameters -> layers (Brown et al. 2020, table 2.1); in between by the logarithm.
_DEPTHS = {125e6: 12, 350e6: 24, 1.3e9: 24, 2.7e9: 32, 6.7e9: 32, 13e9: 40, 30e9: 48, 66e9: 64, 175e9: 96}
_VOCABULARY = 32_000
_HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a `Decoder`."""

    layers: int
    width: int
    inner: int
    vocabulary: int

    @property
    def block_numel(self) -> int:
        """Parameters of one layer."""
        return 4 * self.width**2 + 3 * self.width * self.inner + 2 * self.width

    @property
    def numel(self) -> int:
        """Its parameters."""
        return self.layers * self.block_numel + 2 * self.vocabulary * self.width + self.width


def shape_of(numel: int) -> Shape:
    """The shape whose number of parameters is as near to `numel` as whole columns of the MLPs allow."""
    vocabulary = min(_VOCABULARY, max(256, numel // 1000))
    layers = _depth(numel)
    head = _HEAD_DIM if numel > 50e6 else 16
    # 4 d^2 of attention and 8 d^2 of MLP per layer, beside two tables of the vocabulary.
    width = (math.sqrt(vocabulary**2 + 12 * layers * numel) - vocabulary) / (12 * layers)
    width = max(head, round(width / head) * head)
    rest = numel - Shape(layers, width, 0, vocabulary).numel
    return Shape(layers, width, max(1, round(rest / (3 * layers * width))), vocabulary)


def _depth(numel: int) -> int:
    nearest = min(_DEPTHS, key=lambda known: abs(math.log(known / numel)))
    return _DEPTHS[nearest] if numel > 50e6 else max(1, min(12, round(math.log10(max(numel, 10)) * 3 - 12)))


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.heads = max(1, width // (_HEAD_DIM if width % _HEAD_DIM == 0 else 16))
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q * 1.0, k * 1.0, v, is_causal=True)  # * 1.0 for the rotation
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        normed = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


class Decoder(nn.Module):
    """(batch, length) integers -> (batch, length, vocabulary) logits in fp32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.to(torch.float32)
