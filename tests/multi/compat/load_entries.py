"""Ranks that load a model by each entry point and argument of `from_pretrained`, plainly and then at stage 3.

    load_entries.py FOLDER

Rank 0 prints one JSON line per case: the names whose values differ, the differences of the record of names, the names
that ranks have unequally, and each load's error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.multi.compat.load_pretrained import ZERO3, same, values  # isort: skip - installs the facade
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
FILE = "model.safetensors"


class KindsConfig(transformers.PretrainedConfig):
    """Config of `Kinds`."""

    model_type = "kinds"


class Kinds(transformers.PreTrainedModel):
    """Parameters and buffers of many dtypes and ranks, and a state that is neither."""

    config_class = KindsConfig
    base_model_prefix = "kinds"

    def __init__(self, config: KindsConfig) -> None:
        super().__init__(config)
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.wave = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.counts = nn.Parameter(torch.arange(9), requires_grad=False)
        self.flags = nn.Parameter(torch.arange(9) > 3, requires_grad=False)
        self.pages = nn.Parameter(torch.arange(11, dtype=torch.uint8), requires_grad=False)
        self.scalar, self.empty = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.arange(5) > 2)
        self.times = torch.zeros(3)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def get_extra_state(self) -> Tensor:
        """Returns a state that a strict load needs."""
        return self.times

    def set_extra_state(self, state: Any) -> None:
        """Takes the state, as a program does that computes with it."""
        self.times = torch.tensor(state.tolist())


def llama(folder: Path, **sizes: Any) -> None:
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(folder)


def variant(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / "sub", variant="fp16", max_shard_size="20KB")


def renamed(folder: Path) -> None:
    llama(folder)
    tensors = {f"old.{name}": value for name, value in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE, {"format": "pt"})


def with_pickle(folder: Path) -> None:
    llama(folder)
    torch.save({name: value + 1 for name, value in load_file(folder / FILE).items()}, folder / "pytorch_model.bin")


def tied_twice(folder: Path) -> None:
    llama(folder, tie_word_embeddings=True)
    tensors = load_file(folder / FILE)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / FILE, {"format": "pt"})


def adapter(folder: Path, place: str = "adapter") -> None:
    llama(folder)
    kind = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), kind).save_pretrained(folder / place)


def kinds(folder: Path) -> None:
    model = Kinds(KindsConfig())
    model.times += 2
    model.save_pretrained(folder)


def t5(folder: Path) -> None:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)


def vit(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(folder)


def edited(folder: Path, quantization: dict[str, Any], dtype: torch.dtype = torch.bfloat16, divisor: int = 1) -> None:
    """A checkpoint whose matrices are codes of another shape or dtype, and whose config names a method."""
    llama(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if "proj" in name]:
        codes = tensors[name][:, ::divisor].float() * 100
        tensors |= {name: codes.to(dtype).contiguous(), f"{name}_scale": torch.ones(1)}
    save_file(tensors, folder / FILE, {"format": "pt"})


def auto(folder: Path, cls: Any = AutoModelForCausalLM, place: str = "", **options: Any) -> Any:
    return cls.from_pretrained(folder / place, output_loading_info=True, **options)


def of_state(folder: Path) -> Any:
    config, state = LlamaConfig.from_pretrained(folder), load_file(folder / FILE)
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, output_loading_info=True)


def with_adapter(folder: Path) -> Any:
    model, record = auto(folder)
    model.load_adapter(folder / "adapter")
    return model, record


classify = partial(auto, cls=transformers.AutoModelForSequenceClassification, num_labels=3)
CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "new head": (llama, classify),
    "new head, constructor with random numbers": (
        vit,
        partial(auto, cls=transformers.AutoModelForImageClassification, num_labels=3),
    ),
    "base class": (llama, partial(auto, cls=transformers.AutoModel)),
    "subfolder, variant": (variant, partial(auto, subfolder="sub", variant="fp16", dtype=torch.bfloat16)),
    "key_mapping": (renamed, partial(auto, key_mapping={r"^old\.": ""})),
    "state_dict": (llama, of_state),
    "use_safetensors": (with_pickle, partial(auto, use_safetensors=False)),
    "config of more layers": (llama, partial(auto, num_hidden_layers=2)),
    "ignore_mismatched_sizes": (llama, partial(auto, vocab_size=80, ignore_mismatched_sizes=True)),
    "other sizes": (llama, partial(auto, vocab_size=80)),
    "tied head saved twice": (tied_twice, auto),
    "adapter": (adapter, lambda folder: (AutoPeftModelForCausalLM.from_pretrained(folder / "adapter"), {})),
    "adapter beside the base": (partial(adapter, place=""), auto),
    "load_adapter": (adapter, with_adapter),
    "kinds": (kinds, partial(auto, cls=Kinds)),
    "kept in fp32": (t5, partial(auto, cls=transformers.AutoModelForSeq2SeqLM, dtype=torch.float16)),
    "device_map": (llama, partial(auto, device_map="auto")),
    "unknown method, int8": (partial(edited, quantization={"quant_method": "mine"}, dtype=torch.int8), auto),
    "modelopt FP8": (partial(edited, quantization={"quant_method": "modelopt"}, dtype=torch.float8_e4m3fn), auto),
    "modelopt NVFP4": (partial(edited, quantization={"quant_method": "modelopt"}, dtype=torch.uint8, divisor=2), auto),
    "unknown method, bf16": (partial(edited, quantization={"quant_method": "mine"}), auto),
}


def loaded(load: Callable[[Path], Any], folder: Path) -> tuple[dict[str, Tensor], dict[str, list[str]], str]:
    """Returns the values, the record of names, and the error."""
    torch.manual_seed(0)
    try:
        model, record = load(folder)
    except Exception as error:
        return {}, {}, f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER")[:400]
    drawn = torch.rand(3)  # after as many random numbers
    found = values(model) | {"drawn": drawn} | ({"times": model.times} if isinstance(model, Kinds) else {})
    return found, {key: sorted(map(str, names)) for key, names in record.items()}, ""


def main() -> None:
    """Loads every case."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for name, (make, load) in CASES.items():
        folder = Path(sys.argv[1]) / name.replace(" ", "_")
        if not rank:
            make(folder)
        torch.distributed.barrier()
        expected, expected_record, said = loaded(load, folder)
        zero3 = HfDeepSpeedConfig(ZERO3)
        found, record, error = loaded(load, folder)
        del zero3
        everywhere: list[Any] = [None, None]
        torch.distributed.all_gather_object(everywhere, (found, error))
        names = found.keys() | expected.keys()
        row = {
            "name": name,
            "plain": said,
            "errors": [error for _, error in everywhere],
            "differs": [n for n in names if said == error and not same(expected[n], found[n])],
            "record": [key for key in record if record[key] != expected_record.get(key, record[key])],
            "unequal": [n for n in found if not all(same(found[n], others[n]) for others, _ in everywhere)],
        }
        if not rank:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
