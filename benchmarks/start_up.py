"""Measures the time until the end of the first step: imports, `prepare`, and the step itself.

    python benchmarks/start_up.py

The program times imports in fresh interpreters, in turn, and shows the smallest time of each, because other programs
can only add time. It times `prepare` and the first step on two ranks after the imports, with the model of `make demo`
(examples/train_gpt.py), at stages 0 and 3; kernels come from Numba's cache, which the first run on a machine fills. A
loaded machine affects the processor time of a rank (all threads) less than the wall-clock time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = ("import torch", "import zeroaccel", "import torch, zeroaccel", "from zeroaccel import Accelerator")
BAR_RATIO, BAR_SECONDS = 1.15, 3.0


def seconds_of(statement: str) -> float:
    """Returns the seconds of a fresh interpreter that runs only the import."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, cwd=ROOT)
    return time.perf_counter() - start


def rank(stage: int) -> None:
    """Trains as one rank and prints its times as JSON."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    from train_gpt import GPT

    from zeroaccel import Accelerator, ZeroPlugin

    torch.manual_seed(0)
    model = GPT(dim=320, layers=3, heads=5)
    torch.set_num_threads(1)  # like the launcher for ranks that share the cores
    accelerator = Accelerator(mixed_precision="bf16", zero_plugin=ZeroPlugin(zero_stage=stage))
    tokens = torch.randint(0, 256, (64, 129))
    loader = torch.utils.data.DataLoader(tokens, batch_size=8)  # type: ignore[arg-type]
    # The first optimizer of a process imports torch's compiler, which takes about a second.
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.wait_for_everyone()
    start, busy = time.perf_counter(), time.process_time()
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ready = time.perf_counter()
    batch = next(iter(loader))
    logits = prepared(batch[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    accelerator.backward(loss)
    optimizer.step()
    done, busy = time.perf_counter(), time.process_time() - busy
    if accelerator.is_main_process:
        numel = sum(param.numel() for param in model.parameters())
        times = {"prepare": ready - start, "first_step": done - ready, "busy": busy}
        print(json.dumps({"stage": stage, "numel": numel, **times}))
    accelerator.end_training()


def first_step(stage: int) -> dict[str, float]:
    """Returns the times of rank 0 of two."""
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", "2", __file__, "--rank", str(stage)]
    result = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(result.stdout.strip().splitlines()[-1])
    return measured


@click.command()
@click.option("--rank", "stage", type=int, default=None, hidden=True)
@click.option("--rounds", default=7, show_default=True, help="Interpreters per statement.")
@click.option("--check", is_flag=True, help="Exit with 1 if a bar is missed.")
def main(stage: int | None, rounds: int, check: bool) -> None:
    """Measures imports, prepare and the first step."""
    if stage is not None:
        rank(stage)
        return
    best = dict.fromkeys(IMPORTS, float("inf"))
    for _ in range(rounds):
        for statement in IMPORTS:
            best[statement] = min(best[statement], seconds_of(statement))
    torch_alone = best["import torch"]
    for statement, seconds in best.items():
        print(f"{statement:<36} {seconds:6.2f} s   {seconds / torch_alone:5.2f} x import torch")
    first_step(3)  # fills the cache of compiled kernels
    held = best["import torch, zeroaccel"] <= BAR_RATIO * torch_alone
    for number in (0, 3):
        took = first_step(number)
        total = took["prepare"] + took["first_step"]
        held = held and total < BAR_SECONDS
        print(
            f"stage {number}, {took['numel'] / 1e6:.1f} million parameters, 2 ranks: prepare {took['prepare']:.2f} s, "
            f"first step {took['first_step']:.2f} s, together {total:.2f} s ({took['busy']:.2f} s of the processor)"
        )
    print(f"bars (importing beside torch {BAR_RATIO} x, first step {BAR_SECONDS} s): {'held' if held else 'not held'}")
    if check and not held:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
