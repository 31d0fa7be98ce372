"""The model that every contender trains: a small decoder-only transformer in the style of Llama.

It is plain torch, so that no contender has special support for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Decoder", "Shape", "batches"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of one rank's micro-batch."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    vocabulary: int = 8192
    sequence: int = 64
    batch: int = 2


class Decoder(nn.Module):
    """Embedding, blocks, norm and an untied head; its forward returns the loss.

    (B, T) token ids and (B, T) targets -> scalar fp32 cross entropy.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class _Block(nn.Module):
    """Rotary attention and a gated MLP of four times the width, each after an RMS norm. (B, T, H) -> (B, T, H)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, inner = shape.hidden, 4 * shape.hidden
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        # Not a buffer: some contenders cast buffers, which would change the angles.
        self.turn = _rotation(shape.sequence, hidden // shape.heads)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        query, key, value = (
            projection(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = _rotate(query, self.turn), _rotate(key, self.turn)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _rotation(sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of rotary embeddings (Su et al. 2021), each (T, width), fp32."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(sequence), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates (B, heads, T, width), with the two halves of width as the two coordinates."""
    cosine, sine = (table.to(x.dtype) for table in turn)
    left, right = x.chunk(2, -1)
    turned: Tensor = x * cosine + torch.cat((-right, left), -1) * sine
    return turned


def batches(shape: Shape, rank: int, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Returns `count` fixed random batches of one rank, equal for all contenders: (tokens, targets), (B, T)."""
    generator = torch.Generator().manual_seed(1000 + rank)
    lines = torch.randint(shape.vocabulary, (count, shape.batch, shape.sequence + 1), generator=generator)
    return [(line[:, :-1].contiguous(), line[:, 1:].contiguous()) for line in lines]
