"""Compares the step time of a pipeline across a slow link with that of stage 3 across the same link.

    sudo python benchmarks/pipeline_link.py [--rate 300] [--markdown FILE] [--check]

Two network namespaces with two ranks each, joined by a link with a token bucket, as in `throttled.py`; it needs root,
`ip` and `tc`. Every combination trains the same small Llama in bf16 on the same samples of a step, one after the other
in the same processes. The step time is the median over steps of the slowest rank's time. Every rank counts the bytes
across the link message by message and by axis. The bar: the pipeline at least 3 times as fast as stage 3.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from throttled import HOSTS, RANKS_PER_HOST, run_on_two_hosts

BAR = 3.0
VOCAB = 512
# Axes of the mesh, stage, micro-batches of a step: every combination trains on 8 samples in micro-batches of one.
COMBINATIONS: dict[str, tuple[dict[str, int], int, int]] = {
    "stage 3 over 4 ranks": ({}, 3, 2),
    "stage 1 over 4 ranks": ({}, 1, 2),
    "2 stages x 2 ranks, stage 1": ({"pp": HOSTS}, 1, 4),
    "2 stages x 2 ranks, stage 2": ({"pp": HOSTS}, 2, 4),
}


def run_rank(steps: int, hidden: int, layers: int, tokens: int) -> None:
    """Trains with every combination; rank 0 prints one JSON line."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zeroaccel
    from zeroaccel.comm.collectives import Collectives
    from zeroaccel.comm.recording import RecordingCollectives
    from zeroaccel.comm.topology import current_topology, init_process_group

    torch.set_num_threads(1)
    init_process_group()
    found: dict[str, Any] = {}
    for name, (axes, stage, micro_batches) in COMBINATIONS.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=hidden,
                intermediate_size=8 * hidden // 3,
                num_hidden_layers=layers,
                num_attention_heads=4,
                use_cache=False,
            )
        )
        numel = sum(param.numel() for param in model.parameters())
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_max_reuse_distance": 0},
        }
        recorder = RecordingCollectives(Collectives(current_topology()))
        engine, *_ = zeroaccel.initialize(
            model, config=settings, collectives=recorder, parallel=zeroaccel.ParallelConfig(**axes)
        )
        counting = engine.collectives
        assert isinstance(counting, RecordingCollectives)
        job, place, places = counting.job, counting.rank, counting.world_size
        seconds, losses = [], []
        for step in range(steps + 2):
            samples = torch.randint(VOCAB, (8, 1, tokens), generator=torch.Generator().manual_seed(step))
            batches = [{"input_ids": ids, "labels": ids} for ids in samples[place::places]]
            job.barrier("measure")
            counting.reset()
            start = time.perf_counter()
            if axes:
                loss = engine.train_batch(iter(batches))
            else:
                total = torch.zeros(1)
                for batch in batches:
                    loss = engine(**batch).loss
                    engine.backward(loss)
                    engine.step()
                    total += loss.detach().float() / len(batches)
            taken = torch.tensor([time.perf_counter() - start])
            job.all_reduce(taken, "max", "measure")
            if not axes:  # `train_batch` returns the loss of all ranks
                job.all_reduce(total, "sum", "measure")
                loss = total / places
            if step >= 2:  # step 0 records the module order, step 1 warms up prefetching
                seconds.append(taken.item())
            losses.append(loss.item())
        by_axis = job.gather_objects({axis: links["across"] for axis, links in counting.nbytes_by_axis().items()}, "by")
        across = {axis: sum(of_rank.get(axis, 0) for of_rank in by_axis) for axis in ("dp_shard", "pp")}
        found[name] = {"seconds": statistics.median(seconds), "across": across, "losses": losses, "numel": numel}
        engine.destroy()
    if current_topology().rank == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measures every combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=300, help="rate of the link, Mbit/s")
    parser.add_argument("--steps", type=int, default=5, help="timed ones")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bar is missed")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [f"--{name}={getattr(options, name)}" for name in ("steps", "hidden", "layers", "tokens")]
    if options.rank:
        run_rank(options.steps, options.hidden, options.layers, options.tokens)
        return
    load = os.getloadavg()[0]
    found = json.loads(run_on_two_hosts(options.rate, [sys.executable, __file__, "--rank", *sizes]).splitlines()[-1])
    slowest = found["stage 3 over 4 ranks"]
    first_losses = slowest["losses"][-1]
    lines = [
        f"# A pipeline across a slow link, {date.today()}",
        "",
        f"`python benchmarks/pipeline_link.py --rate {options.rate} {' '.join(sizes)}`: two network",
        f"namespaces with {RANKS_PER_HOST} ranks each, and {options.rate} Mbit/s between them in each direction",
        f"(a token bucket, `tc tbf`), {os.cpu_count()} cores for all; the load average was {load:.1f} at the start.",
        f"A Llama of {slowest['numel'] / 1e6:.1f} M parameters in bf16, 8 samples of {options.tokens} tokens in each",
        "step. MB are the counted megabytes that all ranks together send across in a step.",
        "",
        "| | seconds per step | times as fast as stage 3 | MB across: ZeRO | between stages | last loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in found.items():
        lines.append(
            f"| {name} | {row['seconds']:.3f} | {slowest['seconds'] / row['seconds']:.2f} "
            f"| {row['across']['dp_shard'] / 1e6:.2f} | {row['across']['pp'] / 1e6:.2f} | {row['losses'][-1]:.4f} |"
        )
    factor = min(slowest["seconds"] / row["seconds"] for name, row in found.items() if COMBINATIONS[name][0])
    lines += ["", f"The slower pipeline is {factor:.1f} times as fast as stage 3; the bar is {BAR:g}."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.check and factor < BAR:
        sys.exit(f"{factor:.2f} times as fast as stage 3, below {BAR:g}")
    assert abs(found["2 stages x 2 ranks, stage 1"]["losses"][-1] - first_losses) < 0.05, "not the same training"


if __name__ == "__main__":
    main()
