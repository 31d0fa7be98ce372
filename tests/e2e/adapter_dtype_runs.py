"""Runs of TRL with adapters over a bf16 base: the dtypes of the adapters, and the lines about them.

    adapter_dtype_runs.py FOLDER

Rank 0 prints one JSON line per run. `trainers` lists TRL's modules that turn PEFT's casts of adapters off, and whether
the call that they make is the one that notes it.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from trl import SFTConfig, SFTTrainer

from tests.e2e.huggingface_runs import arguments, config, forget, llama, texts, tokenizer, written
from zeroaccel import logs
from zeroaccel.comm.topology import init_process_group

ADAPTERS = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
FP32 = {"keep_in_fp32_modules": ["lora_A", "lora_B"]}


def trained(folder: Path, stage: str, *, made_by_trl: bool = True, **sections: Any) -> dict[str, Any]:
    """Trains 4 steps; the program or TRL makes the adapters."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroaccel").addHandler(handler)
    logs._seen.clear()
    transformers.set_seed(0)
    base = written(folder, lambda: llama().to(torch.bfloat16))
    settings = arguments(
        folder,
        config(stage, **sections),
        SFTConfig,
        max_length=16,
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=True,
        log_level="info",  # transformers gives the level to the facade's logger
    )
    model = base()
    run = SFTTrainer(
        model=model if made_by_trl else get_peft_model(model, ADAPTERS),
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"text": texts(32, 1)}),
        processing_class=tokenizer(),
        peft_config=ADAPTERS if made_by_trl else None,
    )
    before = dtypes(run.model.named_parameters())
    generator = torch.Generator().manual_seed(0)  # TRL draws other numbers before it makes adapters
    for name, param in run.model.named_parameters():
        if "lora_" in name:
            param.data.copy_(torch.randn(param.shape, generator=generator).mul(0.1).bfloat16())
    run.train()
    inside = dtypes(run.model_wrapped.module.named_parameters())
    run.save_model(str(folder / "final"))
    torch.distributed.barrier()
    saved = dtypes(load_file(folder / "final" / "adapter_model.safetensors").items())
    logging.getLogger("zeroaccel").removeHandler(handler)
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    said = [line for line in lines if "adapters" in line]
    return {"losses": losses, "before": before, "inside": inside, "saved": saved, "said": said}


def dtypes(tensors: Any) -> list[str]:
    return sorted({str(tensor.dtype) for name, tensor in tensors if "lora_" in name})


def trainers() -> dict[str, bool]:
    """Returns TRL's modules that pass autocast_adapter_dtype=False, and whether their call is the patched one."""
    root = Path(trl.__file__).parent
    turned_off = 'get_peft_model_kwargs["autocast_adapter_dtype"] = False'
    names = [path.relative_to(root).with_suffix("") for path in root.rglob("*.py") if turned_off in path.read_text()]
    modules = [importlib.import_module(".".join(("trl", *name.parts))) for name in sorted(names)]
    return {module.__name__: module.get_peft_model is get_peft_model for module in modules}


def main(folder: str) -> None:
    init_process_group()
    runs: dict[str, dict[str, Any]] = {
        "default, stage 3": {"stage": "3"},
        "default, stage 2": {"stage": "2"},
        "fp32, stage 3": {"stage": "3", "data_types": FP32},
        "fp32, stage 2": {"stage": "2", "data_types": FP32},
        "fp32, stage 3, the program's own": {"stage": "3", "data_types": FP32, "made_by_trl": False},
    }
    results: dict[str, Any] = {}
    for number, (name, run) in enumerate(runs.items()):
        forget()
        results[name] = trained(Path(folder) / str(number), **run)
    forget()
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"runs": results, "trainers": trainers()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
