"""Wav2Vec2 with LayerDrop, whose random draw differs between ranks. As a script: trains it at stage 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.training import SGD, config, train_step
from zeroaccel import initialize

SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 12},
    **{"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False},
}
STEPS = 4


def train(stage: int, **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Trains the model; returns the norms of the steps, and the final weights."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC  # imported in ranks only: the test process does not need it

    torch.manual_seed(3)
    model = Wav2Vec2ForCTC(Wav2Vec2Config(layerdrop=0.5, **SIZES))
    engine, *_ = initialize(model, config=config(stage, optimizer=SGD, **changes))
    rank = engine.collectives.rank
    torch.manual_seed(rank)  # for LayerDrop and dropout
    norms = []
    for step in range(STEPS):
        speech = torch.randn(2, 400, generator=torch.Generator().manual_seed(10 * step + rank))
        train_step(engine, engine(input_values=speech, labels=torch.tensor([[1, 2], [3, 4]])).loss)
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return norms, {name: param.detach().clone() for name, param in model.named_parameters()}


if __name__ == "__main__":
    train(3)
