"""Forms of attention under sequence parallelism, on threads that act as ranks: as on one rank, or refused by name."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.support import simulated_groups
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import UsageError
from zeroaccel.parallel.sequence import SequenceGroup
from zeroaccel.parallel.ulysses import UlyssesAttention

transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 24
_SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "use_cache": False},
}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_MLA: dict[str, Any] = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6},
    **{"num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 2},
}
_MIXED = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
_GPT2 = {"add_cross_attention": True, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 8},
}
# Model and config of transformers -> further sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaModel", "Llama", {}),
    "both directions": ("Qwen3Model", "Qwen3", {"head_dim": 8, "is_causal": False}),
    "sinks": ("GptOssModel", "GptOss", {"head_dim": 8, "sliding_window": 6, **_EXPERTS}),
    "cap": ("Gemma2Model", "Gemma2", {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 1.0}),
    "window": ("MistralModel", "Mistral", {"sliding_window": 5}),
    "mixed windows": ("Gemma3TextModel", "Gemma3Text", _MIXED),
    "chunks": (
        "Llama4TextModel",
        "Llama4Text",
        {
            **{"head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
            **{"num_local_experts": 2, "moe_layers": []},
        },
    ),
    "latent": ("DeepseekV3Model", "DeepseekV3", _MLA),
    "encoder": ("BertModel", "Bert", _NO_DROPOUT),
    "encoder with windows": (
        "ModernBertModel",
        "ModernBert",
        {
            **{"local_attention": 8, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2},
            **{"cls_token_id": 1, "sep_token_id": 2},
        },
    ),
    "images": (
        "Gemma3Model",
        "Gemma3",
        {"text_config": {**_SIZES, **_MIXED}, "vision_config": _VISION, "image_token_index": 60},
    ),
    "prefix": (
        "PaliGemmaModel",
        "PaliGemma",
        {
            "text_config": {**_SIZES, "head_dim": 8, "model_type": "gemma"},
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
            **{"image_token_index": 60, "projection_dim": 32},
        },
    ),
    "encoder and decoder": ("T5Model", "T5", _T5),
    "position bias": ("T5EncoderModel", "T5", _T5),
    "cross-attention": (
        "GPT2Model",
        "GPT2",
        {"n_embd": 32, "n_layer": 1, "n_head": 4, **_GPT2},
    ),
    "alibi": ("BloomModel", "Bloom", {"n_layer": 1, "n_head": 4}),
    "own attention": ("FalconModel", "Falcon", {}),
    "dropout": ("LlamaModel", "Llama", {"attention_dropout": 0.3}),
}


def _model(form: str, attention: str) -> nn.Module:
    model, config, sizes = MODELS[form]
    torch.manual_seed(3)
    base = {} if "text_config" in sizes else _SIZES
    settings = getattr(transformers, f"{config}Config")(**{**base, **sizes})
    made = getattr(transformers, model)(settings)
    made.set_attn_implementation(attention)
    for name, param in made.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(param)
    return cast(nn.Module, made.train())


def _batch(what: str) -> dict[str, Tensor]:
    batch = {"input_ids": torch.randint(3, 59, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))}
    types = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    if what == "padded":
        mask = torch.ones_like(types)
        mask[0, 17:], mask[1, :5] = 0, 0
        batch["attention_mask"] = mask
    elif what == "packed":
        batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(15)]).expand(BATCH, -1)
    elif what == "images":  # that cross the borders between ranks, and others that meet only there
        types[:, 3:7], types[0, 10:14], types[1, 16:22] = 1, 1, 1
        batch["token_type_ids"] = types
    elif what == "prefix":
        types[0, 10:], types[1, 15:] = 1, 1
        batch["token_type_ids"] = types
    elif what == "states":
        batch["encoder_hidden_states"] = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(1))
    return batch


def _weights(states: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Returns the weights of a sum that takes the place of a loss; padding has none."""
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    mask = batch.get("attention_mask")
    return weights if mask is None else weights * mask[..., None]


def _run(model: nn.Module, size: int, body: Callable[[nn.Module, SequenceGroup], Any]) -> list[Any]:
    lock = threading.Lock()

    def on_rank(collectives: Collectives) -> Any:
        group = SequenceGroup(collectives, cast(Any, None))
        with lock:  # transformers' tables are those of the process
            cut = copy.deepcopy(model)
            attention = UlyssesAttention(cut, group)
        try:
            return body(cut, group)
        finally:
            with lock:
                attention.undo()

    return [result for result, _ in simulated_groups.run(size, on_rank, records_sizes=False, stack_nbytes=16 << 20)]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


