"""Ranks that load damaged checkpoints with `from_pretrained`; each prints a JSON line with its errors.

    load_damaged.py FOLDER STAGE

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


def misshapen_scales(folder: Path) -> None:
    """Scales of another grid of blocks than the config's."""
    codes_without_scales(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8], "dequantize": True}
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / INDEX).read_text())
    for file in parts(folder):
        tensors = load_file(file)
        scales = {f"{name}_scale_inv": torch.ones(3, 5) for name in tensors if "mlp" in name}
        save_file(tensors | scales, file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(scales, file.name)
    (folder / INDEX).write_text(json.dumps(index))


def missing_scale(folder: Path) -> None:
    """Blocks of codes, one of which has no scales."""
    misshapen_scales(folder)
    index = json.loads((folder / INDEX).read_text())
    for file in parts(folder):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            rows, columns = tensors[name.removesuffix("_scale_inv")].shape
            tensors[name] = torch.ones(rows // 8, columns // 8)
        lost = tensors.pop("model.layers.1.mlp.up_proj.weight_scale_inv", None)
        if lost is not None:
            del index["weight_map"]["model.layers.1.mlp.up_proj.weight_scale_inv"]
        save_file(tensors, file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))


def as_bin(folder: Path) -> None:
    """Replaces the files by `.bin` files."""
    index = json.loads((folder / INDEX).read_text())
    for file in parts(folder):
        torch.save(load_file(file), file.with_suffix(".bin"))
        file.unlink()
    index["weight_map"] = {name: file.replace("safetensors", "bin") for name, file in index["weight_map"].items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / INDEX).unlink()


def truncated_bin(folder: Path) -> None:
    as_bin(folder)
    file = sorted(folder.glob("*.bin"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def missing_bin(folder: Path) -> None:
    as_bin(folder)
    sorted(folder.glob("*.bin"))[1].unlink()


def pickle_with_code(folder: Path) -> None:
    as_bin(folder)
    torch.save({"run": Program()}, sorted(folder.glob("*.bin"))[0])


def duplicate_names(folder: Path) -> None:
    """Two files have a tensor, and the index names a third one for it."""
    index, files = json.loads((folder / INDEX).read_text()), parts(folder)
    name = next(name for name, file in index["weight_map"].items() if file == files[0].name)
    save_file({**load_file(files[1]), name: load_file(files[0])[name]}, files[1], {"format": "pt"})
    index["weight_map"][name] = files[2].name
    (folder / INDEX).write_text(json.dumps(index))


class Program:
    """Code in a pickle, which must not run."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[()]]:
        return os.abort, ()


def empty_file(folder: Path) -> None:
    parts(folder)[1].write_bytes(b"")


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
    misshapen_scales,
    missing_scale,
    pickle_with_code,
    duplicate_names,
    truncated_bin,
    missing_bin,
    empty_file,
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
    zero3 = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(sys.argv[2])}})
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
