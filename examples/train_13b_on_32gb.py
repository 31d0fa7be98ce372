"""Trains a decoder of 13 billion parameters on one GPU with 32 GB, with weights and optimizer states on the host.

    zeroaccel launch --num_processes 1 examples/train_13b_on_32gb.py
    zeroaccel launch --num_processes 1 examples/train_13b_on_32gb.py --model meta-llama/Llama-2-13b-hf
    python examples/train_13b_on_32gb.py --hidden 64 --layers 2 --vocabulary 256 --sequence 32   # on any machine

The host needs 8.19 bytes per parameter: bf16 weights and gradients, residual masters and 8-bit moments, all settings of
the template `train_13b_on_32gb.json`. The script compares that with the free memory before it makes a weight.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from zeroaccel import Accelerator, DummyOptim, DummyScheduler, ZeroPlugin, zero
from zeroaccel.offload import free_nbytes

HOST_NBYTES = 2 + (2 + 1 / 8) + (2 + 2 / 32) + 2
"""Bytes per parameter: bf16 weight, residual of its master, two moments with an exponent per 32, bf16 gradient."""


def check_memory(config: PretrainedConfig, ranks: int) -> None:
    """Ends the program if the free host memory cannot hold the training."""
    with torch.device("meta"):
        numel = sum(param.numel() for param in AutoModelForCausalLM.from_config(config).parameters())
    needed, free = HOST_NBYTES * numel / ranks, free_nbytes()
    if needed > 0.97 * free:
        raise SystemExit(
            f"{numel / 1e9:.1f} billion parameters need {needed / 1e9:.0f} GB of host memory on each of {ranks} ranks, "
            f"but {free / 1e9:.0f} GB are free: set fewer --layers, or offload_optimizer.device to nvme in --config"
        )


def main(argv: list[str] | None = None) -> list[float]:
    """Returns the losses of the steps on this rank."""
    parser = argparse.ArgumentParser(description="Trains 13 billion parameters on one GPU with 32 GB.")
    parser.add_argument("--model", help="name or folder of a model to fine-tune; by default a Llama with new weights")
    parser.add_argument("--config", default=str(files("zeroaccel.templates") / "train_13b_on_32gb.json"))
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--layers", type=int, default=41)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    settings = {**json.loads(Path(args.config).read_text()), "train_micro_batch_size_per_gpu": args.batch}
    accelerator = Accelerator(zero_plugin=ZeroPlugin(settings))
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)  # keeps only the shard
    else:
        heads = max(args.hidden // 128, 2)
        config = LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=27 * args.hidden // 10,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
        )
        check_memory(config, accelerator.num_processes)
        # The device draws each weight; `Init` moves it to host memory before the next module begins.
        with zero.Init(config_dict_or_path=settings), torch.device(accelerator.device):
            model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    optimizer = DummyOptim(model.parameters(), lr=args.lr, weight_decay=0.0)
    schedule = DummyScheduler(optimizer, total_num_steps=args.steps, warmup_num_steps=1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    tokens = torch.randint(args.vocabulary, (args.batch, args.sequence), device=accelerator.device)  # your texts
    losses = []
    for step in range(args.steps):
        begun = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {step}: loss {losses[-1]:.3f}, {time.perf_counter() - begun:.1f} s")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
