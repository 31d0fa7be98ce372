"""Small mixture-of-experts models of transformers: each kind of router, of expert tensors and of shared experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MIXTURE_VOCABULARY = 64

_SIZES: dict[str, Any] = {"vocab_size": MIXTURE_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
_TOP_2 = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 24}

_RECURRENT: dict[str, Any] = {
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}

_OF_TEXT = ("Qwen3_5Moe", "Llama4")

MIXTURES: dict[str, dict[str, Any]] = {
    # Softmax over all experts, and an auxiliary loss.
    "Mixtral": {
        "num_local_experts": 4,
        "intermediate_size": 24,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    "Qwen3Moe": {**_TOP_2, "num_experts": 8, "head_dim": 8, "norm_topk_prob": True},
    # Biases of routers and experts, transposed and interleaved projections, attention sinks.
    "GptOss": {"num_local_experts": 4, "intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 8},
    # Sigmoid scores, a correction bias in the router, groups of experts, shared experts, one dense layer.
    "DeepseekV3": {
        **_TOP_2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 16},
    # A gated shared expert beside the routed experts, recurrent layers among the attention layers.
    "Qwen3Next": {**_TOP_2, **_RECURRENT},
    # The same layers with other projections.
    "Qwen3_5Moe": {"num_experts_per_tok": 2, "moe_intermediate_size": 16, **_RECURRENT},
    # Experts that process all tokens, weighted by their scores; one expert per token, and a shared one.
    "Llama4": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 16,
        "intermediate_size_mlp": 16,
        "head_dim": 8,
    },
}
"""For each kind, the sizes in its config beyond the common ones."""


def small_mixture(kind: str, experts: str = "grouped_mm", **changes: Any) -> nn.Module:
    """Builds a model of transformers, the same on every rank.

    Args:
        experts: transformers' implementation of the experts' forward.
    """
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, kind + "ForCausalLM")
    config = getattr(transformers, kind + ("TextConfig" if kind in _OF_TEXT else "Config"))
    made: nn.Module = model(config(**{**_SIZES, **_HEADS, **MIXTURES[kind], **changes}))
    if kind != "Llama4":
        made.set_experts_implementation(experts)  # type: ignore[operator]
    return made
