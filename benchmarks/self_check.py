"""How long `initialize` takes to compare a model of 1.1B parameters, cut by sp or tp, with the whole one.

    python benchmarks/self_check.py [--ranks 4] [--precision bf16] [--axes sp tp] [--stages 1 3] [--markdown FILE]

Each row is a job of its own: a Llama in the shape of TinyLlama-1.1B with random weights, made by `initialize` on CPU
ranks of one machine. The time is that of the check alone, of the slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    **{"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048},
}
BAR = 3.0


def time_of_a_rank(axis: str, stage: int, precision: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zeroaccel
    from zeroaccel.setup import build

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to({"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer has a value of its own
    numbers = torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(0)) * 0.02
    for name, param in model.named_parameters():
        values = numbers.to(param.dtype).repeat(-(-param.numel() // len(numbers)))[: param.numel()].view(param.shape)
        param.data.copy_(values if "norm" not in name else torch.ones(()))
    seconds, computing = [], []
    verify: Callable[..., None] = build.verify_cuts

    def timed(*args: Any, **kwargs: Any) -> None:
        start, busy = time.perf_counter(), time.process_time()
        verify(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        computing.append(time.process_time() - busy)

    vars(build)["verify_cuts"] = timed
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
    }
    parallel = zeroaccel.ParallelConfig(**{axis: int(os.environ["WORLD_SIZE"])})
    engine, *_ = zeroaccel.initialize(model, config=config, parallel=parallel)
    of_ranks = engine.collectives.job.gather_objects((seconds[0], computing[0]), "seconds")
    if torch.distributed.get_rank() == 0:
        slowest, total = max(own for own, _ in of_ranks), sum(busy for _, busy in of_ranks)
        print(json.dumps({"seconds": slowest, "cpu": total}), flush=True)
    engine.destroy()


def _measured(ranks: int, axis: str, stage: int, precision: str) -> dict[str, Any]:
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(ranks), __file__]
    words = [*launch, "--rank", "--axis", axis, "--stage", str(stage), "--precision", precision]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr[-4000:])
    measured: dict[str, Any] = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--axes", nargs="+", choices=["sp", "tp"], default=["sp", "tp"])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--axis", choices=["sp", "tp"], help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        return time_of_a_rank(asked.axis, asked.stage, asked.precision)
    lines = [
        f"# The check of a cut model of 1.1B parameters, {date.today()}",
        "",
        f"Llama in the shape of TinyLlama-1.1B, {asked.precision}, {asked.ranks} CPU ranks on {os.cpu_count()} cores. "
        f"Seconds of the check in `initialize`, of the slowest rank; bar {BAR} s.",
        "CPU s are of all ranks together. The load is that of the machine before the job: above 0, other programs ran.",
        "",
        "| cut | stage | s | CPU s | load |",
        "| --- | --- | --- | --- | --- |",
    ]
    for axis, stage in itertools.product(asked.axes, asked.stages):
        load = os.getloadavg()[0]
        row = _measured(asked.ranks, axis, stage, asked.precision)
        lines.append(f"| {axis} {asked.ranks} | {stage} | {row['seconds']:.2f} | {row['cpu']:.2f} | {load:.1f} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.markdown:
        asked.markdown.write_text(text)


if __name__ == "__main__":
    main()
