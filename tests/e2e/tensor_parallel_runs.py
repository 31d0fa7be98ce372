"""A Trainer with `autotp_size` in its DeepSpeed config, as its user writes it; run on every rank, with the facade on.

    tensor_parallel_runs.py FOLDER AUTOTP_SIZE:STAGE ...

Prints, on rank 0, one JSON line per size and stage: losses, the evaluation's, and the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 64


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """`count` sequences of twelve tokens."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self._ids = torch.randint(VOCABULARY, (count, 12), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index].clone()}


def run(folder: Path, size: int, stage: int, world_size: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": size},
    }
    arguments = TrainingArguments(
        str(folder),
        deepspeed=settings,
        # A step is of as many samples whatever shares the layers.
        per_device_train_batch_size=2 * size // world_size,
        per_device_eval_batch_size=2,
        max_steps=4,
        optim="sgd",  # Adam makes steps of what rounding leaves where a gradient is almost 0
        learning_rate=0.1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        dataloader_pin_memory=False,
    )
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes))
    trainer = Trainer(model=model, args=arguments, train_dataset=Samples(32), eval_dataset=Samples(8))
    trainer.train()
    trainer.save_model(str(folder / "final"))
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "evaluated": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "folder": str(folder),
    }


def main() -> None:
    root, *cases = sys.argv[1:]
    for case in cases:
        size, stage = map(int, case.split(":"))
        world_size = int(os.environ["WORLD_SIZE"])
        result = run(Path(root) / f"tp{size}-stage{stage}", size, stage, world_size)
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"case": case, **result}), flush=True)


if __name__ == "__main__":
    main()
