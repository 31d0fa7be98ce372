"""`from_pretrained` reads the files that zero-to-fp32 writes, with tied weights and shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.checkpoint_by_hand import Entry, make_checkpoint
from zeroaccel.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict


@pytest.mark.parametrize("safe_serialization", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tied_model_comes_back_from_shards(safe_serialization: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    entries = {name: Entry("F32", param.detach().numpy().copy()) for name, param in model.named_parameters()}
    make_checkpoint(tmp_path / "ckpt", entries, ties={"lm_head.weight": "model.embed_tokens.weight"})
    convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "ckpt", tmp_path / "out", max_shard_size="4KB", safe_serialization=safe_serialization
    )
    assert len(list((tmp_path / "out").glob("*-of-*"))) > 2
    config.save_pretrained(tmp_path / "out")
    found, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert found.lm_head.weight is found.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
