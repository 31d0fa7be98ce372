"""GRPO with TRL: `zeroaccel launch --num_processes 2 examples/recipes/grpo.py MODEL [URL of a vLLM server]`."""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

config = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
}
arguments = GRPOConfig(
    output_dir="policy",
    deepspeed=config,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=16,
    learning_rate=1e-3,
    max_steps=6,
    logging_steps=2,
    report_to="none",
    use_vllm=len(sys.argv) > 2,  # a server: `trl vllm-serve --model MODEL`, on a GPU of its own
    vllm_mode="server",
    vllm_server_base_url=sys.argv[2] if len(sys.argv) > 2 else None,
)


def vowels(completions: list[str], **columns: object) -> list[float]:
    """The reward: the share of vowels in each completion."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


prompts = Dataset.from_dict({"prompt": ["hello", "a tale", "the sea", "one more"] * 8})
trainer = GRPOTrainer(sys.argv[1], vowels, args=arguments, train_dataset=prompts)
trainer.train()
trainer.save_model()
