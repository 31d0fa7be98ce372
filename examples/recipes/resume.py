"""Saves every 10 steps, and continues from the newest checkpoint, on any number of ranks or machines.

zeroaccel launch --num_processes 2 examples/recipes/resume.py MODEL 10
zeroaccel launch --num_processes 8 examples/recipes/resume.py MODEL 20
"""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
}
arguments = TrainingArguments(
    output_dir="trained",
    deepspeed=config,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    max_steps=int(sys.argv[2]),
    save_steps=10,
    logging_steps=5,
    report_to="none",
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
tokens = torch.arange(256 * 32).reshape(256, 32) % 251  # your tokenized texts
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train(resume_from_checkpoint=get_last_checkpoint("trained"))
