"""Ranks that save FP8 and MXFP4 models in the format of their source.

    save_codes.py FOLDER FORMAT/KIND:CLASS ...

Rank 0 prints one JSON line per class: the tensors whose bytes are not those of the source's files after each save, and
whether plain transformers loads what was trained.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.multi.compat.train_codes import adapted, config_of, train  # isort: skip - installs the facade
from tests.multi.compat.load_pretrained import source  # isort: skip
import deepspeed  # type: ignore[import-not-found]
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations import HfDeepSpeedConfig

from zeroaccel.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def other_bytes(source: Path, saved: Path) -> list[str]:
    """Returns the names, without those of adapters, whose dtype, shape or bytes differ."""
    before, after = tensors(source), tensors(saved)

    def facts(value: Tensor) -> Any:
        return value.dtype, value.shape, bytes(value.contiguous().view(-1).view(torch.uint8).tolist())

    names = {name for name in before.keys() | after.keys() if ".lora_" not in name}
    return sorted(n for n in names if n not in before or n not in after or facts(before[n]) != facts(after[n]))


def loaded(cls: Any, folder: Path, source: Path) -> dict[str, Tensor]:
    """Returns the weights that plain transformers decodes from a folder."""
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    state: dict[str, Tensor] = cls.from_pretrained(folder, dtype=torch.float32).state_dict()
    return state


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Returns the largest of the mean errors of tensors, by their mean magnitudes."""
    assert one.keys() == other.keys()
    pairs = [(one[name].float(), other[name].float()) for name in one]
    return max(((a - b).abs().sum() / b.abs().sum().clamp(min=1e-12)).item() for a, b in pairs)


def saved(name: str, folder: Path) -> dict[str, Any]:
    cls = getattr(transformers, name.partition(":")[2])
    row: dict[str, Any] = {"name": name}
    rank0 = not torch.distributed.get_rank()
    codes = config_of(3)
    decoded = copy.deepcopy(codes)
    del decoded["zero_optimization"]["frozen_weights"]

    known = HfDeepSpeedConfig(codes)  # adapters beside the codes
    model = adapted(name, folder)
    engine, *_ = deepspeed.initialize(model=model, config=codes)
    train(engine)
    engine.save_model(folder / "adapted", max_nbytes=10**9, requantize=folder)
    engine.save_model(folder / "values", max_nbytes=10**9)
    model.save_pretrained(folder / "adapter", is_main_process=rank0)
    engine.destroy()
    del known, model, engine

    known = HfDeepSpeedConfig(decoded)  # merged, and then trained as a whole
    torch.distributed.barrier()
    base = cls.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().requires_grad_(True)
    engine, *_ = deepspeed.initialize(model=model, config=decoded)
    engine.save_16bit_model(folder / "merged", "model.safetensors", requantize=folder)
    expected = engine._consolidated_16bit_state_dict()
    train(engine)
    trained = engine._consolidated_16bit_state_dict()
    engine.save_checkpoint(str(folder / "run"))
    engine.save_model(folder / "trained", max_nbytes=10**9, requantize=True)
    engine.destroy()
    del known, model, engine, base
    if rank0:
        convert_zero_checkpoint_to_fp32_state_dict(folder / "run", folder / "converted", like=folder, requantize=True)
        row["adapted"] = other_bytes(folder, folder / "adapted")
        row["merged"] = other_bytes(folder, folder / "merged")
        row["converted"] = other_bytes(folder / "trained", folder / "converted")
        row["names"] = sorted(tensors(folder / "trained").keys() ^ tensors(folder).keys())
        base = cls.from_pretrained(folder, dtype=torch.float32).state_dict()
        values = {key: value for key, value in tensors(folder / "values").items() if ".lora_" not in key}
        row["values"] = sorted(key for key in values if key in base and not torch.equal(values[key], base[key]))
        row["moved"] = distance(base, expected), distance(base, trained)
        row["merged error"] = distance(loaded(cls, folder / "merged", folder), expected)
        row["trained error"] = distance(loaded(cls, folder / "trained", folder), trained)
        row["report"] = json.loads((folder / "trained" / "requantized.json").read_text())
    return row


def main() -> None:
    """Saves the classes of the command line."""
    deepspeed.init_distributed("gloo")
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name.replace(":", "-").replace("/", "-")
        reason = source(name, folder)
        row = {"name": name, "not built": reason} if reason else saved(name, folder)
        if not torch.distributed.get_rank():
            print(json.dumps(row), flush=True)
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
