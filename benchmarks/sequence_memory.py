"""How much memory a long sequence takes: on one rank, cut over four, and with its logits and MLPs tile by tile.

    python benchmarks/sequence_memory.py [--tokens 32768] [--ranks 4] [--markdown FILE] [--check]

Each run trains a small Llama for two steps in processes of its own; a rank's activations are its peak of resident
memory over what it had before the first forward with gradients, from a step with a sixteenth of the tokens on. The
tiled loss is timed beside the whole one on one rank, in turn; the median of the ratios counts.
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
from datetime import date
from pathlib import Path
from typing import Any

VOCAB, HIDDEN, LAYERS, HEADS, INNER = 4096, 64, 2, 4, 256
TILES = 16
MEMORY_BAR, TIME_BAR = 0.3, 1.05


def _engine(sp: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zeroaccel

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCAB}
    model = LlamaForCausalLM(
        LlamaConfig(intermediate_size=INNER, max_position_embeddings=1 << 20, use_cache=False, **sizes)
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = zeroaccel.initialize(model, config=config, parallel=zeroaccel.ParallelConfig(sp=sp))
    return engine


def _step(engine: Any, tokens: int) -> float:
    import torch

    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    batch = engine.sequence_group.shard({"input_ids": ids, "labels": ids})
    labels = batch["shift_labels"]
    loss = engine.sequence_group.mean_loss(engine(**batch, labels=labels).loss, labels)
    engine.backward(loss)
    engine.step()
    value: float = loss.item()
    return value


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_of_a_rank(tokens: int, tiled: bool) -> None:
    from zeroaccel.parallel import TiledLoss, TiledModules

    engine = _engine(int(os.environ["WORLD_SIZE"]))
    if tiled:
        TiledLoss(engine, TILES)
        TiledModules([layer.mlp for layer in engine.module.model.layers], TILES)
    _step(engine, tokens // 16)  # kernels are loaded, buffers exist
    before = _peak()
    losses = [_step(engine, tokens) for _ in range(2)]
    peaks = engine.collectives.gather_objects(_peak() - before, "peaks")
    if engine.collectives.rank == 0:
        print(json.dumps({"peak": max(peaks), "losses": losses}), flush=True)
    engine.destroy()


def times_of_the_loss(rounds: int) -> list[float]:
    """Seconds with tiles / seconds without, of a head and a loss, forward and backward."""
    import torch
    from torch.nn import functional

    from zeroaccel.parallel import tiled_cross_entropy

    head = torch.nn.Linear(512, 2 * VOCAB, bias=False)
    hidden = torch.randn(8192, 512, requires_grad=True)
    labels = torch.randint(2 * VOCAB, (8192,))

    def seconds(tiled: bool) -> float:
        start = time.perf_counter()
        if tiled:
            loss = tiled_cross_entropy(hidden, head, head.parameters(), labels, tiles=TILES)
        else:
            loss = functional.cross_entropy(head(hidden), labels)
        loss.backward()
        return time.perf_counter() - start

    seconds(tiled=True), seconds(tiled=False)
    ratios = []
    for number in range(rounds):
        first = bool(number % 2)
        took = {first: seconds(first), (not first): seconds(not first)}
        ratios.append(took[True] / took[False])
    return ratios


def _measured(ranks: int, tokens: int, tiled: bool) -> dict[str, Any]:
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(ranks), __file__]
    words = [*launch, "--tokens", str(tokens), "--rank", *(["--tiled"] if tiled else [])]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr[-4000:])
    measured: dict[str, Any] = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiled", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        return memory_of_a_rank(asked.tokens, asked.tiled)
    rows = {
        (ranks, tiled): _measured(ranks, asked.tokens, tiled) for tiled in (False, True) for ranks in (1, asked.ranks)
    }
    whole = rows[1, False]["peak"]
    lines = [
        f"# Memory of a sequence of {asked.tokens} tokens, {date.today()}",
        "",
        f"Llama, hidden {HIDDEN}, {LAYERS} layers, {HEADS} heads, vocabulary {VOCAB}, fp32, ZeRO-3, CPU ranks; "
        f"{TILES} tiles. Peak of resident memory of the worst rank over what it had before.",
        "",
        "| ranks of the sequence | logits and MLPs | activations, MiB per rank | of one rank's | losses of two steps |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (ranks, tiled), row in rows.items():
        how = "tiled" if tiled else "whole"
        losses = ", ".join(f"{loss:.7f}" for loss in row["losses"])
        lines.append(f"| {ranks} | {how} | {row['peak'] / 2**20:.0f} | {row['peak'] / whole:.2f} | {losses} |")
    ratios = times_of_the_loss(asked.rounds)
    ratio = statistics.median(ratios)
    lines += [
        "",
        f"Tiled loss / whole loss, forward and backward (512 -> {2 * VOCAB}, 8192 tokens): {ratio:.2f} "
        f"({min(ratios):.2f}..{max(ratios):.2f}, {len(ratios)} rounds); bar {TIME_BAR}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.markdown:
        asked.markdown.write_text(text)
    if asked.check and (rows[asked.ranks, False]["peak"] > MEMORY_BAR * whole or ratio > TIME_BAR):
        raise SystemExit("a bar is missed")


if __name__ == "__main__":
    main()
