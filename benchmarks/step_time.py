"""Compares step time, memory and traffic of zeroaccel, DDP, FSDP2 and DeepSpeed on this machine.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --only zeroaccel-3-lean,fsdp2 --rounds 5 --json result.json
    python benchmarks/step_time.py --only zeroaccel-3,zeroaccel-3@older --older ../older

This file is the command line; `race.py` measures, and `report.py` prints.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from contenders import CONTENDERS, HEATS
from models import Shape
from race import OLDER, Conditions, ContenderFailed, TooLittleMemory, race
from report import document, holds, machine, show
from rich.console import Console


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=15, help="Rounds; each runs every contender once.")
@click.option("--steps", default=5, help="Timed steps of a contender in a round.")
@click.option("--warmup", default=5, help="Untimed steps of a contender at the start.")
@click.option("--world-size", default=2, help="Processes of each contender.")
@click.option("--threads", default=1, help="Threads of each process.")
@click.option("--only", help="Contenders, separated by commas, all in one heat; by default two heats.")
@click.option("--deepspeed-python", type=click.Path(exists=True, dir_okay=False), help="Interpreter with DeepSpeed.")
@click.option("--older", default="", metavar="TREE", help="Another checkout: --only NAME@older runs NAME there.")
@click.option("--hidden", default=Shape.hidden)
@click.option("--layers", default=Shape.layers)
@click.option("--heads", default=Shape.heads)
@click.option("--vocabulary", default=Shape.vocabulary)
@click.option("--sequence", default=Shape.sequence)
@click.option("--batch", default=Shape.batch, help="Sequences per rank and step.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this file."
)
@click.option("--check", is_flag=True, help="Exit with 1 if a bar is missed or the losses disagree.")
def main(
    rounds: int,
    steps: int,
    warmup: int,
    world_size: int,
    threads: int,
    only: str | None,
    deepspeed_python: str | None,
    older: str,
    json_path: Path | None,
    check: bool,
    **shape: Any,
) -> None:
    """Compares the engines on one model, the same tokens and the same processes, in interleaved rounds."""
    wanted = [name.strip() for name in only.split(",")] if only else [name for heat in HEATS for name in heat]
    unknown = sorted({name.removesuffix(OLDER if older else "") for name in wanted} - set(CONTENDERS))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}; there are {', '.join(CONTENDERS)}", param_hint="--only")
    if deepspeed_python is None and importlib.util.find_spec("deepspeed") is not None:
        deepspeed_python = sys.executable
    conditions = Conditions(Shape(**shape), world_size, threads, rounds, steps, warmup, deepspeed_python, older)
    progress = Console(stderr=True)
    documents, good = [], True
    for names in [wanted] if only else HEATS:
        try:
            results = race(names, conditions, lambda line: progress.print(line, style="dim", highlight=False))
        except (ContenderFailed, TooLittleMemory) as error:
            raise click.ClickException(str(error)) from error
        show(results, conditions, Console(width=None if sys.stdout.isatty() else 200))
        documents.append(document(results, conditions))
        good = good and holds(results, conditions.world_size)
    if json_path is not None:
        common = {key: value for key, value in asdict(conditions).items() if key != "deepspeed_python"}
        whole = {"machine": machine(), "conditions": common, "heats": documents}
        json_path.write_text(json.dumps(whole, indent=1) + "\n")
    if check and not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
