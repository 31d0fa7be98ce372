"""Tokens of each rank in a step, and processor time of the slowest rank, with and without `balance="tokens"`.

    zeroaccel launch --cpu --num_processes 2 benchmarks/balanced_batches.py [--steps 64] [--batch_size 4]

Trains a small Llama at stage 2 on sequences of long-tailed lengths, in two orders: shuffled, and dealt out by tokens. A
step waits for its slowest rank, so its time is that of the rank with the most processor time in forward and backward,
which, unlike a clock's, does not grow with other programs. Rank 0 prints one row per order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import zeroaccel
from zeroaccel import DataLoaderConfiguration
from zeroaccel.comm.topology import init_process_group
from zeroaccel.data import prepare_data_loader

VOCABULARY = 512
SHORTEST, LONGEST = 8, 1024


def sequences(count: int) -> list[torch.Tensor]:
    """Returns sequences whose lengths have a log-normal distribution: half are shorter than 149 tokens."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.exp(5 + torch.randn(count, generator=random)).clamp(SHORTEST, LONGEST).long().tolist()
    return [torch.randint(VOCABULARY, (length,), generator=random) for length in lengths]


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(sample) for sample in samples])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def measured(data: list[torch.Tensor], batch_size: int, balance: str | None) -> list[tuple[int, int, float]]:
    """Trains an epoch; returns tokens, positions and processor seconds of this rank's steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = zeroaccel.initialize(model, config=config)
    ranks = engine.collectives
    loader = prepare_data_loader(
        DataLoader(data, batch_size, shuffle=True, drop_last=True, collate_fn=padded),  # type: ignore[arg-type]
        DataLoaderConfiguration(balance=balance, data_seed=0),
        rank=ranks.rank,
        world_size=ranks.world_size,
        collectives=ranks,
    )
    rows = []
    for batch in loader:
        begun = time.process_time()
        engine.backward(engine(**batch).loss)
        seconds = time.process_time() - begun
        engine.step()
        rows.append((int(batch["attention_mask"].sum()), batch["input_ids"].numel(), seconds))
    engine.destroy()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--batch_size", type=int, default=4, help="samples per rank [%(default)s]")
    arguments = parser.parse_args()
    ranks = init_process_group().all_ranks
    data = sequences(arguments.steps * arguments.batch_size * ranks.size)
    for balance in (None, "tokens"):
        rank_steps = measured(data, arguments.batch_size, balance)
        of_ranks: list[Any] = [None] * ranks.size
        torch.distributed.all_gather_object(of_ranks, rank_steps)
        steps = [list(zip(*step, strict=True)) for step in zip(*of_ranks, strict=True)]
        spreads = [ranks.size * max(tokens) / sum(tokens) for tokens, _, _ in steps]
        padding = 1 - sum(sum(tokens) for tokens, _, _ in steps) / sum(sum(positions) for _, positions, _ in steps)
        slowest, mean = (
            statistics.mean(value(seconds) for _, _, seconds in steps[5:]) for value in (max, statistics.mean)
        )
        if ranks.rank == 0:
            print(
                f"balance {balance}: {len(steps)} steps, most tokens by mean: mean {statistics.mean(spreads):.3f}, "
                f"worst {max(spreads):.3f}; padding {padding:.1%}; processor time of a step: slowest rank "
                f"{1e3 * slowest:.1f} ms, mean of the ranks {1e3 * mean:.1f} ms"
            )


if __name__ == "__main__":
    main()
