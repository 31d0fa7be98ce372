"""LoRA on a base in FP8 or MXFP4: `zeroaccel launch --num_processes 2 examples/recipes/fp8_base.py MODEL`."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

config = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "frozen_weights": "codes"},  # keeps the codes and scales of the checkpoint
}
arguments = TrainingArguments(
    output_dir="adapters",
    deepspeed=config,  # before from_pretrained, which then reads codes
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    max_steps=15,
    logging_steps=5,
    report_to="none",
)
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
tokens = torch.arange(256 * 32).reshape(256, 32) % 251  # your tokenized texts
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train()
trainer.save_model()
