"""Decoder with the usual structure of open models (gated MLP, heads of 128, RMS norms), and shapes of common models.

Only its sizes matter; it is never trained. A pipeline stage is a decoder with fewer blocks, without embedding or head
if these are on other stages. The axes of a mesh divide its layers and sequences among ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroaccel.parallel.ulysses import UlyssesAttention
from zeroaccel.setup.axis_estimate import Shape

# Parameters -> layers (Brown et al. 2020, table 2.1); `_depth` chooses the nearest by logarithm.
_DEPTHS = {125e6: 12, 350e6: 24, 1.3e9: 24, 2.7e9: 32, 6.7e9: 32, 13e9: 40, 30e9: 48, 66e9: 64, 175e9: 96}
_VOCABULARY = 32_000
_HEAD_DIM = 128


# From the published config.json of each model.
_LLAMA_3 = partial(Shape, vocabulary=128_256, key_heads=8)
MODELS: Mapping[str, Shape] = {
    "llama-2-7b": Shape(32, 4096, 11008, 32_000),
    "llama-2-13b": Shape(40, 5120, 13824, 32_000),
    "llama-2-70b": Shape(80, 8192, 28672, 32_000, key_heads=8),
    "llama-3.1-8b": _LLAMA_3(32, 4096, 14336),
    "llama-3.1-70b": _LLAMA_3(80, 8192, 28672),
    "llama-3.1-405b": _LLAMA_3(126, 16384, 53248),
    "llama-3.2-1b": _LLAMA_3(16, 2048, 8192, heads=32, head_dim=64, tied=True),
    "llama-3.2-3b": _LLAMA_3(28, 3072, 8192, tied=True),
    "llama-3-8b": _LLAMA_3(32, 4096, 14336),
    "llama-3-70b": _LLAMA_3(80, 8192, 28672),
    "llama-3.3-70b": _LLAMA_3(80, 8192, 28672),
    "mistral-7b": Shape(32, 4096, 14336, 32_000, key_heads=8),
    "mistral-nemo": Shape(40, 5120, 14336, 131_072, 32, 128, 8),
    "mistral-small-24b": Shape(40, 5120, 32768, 131_072, 32, 128, 8),
    "deepseek-llm-7b": Shape(30, 4096, 11008, 102_400),
    "falcon3-7b": Shape(28, 3072, 23040, 131_072, 12, 256, 4),
    "phi-3-mini": Shape(32, 3072, 8192, 32_064, 32, 96),
    "phi-3-medium": Shape(40, 5120, 17920, 32_064, 40, 128, 10),
    "phi-4": Shape(40, 5120, 17920, 100_352, 40, 128, 10),
    "smollm2-135m": Shape(30, 576, 1536, 49_152, 9, 64, 3, tied=True),
    "smollm2-360m": Shape(32, 960, 2560, 49_152, 15, 64, 5, tied=True),
    "smollm2-1.7b": Shape(24, 2048, 8192, 49_152, 32, 64, tied=True),
    "yi-6b": Shape(32, 4096, 11008, 64_000, 32, 128, 4),
    "yi-34b": Shape(60, 7168, 20480, 64_000, 56, 128, 8),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 151_936, 14, 64, 2, tied=True, biased=True),
    "qwen2.5-1.5b": Shape(28, 1536, 8960, 151_936, 12, 128, 2, tied=True, biased=True),
    "qwen2.5-3b": Shape(36, 2048, 11008, 151_936, 16, 128, 2, tied=True, biased=True),
    "qwen2.5-7b": Shape(28, 3584, 18944, 152_064, 28, 128, 4, biased=True),
    "qwen2.5-14b": Shape(48, 5120, 13824, 152_064, 40, 128, 8, biased=True),
    "qwen2.5-32b": Shape(64, 5120, 27648, 152_064, 40, 128, 8, biased=True),
    "qwen2.5-72b": Shape(80, 8192, 29568, 152_064, 64, 128, 8, biased=True),
    "tinyllama-1.1b": Shape(22, 2048, 5632, 32_000, 32, 64, 4),
}
"""Common models by name: dense decoders with gated MLPs and RMS norms."""


def known_shape(text: str) -> Shape | None:
    """Returns the shape of a model by its name, ignoring case, owner, and suffixes such as "-instruct".

    Example:
        >>> known_shape("meta-llama/Llama-3.1-8B-Instruct").numel
        8030261248
    """
    return next((MODELS[name] for name in plain_names(text) if name in MODELS), None)


def plain_names(text: str) -> Iterator[str]:
    """Yields the names under which a table may list a model: it removes one suffix such as "-instruct" after another.

    Example:
        >>> list(plain_names("mistralai/Mixtral-8x7B-Instruct-v0.1"))
        ['mixtral-8x7b-instruct-v0.1', 'mixtral-8x7b-instruct', 'mixtral-8x7b']
    """
    name = text.strip().rsplit("/", 1)[-1].lower().removeprefix("meta-")
    while name:
        yield name
        shorter = _NAME_ENDING.sub("", name)
        if shorter == name:
            return
        name = shorter


_NAME_ENDING = re.compile(r"-(instruct|chat|base|hf|it|pt|preview|v\d[\d.]*|\d{4}|\d+k|17b-\d+e)$")


def shape_of(numel: int) -> Shape:
    """Returns the shape whose number of parameters is nearest to `numel`, up to the granularity of MLP columns."""
    vocabulary = min(_VOCABULARY, max(256, numel // 1000))
    layers = _depth(numel)
    head = _HEAD_DIM if numel > 50e6 else 16
    # Per layer 4 d^2 parameters in attention and 8 d^2 in the MLP, and two tables of the vocabulary.
    width = (math.sqrt(vocabulary**2 + 12 * layers * numel) - vocabulary) / (12 * layers)
    width = max(head, round(width / head) * head)
    mlp_numel = numel - Shape(layers, width, 0, vocabulary).numel
    inner, heads = max(1, round(mlp_numel / (3 * layers * width))), width // head
    if head == _HEAD_DIM:  # divisible among ranks: multiples of 8 heads that divide the width, of 16 columns
        heads = min(
            (count for count in range(8, width // 8, 8) if width % count == 0), key=lambda number: abs(number - heads)
        )
        inner = max(1, round(inner / 16)) * 16
    return Shape(layers, width, inner, vocabulary, heads, width // heads)


def _depth(numel: int) -> int:
    nearest = min(_DEPTHS, key=lambda count: abs(math.log(count / numel)))
    return _DEPTHS[nearest] if numel > 50e6 else max(1, min(12, round(math.log10(max(numel, 10)) * 3 - 12)))


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.head_dim = shape.head_dim
        self.num_key_value_groups = shape.heads // shape.key_heads
        self.exchange: UlyssesAttention | None = None
        queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, queries, bias=shape.biased)
        self.k, self.v = (nn.Linear(width, keys, bias=shape.biased) for _ in range(2))
        self.out = nn.Linear(queries, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        parts = (self.q, self.k, self.v)
        q, k, v = (linear(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in parts)
        q, k = q * 1.0, k * 1.0  # in place of the rotary embedding
        if self.exchange is None:
            mixed, _ = _attend(self, q, k, v, None)
        else:  # ranks share the sequence
            mixed, _ = self.exchange.attend(_attend, self, q, k, v, None)
        x = x + self.out(mixed.flatten(-2))
        normed = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, None]:
    """(B, H, S, D) and twice (B, K, S, D) -> (B, S, H, D); has the interface of transformers' attention functions."""
    if (groups := module.num_key_value_groups) > 1:
        k, v = (tensor.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None


class Decoder(nn.Module):
    """Decoder from (batch, length) integers to (batch, length, vocabulary) logits in fp32, or one pipeline stage of it.

    Args:
        is_first: True to start with the embedding; otherwise the input is hidden states, (batch, length, width).
        is_last: True to end with norm and head; otherwise the output is hidden states.

    Attributes:
        table: copy of the embedding for a tied head, if this is the last stage but not the first.
    """

    # Same plan as transformers' for such models.
    _tp_plan: Mapping[str, str] = {
        **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "gate", "up")},
        **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
        "embedding": "embedding_rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, shape: Shape, *, is_first: bool = True, is_last: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if is_first else None
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width) if is_last else None
        copies = shape.tied and not is_first
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if is_last and not copies else None
        self.table: Tensor | None = None
        self._table_shape = (shape.vocabulary, shape.width) if is_last and copies else None
        if shape.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is None:
            return x
        x = self.norm(x)
        logits = self._by_copy(x) if self.head is None else self.head(x)
        return logits.to(torch.float32)

    def _by_copy(self, x: Tensor) -> Tensor:
        if self.table is None:
            assert self._table_shape is not None, "a last stage without a head"
            self.table = torch.empty(self._table_shape, dtype=x.dtype, device=x.device)
        leaf = self.table.detach().requires_grad_(torch.is_grad_enabled())
        return F.linear(x, leaf)
