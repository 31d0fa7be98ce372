"""Pipeline stages keep the patched forwards of a model's modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.mesh_training import NEEDS_STAGES
from zeroaccel.config.parallel import PipelineConfig
from zeroaccel.parallel.pipeline_cut import cut


@NEEDS_STAGES
def test_a_patched_forward_stays_where_a_model_is_cut() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=32))
    plain = model.lm_head.forward

    def doubled(hidden: Tensor) -> Tensor:
        return 2 * plain(hidden)

    model.lm_head.forward = doubled
    cut(model, 1, 2, PipelineConfig())
    assert vars(model.lm_head)["forward"] is doubled
    hidden = torch.ones(1, 16)
    assert torch.equal(model.lm_head(hidden), 2 * plain(hidden))
    assert "forward" not in vars(model.model.norm)
