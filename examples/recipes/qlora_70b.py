"""QLoRA of 70B on two GPUs with 24 GB: `zeroaccel launch --num_processes 2 examples/recipes/qlora_70b.py MODEL`."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

config = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "activation_checkpointing": {"wrap_blocks": True},
    "zero_optimization": {
        "stage": 3,
        "frozen_weights": "nf4",  # 4 bits for each frozen weight, a half of them on each rank
        "offload_param": {"device": "cpu", "pin_memory": True},  # in host memory until a layer needs them
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}
arguments = TrainingArguments(
    output_dir="adapters",
    deepspeed=config,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
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
trainer.save_model()  # the adapters, as PEFT loads them
