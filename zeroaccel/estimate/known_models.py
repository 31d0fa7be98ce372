"""Common models other than a plain `Decoder`, by name: fields of their config.json that differ from the defaults.

Mixtures of experts, and dense models with other norms, biases or layers. Only sizes are here; transformers builds the
model. `decoder.MODELS` lists the models that do not need transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """A model of transformers.

    Attributes:
        model_type: `model_type` of its config.
        numel: number of parameters, including all experts; for a multimodal model, those of the text model.
        fields: fields of its config that differ from the defaults of the type.
        period: number of layers after which the kinds of layers repeat.
        leading: number of first layers of another kind.
    """

    model_type: str
    numel: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    period: int = 1
    leading: int = 0


def _config(
    model_type: str,
    numel: int,
    width: int,
    inner: int,
    layers: int,
    heads: int,
    key_heads: int = 0,
    *,
    period: int = 1,
    leading: int = 0,
    **fields: Any,
) -> ModelConfig:
    keys = {"num_key_value_heads": key_heads} if key_heads else {}
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return ModelConfig(model_type, numel, {**sizes, **keys, **fields}, period, leading)


_QWEN3 = {"vocab_size": 151_936, "head_dim": 128}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128, "num_experts_per_tok": 8}
_QWEN3_5 = {"vocab_size": 248_320, "linear_num_value_heads": 48}
_QWEN3_5_MOE = ModelConfig("qwen3_5_moe_text", 34_660_610_688, {"num_hidden_layers": 40}, period=4)
_GEMMA4 = {
    **{"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
}
_GEMMA4_MOE = {
    **_GEMMA4,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
_GLM4 = {"attention_bias": True, "head_dim": 128}
_GLM4_355B = {"moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True}
_KIMI_K2 = {"n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163_840, "n_group": 1, "topk_group": 1}
_NEMOTRON_3_NANO: Mapping[str, Any] = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "head_dim": 128,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
_GEMMA3 = {"vocab_size": 262_208, "head_dim": 256}
_SCOUT = {"num_local_experts": 16}
_MAVERICK = {"num_local_experts": 128, "interleave_moe_layer_step": 2}

CONFIGS: Mapping[str, ModelConfig] = {
    "deepseek-v3": _config("deepseek_v3", 671_026_404_352, 7168, 18432, 61, 128, 128, leading=3),
    "deepseek-r1": _config("deepseek_v3", 671_026_404_352, 7168, 18432, 61, 128, 128, leading=3),
    "deepseek-v4-flash": ModelConfig("deepseek_v4", 284_325_869_015, {"num_hidden_layers": 43}, period=43),
    "falcon-7b": ModelConfig("falcon", 6_921_720_704, {"num_hidden_layers": 32}),
    "gemma-2b": _config("gemma", 2_506_172_416, 2048, 16384, 18, 8, 1, head_dim=256),
    "gemma-7b": _config("gemma", 8_537_680_896, 3072, 24576, 28, 16, 16, head_dim=256),
    "gemma-2-2b": _config("gemma2", 2_614_341_888, 2304, 9216, 26, 8, 4, head_dim=256),
    "gemma-2-9b": _config("gemma2", 9_241_705_984, 3584, 14336, 42, 16, 8, head_dim=256),
    "gemma-2-27b": _config("gemma2", 27_227_128_320, 4608, 36864, 46, 32, 16, head_dim=128),
    "gemma-3-1b": _config("gemma3_text", 999_885_952, 1152, 6912, 26, 4, 1, head_dim=256, vocab_size=262_144),
    "gemma-3-4b": _config("gemma3_text", 3_880_263_168, 2560, 10240, 34, 8, 4, **_GEMMA3),
    "gemma-3-12b": _config("gemma3_text", 11_766_034_176, 3840, 15360, 48, 16, 8, **_GEMMA3),
    "gemma-3-27b": _config("gemma3_text", 27_009_346_304, 5376, 21504, 62, 32, 16, vocab_size=262_208, head_dim=128),
    "gemma-4-31b": _config(
        "gemma4_text", 30_697_345_280, 5376, 21504, 60, 32, 16, period=6, num_global_key_value_heads=4, **_GEMMA4
    ),
    "gemma-4-26b-a4b": _config("gemma4_text", 25_233_141_760, 2816, 2112, 30, 16, 8, period=6, **_GEMMA4_MOE),
    "glm-4.5-air": _config("glm4_moe", 106_852_245_504, 4096, 10944, 46, 96, 8, leading=1, **_GLM4),
    "glm-4.5": _config("glm4_moe", 352_797_814_784, 5120, 12288, 92, 96, 8, leading=3, **_GLM4, **_GLM4_355B),
    "glm-4.6": _config("glm4_moe", 352_797_814_784, 5120, 12288, 92, 96, 8, leading=3, **_GLM4, **_GLM4_355B),
    "glm-4.7-flash": ModelConfig("glm4_moe_lite", 29_943_390_976, {"num_hidden_layers": 47}, leading=1),
    "glm-5": _config("glm_moe_dsa", 743_911_199_232, 6144, 12288, 78, 64, 64, leading=3),
    "gpt-neox-20b": _config("gpt_neox", 20_554_567_680, 6144, 24576, 44, 64, vocab_size=50_432),
    "gpt-oss-20b": _config("gpt_oss", 20_914_757_184, 2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": _config("gpt_oss", 116_829_156_672, 2880, 2880, 36, 64, 8, num_local_experts=128),
    "granite-3.1-8b": _config(
        "granite", 8_170_848_256, 4096, 12800, 40, 32, 8, vocab_size=49_155, tie_word_embeddings=True
    ),
    "kimi-k2": _config("deepseek_v3", 1_026_408_209_408, 7168, 18432, 61, 64, 64, leading=1, **_KIMI_K2),
    "kimi-linear-48b-a3b": ModelConfig("kimi_linear", 49_133_074_464, {"num_hidden_layers": 27}, period=27),
    "llama-4-scout": _config("llama4_text", 107_769_861_120, 5120, 8192, 48, 40, 8, **_SCOUT),
    "llama-4-maverick": _config("llama4_text", 400_711_848_960, 5120, 8192, 48, 40, 8, period=2, **_MAVERICK),
    "minimax-m2": _config("minimax_m2", 228_689_748_992, 3072, 1536, 62, 48, 8),
    "mixtral-8x7b": _config("mixtral", 46_702_792_704, 4096, 14336, 32, 32, 8, num_local_experts=8),
    "mixtral-8x22b": _config("mixtral", 140_630_071_296, 6144, 16384, 56, 48, 8, vocab_size=32_768),
    "nemotron-3-nano-30b-a3b": _config(
        "nemotron_h", 31_577_937_344, 2688, 1856, 52, 32, 2, period=52, **_NEMOTRON_3_NANO
    ),
    "olmo-2-1124-7b": _config("olmo2", 7_298_617_344, 4096, 11008, 32, 32, 32, vocab_size=100_352),
    "olmo-2-1124-13b": _config("olmo2", 13_716_198_400, 5120, 13824, 40, 40, 40, vocab_size=100_352),
    "phi-2": _config("phi", 2_779_683_840, 2560, 10240, 32, 32, 32, vocab_size=51_200),
    "pythia-6.9b": _config("gpt_neox", 6_857_302_016, 4096, 16384, 32, 32, vocab_size=50_432),
    "pythia-12b": _config("gpt_neox", 11_846_072_320, 5120, 20480, 36, 40, vocab_size=50_688),
    "qwen3-0.6b": _config("qwen3", 596_049_920, 1024, 3072, 28, 16, 8, tie_word_embeddings=True, **_QWEN3),
    "qwen3-1.7b": _config("qwen3", 1_720_574_976, 2048, 6144, 28, 16, 8, tie_word_embeddings=True, **_QWEN3),
    "qwen3-4b": _config("qwen3", 4_022_468_096, 2560, 9728, 36, 32, 8, tie_word_embeddings=True, **_QWEN3),
    "qwen3-8b": _config("qwen3", 8_190_735_360, 4096, 12288, 36, 32, 8, **_QWEN3),
    "qwen3-14b": _config("qwen3", 14_768_307_200, 5120, 17408, 40, 40, 8, **_QWEN3),
    "qwen3-32b": _config("qwen3", 32_762_123_264, 5120, 25600, 64, 64, 8, **_QWEN3),
    "qwen3-30b-a3b": _config(
        "qwen3_moe", 30_532_122_624, 2048, 6144, 48, 32, 4, moe_intermediate_size=768, **_QWEN3_MOE
    ),
    "qwen3-235b-a22b": _config(
        "qwen3_moe", 235_093_634_560, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536, **_QWEN3_MOE
    ),
    "qwen3-next-80b-a3b": _config("qwen3_next", 79_674_391_296, 2048, 5120, 48, 16, 2, period=4, head_dim=256),
    "qwen3.5-9b": _config("qwen3_5_text", 8_953_803_264, 4096, 12288, 32, 16, 4, period=4),
    "qwen3.5-35b-a3b": _QWEN3_5_MOE,
    "qwen3.6-35b-a3b": _QWEN3_5_MOE,
    "qwen3.5-27b": _config("qwen3_5_text", 26_895_998_464, 5120, 17408, 64, 24, 4, period=4, **_QWEN3_5),
    "qwen3.6-27b": _config("qwen3_5_text", 26_895_998_464, 5120, 17408, 64, 24, 4, period=4, **_QWEN3_5),
    "smollm3-3b": _config("smollm3", 3_075_098_624, 2048, 11008, 36, 16, 4),
}
"""Model configs by name, from the published config.json of each model."""

READ_PICTURES = (
    *("gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "llama-4-scout", "llama-4-maverick"),
    *("gemma-4-31b", "gemma-4-26b-a4b"),
    *("qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.6-27b", "qwen3.6-35b-a3b"),
)
"""Models with a vision tower and a projector, which the estimate omits."""
