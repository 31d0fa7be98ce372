"""Pipeline parallelism: `zeroaccel launch --num_processes 2 examples/parallel/pipeline_parallel.py MODEL`.

`PP` stages hold consecutive layers; the micro-batches of a step pass through them one after the other.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import zeroaccel

PP, MICRO_BATCHES = 2, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 1},
}


def main(argv: list[str]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(argv[0])
    parallel = zeroaccel.ParallelConfig(pp=PP)
    engine, *_ = zeroaccel.initialize(model, config=CONFIG, parallel=parallel)
    tokens = torch.arange(8 * MICRO_BATCHES * 2 * 32).reshape(-1, 2, 32) % 251  # your tokenized texts
    batches = iter([{"input_ids": rows, "labels": rows} for rows in tokens])
    losses = [float(engine.train_batch(batches)) for _ in range(8)]  # forward, backward, step
    engine.destroy()
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1:]))
