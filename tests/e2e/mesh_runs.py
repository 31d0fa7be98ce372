"""A training script that does not mention a mesh; `zeroaccel launch` sets it. Run by `test_launched_meshes.py`."""

from __future__ import annotations

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zeroaccel
from tests.support.training import train_step
from zeroaccel.engine import Engine


def main(batches_by: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes))
    rows = torch.randint(40, (24, 8), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": row, "labels": row} for row in rows]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    engine, _, loader, _ = zeroaccel.initialize(model, config=config, training_data=samples)
    assert loader is not None
    losses = by_pipeline(engine) if batches_by == "engine" else by_loop(engine, loader)
    if engine.collectives.job.rank == 0:
        print(json.dumps({"losses": losses, "batch": engine.train_batch_size()}), flush=True)
    engine.destroy()


def by_pipeline(engine: Engine) -> list[float]:
    return [engine.train_batch().item() for _ in range(3)]  # type: ignore[attr-defined]


def by_loop(engine: Engine, loader: torch.utils.data.DataLoader[dict[str, torch.Tensor]]) -> list[float]:
    losses = []
    for batch in loader:
        losses.append(train_step(engine, engine(**batch).loss))
    return losses


if __name__ == "__main__":
    main(sys.argv[1])
