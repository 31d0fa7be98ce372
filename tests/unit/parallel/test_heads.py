"""Heads that tensor-parallel ranks cannot divide: the error names the config that has them."""

from __future__ import annotations

import pytest
import torch

from zeroaccel.errors import UsageError
from zeroaccel.parallel import tensor

transformers = pytest.importorskip("transformers")


def test_heads_of_a_model_that_reads_pictures_are_those_of_its_text() -> None:
    text = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12, "num_hidden_layers": 1}
    config = transformers.PaliGemmaConfig(text_config={"model_type": "gemma", **text})
    with torch.device("meta"):
        model = transformers.PaliGemmaForConditionalGeneration(config)
    with pytest.raises(
        UsageError, match="num_attention_heads of PaliGemmaForConditionalGeneration: expected a multiple"
    ):
        tensor._check_heads(model, 2, {"model.language_model.layers.*.self_attn.q_proj": "colwise"})
