"""A mixture of experts: `zeroaccel launch --num_processes 2 examples/parallel/experts.py MODEL`.

`EP` ranks divide the experts of each layer; everything else is as in data parallelism.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import zeroaccel

EP = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3},
}


def main(argv: list[str]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(argv[0])
    tokens = torch.arange(128 * 32).reshape(128, 32) % 251  # your tokenized texts
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    parallel = zeroaccel.ParallelConfig(ep=EP)
    engine, _, loader, _ = zeroaccel.initialize(model, training_data=samples, config=CONFIG, parallel=parallel)
    losses = []
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1:]))
