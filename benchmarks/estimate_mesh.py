"""Compares peak memory and sent bytes of a rank on a mesh with the prediction of `zeroaccel.estimate`.

    zeroaccel launch --cpu --num_processes 2 benchmarks/estimate_mesh.py --tp 2      # or --sp 2, or --pp 2; as JSON
    zeroaccel launch --cpu --num_processes 4 benchmarks/estimate_mesh.py --ep 2

The model is a small Llama of transformers, with --ep a small Mixtral. The measured peak is the largest amount that
torch's CPU allocator had allocated at a time, according to its profiler, on the rank with the most memory, in the step
with the least: gloo's threads free a message shortly after it has arrived, later on a busy machine, and a step does not
need that memory. Sent bytes are those of every message: the engine's meter counts ZeRO and sequences (a recorder with
--ep), and `CollectiveBytes` counts torch's collectives of layers and stages.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import zeroaccel
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.estimate import Workload, estimate

BATCH, LENGTH = 4, 128
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}

_STEP = "step of the benchmark"
_SILENT = ("::wait_tensor", "::_wrap_tensor_autograd")  # nothing is sent


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes that torch's own collectives send: sums as a ring, gathers and messages in full."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("_c10d_functional::all_reduce"):
            size = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[2]))
            self.total += round(2 * (size - 1) / size * args[0].nbytes)
        elif name.startswith("_c10d_functional::all_gather_into_tensor"):
            self.total += (args[1] - 1) * args[0].nbytes
        elif name == "c10d::allreduce_":  # torch 2.15: a pipeline's stages agree before their first step
            size = dist.ProcessGroup.unbox(args[1]).size()
            self.total += round(2 * (size - 1) / size * sum(tensor.nbytes for tensor in args[0]))
        elif name == "c10d::send":
            self.total += sum(tensor.nbytes for tensor in args[0])
        elif name.endswith(_SILENT):
            pass
        elif name.startswith(("_c10d_functional", "c10d::all", "c10d::reduce")):
            raise RuntimeError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(engine: Any, sequences: Any) -> Iterator[Counter[str]]:
    """Collects axis -> bytes that this rank sends inside the context."""
    sent: Counter[str] = Counter()

    def on(axis: str) -> Any:
        return lambda tag, rank, nbytes: sent.update({axis: nbytes})

    if isinstance(engine.collectives, RecordingCollectives):
        engine.collectives.reset()
        yield sent
        of_axes = engine.collectives.nbytes_by_axis()
        sent.update({axis.removesuffix("_shard"): sum(links.values()) for axis, links in of_axes.items()})
        return
    engine.collectives.meter = on("dp")
    if sequences is not None:
        sequences.collectives.meter = on("sp")
    with CollectiveBytes() as layers:
        yield sent
    engine.collectives.meter = None
    sent["tp" if engine.collectives.parts is not None else "pp"] += layers.total


MODELS: list[Any] = [(LlamaForCausalLM, LlamaConfig), (MixtralForCausalLM, MixtralConfig)]


def _settings(sizes: dict[str, int]) -> Any:
    model, settings = MODELS[sizes["ep"] > 1]
    return settings(**CONFIG, **EXPERTS, architectures=[model.__name__])


def measure(stage: int, accumulation: int, steps: int, sizes: dict[str, int]) -> tuple[int, dict[str, int]]:
    """Returns the peak in bytes and the bytes sent per step on this rank, in the steps after the first. (all ranks)"""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    run = LENGTH // sizes["sp"]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.manual_seed(0)  # all ranks cut the same model
        model = MODELS[sizes["ep"] > 1][0](_settings(sizes))
        ranks = RecordingCollectives(Collectives(init_process_group())) if sizes["ep"] > 1 else None
        parallel = zeroaccel.ParallelConfig(**sizes)
        engine, *_ = zeroaccel.initialize(model, config=config, parallel=parallel, collectives=ranks)
        sequences = getattr(engine, "sequence_group", None)
        for _ in range(steps):
            ids = torch.randint(CONFIG["vocab_size"], (BATCH, run))
            with record_function(_STEP), counted(engine, sequences) as sent:
                if sizes["pp"] > 1:
                    engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * accumulation))
                    continue
                for _ in range(accumulation):
                    shifted = {} if sequences is None else {"shift_labels": ids}
                    output = engine(input_ids=ids, labels=ids, **shifted)
                    engine.backward(output.loss)
                    engine.step()
    engine.destroy()
    peaks = _peaks(profiled.profiler.kineto_results.events())
    assert len(peaks) == steps
    return min(peaks[1:]), {axis: nbytes for axis, nbytes in sent.items() if nbytes}  # step 0 makes the states


def _peaks(events: list[Any]) -> list[int]:
    """Returns, per step, the most bytes allocated at a time."""
    peaks: list[int] = []
    allocated = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == _STEP:
            peaks.append(allocated)
        elif event.name() == "[memory]":
            allocated += event.nbytes()
            if peaks:
                peaks[-1] = max(peaks[-1], allocated)
    return peaks


@click.command()
@click.option("--stage", type=click.IntRange(0, 3), default=1)
@click.option("--accumulation", type=click.IntRange(1), default=1)
@click.option("--steps", type=click.IntRange(2), default=6)
@click.option("--pp", type=click.IntRange(1), default=1)
@click.option("--sp", type=click.IntRange(1), default=1)
@click.option("--tp", type=click.IntRange(1), default=1)
@click.option("--ep", type=click.IntRange(1), default=1)
def main(stage: int, accumulation: int, steps: int, **sizes: int) -> None:
    peak, sent = measure(stage, accumulation, steps, sizes)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (peak, sent))
    if dist.get_rank() == 0:
        workload = Workload(
            ranks=dist.get_world_size(), batch=BATCH, sequence=LENGTH, accumulation=accumulation, **sizes
        )
        with tempfile.TemporaryDirectory() as folder:
            _settings(sizes).to_json_file(Path(folder) / "config.json", False)
            (one,) = estimate(folder, workload, [(stage, "none", "none")], on_cpu=True)
        axes = {axis for _, sent in of_ranks for axis in sent}
        most = {axis: max(sent.get(axis, 0) for _, sent in of_ranks) for axis in sorted(axes)}
        estimated = Counter(one.sent)
        if sizes["ep"] > 1:  # the router decides which rank gets more tokens
            most["ep"] = round(sum(sent["ep"] for _, sent in of_ranks) / len(of_ranks))
            estimated["dp"] += estimated.pop("dp of experts", 0)
        found = {"peak": one.device.total, "sent": dict(sorted(estimated.items()))}
        print(json.dumps({"estimated": found, "measured": {"peak": max(peak for peak, _ in of_ranks), "sent": most}}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
