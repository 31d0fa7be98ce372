"""All parameters of 13B on one GPU with 32 GB; ds_config.json is the template train_13b_on_32gb.

zeroaccel launch --num_processes 1 examples/recipes/full_13b.py MODEL
"""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="trained",
    deepspeed="ds_config.json",
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=8,  # a larger batch, not accumulation, which needs a sum in fp32
    learning_rate=1e-3,
    warmup_steps=2,
    max_steps=15,
    logging_steps=5,
    report_to="none",
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
tokens = torch.arange(256 * 32).reshape(256, 32) % 251  # your tokenized texts
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train()
trainer.save_model()
