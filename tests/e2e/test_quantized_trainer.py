"""A Trainer script for QLoRA that loads its base after `TrainingArguments(deepspeed=)`, as transformers documents."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.job import run_command

LIBRARIES = ("bitsandbytes", "peft", "transformers")
pytestmark = pytest.mark.skipif(not all(map(find_spec, LIBRARIES)), reason=f"needs {', '.join(LIBRARIES)}")

SCRIPT = """
import json, sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers import Trainer, TrainingArguments
from zeroaccel.zero.access.param_registry import handle_of

stage, folder = int(sys.argv[1]), sys.argv[2]
zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero}
args = TrainingArguments(
    folder, deepspeed=config, max_steps=3, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2,
    report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
)
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)
is_sharded = handle_of(model.model.layers[0].mlp.up_proj.weight) is not None
torch.manual_seed(1)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
rows = [{"input_ids": torch.arange(16) + index, "labels": torch.arange(16) + index} for index in range(32)]
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if torch.distributed.get_rank() == 0:
    print(json.dumps({"sharded": is_sharded, "losses": losses}), flush=True)
"""


def test_a_base_is_sharded_while_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).save_pretrained(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", "2", "--use_deepspeed"]
    found = {}
    for stage in (2, 3):
        run = run_command([*launch, script, stage, tmp_path], timeout=120)
        assert run.returncodes == (0,), run.stderr
        found[stage] = json.loads(run.stdout.splitlines()[-1])
    assert (found[2]["sharded"], found[3]["sharded"]) == (False, True)
    assert found[3]["losses"] == pytest.approx(found[2]["losses"], abs=1e-6)
    assert len(set(found[3]["losses"])) == 3
