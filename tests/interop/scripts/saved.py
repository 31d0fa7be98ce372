"""Loads saved models and adapters by plain transformers and PEFT, and compares them with those of the DDP run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

_NAMES = ("model.safetensors", "adapter_model.safetensors")


def compare_saved(here: Path, plain: Path) -> str:
    """Returns how many folders were loaded again, with the greatest relative difference of a tensor, or the faults."""
    files, beside = ({path.relative_to(root) for name in _NAMES for path in root.rglob(name)} for root in (here, plain))
    if files != beside:
        return f"other files: {sorted(map(str, files ^ beside))[:3]}"
    faults, most, where = [], 0.0, ""
    for path in sorted(files):
        new, old = load_file(here / path), load_file(plain / path)
        changed = [key for key in new.keys() | old.keys() if _kind(new.get(key)) != _kind(old.get(key))]
        if changed:
            faults.append(f"{path}: other tensors: {sorted(changed)[:3]}")
            continue
        most, where = max([(most, where), *((_difference(value, old[key]), key) for key, value in new.items())])
        faults += [f"{path}: {fault}" for fault in _load((here / path).parent, new)]
    return "; ".join(faults) or (f"{len(files)}, {most:.1e}" + f" {where}" * (most > 1e-4) if files else "none")


def _kind(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _difference(new: torch.Tensor, old: torch.Tensor) -> float:
    scale = max(float(old.float().abs().max()), 1e-6) if old.numel() else 1.0
    return float((new.float() - old.float()).abs().max()) / scale if old.numel() else 0.0


def _load(folder: Path, file: dict[str, torch.Tensor]) -> list[str]:
    """Loads a folder by the class that its config names; returns differences from the file."""
    if (folder / "adapter_config.json").exists():
        import peft

        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        config = transformers.AutoConfig.from_pretrained(base)
        model = getattr(transformers, config.architectures[0]).from_pretrained(base)
        words = next((value.shape[0] for key, value in file.items() if key.endswith("embed_tokens.weight")), None)
        if words:
            model.resize_token_embeddings(words)
        loaded = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(model, str(folder)))
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, config.architectures[0])
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        faults = [f"{name}: {sorted(map(str, keys))[:3]}" for name, keys in report.items() if keys]
        if faults:
            return faults
        loaded = model.state_dict()
    return [
        f"{key} is not the file's" for key, value in file.items() if key in loaded and not _same(loaded[key], value)
    ]


def _same(loaded: torch.Tensor, file: torch.Tensor) -> bool:
    return loaded.shape == file.shape and torch.equal(loaded.float(), file.float())
