"""Training on meshes: versions of torch that each axis needs, a small Llama to split, and a micro-step on any mesh."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor.parallel import parallelize_module

from tests.support.training import train_step

# `initialize` refuses these combinations by name on an older torch.
NEEDS_SPLIT_LAYERS = pytest.mark.skipif(
    "src_data_rank" not in inspect.signature(parallelize_module).parameters,
    reason="parallelize_module of this torch sends weights from rank 0; that of 2.7 need not",
)
NEEDS_STAGES = pytest.mark.skipif(
    "return_outputs" not in inspect.signature(ScheduleGPipe.step).parameters,
    reason="schedules of this torch keep all outputs; those of 2.10 need not",
)


def with_frozen_base(model: Any) -> nn.Module:
    """Freezes all weights of a transformers model except its head."""
    model.model.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def small_llama(kind: str = "Llama", **changes: Any) -> nn.Module:
    """Builds two Llama blocks (or another `kind`), the same on every rank, with fewer heads of keys than of queries."""
    import transformers

    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model, config = (getattr(transformers, kind + name) for name in ("ForCausalLM", "Config"))
    made: nn.Module = model(config(**{**sizes, **heads, "use_cache": False, **changes}))
    return made


def small_gpt2(**changes: Any) -> nn.Module:
    """Builds a GPT-2 of four blocks without dropout, the same on every rank; its head is tied to its embedding."""
    import transformers

    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **dropout, **changes}))
    return made


def mean_loss(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the mean loss over whole sequences, from a batch or from a rank's part of a batch."""
    labels = batch.get("shift_labels", batch.get("labels"))
    loss: Tensor = engine(**{**batch, "labels": labels}).loss
    return engine.sequence_group.mean_loss(loss, labels) if "shift_labels" in batch else loss


def train_micro_step(engine: Any, batch: dict[str, Tensor]) -> float:
    """Trains on a batch, or on a rank's part of it; returns the mean loss over whole sequences."""
    return train_step(engine, mean_loss(engine, batch))
