"""Fine-tunes a causal language model: `zeroaccel launch --num_processes 2 examples/finetune_7b.py MODEL`."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from zeroaccel import Accelerator, DummyOptim, DummyScheduler, ZeroPlugin

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "activation_checkpointing": {"wrap_blocks": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 2000}},
    "zero_optimization": {"stage": 3},
}  # or the path of a JSON file


def main(argv: list[str]) -> list[float]:
    folder = Path(argv[1] if len(argv) > 1 else "finetuned")
    accelerator = Accelerator(zero_plugin=ZeroPlugin(CONFIG))
    model = AutoModelForCausalLM.from_pretrained(argv[0], dtype=torch.bfloat16)  # keeps only the shard
    model.config.use_cache = False
    tokens = torch.arange(64 * 32).reshape(64, 32) % 251  # your tokenized texts, one row a sample
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=1, shuffle=True)

    optimizer = DummyOptim(model.parameters())
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, DummyScheduler(optimizer))
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {model.global_steps} steps")

    accelerator.save_state(folder / "state")  # accelerator.load_state(...) resumes
    accelerator.save_pretrained(model, folder / "finished")  # for from_pretrained
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
