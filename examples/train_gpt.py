"""Trains a small GPT on the bytes of a text, evaluates it on held-out text, and generates a few lines.

    zeroaccel launch --num_processes 2 examples/train_gpt.py
    python examples/train_gpt.py --stage 0 --precision fp32 --text book.txt

The text is the source code of Python's standard library, which every machine has, or a file of yours. The model is
plain PyTorch. ZeRO needs `ds_config`, the call of `zeroaccel.initialize`, and `engine` in place of the model, the
optimizer and the schedule. The exit code is 1 unless the loss on held-out text is below its unigram entropy.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import zeroaccel

BYTES = 256
HELD_OUT_LIMIT = 1 << 18  # bytes; enough to distinguish models, and quick to read
NOT_SOURCE = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


# -- the model


def rotated(x: Tensor) -> Tensor:
    """Applies rotary positions (Su et al., arXiv:2104.09864, section 3.4). x: (batch, heads, length, dim)."""
    length, dim = x.shape[-2:]
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = torch.outer(torch.arange(length, device=x.device), frequencies)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Causal attention, then a two-layer network; each is added to its input, which it reads normalized."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        # (batch, length, 3 * dim) -> three of (batch, heads, length, dim / heads)
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Predicts the next byte. (batch, length) integers -> (batch, length, 256) logits in fp32."""

    def __init__(self, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x))
        return x.float()


# -- the text


def corpus(path: Path | None, at_least: int) -> tuple[Tensor, Tensor]:
    """Returns (training text, held-out text) as uint8; holds out every 25th source file, or the end of the one file."""
    if path is not None:
        text = path.read_bytes()
        cut = len(text) - min(len(text) // 10, HELD_OUT_LIMIT)
    else:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(file for file in root.rglob("*.py") if NOT_SOURCE.isdisjoint(file.relative_to(root).parts))
        train = b"".join(file.read_bytes() for index, file in enumerate(files) if index % 25 != 0)
        cut = len(train)
        text = train + b"".join(file.read_bytes() for file in files[::25])[:HELD_OUT_LIMIT]
    if len(text) - cut < at_least:
        raise SystemExit(f"{path or root}: expected {at_least} bytes or more to hold out, got {len(text) - cut}")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:cut], data[cut:]


