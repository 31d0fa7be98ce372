"""Ranks that load damaged checkpoints with `from_pretrained` at stage 3; each prints a JSON line with its errors.

    load_damaged.py FOLDER

Rank 0 makes the checkpoints from one good one. Every case must raise on all ranks, with one message.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from zeroaccel import compat

compat.install()

import deepspeed  # type: ignore[import-not-found]  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
INDEX = "model.safetensors.index.json"


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def truncated(folder: Path) -> None:
    file = parts(folder)[1]
    file.write_bytes(file.read_bytes()[:-100])


def flipped_header(folder: Path) -> None:
    file = parts(folder)[0]
    content = bytearray(file.read_bytes())
    content[12] ^= 0x80
    file.write_bytes(content)


def missing_file(folder: Path) -> None:
    parts(folder)[0].unlink()


def downloading(folder: Path) -> None:
    parts(folder)[0].rename(folder / "0123.incomplete")


def missing_tensor(folder: Path) -> None:
    file = parts(folder)[0]
    tensors = load_file(file)
    tensors.pop("model.layers.0.mlp.up_proj.weight", None) or tensors.popitem()
    save_file(tensors, file, {"format": "pt"})


def wrong_shape(folder: Path) -> None:
    for file in parts(folder):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = torch.ones(48)
            save_file(tensors, file, {"format": "pt"})


def other_config(folder: Path) -> None:
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(folder)


def codes_without_scales(folder: Path) -> None:
    for file in parts(folder):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if "mlp" in name:
                tensors[name] = tensor.to(torch.float8_e4m3fn)
        save_file(tensors, file, {"format": "pt"})


def other_machine(folder: Path) -> None:
    """Rank 1 looks into a folder without files."""


CASES: list[Callable[[Path], None]] = [
    truncated,
    flipped_header,
    missing_file,
    downloading,
    missing_tensor,
    wrong_shape,
    other_config,
    codes_without_scales,
    other_machine,
]


def main() -> None:
    """Loads every case, and a good checkpoint at the end."""
    root, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    good = root / "good"
    if not rank:
        config = transformers.LlamaConfig(**SIZES, num_attention_heads=2)
        transformers.LlamaForCausalLM(config).save_pretrained(good, max_shard_size="20KB")
        for damage in CASES:
            damage(Path(shutil.copytree(good, root / damage.__name__)))
    torch.distributed.barrier()
    zero3 = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    errors = {}
    for damage in CASES:
        folder = root / ("elsewhere" if damage is other_machine and rank else damage.__name__)
        try:
            cls = transformers.GPT2LMHeadModel if damage is other_config else transformers.LlamaForCausalLM
            cls.from_pretrained(folder)
            errors[damage.__name__] = ""
        except Exception as error:
            errors[damage.__name__] = f"{type(error).__name__}: {error}".replace(str(root), "ROOT")
    transformers.AutoModelForCausalLM.from_pretrained(good)
    del zero3
    print(json.dumps(errors), flush=True)


if __name__ == "__main__":
    main()
