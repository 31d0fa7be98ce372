"""The recipes of docs/recipes.md run as a reader runs them, with tiny models in place of the named ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.support.environment import ROOT
from tests.support.job import run_command
from zeroaccel.cli.config.convert import validate_file
from zeroaccel.templates import ABOUT

pytest.importorskip("transformers")
RECIPES = ROOT / "examples" / "recipes"
PAGE = (ROOT / "docs" / "recipes.md").read_text()
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
CONFIG = ("config", "template")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Folder of a tiny Llama with a tokenizer of single letters."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    folder = tmp_path / "tiny"
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **SIZES)).save_pretrained(folder)
    letters = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(code): code for code in range(3, 256)}
    tokenizer = Tokenizer(models.BPE(letters, [], unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def _to_fp8(folder: Path) -> None:
    """Replaces the matrices of the blocks by codes in FP8 with a scale for each block of 32 x 32."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".layers." in name and weights[name].dim() == 2]:
        blocks = weights[name].unflatten(0, (-1, 32)).unflatten(2, (-1, 32))  # (rows, 32, columns, 32)
        scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        weights[name] = codes.flatten(2).flatten(0, 1).contiguous()
        weights[f"{name}_scale_inv"] = scales
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(config))


def _run(folder: Path, name: str, *words: object, ranks: int = 2) -> list[float]:
    launch = (sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", ranks)
    result = run_command([*launch, RECIPES / name, *words], timeout=100.0, cwd=folder)
    assert result.returncode == 0, result.stderr
    return [float(loss) for loss in re.findall(r"'loss': '([-\d.]+)'", result.stdout)]


def test_adapters_on_an_fp8_base(tiny: Path, tmp_path: Path) -> None:
    _to_fp8(tiny)
    losses = _run(tmp_path, "fp8_base.py", tiny)
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert all("lora" in name for name in load_file(tmp_path / "adapters" / "adapter_model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_scripts_of_trl_run_by_the_commands_of_the_page(tiny: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("trl")
    data = tmp_path / "data"
    data.mkdir()
    row = {"text": "a tale of the sea"} if name == "sft" else {"prompt": "a", "chosen": " tale", "rejected": " zz"}
    (data / "train.jsonl").write_text("\n".join([json.dumps(row)] * 32))
    template = [sys.executable, "-m", "zeroaccel.cli", *CONFIG, "zero_stage3_bf16", "-o", "zero3.json"]
    assert run_command(template, cwd=tmp_path).returncode == 0
    (words,) = re.findall(rf"^zeroaccel (launch .* trl\.scripts\.{name} .*)$", PAGE, re.MULTILINE)
    words = [*words.replace("MODEL", str(tiny)).replace("DATA", str(data)).split(), "--use_cpu", "--report_to", "none"]
    steps = ["--max_steps", "6", "--logging_steps", "2", "--learning_rate", "1e-3", "--output_dir", "trained"]
    result = run_command([sys.executable, "-m", "zeroaccel.cli", *words, *steps], timeout=100.0, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", result.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert (tmp_path / "trained" / "model.safetensors").exists()


@pytest.mark.slow
def test_qlora_with_codes_in_host_memory(tiny: Path, tmp_path: Path) -> None:
    losses = _run(tmp_path, "qlora_70b.py", tiny)
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert all("lora" in name for name in load_file(tmp_path / "adapters" / "adapter_model.safetensors"))


@pytest.mark.slow
def test_all_parameters_by_the_template_of_13b(tiny: Path, tmp_path: Path) -> None:
    template = [sys.executable, "-m", "zeroaccel.cli", *CONFIG, "train_13b_on_32gb", "-o", "ds_config.json"]
    assert run_command(template, cwd=tmp_path).returncode == 0
    losses = _run(tmp_path, "full_13b.py", tiny, ranks=1)
    assert len(losses) == 3
    assert losses[2] < losses[0] - 0.1
    assert (tmp_path / "trained" / "model.safetensors").exists()


@pytest.mark.slow
def test_grpo_rewards_completions(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert len(_run(tmp_path, "grpo.py", tiny)) == 3
    assert (tmp_path / "policy" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_continues_on_other_ranks(tiny: Path, tmp_path: Path) -> None:
    first = _run(tmp_path, "resume.py", tiny, 10)
    second = _run(tmp_path, "resume.py", tiny, 20, ranks=1)
    assert (len(first), len(second)) == (2, 2)  # the second run logs steps 15 and 20 only
    assert first[0] > first[1] > second[1]


def test_the_files_of_other_programs_are_complete() -> None:
    # axolotl and ms-swift are not installed with the tests; tests/interop/results/programs.md has their runs.
    axolotl = yaml.safe_load((RECIPES / "axolotl.yml").read_text())
    assert {"base_model", "datasets", "output_dir", "micro_batch_size", "num_epochs", "learning_rate"} <= set(axolotl)
    swift = (RECIPES / "ms_swift.sh").read_text()
    assert re.search(r"^zeroaccel launch --num_processes \d+ -m swift\.cli\.sft", swift, re.MULTILINE)
    assert axolotl["deepspeed"] == "zero3.json"
    assert re.search(r"--deepspeed zero3\.json", swift)
    assert "zero_stage3_bf16.json" in ABOUT
    assert validate_file(str(ROOT / "templates" / "zero_stage3_bf16.json"))[0] == "JSON config"


def test_the_page_shows_each_recipe_in_at_most_60_lines() -> None:
    for path in sorted(RECIPES.iterdir()):
        if path.is_file():
            assert len(path.read_text().splitlines()) < 60
            assert f"<!-- code: examples/recipes/{path.name} -->" in PAGE
            assert path.suffix != ".py" or f"examples/recipes/{path.name}" in PAGE.replace(
                f"code: examples/recipes/{path.name}", ""
            )