def batches(text: Tensor, size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (inputs, targets) without end, (size, length) each, from random places of the text."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (size, 1), generator=random)
        window = text[starts + torch.arange(length + 1)].long()
        yield window[:, :-1], window[:, 1:]


def unigram_entropy(text: Tensor) -> float:
    """Returns the bits per byte of a model that knows only the frequency of each byte in this text."""
    p = torch.bincount(text.flatten().int(), minlength=BYTES) / text.numel()
    return -torch.xlogy(p, p).sum().item() / math.log(2)


# -- ZeRO


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    """Returns a config in the format of a DeepSpeed JSON; `zeroaccel.initialize` also takes the path of such a file."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": args.steps,
                "warmup_num_steps": max(1, args.steps // 20),
                "warmup_type": "linear",
                "cos_min_ratio": 0.05,
            },
        },
        # The threshold keeps biases and norms unsharded on every rank; larger parameters are gathered for use.
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 4 * args.dim},
    }
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    if args.offload != "none":
        where = {"device": args.offload, "nvme_path": str(args.nvme_path)}
        keys = {"pipeline_read": True, "pipeline_write": True, "update_during": args.update_during}
        config["zero_optimization"]["offload_optimizer"] = {**where, **keys}
        if args.stage == 3:
            config["zero_optimization"]["offload_param"] = {**where, "max_in_cpu": 0}
        config |= {"wall_clock_breakdown": True, "steps_per_print": max(1, args.steps // 5)}
    if args.report is not None:
        config["jsonl_monitor"] = {"enabled": True, "output_path": str(args.report), "job_name": "metrics"}
    return config


def zero_formula(numel: int, stage: int, ranks: int, precision: str) -> float:
    """Bytes of weights, gradients and Adam's state per rank (Rajbhandari et al., arXiv:1910.02054, section 5)."""
    # Adam has two fp32 moments; 16-bit weights also have an fp32 master, fp32 weights need none.
    weights, gradients, optimizer = (4, 4, 8) if precision == "fp32" else (2, 2, 12)
    shared = [ranks if stage >= first else 1 for first in (3, 2, 1)]
    return numel * (weights / shared[0] + gradients / shared[1] + optimizer / shared[2])


def train(engine: zeroaccel.Engine, text: Tensor, args: argparse.Namespace, console: Console) -> dict[str, int]:
    """Trains with forward, backward and step. Returns the bytes of model state on this rank, including gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = next(engine.parameters()).device
    data = batches(text, args.batch_size, args.seq, seed=args.seed + rank)
    numel = sum(param.numel() for param in engine.parameters())
    formula = zero_formula(numel, args.stage, ranks, args.precision) / 1e6
    columns = TaskProgressColumn(), BarColumn(None), TextColumn("{task.description}"), TimeRemainingColumn(compact=True)
    engine.train()
    start = time.perf_counter()
    with Progress(*columns, console=console, disable=rank != 0 or not console.is_terminal, expand=True) as progress:
        task = progress.add_task("", total=args.steps)
        for step in range(1, args.steps + 1):
            inputs, targets = next(data)
            logits = engine(inputs.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
            engine.backward(loss)
            # Gradients are reduced by now; stages 0 and 1 have freed the unsharded ones, which the formula counts.
            state = engine.model_state_nbytes()
            engine.step()

            speed = step * inputs.numel() * ranks / (time.perf_counter() - start)
            status = (
                f"{loss.item() / math.log(2):.2f} bits/byte  {speed:,.0f} tokens/s  "
                f"{sum(state.values()) / 1e6:.1f} MB/rank (formula {formula:.1f})"
            )
            progress.update(task, completed=step, description=status)
            if not console.is_terminal and (step % 50 == 0 or step == args.steps):
                console.print(f"step {step:5}/{args.steps}  {status}")
    return state


@torch.no_grad()
def evaluate(engine: zeroaccel.Engine, windows: Tensor, batch_size: int) -> float:
    """Returns the mean loss in bits per byte over windows (count, length + 1), with count a multiple of the ranks."""
    engine.eval()
    device = next(engine.parameters()).device
    total = torch.zeros((), device=device)
    # Each rank has parts of the weights, so all ranks must run the same number of forwards.
    for window in windows[dist.get_rank() :: dist.get_world_size()].split(batch_size):
        ids = window.to(device).long()
        logits = engine(ids[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    dist.all_reduce(total)
    return total.item() / windows[:, 1:].numel() / math.log(2)


@torch.no_grad()
def generate(engine: zeroaccel.Engine, prompt: str, length: int, context: int, seed: int) -> str:
    """Continues `prompt` by `length` bytes. Every rank draws the same bytes: equal logits, equal seeds."""
    engine.eval()
    device = next(engine.parameters()).device
    random = torch.Generator().manual_seed(seed)
    ids = list(prompt.encode())
    for _ in range(length):
        logits = engine(torch.tensor([ids[-context:]], device=device))[0, -1]
        probabilities = torch.softmax(logits.cpu() / 0.7, dim=-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=random)))
    return bytes(ids).decode(errors="replace")


def finish_report(args: argparse.Namespace, console: Console, seconds: float) -> None:
    """Writes the report page, and prints its path and commands to try next."""
    page = args.report / "report.html"
    subprocess.run([sys.executable, "-m", "zeroaccel.cli", "report", args.report, "-o", page], check=True)
    program = os.path.relpath(Path(sys.executable).with_name("zeroaccel"))
    console.print(f"{seconds:.1f} s in all; {page} shows losses, times, memory and traffic of each step. Try next:")
    console.print("  make demo OFFLOAD=cpu              # masters and states in host memory")
    console.print("  make demo DEMO_ARGS='--stage 1'    # another stage, the same losses")
    console.print(f"  {program} trace --num_processes 2 examples/train_gpt.py    # where a step's time goes")
    console.print(f"  {program} estimate 7b --ranks 8    # what a larger model needs")


# -- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this file, and hold out its end")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage [%(default)s]")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp16", "fp32"), help="[%(default)s]")
    parser.add_argument("--offload", default="none", choices=("none", "cpu", "nvme"), help="of states [%(default)s]")
    parser.add_argument("--update-during", default="auto", metavar="WHEN", help="of --offload: docs/offload.md [auto]")
    parser.add_argument("--nvme-path", type=Path, default=Path(), metavar="FOLDER", help="for --offload nvme [here]")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps [%(default)s]")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step [%(default)s]")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence [%(default)s]")
    parser.add_argument("--dim", type=int, default=320, help="width of the model [%(default)s]")
    parser.add_argument("--layers", type=int, default=3, help="blocks [%(default)s]")
    parser.add_argument("--heads", type=int, default=5, help="attention heads [%(default)s]")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate [%(default)s]")
    parser.add_argument("--prompt", default="class ", help="text that the model continues at the end [%(default)r]")
    parser.add_argument("--generate", type=int, default=300, help="bytes to generate [%(default)s]")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write metrics and a report page to this folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and generated text [%(default)s]")
    args = parser.parse_args()
    if args.offload != "none" and args.stage == 0:
        parser.error("--offload: needs --stage 1, 2 or 3")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text: {args.text} is not a file")
    if args.dim % (2 * args.heads):
        parser.error(f"--dim: {args.dim} is not an even number for each of {args.heads} heads")
    return args


def main() -> int:
    args, begun = arguments(), time.perf_counter()
    if args.report is not None and os.environ.get("RANK", "0") == "0":
        shutil.rmtree(args.report / "metrics", ignore_errors=True)  # of an earlier run
    torch.manual_seed(args.seed)
    model = GPT(args.dim, args.layers, args.heads)
    engine, _, _, _ = zeroaccel.initialize(model=model, config=ds_config(args))

    rank, ranks = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
    text, held_out = corpus(args.text, at_least=ranks * (args.seq + 1))
    # Each window has the inputs and the byte after them; each rank gets the same number of windows.
    windows = held_out.unfold(0, args.seq + 1, args.seq)
    windows = windows[: len(windows) // ranks * ranks]
    targets = windows[:, 1:]
    numel = sum(param.numel() for param in model.parameters())
    console.print(
        f"{numel / 1e6:.2f} M parameters in {args.precision}, ZeRO-{args.stage} on {ranks} rank(s); "
        f"{len(text):,} bytes to train on, {targets.numel():,} held out"
    )
    state = train(engine, text, args, console)
    loss, entropy = evaluate(engine, windows, args.batch_size), unigram_entropy(targets)
    sample = generate(engine, args.prompt, args.generate, args.seq, args.seed)

    console.rule(f"generated under ZeRO-{args.stage}")
    console.print(sample, markup=False)
    console.rule()
    formula = zero_formula(numel, args.stage, ranks, args.precision)
    parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in state.items())
    console.print(f"model state: {sum(state.values()):,} bytes per rank ({parts}); by the formula {formula:,.0f}")
    for name, nbytes in engine.tier_nbytes().items():
        console.print(f"offloaded {name}: {nbytes:,} bytes per rank")
    below = loss < entropy
    console.print(
        f"held-out loss {loss:.3f} bits/byte, unigram entropy {entropy:.3f} bits/byte: "
        f"{'below' if below else 'NOT BELOW'} by {abs(entropy - loss):.3f}"
    )
    engine.destroy()
    if args.report is not None and rank == 0:
        finish_report(args, console, time.perf_counter() - begun)
    dist.destroy_process_group()
    return 0 if below else 1


if __name__ == "__main__":
    sys.exit(main())
