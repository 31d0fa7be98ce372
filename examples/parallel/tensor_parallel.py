"""Tensor parallelism: `zeroaccel launch --num_processes 2 examples/parallel/tensor_parallel.py MODEL`.

Both ranks work on the same samples, each with half of every layer; `TP` ranks share a layer.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import zeroaccel

TP = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 2},
}


def main(argv: list[str]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(argv[0])
    tokens = torch.arange(64 * 32).reshape(64, 32) % 251  # your tokenized texts
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    parallel = zeroaccel.ParallelConfig(tp=TP)
    engine, _, loader, _ = zeroaccel.initialize(model, training_data=samples, config=CONFIG, parallel=parallel)
    losses = []
    for batch in loader:  # the same on ranks that share layers
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1:]))
