"""Long context: `zeroaccel launch --num_processes 2 examples/parallel/sequence_parallel.py MODEL`.

Each sequence is divided over `SP` ranks: a rank holds the activations of its part only.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import zeroaccel
from zeroaccel.parallel import SequenceLoader

SP = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3},
}


def main(argv: list[str]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(argv[0])
    parallel = zeroaccel.ParallelConfig(sp=SP)
    engine, *_ = zeroaccel.initialize(model, config=CONFIG, parallel=parallel)
    tokens = torch.arange(16 * 2 * 64).reshape(16, 2, 64) % 251  # 16 batches of 2 long texts
    batches = [{"input_ids": rows, "labels": rows} for rows in tokens]
    losses = []
    for batch in SequenceLoader(batches, engine.sequence_group, same_batches=True):
        labels = batch["shift_labels"]
        loss = engine(**batch, labels=labels).loss  # the mean over this rank's labels
        loss = engine.sequence_group.mean_loss(loss, labels)  # over the labels of whole sequences
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1:]))
