"""Small models of transformers that carry a state or a window along the sequence, by family."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

VOCAB = 61
_BASE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
}
_DELTA: dict[str, Any] = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
_EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16},
}
_MAMBA2: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2},
    **{"mamba_chunk_size": 8, "mamba_d_conv": 4},
}
_KIMI: dict[str, Any] = {
    **{"linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**_DELTA, **_EXPERTS}),
    "qwen3_5": ("Qwen3_5Text:Qwen3_5", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeText:Qwen3_5Moe", {**_DELTA, **_EXPERTS}),
    "olmo_hybrid": ("OlmoHybrid", {**_DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": (
        "KimiLinear",
        {**_KIMI, "layer_types": ["linear_attention", "full_attention"], "first_k_dense_replace": 2},
    ),
    "mamba": ("Mamba", {"state_size": 8, "time_step_rank": 4}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}),
    "bamba": ("Bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1",
        {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_MAMBA2,
            **{"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
            "shared_intermediate_size": 16,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **{"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2, "num_experts_per_tok": 1},
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
            **{"head_dim": 8, "layers_block_type": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
        },
    ),
    "zamba": (
        "Zamba",
        {
            **{"mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_head_dim": 16},
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "num_key_value_heads": 4},
            **{"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **{"mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 8},
            **{"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
        },
    ),
    "lfm2": ("Lfm2", {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **{"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 16, "num_dense_layers": 1},
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {"lru_width": 32, "head_dim": 8, "attention_window_size": 6, "block_types": ["recurrent", "attention"]},
    ),
    "rwkv": ("Rwkv", {"attention_hidden_size": 32, "context_length": 64, "rescale_every": 0}),
    "bailing_hybrid": (
        "BailingHybrid",
        {
            **{"head_dim": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
            **{"num_key_value_heads": 4, "layer_group_size": 2, "first_k_dense_replace": 1, "n_group": 2},
            **{"topk_group": 1, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 16},
            "num_mtp_layers": 0,
        },
    ),
    "lfm3": ("Lfm3", {"conv_L_cache": 3, "head_dim": 8, "layer_types": ["conv", "full_attention"]}),
    "inkling": (
        "InklingText:Inkling",
        {
            **{"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
            **{"sliding_window_size": 6, "rel_extent": 64, "d_rel": 4, "moe_intermediate_size": 16},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
        },
    ),
    "inkling2": (
        "Inkling2Text:Inkling2",
        {
            **{"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
            **{"sliding_window_size": 6, "rel_extent": 64, "d_rel": 4, "moe_intermediate_size": 16},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": VOCAB},
            "n_layers_per_attn_res_block": 1,
        },
    ),
    "qwen4_exp": (
        "Qwen4ExpText:Qwen4Exp",
        {
            **_DELTA,
            **_EXPERTS,
            **{"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
            **{"indexer_budget": 8, "indexer_compress_ratio": 4},
        },
    ),
    "xlstm": ("xLSTM", {"num_heads": 4, "chunk_size": 8}),
    "zaya": (
        "Zaya",
        {
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "router_hidden_size": 8,
        },
    ),
    "minimax": (
        "MiniMax",
        {
            **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "block_size": 8},
            **{"num_local_experts": 2, "num_experts_per_tok": 1},
        },
    ),
}


def recurrent_model(family: str, **changes: Any) -> nn.Module:
    """Makes a model of a family, with the same weights on every call."""
    import transformers

    name, sizes = FAMILIES[family]
    config_name, _, model_name = name.partition(":")
    kind = getattr(transformers, f"{config_name}Config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = kind(**{**_BASE, **sizes, **changes})
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, f"{model_name or config_name}ForCausalLM")(settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():  # biases and gates that begin with zeros would hide their gradients
            param.add_(0.05 * torch.randn(param.shape, generator=generator).to(param.dtype))
    return model.float()
