"""Loss of the demo model with and without ZeRO++, 200 steps on 4 ranks that pretend to be 2 nodes of 2.

    python benchmarks/zeropp_curves.py --markdown result.md

Starts `torch.distributed.run` on itself. All variants train in the same processes from the same weights on the same
batches of `examples/train_gpt.py`, one after the other. What is compared is the mean loss over all ranks and the last
20 steps. The bar: within 1 % of the exact run. Exit code 1 if not. The plot is made of characters, one column per ten
steps.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import click

BAR = 0.01
NODE_SIZE = 2
LAST = 20
_ROOT = Path(__file__).resolve().parents[1]
_QWZ, _QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "qwZ": _QWZ,
    "qgZ": _QGZ,
    "all three": {**_QWZ, **_QGZ, "zero_hpz_partition_size": NODE_SIZE},
}


def run_rank(steps: int, dim: int, layers: int, variants: list[str]) -> None:
    """Trains the variants; rank 0 prints one JSON line of losses in bits per byte."""
    import torch

    import zeroaccel

    sys.path.insert(0, str(_ROOT / "examples"))
    from train_gpt import GPT, batches, corpus

    torch.set_num_threads(1)
    curves: dict[str, list[float]] = {}
    for name in variants:
        torch.manual_seed(0)
        model = GPT(dim, layers, heads=dim // 64)
        settings = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": steps, "warmup_num_steps": steps // 20, "warmup_type": "linear"},
            },
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "zeropp": {"node_size": NODE_SIZE},
                **VARIANTS[name],
            },
        }
        engine, *_ = zeroaccel.initialize(model, config=settings)
        text, _ = corpus(None, 1)
        data = batches(text, 4, 64, seed=engine.collectives.rank)
        losses = []
        for _ in range(steps):
            inputs, targets = next(data)
            loss = torch.nn.functional.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item() / math.log(2))
        everyone = torch.tensor(losses, dtype=torch.float64)
        engine.collectives.all_reduce(everyone, "sum", "mean loss")
        curves[name] = (everyone / engine.collectives.world_size).tolist()
        engine.destroy()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(curves))
    torch.distributed.destroy_process_group()


def plot(curves: dict[str, list[float]], height: int = 14) -> list[str]:
    """Means over ten steps; a letter per variant, `*` where several meet."""
    means = {
        name: [sum(c[i : i + 10]) / len(c[i : i + 10]) for i in range(0, len(c), 10)] for name, c in curves.items()
    }
    values = [value for mean in means.values() for value in mean]
    low, high = min(values), max(values)
    width = max(map(len, means.values()))
    grid = [[" "] * width for _ in range(height)]
    for index, mean in enumerate(means.values()):
        for column, value in enumerate(mean):
            row = round((high - value) / (high - low) * (height - 1))
            grid[row][column] = "*" if grid[row][column] != " " else "abcdefgh"[index]
    rows = [
        f"{high - (high - low) * row / (height - 1):6.2f} | {'  '.join(cells)}".rstrip()
        for row, cells in enumerate(grid)
    ]
    legend = ", ".join(f"{'abcdefgh'[index]} {name}" for index, name in enumerate(means))
    return [*rows, f"        steps 1 to {10 * width}; {legend}, * several"]


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=200)
@click.option("--dim", default=320, help="Width of the model.")
@click.option("--layers", default=3)
@click.option("--variants", default=",".join(VARIANTS), help="Of these, the first is what the others are held against.")
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here, too.")
def main(steps: int, dim: int, layers: int, variants: str, markdown: Path | None) -> None:
    """Trains every variant and compares the ends."""
    wanted = variants.split(",")
    if "RANK" in os.environ:
        run_rank(steps, dim, layers, wanted)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", __file__]
    options = ["--steps", str(steps), "--dim", str(dim), "--layers", str(layers), "--variants", variants]
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *options], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    curves: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    ends = {name: sum(curve[-LAST:]) / LAST for name, curve in curves.items()}
    exact = ends[wanted[0]]
    lines = [
        f"# Loss with and without ZeRO++, {date.today()}",
        "",
        f"`python benchmarks/zeropp_curves.py --steps {steps} --dim {dim} --layers {layers}`: the model of",
        "`examples/train_gpt.py` in bf16 on 4 ranks taken for 2 nodes of 2, 4 windows of 64 bytes each, AdamW,",
        f"clipping to 1. Loss in bits per byte, mean over the ranks and the last {LAST} steps.",
        f"The bar: within {BAR:.0%} of the exact run.",
        "",
        "| variant | loss | against exact |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {end:.4f} | {end / exact - 1:+.2%} |" for name, end in ends.items()),
        "",
        "```text",
        *plot(curves),
        "```",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if markdown is not None:
        markdown.write_text(text)
    far = [name for name, end in ends.items() if abs(end / exact - 1) > BAR]
    if far:
        sys.exit(f"further than {BAR:.0%} from the exact run: {', '.join(far)}")


if __name__ == "__main__":
    main()
