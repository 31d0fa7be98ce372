"""Every save of a converted model writes the names and values of the source, and other names are logged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.job import run_command
from tests.support.libraries import TRANSFORMERS_4

pytest.importorskip("transformers")

SCRIPT = """\
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from zeroaccel import Accelerator

accelerator = Accelerator()
folder, rank0 = Path(sys.argv[1]), accelerator.is_main_process
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, num_key_value_heads=2, head_dim=16)
if rank0:
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts)).save_pretrained(folder / "source")
accelerator.wait_for_everyone()

source = load_file(folder / "source" / "model.safetensors")
assert "model.layers.0.mlp.experts.1.up_proj.weight" in source

def check(values):
    assert values.keys() == source.keys()
    assert [name for name in source if not torch.equal(source[name], values[name])] == []

plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "source")
model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
assert accelerator.save_pretrained(model, folder / "saved") == ["model.safetensors"]
check(load_file(folder / "saved" / "model.safetensors"))
names = accelerator.save_model(model, folder / "streamed", max_shard_size="20KB")
check({key: value for name in names[:-1] for key, value in load_file(folder / "streamed" / name).items()})
accelerator.save_model(model, folder / "pickled", safe_serialization=False)
check(torch.load(folder / "pickled" / "pytorch_model.bin"))
model.save_16bit_model(folder / "one", "model.safetensors")
check(load_file(folder / "one" / "model.safetensors"))
plain.save_pretrained(folder / "own", is_main_process=rank0, max_shard_size="20KB")
check({key: value for file in (folder / "own").glob("*.safetensors") for key, value in load_file(file).items()})
plain._weight_conversions = []
plain.save_pretrained(folder / "renamed", is_main_process=rank0)
accelerator.wait_for_everyone()
print("done")
accelerator.end_training()
"""


def test_saves_have_the_names_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("--cpu", "--num_processes", 2, "--engine", "zeroaccel", "--zero_stage", 3, "--zero3_init_flag", "true")
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", *flags, tmp_path / "script.py", tmp_path]
    result = run_command(command, timeout=120.0)
    assert result.returncode == 0, result.stderr
    lines = [each for each in result.stderr.splitlines() if "differs from its source" in each]
    if TRANSFORMERS_4:  # it converts no weights, so the last save has the source's names as well
        assert lines == []
        return
    (line,) = lines
    assert f"{tmp_path / 'renamed'} differs from its source {tmp_path / 'source'}" in line
    names = "model.layers.0.mlp.experts.down_proj; model.layers.0.mlp.experts.gate_up_proj"
    assert f"2 names that the files do not have: {names}" in line
    assert "6 names that the checkpoint does not have: model.layers.0.mlp.experts.0.down_proj.weight; " in line