QUICK = [
    ("llama", "flex_attention", "packed", 8),
    ("both directions", "sdpa", "packed", 8),
    ("sinks", "eager", "padded", 8),
    ("cap", "eager", "plain", 6),
    ("chunks", "sdpa", "packed", 8),
    ("latent", "sdpa", "plain", 3),
    ("encoder with windows", "sdpa", "packed", 8),
    ("images", "sdpa", "images", 3),
    ("images", "eager", "images", 8),
    ("prefix", "eager", "prefix", 8),
]
SWEPT = [
    (form, attention, what, size)
    for form in (
        *("llama", "both directions", "sinks", "cap", "window", "mixed windows", "chunks", "latent"),
        "encoder",
    )
    for attention in (("eager",) if form in ("sinks", "cap") else ("sdpa", "eager"))
    for what in ("plain", "padded", "packed")
    for size in (2, 3, 6, 8)
    if (form, attention, what, size) not in QUICK
]


@pytest.mark.parametrize(
    ("form", "attention", "what", "size"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SWEPT)]
)
def test_a_form_of_attention_is_that_of_one_rank(form: str, attention: str, what: str, size: int) -> None:
    batch = _batch(what)
    # Flex attention of whole sequences would compile.
    model, whole = _model(form, attention), _model(form, "sdpa" if attention == "flex_attention" else attention)
    states = whole(**batch).last_hidden_state
    weights = _weights(states, batch)
    (states * weights).sum().backward()

    def body(cut: nn.Module, group: SequenceGroup) -> tuple[Tensor, dict[str, Tensor]]:
        own = cut(**group.shard(batch)).last_hidden_state
        run = LENGTH // size
        (own * weights[:, group.rank * run : (group.rank + 1) * run]).sum().backward()
        return own.detach(), _gradients(cut)

    results = _run(model, size, body)
    valid = batch.get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
    assert torch.allclose(torch.cat([own for own, _ in results], 1)[valid], states[valid], rtol=1e-5, atol=3e-6)
    for name, grad in _gradients(whole).items():
        total = sum(gradients[name] for _, gradients in results)
        assert torch.allclose(total, grad, rtol=1e-5, atol=2e-6 * max(1.0, grad.abs().max().item())), name


@pytest.mark.parametrize(
    ("form", "what", "says"),
    [
        ("encoder and decoder", "plain", "T5Model: expected one sequence per sample, got 'an encoder and a decoder"),
        (
            "position bias",
            "plain",
            "T5Attention: expected attention whose heads differ only in their weights",
        ),
        ("cross-attention", "states", "GPT2Attention: expected attention of a sequence to itself, got '12 queries"),
        (
            "alibi",
            "plain",
            "BloomModel: h.0.self_attention (BloomAttention): expected attention that",
        ),
        ("own attention", "plain", "FalconModel: h.0.self_attention (FalconAttention): expected attention that"),
        ("dropout", "plain", "LlamaAttention: expected attention without dropout, whose random numbers differ"),
    ],
)
def test_a_form_that_a_cut_would_change_is_refused_by_name(form: str, what: str, says: str) -> None:
    model, batch = _model(form, "eager"), _batch(what)
    messages = []

    def body(cut: nn.Module, group: SequenceGroup) -> None:
        try:
            cut(**group.shard(batch))
        except UsageError as error:
            messages.append(str(error))

    try:
        _run(model, 2, body)
    except UsageError as error:  # at the start
        messages += [str(error)] * 2
    assert len(messages) == 2
    assert all(f"sequence parallelism: {says}" in one for one in messages)


def test_packed_sequences_with_images_are_refused_by_name() -> None:
    batch = _batch("packed") | _batch("images")
    messages = []

    def body(cut: nn.Module, group: SequenceGroup) -> None:
        with pytest.raises(UsageError, match="position_ids: expected one sequence in each row, for tokens that attend"):
            cut(**group.shard(batch))
        messages.append(group.rank)

    _run(_model("images", "sdpa"), 2, body)
    assert sorted(messages) == [0, 1]
