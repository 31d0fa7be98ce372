"""`zero-to-fp32 --like`: the files have the names, shapes and values of the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import typed
from tests.unit.checkpoint.checkpoint_by_hand import Entry, make_checkpoint
from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import dtype_name

transformers = pytest.importorskip("transformers")
zoo = pytest.importorskip("tests.multi.zero.zoo")

# Merged experts, fused projections, prefixes, tied weights, encoders and decoders, buffers.
QUICK = ["mixtral:MixtralForCausalLM", "t5:T5ForConditionalGeneration", "llava:LlavaForConditionalGeneration"]
SLOW = [
    *(
        "marian:MarianMTModel",
        "llama:LlamaForCausalLM",
        "gpt2:GPT2LMHeadModel",
        "gpt_neox:GPTNeoXForCausalLM",
        "opt:OPTForCausalLM",
    ),
    *(
        "bart:BartForConditionalGeneration",
        "mbart:MBartForConditionalGeneration",
        "whisper:WhisperForConditionalGeneration",
    ),
    *(
        "bert:BertForMaskedLM",
        "roberta:RobertaForMaskedLM",
        "albert:AlbertForMaskedLM",
        "deberta-v2:DebertaV2ForMaskedLM",
    ),
    *("vit:ViTForImageClassification", "resnet:ResNetForImageClassification", "clip:CLIPModel", "siglip:SiglipModel"),
    *("qwen3:Qwen3ForCausalLM", "qwen3_moe:Qwen3MoeForCausalLM", "gpt_oss:GptOssForCausalLM", "phi3:Phi3ForCausalLM"),
    *("olmoe:OlmoeForCausalLM", "granitemoe:GraniteMoeForCausalLM", "jetmoe:JetMoeForCausalLM"),
    *("wav2vec2:Wav2Vec2ForCTC", "hubert:HubertForCTC", "detr:DetrForObjectDetection", "gemma3:Gemma3ForCausalLM"),
    *("vipllava:VipLlavaForConditionalGeneration", "video_llava:VideoLlavaForConditionalGeneration"),
    *("t5gemma2:T5Gemma2ForConditionalGeneration", "llava_onevision:LlavaOnevisionForConditionalGeneration"),
    *("mixtral:MixtralForSequenceClassification", "llava_next:LlavaNextForConditionalGeneration"),
]


def _entry(value: torch.Tensor) -> Entry:
    return Entry(dtype_name(value.dtype), value.detach().contiguous().numpy().copy())


def _checkpoint_of(model: Any, folder: Path) -> None:
    named: dict[int, str] = {}
    ties, parameters = {}, {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first = named.setdefault(id(param), name)
        if first == name:
            parameters[name] = _entry(param)
        else:
            ties[name] = first
    persistent = model.state_dict().keys()
    buffers = {name: _entry(value) for name, value in model.named_buffers() if name in persistent}
    make_checkpoint(folder, parameters, ties=ties, buffers=buffers)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def _compare(kind: str, folder: Path) -> None:
    kind, _, cls = kind.partition(":")
    zoo.build(kind, cls, 0)[0].save_pretrained(folder / "source")
    _checkpoint_of(getattr(transformers, cls).from_pretrained(folder / "source"), folder / "checkpoint")
    convert_zero_checkpoint_to_fp32_state_dict(
        folder / "checkpoint", folder / "out", max_shard_size="300KB", like=folder / "source"
    )
    source, out = _tensors(folder / "source"), _tensors(folder / "out")
    assert {name: value.shape for name, value in source.items()} == {name: value.shape for name, value in out.items()}
    assert [name for name, value in source.items() if not torch.equal(value, out[name])] == []


@pytest.mark.parametrize("kind", QUICK)
def test_files_are_those_of_the_source(kind: str, tmp_path: Path) -> None:
    _compare(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
def test_files_of_more_families_are_those_of_the_source(kind: str, tmp_path: Path) -> None:
    try:
        _compare(kind, tmp_path)
    except zoo.NotBuilt as reason:
        pytest.skip(str(reason))


def _small(folder: Path) -> Path:
    values = {"embed.weight": torch.rand(5, 3), "out.weight": torch.rand(2, 3)}
    make_checkpoint(folder / "checkpoint", {name: _entry(value) for name, value in values.items()})
    return folder / "checkpoint"


def test_other_names_and_shapes_are_an_error_or_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, like, out = _small(tmp_path), tmp_path / "model.safetensors", tmp_path / "out"
    save_file({"embed.weight": torch.zeros(6, 3), "head.weight": torch.zeros(2, 3)}, like)
    with pytest.raises(
        CheckpointError,
        match=r"1 names that the files do not have: out\.weight; "
        r"1 names that the checkpoint does not have: head\.weight; "
        r"1 other shapes: embed\.weight is \[5, 3\], and \[6, 3\] in the files; .*--allow-differences",
    ):
        convert_zero_checkpoint_to_fp32_state_dict(checkpoint, out, like=like)
    assert not out.exists()
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint, out, like=like, allow_differences=True)
    assert "1 names that the files do not have: out.weight" in capsys.readouterr().out
    assert _tensors(out).keys() == {"embed.weight", "out.weight"}


def test_an_index_alone_gives_the_names(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    weights = dict.fromkeys(("embed.weight", "out.weight"), "model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"weight_map": weights}))
    typed("zero-to-fp32", _small(tmp_path), tmp_path / "out", "--like", index)
    assert _tensors(tmp_path / "out").keys() == weights.keys()


def test_the_copied_script_names_the_command_that_can(tmp_path: Path) -> None:
    with pytest.raises(zero_to_fp32.ArgumentsError, match="zeroaccel zero-to-fp32"):
        zero_to_fp32.run([str(_small(tmp_path)), str(tmp_path / "out"), "--like", str(tmp_path)], "zero_to_fp32.py")
