"""Compares the peak memory that `zeroaccel.estimate` predicts with that of a real run.

    python benchmarks/estimate_peak.py                     # all stages, two ranks each; about three minutes
    python benchmarks/estimate_peak.py --frozen            # adapters on frozen bases; needs peft, and bitsandbytes
    zeroaccel launch --cpu --num_processes 2 benchmarks/estimate_peak.py --stage 3    # one of them, as JSON

The model is that of examples/train_gpt.py, and with adapters a Llama or a Mixtral of transformers with PEFT's LoRA. The
measured peak is the largest amount that torch's CPU allocator had allocated at a time in the second step, according to
torch's memory profiler: all tensors, and all temporary memory of kernels. Each stage runs in new processes, because a
second profile in one process loses events.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import zeroaccel
from zeroaccel.estimate import Precision, Workload, estimate
from zeroaccel.estimate.workload import FrozenWeights

ROOT = Path(__file__).resolve().parents[1]
BATCH, LENGTH, RANKS, ADAPTERS = 8, 128, 2, 8
BASES = ("", "int8", "nf4", "mxfp4", "bnb_nf4", "bnb_nf4_double")
MODELS = ("gpt", "llama", "mixtral")
# "all-linear" includes the experts of a Mixtral; PEFT computes the full product of their adapters.
_TARGETS: dict[str, Any] = {"llama": "all-linear", "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"]}
_STEP = "the step that is measured"


def demo() -> tuple[nn.Module, Callable[[nn.Module, int, int], Any]]:
    """Returns the model and step of examples/train_gpt.py; a MODEL for `zeroaccel estimate`."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None and spec.loader is not None, "the example has moved"
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.GPT(dim=320, layers=3, heads=5), _step


def _step(model: nn.Module, batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def llama() -> tuple[nn.Module, Callable[[nn.Module, int, int], Any]]:
    """Returns a small Llama; a MODEL for `zeroaccel estimate`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **_SIZES)), _causal_step


def mixtral() -> tuple[nn.Module, Callable[[nn.Module, int, int], Any]]:
    """Returns a small Mixtral, whose experts are three-dimensional parameters."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**_SIZES, "intermediate_size": 512}
    return MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **sizes)), _causal_step


_SIZES: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6},
    **{"vocab_size": 2048, "num_attention_heads": 4},
}


def _causal_step(model: nn.Module, batch: int, length: int) -> tuple[Tensor, Any]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    output = model(input_ids=ids, labels=ids)
    return output.loss, output


def _model(name: str, frozen: str | None) -> tuple[nn.Module, Callable[[nn.Module, int, int], Any]]:
    """Returns the model to train: `frozen` names the storage of its base under adapters, None without adapters."""
    model, step = {"gpt": demo, "llama": llama, "mixtral": mixtral}[name]()
    if frozen is None:
        return model, step
    from peft import LoraConfig, get_peft_model

    if frozen.startswith("bnb"):
        from qlora_bytes import quantize

        quantize(model, nested=frozen.endswith("double"))
    return get_peft_model(model, LoraConfig(r=ADAPTERS, target_modules=_TARGETS[name])).train(), step


def measure(stage: int, precision: str, accumulation: int, name: str, frozen: str | None) -> int:
    """Returns the most bytes allocated at a time in the second step. (all ranks)"""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if frozen and not frozen.startswith("bnb"):
        config["zero_optimization"]["frozen_weights"] = frozen
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model, step = _model(name, frozen)
        engine, *_ = zeroaccel.initialize(model=model, config=config)
        for number in range(2):
            with record_function(_STEP if number else "the first step"):
                for _ in range(accumulation):
                    loss, _output = step(engine, BATCH, LENGTH)
                    engine.backward(loss)
                    engine.step()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == _STEP)
    allocated = peak = 0
    for event in events:
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated) if event.start_ns() >= begin else allocated
    engine.destroy()
    return peak


def compare(
    stage: int, precision: Precision, accumulation: int, name: str, frozen: FrozenWeights | None
) -> dict[str, Any]:
    """Returns the predicted and the measured peak of one plan on every rank. (all ranks)"""
    measured = measure(stage, precision, accumulation, name, frozen)
    workload = Workload(
        ranks=dist.get_world_size(), precision=precision, batch=BATCH, sequence=LENGTH, accumulation=accumulation
    )
    if frozen is not None:
        workload = replace(workload, lora_rank=ADAPTERS, frozen_weights=frozen)
    subject = {"gpt": demo, "llama": llama, "mixtral": mixtral}[name]
    (estimated,) = estimate(subject, workload, [(stage, "none", "none")], on_cpu=True)
    plan = {"stage": stage, "precision": precision, "accumulation": accumulation, "model": name, "frozen": frozen}
    return plan | {"measured": measured, "estimated": estimated.device.total, "peak": estimated.peak}


@click.command()
@click.option("--stage", type=click.IntRange(0, 3), help="Measure this stage in the job that is running.")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16")
@click.option("--accumulation", type=click.IntRange(1), default=1)
@click.option("--model", type=click.Choice(MODELS), default="gpt")
@click.option("--base", type=click.Choice(BASES), help="With adapters: storage of their frozen base.")
@click.option("--frozen", is_flag=True, help="Compare all bases.")
def main(
    stage: int | None, precision: Precision, accumulation: int, model: str, base: FrozenWeights | None, frozen: bool
) -> None:
    if stage is not None:
        result = compare(stage, precision, accumulation, model, base)
        if dist.get_rank() == 0:
            print(json.dumps(result))
        dist.destroy_process_group()
        return
    kinds = ("model", "frozen weights") if frozen else ("precision", "accumulation")
    table = Table("stage", *kinds, "estimated, bytes", "measured, bytes", "difference", "peak in")
    for plan in _frozen_plans() if frozen else _plans():
        row = _in_a_job(plan)
        off = row["estimated"] / row["measured"] - 1
        sizes = f"{row['estimated']:,}", f"{row['measured']:,}", f"{off:+.3%}"
        words = (
            (row["model"], row["frozen"] or row["precision"])
            if frozen
            else (row["precision"], str(row["accumulation"]))
        )
        table.add_row(str(row["stage"]), *words, *sizes, row["peak"])
    Console(width=110).print(table)


def _plans() -> Iterator[list[str]]:
    for precision in ("bf16", "fp32"):
        for accumulation in (1, 2):
            for stage in range(4):
                yield [f"--stage={stage}", f"--precision={precision}", f"--accumulation={accumulation}"]


def _frozen_plans() -> Iterator[list[str]]:
    for model in ("llama", "mixtral"):
        for base in BASES:
            for stage in (2, 3):
                yield [f"--stage={stage}", f"--model={model}", f"--base={base}"]


def _in_a_job(plan: Sequence[str]) -> dict[str, Any]:
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(RANKS), __file__]
    done = subprocess.run([*launch, *plan], check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    main()
