"""Step times, memory and start-up of this tree and of another checkout of it, in one interleaved run.

    git worktree add ../older <commit>
    python benchmarks/two_trees.py ../older

For changes that are to cost nothing. Rounds as in `race.py`: each has every contender of both trees once, and what is
compared is times of the same round. Start-up is timed in fresh interpreters, in turn; the least of each is shown, as
what else the machine does can only add.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
from contenders import CONTENDERS
from models import Shape
from race import OLDER, ROOT, Conditions, race

STAGES = "zeroaccel-0,zeroaccel-2,zeroaccel-3,zeroaccel-3-lean,zeroaccel-3-host"
FIRST_STEP = """
import torch
from torch import nn
from zeroaccel import Accelerator, ZeroPlugin
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)], nn.Linear(256, 1))
accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=3))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.randn(8, 256)).square().mean())
optimizer.step()
"""
STATEMENTS = {
    "import zeroaccel": "import zeroaccel",
    "import Accelerator": "from zeroaccel import Accelerator",
    "to the end of a first step": FIRST_STEP,
}


def seconds_of(statement: str, tree: Path) -> float:
    """Of a fresh interpreter in `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, cwd=tree, env=environment, capture_output=True)
    return time.perf_counter() - start


@click.command(context_settings={"show_default": True})
@click.argument("older", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default=STAGES, help="Contenders, separated by commas.")
@click.option("--rounds", default=15, help="Rounds of steps; each has every contender of both trees.")
@click.option("--steps", default=5, help="Timed steps of a contender in a round.")
@click.option("--starts", default=7, help="Interpreters per tree and statement.")
def main(older: Path, only: str, rounds: int, steps: int, starts: int) -> None:
    """Compares this tree with the checkout OLDER."""
    names = only.split(",")
    if unknown := sorted(set(names) - set(CONTENDERS)):
        raise click.BadParameter(f"{', '.join(unknown)}; there are {', '.join(CONTENDERS)}", param_hint="--only")
    older = older.resolve()
    conditions = Conditions(Shape(), rounds=rounds, steps=steps, older=str(older))
    both = [each for name in names for each in (name, name + OLDER)]
    results = race(both, conditions, lambda line: click.echo(line, err=True))
    click.echo("| contender | step, ms | older, ms | ratio, median of rounds | its quartiles | peak RSS, MiB | older |")
    click.echo("|---|---|---|---|---|---|---|")
    for name in names:
        new, old = results[name], results[name + OLDER]
        if new.failure or old.failure:
            raise SystemExit(f"{name}: {new.failure or old.failure}")
        ratios = [ours / theirs for ours, theirs in zip(new.seconds, old.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        times = f"{1e3 * statistics.median(new.seconds):.1f} | {1e3 * statistics.median(old.seconds):.1f}"
        memory = f"{new.peak_rss >> 20} | {old.peak_rss >> 20}"
        click.echo(f"| {name} | {times} | {middle:.3f} | {low:.3f} to {high:.3f} | {memory} |")
        if new.losses != old.losses:
            click.echo(f"{name}: losses differ: {new.losses} and {old.losses}")
    click.echo("")
    click.echo("| start-up | s | older, s | ratio |")
    click.echo("|---|---|---|---|")
    for label, statement in STATEMENTS.items():
        for tree in (ROOT, older):
            seconds_of(statement, tree)  # fills the caches of compiled code
        pairs = [(seconds_of(statement, ROOT), seconds_of(statement, older)) for _ in range(starts)]
        ours, theirs = (min(column) for column in zip(*pairs, strict=True))
        click.echo(f"| {label} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
