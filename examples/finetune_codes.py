"""Adapters on a model in FP8 or MXFP4, such as gpt-oss, and the merged model in the same format.

`zeroaccel launch --num_processes 2 examples/finetune_codes.py MODEL` trains adapters beside the codes, in `adapters/`;
the same command with `--merge` writes `merged/`, which servers read like MODEL.
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from zeroaccel import Accelerator, ZeroPlugin


def train(name: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "frozen_weights": "codes"},  # the bytes of the checkpoint, sharded
    }
    arguments = TrainingArguments(
        output_dir="adapters",
        deepspeed=config,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_steps=30,
        logging_steps=10,
        report_to="none",
    )
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "o_proj"]))
    tokens = torch.arange(256 * 32).reshape(256, 32) % 97  # your tokenized texts
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()
    trainer.save_model()


def merge(name: str) -> None:
    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=3, zero3_init_flag=True))
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)  # decoded
    model = accelerator.prepare(PeftModel.from_pretrained(base, "adapters").merge_and_unload())
    files = accelerator.save_pretrained(model, "merged", requantize=name)
    accelerator.print(f"merged: {', '.join(files)}, errors in requantized.json")
    accelerator.end_training()


if __name__ == "__main__":
    (merge if "--merge" in sys.argv else train)(sys.argv[1])
