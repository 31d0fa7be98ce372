"""Every way of saving at stage 3 writes the names and shapes of the source, and transformers loads equal weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.job import FACADE, run_job

pytest.importorskip("transformers")
pytest.importorskip("peft")
SCRIPT = "tests/multi/compat/save_ways.py"
# Tied, and without the head's prefix in the files; a tower, prefixes and renames. Merged experts: test_saved_names.py
FEW = ("base/gpt2:GPT2LMHeadModel", "qwen2_vl:Qwen2VLForConditionalGeneration")
FAMILIES = [
    "qwen3_moe:Qwen3MoeForCausalLM",
    "mixtral:MixtralForCausalLM",
    "qwen2_moe:Qwen2MoeForCausalLM",
    "deepseek_v3:DeepseekV3ForCausalLM",
    "gpt_oss:GptOssForCausalLM",
    "olmoe:OlmoeForCausalLM",
    "granitemoe:GraniteMoeForCausalLM",
    "phimoe:PhimoeForCausalLM",
    "dbrx:DbrxForCausalLM",
    "llama4:Llama4ForConditionalGeneration",
    "ernie4_5_moe:Ernie4_5_MoeForCausalLM",
    "glm4_moe:Glm4MoeForCausalLM",
    "minimax:MiniMaxForCausalLM",
    "minimax_m2:MiniMaxM2ForCausalLM",
    "hunyuan_v1_moe:HunYuanMoEV1ForCausalLM",
    "phi3:Phi3ForCausalLM",
    "gpt_neox:GPTNeoXForCausalLM",
    "falcon:FalconForCausalLM",
    "bloom:BloomForCausalLM",
    "gpt2:GPT2LMHeadModel",
    "qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration",
    "llava:LlavaForConditionalGeneration",
    "paligemma:PaliGemmaForConditionalGeneration",
    "gemma3:Gemma3ForConditionalGeneration",
    "idefics3:Idefics3ForConditionalGeneration",
    "internvl:InternVLForConditionalGeneration",
    "mistral3:Mistral3ForConditionalGeneration",
    "gemma:GemmaForCausalLM",
    "opt:OPTForCausalLM",
    "t5:T5ForConditionalGeneration",
    "bart:BartForConditionalGeneration",
    "mbart:MBartForConditionalGeneration",
    "whisper:WhisperForConditionalGeneration",
    "qwen3_next:Qwen3NextForCausalLM",
    "jamba:JambaForCausalLM",
    "bamba:BambaForCausalLM",
    "mamba:MambaForCausalLM",
    "mamba2:Mamba2ForCausalLM",
    "bert:BertForMaskedLM",
    "base/bloom:BloomForCausalLM",
]


def _check(folder: Path, names: tuple[str, ...], timeout: float) -> None:
    result = run_job(2, SCRIPT, [folder, *names], timeout=timeout, imports=FACADE)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row.pop("name") for row in rows] == list(names)
    for name, row in zip(names, rows, strict=True):
        assert len(row) == 10, (name, row)
        assert not [way for way, found in row.items() if not isinstance(found, dict) or any(found.values())], name


def test_every_way_of_saving_writes_what_others_read(tmp_path: Path) -> None:
    _check(tmp_path, FEW, 120)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    _check(tmp_path, (name,), 120)
