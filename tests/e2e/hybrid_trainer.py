"""A Trainer script for a hybrid with linear attention, as users write it; run by `test_sequence_parallel_libraries.py`.

    hybrid_trainer.py FOLDER

In one process without the launcher it trains on whole sequences. It prints losses and gradient norms.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
model = Qwen3NextForCausalLM(
    Qwen3NextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, mlp_only_layers=[0, 1, 2, 3],
    )
)  # fmt: skip
samples = [
    {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    for ids in torch.randint(0, 128, (16, 64), generator=torch.Generator().manual_seed(1))
]
zero = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=3,
    logging_steps=1,
    learning_rate=1e-3,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
    deepspeed=zero if "WORLD_SIZE" in os.environ else None,
)
trainer = Trainer(model, arguments, train_dataset=samples)
trainer.train()
if arguments.process_index == 0:
    steps = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"steps": steps}), flush=True)
