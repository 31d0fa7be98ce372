"""The networks that the model trains: gated blocks, attention, and a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.cuda_model.network_size import Size


class _GatedBlock(nn.Module):
    """Seven matrices and two norms: 4 w^2 + 3 w i elements."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, inner = size.width, size.inner
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_in(x)
        x = x + self.mix(self.query(y) * torch.sigmoid(self.key(y)) + self.value(y))
        y = self.norm_out(x)
        return x + self.down(torch.relu(self.gate(y)) * self.up(y))


class GatedNetwork(nn.Module):
    """Maps tokens to a loss: it predicts its own input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(_GatedBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def staged_network(size: Size) -> nn.Sequential:
    """Returns the network as a row of modules, for stages, with tied embedding and head. Maps tokens to logits."""
    embedding, head = nn.Embedding(size.vocabulary, size.width), nn.Linear(size.width, size.vocabulary, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, *(_GatedBlock(size) for _ in range(size.layers)), nn.LayerNorm(size.width), head)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the loss of the outputs of `staged_network`."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def attention_network(size: Size) -> nn.Module:
    """Returns a model of transformers whose attention exchanges heads between the ranks of a sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": size.layers}
    sizes = {"hidden_size": size.width, "intermediate_size": size.inner, "vocab_size": size.vocabulary}
    return LlamaForCausalLM(LlamaConfig(**heads, **sizes, attn_implementation="eager"))


def mixture_network(size: Size) -> nn.Module:
    """Returns a model of transformers with two of four experts per token; the ranks divide the experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": size.layers}
    sizes = {"hidden_size": size.width, "intermediate_size": size.inner, "vocab_size": size.vocabulary}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**heads, **sizes, **experts, attn_implementation="eager"))
    model.set_experts_implementation("batched_mm")  # torch counts integers for grouped_mm on a device only
    return model
