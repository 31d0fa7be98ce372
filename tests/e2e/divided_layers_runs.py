"""A user's Trainer script with a DeepSpeed config that splits layers; run on every rank, with the facade installed.

    divided_layers_runs.py FOLDER AXIS:KIND:SIZE:STAGE[:RESUMED_FROM] ...

AXIS is "tp" for `autotp_size`, "ep" for `autoep_size`, "launched" for experts split by the launcher's flag, or
"ddp" for a Trainer without a DeepSpeed config. RESUMED_FROM is an earlier case, written with dashes; this case resumes
from its checkpoint after two of four steps. Rank 0 prints one JSON line per case: the losses of training and
evaluation, and the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

VOCABULARY = 64
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
SECTIONS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel": {"autotp_size": 0}},
    "ep": {"expert_parallel": {"enabled": True, "autoep_size": 0}},
    "launched": {"checkpoint": {"save_random_state": True}},  # its checkpoint contains the mesh
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Dataset of `count` sequences of twelve tokens."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self._ids = torch.randint(VOCABULARY, (count, 12), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index].clone()}


def run(folder: Path, axis: str, kind: str, size: int, stage: int, resumed: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    for section, keys in SECTIONS.get(axis, {}).items():
        settings[section] = {key: size if key == f"auto{axis}_size" else value for key, value in keys.items()}
    arguments = TrainingArguments(
        str(folder),
        deepspeed=None if axis == "ddp" else settings,
        use_cpu=axis == "ddp",  # otherwise each rank would train alone
        # A step has the same number of samples whichever ranks share the layers.
        per_device_train_batch_size=2 * size // int(os.environ["WORLD_SIZE"]) if axis == "tp" else 2,
        per_device_eval_batch_size=2,
        max_steps=4,
        optim="sgd",  # Adam turns rounding errors into steps where a gradient is almost 0
        learning_rate=0.1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        dataloader_pin_memory=False,
    )
    torch.manual_seed(5)
    model, config = (getattr(transformers, kind + name) for name in ("ForCausalLM", "Config"))
    made = model(config(**SIZES, **({} if axis == "tp" else EXPERTS)))
    trainer = Trainer(model=made, args=arguments, train_dataset=Samples(64), eval_dataset=Samples(8))
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed / "checkpoint-2"))
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
        axis, kind, size, stage, *resumed = case.split(":")
        before = Path(root) / resumed[0] if resumed else None
        result = run(Path(root) / case.replace(":", "-"), axis, kind, int(size), int(stage), before)
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"case": case, **result}), flush=True)


if __name__ == "__main__":
    main()
