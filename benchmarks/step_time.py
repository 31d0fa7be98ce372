"""Step time, memory and traffic of zeroaccel beside DDP, FSDP2 and DeepSpeed, on this machine.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --only zeroaccel-3-lean,fsdp2 --rounds 5 --json result.json

The command line only: `race.py` measures, `report.py` prints.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import click
from contenders import CONTENDERS
from models import Shape
from race import Conditions, race
from report import bars, document, losses_agree, show
from report import LOSS_TOLERANCE
from rich.console import Console


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=15, help="Rounds; each has every contender once.")
@click.option("--steps", default=5, help="Timed steps of a contender in a round.")
@click.option("--warmup", default=5, help="Untimed steps of a contender at the start.")
@click.option("--world-size", default=2, help="Processes of each contender.")
@click.option("--threads", default=1, help="Threads of each process.")
@click.option("--only", default=",".join(CONTENDERS), show_default=False, help="Contenders, separated by commas.")
@click.option("--deepspeed-python", type=click.Path(exists=True, dir_okay=False), help="Interpreter that has DeepSpeed.")
@click.option("--hidden", default=Shape.hidden)
@click.option("--layers", default=Shape.layers)
@click.option("--heads", default=Shape.heads)
@click.option("--vocabulary", default=Shape.vocabulary)
@click.option("--sequence", default=Shape.sequence)
@click.option("--batch", default=Shape.batch, help="Sequences per rank and step.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--check", is_flag=True, help="Exit with 1 if a bar is missed or the losses disagree.")
def main(
    rounds: int,
    steps: int,
    warmup: int,
    world_size: int,
    threads: int,
    only: str,
    deepspeed_python: str | None,
    json_path: Path | None,
    check: bool,
    **shape: Any,
) -> None:
    """Compares the engines on one model, the same tokens and the same processes, in interleaved rounds."""
    names = [name.strip() for name in only.split(",")]
    unknown = sorted(set(names) - set(CONTENDERS))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}; there are {', '.join(CONTENDERS)}", param_hint="--only")
    if deepspeed_python is None and importlib.util.find_spec("deepspeed") is not None:
        deepspeed_python = sys.executable
    conditions = Conditions(Shape(**shape), world_size, threads, rounds, steps, warmup, deepspeed_python)
    progress = Console(stderr=True)
    results = race(names, conditions, lambda line: progress.print(line, style="dim", highlight=False))
    show(results, conditions, Console(width=None if sys.stdout.isatty() else 200))
    if json_path is not None:
        json_path.write_text(json.dumps(document(results, conditions), indent=1) + "\n")
    there = {name: result for name, result in results.items() if not result.failure}
    missed = any(not bar.passed for bar in bars(there, world_size))
    if check and (missed or (len(there) > 1 and losses_agree(there)[1] > LOSS_TOLERANCE)):
        sys.exit(1)


if __name__ == "__main__":
    main()
