import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="trained",
    deepspeed="ds_config.json",
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    learning_rate=2e-3,
    max_steps=60,
    logging_steps=20,
    report_to="none",
)
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
model = AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, **sizes))  # or from_pretrained(NAME)
rows = torch.arange(256 * 32).reshape(256, 32) % 251  # or your tokenized texts
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
trainer.save_model()
