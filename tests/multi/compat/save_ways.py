"""Ranks that save small models in every way, beside the files that the models come from and plain transformers.

    save_ways.py FOLDER [FORMAT/]KIND:CLASS ...

Rank 0 prints one JSON line per class: for each way of saving the names, shapes and dtypes that are not those of the
source's files, and the weights that differ when plain transformers loads the files on one process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.multi.compat.load_pretrained import ZERO3, names_of, same, source  # isort: skip - installs the facade
import deepspeed  # type: ignore[import-not-found]
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from zeroaccel.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict

Save = Callable[[Any, Any, Path], object]


def _trainer(engine: Any, model: Any, folder: Path) -> None:
    arguments = transformers.TrainingArguments(str(folder), deepspeed=ZERO3, use_cpu=True, report_to="none")
    trainer = transformers.Trainer(model, arguments)
    trainer.model_wrapped = trainer.deepspeed = engine  # as `train()` sets them
    trainer.accelerator.deepspeed_config = ZERO3
    trainer.save_model(str(folder))


def _like(engine: Any, model: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder / "checkpoints"))
    if not torch.distributed.get_rank():
        model.config.save_pretrained(folder)
        like = folder.parent.parent / "source"
        convert_zero_checkpoint_to_fp32_state_dict(
            folder / "checkpoints", folder, like=like, allow_differences="base" in like.parent.name
        )


def _own_names(engine: Any, model: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder / "checkpoints"))
    if not torch.distributed.get_rank():
        convert_zero_checkpoint_to_fp32_state_dict(folder / "checkpoints", folder)


WAYS: dict[str, Save] = {
    "save_model": lambda engine, model, folder: (engine.save_model(folder, max_nbytes=100_000), _config(model, folder)),
    "save_16bit_model": lambda engine, model, folder: (
        engine.save_16bit_model(folder, "model.safetensors"),
        _config(model, folder),
    ),
    "save_16bit_model .bin": lambda engine, model, folder: (engine.save_16bit_model(folder), _config(model, folder)),
    "save_pretrained": lambda engine, model, folder: model.save_pretrained(
        folder, is_main_process=not torch.distributed.get_rank(), max_shard_size="100KB"
    ),
    "Trainer": _trainer,
    "zero-to-fp32 --like": _like,
}


def _adapted(cls: Any, source: Path) -> Any:
    model = cls.from_pretrained(source)
    torch.manual_seed(0)
    refused = ["out_proj", "conv1d"] if model.config.model_type.startswith("mamba") else None  # by PEFT
    kind = LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear", exclude_modules=refused)
    return get_peft_model(model, kind)


def _save_adapted(engine: Any, model: Any, root: Path) -> None:
    rank0 = not torch.distributed.get_rank()
    engine.save_model(root / "whole", max_nbytes=100_000)
    model.save_pretrained(root / "adapter", is_main_process=rank0)
    engine.destroy()
    model.merge_and_unload().save_pretrained(root / "merged", is_main_process=rank0)


def _read_adapted(cls: Any, root: Path, before: dict[str, list[int]]) -> dict[str, Any]:
    """Returns what differs in the saves of adapters, beside those that PEFT merges on one process."""
    source, folder = root / "source", root / "saved"
    expected = _adapted(cls, source).merge_and_unload().state_dict()
    merged = cls.from_pretrained(folder / "merged").state_dict()
    adapters = PeftModel.from_pretrained(cls.from_pretrained(source), folder / "adapter")
    whole, after = names_of(folder / "whole"), names_of(folder / "merged")
    base, files = (
        {k: v for f in path.glob("*.safetensors") for k, v in load_file(f).items()}
        for path in (root / "theirs", folder / "whole")
    )
    return {
        "PEFT merged": {
            "files": _differing(before, after),
            "values": differences(expected, merged),
        },
        "PEFT adapter": {"values": differences(expected, adapters.merge_and_unload().state_dict())},
        "PEFT whole": {
            "files": sorted(n for n in whole if (".lora_" not in n and n not in before) or n.startswith("base_model")),
            "values": differences(base, {name: value for name, value in files.items() if ".lora_" not in name}),
        },
    }


def _config(model: Any, folder: Path) -> None:
    if not torch.distributed.get_rank():
        model.config.save_pretrained(folder)


def files_of(folder: Path) -> dict[str, list[int]]:
    if not (folder / "pytorch_model.bin").exists():
        return names_of(folder)
    tensors = torch.load(folder / "pytorch_model.bin")
    firsts = {id(value): name for name, value in reversed(tensors.items())}  # it has all names of a tied weight
    return {name: list(tensors[name].shape) for name in firsts.values()}


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    names = expected.keys() | found.keys()
    return sorted(n for n in names if n not in found or n not in expected or not same(expected[n], found[n]))


def _differing(before: dict[str, list[int]], after: dict[str, list[int]]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def saved(name: str, root: Path) -> dict[str, Any]:
    cls = getattr(transformers, name.partition(":")[2])
    zero3 = HfDeepSpeedConfig(ZERO3)
    model = cls.from_pretrained(root / "source")
    engine, *_ = deepspeed.initialize(model=model, config={**ZERO3, "optimizer": {"type": "Adam"}})
    row: dict[str, Any] = {"name": name}
    for way, save in WAYS.items():
        folder = root / "saved" / way.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        try:
            save(engine, model, folder)
        except Exception as error:
            row[way] = f"{type(error).__name__}: {error}"[:400]
            if len(sys.argv) == 3:
                raise
        torch.distributed.barrier()
    module_names = root / "saved" / "own"
    _own_names(engine, model, module_names)
    engine.destroy()
    del engine, model
    adapted = _adapted(cls, root / "source")
    optimizer = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=adapted, optimizer=optimizer, config=ZERO3)
    failed: dict[str, Any] = {}
    try:
        _save_adapted(engine, adapted, root / "saved")
    except Exception as error:
        failed = {"PEFT": f"{type(error).__name__}: {error}"[:400]}
        if len(sys.argv) == 3:
            raise
    torch.distributed.barrier()
    del zero3, engine, adapted
    unset_hf_deepspeed_config()  # that of the Trainer
    if torch.distributed.get_rank():
        return row
    own = cls.from_pretrained(root / "source")
    own.save_pretrained(root / "theirs")
    source, before, plain = names_of(root / "source"), names_of(root / "theirs"), own.state_dict()
    for way in WAYS:
        if way in row:
            continue
        folder = root / "saved" / way.replace(" ", "_")
        after = files_of(folder)
        loaded, record = cls.from_pretrained(folder, output_loading_info=True)
        row[way] = {
            "files": _differing(source if way.endswith("--like") else before, after),
            "values": differences(plain, loaded.state_dict()),
            "record": {key: sorted(map(str, value)) for key, value in record.items() if value},
        }
    fresh = cls(own.config)
    fresh.load_state_dict(
        {k: v for file in module_names.glob("*.safetensors") for k, v in load_file(file).items()}, strict=False
    )
    row["zero-to-fp32"] = {"values": differences(plain, fresh.state_dict())}
    return row | (failed or _read_adapted(cls, root, before))


def main() -> None:
    """Saves the classes of the command line."""
    deepspeed.init_distributed("gloo")
    for name in sys.argv[2:]:
        root = Path(sys.argv[1]) / name.replace(":", "-").replace("/", "-")
        reason = source(name, root / "source")
        try:
            row = {"name": name, "not built": reason} if reason else saved(name, root)
        except Exception as error:
            if len(sys.argv) == 3:
                raise
            row = {"name": name, "error": f"{type(error).__name__}: {error}"[:600]}
        if not int(os.environ["RANK"]):
            print(json.dumps(row), flush=True)
        torch.distributed.barrier()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
