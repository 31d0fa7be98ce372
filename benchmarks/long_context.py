"""Counts the activations of a hybrid whose sequences ranks share, and times its steps, beside the whole on one rank.

    python benchmarks/long_context.py [--tokens 8192] [--sizes 1,2,4] [--rounds 3] [--markdown FILE] [--check]

Three layers in four carry a gated delta rule, one has attention, as in Qwen3-Next and Qwen3.5. Activations are the
bytes of all storages that autograd saves in the forward of one sequence, without parameters, on the rank with most.
Sizes run in turn in every round, one job each; a step's time is the median of a job's steps on the slowest rank, and a
ratio is the median over rounds. Each rank has one thread, so on enough free cores a step would take 1/N of the time if
the exchanges cost nothing. The bar: 0.30 of one rank's activations on 4 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

BAR = 0.30
_ROOT = Path(__file__).resolve().parents[1]


def run_rank(tokens: int, size: int, steps: int, out: Path) -> None:
    """Trains on one sequence; each rank writes a JSON file."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    import zeroaccel

    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8, use_cache=False,
            linear_key_head_dim=16, linear_value_head_dim=16, mlp_only_layers=[0, 1, 2, 3], num_experts=4,
        )
    )  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    engine, *_ = zeroaccel.initialize(model, config=config, parallel=zeroaccel.ParallelConfig(sp=size))
    engine.train()
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(1))
    batch = engine.sequence_group.shard({"input_ids": ids, "labels": ids})
    labels = batch["shift_labels"]
    held = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    seconds = []
    for step in range(steps + 1):
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = engine(**batch, labels=labels).loss
        loss = engine.sequence_group.mean_loss(loss, labels)
        nbytes = sum(saved.values())
        saved.clear()
        engine.backward(loss)
        engine.step()
        if step:
            seconds.append(time.perf_counter() - start)
    result = {"nbytes": nbytes, "seconds": statistics.median(seconds), "loss": loss.item()}
    (out / f"{engine.sequence_group.rank}.json").write_text(json.dumps(result))


def run_job(tokens: int, size: int, steps: int) -> dict[str, float]:
    """Runs one job and returns the most activations and the longest step of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(size)]
        words = [str(Path(__file__)), "--rank", folder, "--tokens", str(tokens), "--sizes", str(size)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([*launch, *words, "--steps", str(steps)], check=True, env=environment, stdout=sys.stderr)
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert len(results) == size, "a rank wrote no result"
    return {name: max(result[name] for result in results) for name in ("nbytes", "seconds", "loss")}


def table(rounds: list[dict[int, dict[str, float]]], tokens: int) -> list[tuple[int, int, float, float, float, float]]:
    """Returns (ranks, bytes, share of one rank's, bytes per token of the sequence, step ratio, loss) of each size."""
    first = rounds[0]
    one = first[min(first)]["nbytes"]
    return [
        (
            size,
            int(found["nbytes"]),
            found["nbytes"] / one,
            found["nbytes"] / tokens,
            statistics.median(every[size]["seconds"] / every[min(first)]["seconds"] for every in rounds),
            found["loss"],
        )
        for size, found in first.items()
    ]


def page(rows: list[tuple[int, int, float, float, float, float]], arguments: argparse.Namespace) -> str:
    """Returns the results page."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = [
        "# Activations and steps of long sequences",
        "",
        f"Measured on {date.today()}, recorded in commit {commit}.",
        "",
        f"`python benchmarks/long_context.py --tokens {arguments.tokens} --sizes {arguments.sizes} --rounds "
        f"{arguments.rounds} --steps {arguments.steps}`: a hybrid of 4 layers in fp32, one sequence, over gloo on one "
        f"machine with {os.cpu_count()} cores, whose load average was {os.getloadavg()[0]:.1f} at the end. Each rank "
        "has one thread.",
        "",
        "| ranks | activations of a rank, bytes | beside one rank | bytes per token | step beside one rank | loss |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size, nbytes, share, per_token, ratio, loss in rows:
        lines.append(f"| {size} | {nbytes:,} | {share:.4f} | {per_token:,.0f} | {ratio:.3f} | {loss:.7f} |")
    lines += ["", f"The bar is {BAR} on 4 ranks.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sizes", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    if arguments.rank:
        run_rank(arguments.tokens, sizes[0], arguments.steps, arguments.rank)
        return 0
    rounds = [
        {size: run_job(arguments.tokens, size, arguments.steps) for size in sizes} for _ in range(arguments.rounds)
    ]
    rows = table(rounds, arguments.tokens)
    text = page(rows, arguments)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    failed = [size for size, _, share, *_ in rows if size == 4 and share > BAR]
    return int(arguments.check and bool(failed))


if __name__ == "__main__":
    sys.exit(main())
