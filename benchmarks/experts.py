"""Compares expert parallelism, stage 3 and FSDP2 on a mixture whose parameters are mostly experts.

    python benchmarks/experts.py --markdown benchmarks/results/experts.md

Each round starts one job of every contender in turn: a Mixtral with 16 experts per layer in fp32, AdamW, 4 gloo ranks,
one sample per rank. The reference, "whole layers", is stage 3 with one gather per layer. With `--regather`, zeroaccel
gathers weights for each use and one unit ahead, as it does for a model that does not fit. A job's step time is the
median of its timed steps on the slowest rank. Its peak is the largest growth of a rank's memory since before the model
was made. CPU seconds and page faults are per process and step, including the kernel's share. The table shows the median
of the ratios within a round, because a busy machine slows both sides of such a ratio. Gathers are the bytes that a rank
sends, according to the engine's recorder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, TOKENS, WARM, TIMED = 4, 128, 2, 5
SIZES: dict[str, int] = {
    **{"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 2},
}
WHOLE = "stage 3, whole layers"
CONTENDERS = ("ep 4", "stage 3", WHOLE, "FSDP2")
REGATHER = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1}


def _model() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model: nn.Module = MixtralForCausalLM(MixtralConfig(**SIZES, use_cache=False))
    return model


def _experts_share() -> float:
    with torch.device("meta"):
        named = [(name, param.numel()) for name, param in _model().named_parameters()]
    return sum(numel for name, numel in named if "experts" in name) / sum(numel for _, numel in named)


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(SIZES["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))
    return {"input_ids": ids, "labels": ids}


def _zeroaccel(ep: int, keys: dict[str, Any]) -> tuple[Callable[[], None], Callable[[], dict[str, int]]]:
    """Returns (runs one step, returns the bytes of weight gathers since its last call: all, and those of experts)."""
    import zeroaccel
    from zeroaccel.comm.collectives import Collectives
    from zeroaccel.comm.recording import RecordingCollectives
    from zeroaccel.comm.topology import init_process_group

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, **keys},
    }
    ranks = RecordingCollectives(Collectives(init_process_group()))
    parallel = zeroaccel.ParallelConfig(ep=ep)
    engine, *_ = zeroaccel.initialize(_model(), config=config, collectives=ranks, parallel=parallel)
    batch = _batch()

    def step() -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    def gathers() -> dict[str, int]:
        sent = sum(one.nbytes for one in ranks.traffic() if one.purpose == "unshard")
        dense = sum(call.nbytes for call in ranks.calls if call.label.startswith("unshard"))
        ranks.reset()
        return {"gathers": sent, **({"gathers of experts": sent - dense} if ep > 1 else {})}

    return step, gathers


def _fsdp2() -> tuple[Callable[[], None], Callable[[], dict[str, int]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), _model()
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-4), _batch()

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, dict


def measure(name: str, regather: bool) -> None:
    """Runs one job of a contender; rank 0 prints the figures. (all ranks)"""
    import transformers  # noqa: F401  before memory is read

    before = resource.getrusage(resource.RUSAGE_SELF)
    keys: dict[str, Any] = {"leaf_module": {"classes": ["MixtralDecoderLayer"]}} if name == WHOLE else {}
    keys |= REGATHER if regather else {}
    step, gathers = _fsdp2() if name == "FSDP2" else _zeroaccel(RANKS if name == "ep 4" else 1, keys)
    seconds, used = [], before
    for number in range(WARM + TIMED):
        dist.barrier()
        if number == WARM:
            used = resource.getrusage(resource.RUSAGE_SELF)
        if number == WARM + TIMED - 1:
            gathers()
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    after = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "seconds": statistics.median(seconds[WARM:]),
        "peak": (after.ru_maxrss - before.ru_maxrss) * 1024,
        "cpu": (after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime) / TIMED,
        "faults": (after.ru_minflt - used.ru_minflt) / TIMED,
        **gathers(),
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, figures)
    if dist.get_rank() == 0:
        print(json.dumps({key: max(one[key] for one in of_ranks) for key in figures}), flush=True)
    if name == "FSDP2":  # torch's gloo groups crash about one process in ten at exit; zeroaccel destroys its groups
        dist.barrier()
        os._exit(0)


def _job(name: str, regather: bool) -> dict[str, Any]:
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(RANKS), __file__]
    options = ["--contender", name, *(["--regather"] if regather else [])]
    result = subprocess.run([*launch, *options], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr[-4000:])
    found: dict[str, Any] = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    return found


def _table(rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    def against(name: str, key: str) -> str:
        ratios = sorted(one[name][key] / one[WHOLE][key] for one in rounds)
        return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"

    lines = [
        "| | step / whole layers' | CPU seconds / whole layers' | peak memory / whole layers' | page faults "
        "| gathers of weights, MB | of experts, MB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in CONTENDERS:
        last = rounds[-1][name]
        sent = [f"{last[key] / 1e6:.1f}" if key in last else "-" for key in ("gathers", "gathers of experts")]
        ratios = " | ".join(against(name, key) for key in ("seconds", "cpu", "peak"))
        lines.append(f"| {name} | {ratios} | {last['faults']:,.0f} | {' | '.join(sent)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--regather", action="store_true", help="gather for each use, one unit ahead")
    parser.add_argument("--markdown", type=Path, help="append the table to this file")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.contender:
        return measure(asked.contender, asked.regather)
    rounds = [{name: _job(name, asked.regather) for name in CONTENDERS} for _ in range(asked.rounds)]
    lines = [
        f"Mixtral, {', '.join(f'{key} {value}' for key, value in SIZES.items())}:",
        f"{_experts_share():.0%} of the parameters are experts; fp32, AdamW, {RANKS} gloo ranks, {TOKENS} tokens each.",
        f"Medians over {asked.rounds} rounds, smallest and largest in brackets."
        + (" zeroaccel gathers for each use, one unit ahead." if asked.regather else ""),
        "",
        *_table(rounds),
    ]
    print("\n".join(lines))
    print(json.dumps(rounds), file=sys.stderr)
    if asked.markdown is not None:
        with asked.markdown.open("a") as file:
            file.write("\n".join(["", *lines, ""]))


if __name__ == "__main__":
    main()
