"""Tries hostile files on every reader of outside files, and measures the time and memory of each attempt.

    python benchmarks/fuzz_readers.py --inputs 10000 --markdown result.md

Every reader gets the corpus of found cases (tests/hostile/bombs.py) and then valid files with random edits, in separate
processes. The program measures the processor time, the wall-clock time and the growth of the resident set for each
attempt. The exit code is 1 if an attempt took more than 2 s of processor time or 500 MB, raised an exception that
errors.py does not define, or ended its process.
"""

from __future__ import annotations

import gc
import multiprocessing
import platform
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.hostile.bombs import BOMBS, bomb
from tests.hostile.readers import ALLOWED, READERS, apply_edits, edited_tree

MOST_SECONDS = 2.0
MOST_MB = 500.0
PATIENCE_SECONDS = 120.0
ADDRESS_SPACE_NBYTES = 16 << 30

Attempt = tuple[str, str, int]
"""(reader, name of a found case or "", seed of random edits)."""


@dataclass
class Tally:
    """Results of one reader."""

    tried: int = 0
    found: int = 0
    refused: int = 0
    cpu_seconds: float = 0.0
    slowest_cpu: float = 0.0
    slowest_clock: float = 0.0
    most_mb: float = 0.0
    beyond: list[str] = field(default_factory=list)

    def add(self, attempt: Attempt, cpu: float, clock: float, grown_mb: float, outcome: str) -> None:
        """Counts one attempt."""
        self.tried += 1
        self.found += bool(attempt[1])
        self.refused += outcome == "refused"
        self.cpu_seconds += cpu
        self.slowest_cpu = max(self.slowest_cpu, cpu)
        self.slowest_clock = max(self.slowest_clock, clock)
        self.most_mb = max(self.most_mb, grown_mb)
        if cpu > MOST_SECONDS or grown_mb > MOST_MB or outcome not in ("read", "refused"):
            self.beyond.append(f"{attempt}: {outcome}, {cpu:.2f} s, {grown_mb:.0f} MB")


def _content(attempt: Attempt, seeds: dict[str, list[bytes]], folder: Path) -> bytes:
    reader, name, seed = attempt
    if name:
        return bomb(reader, name, folder)
    chance = random.Random(f"{reader} {seed}")
    content = chance.choice(seeds[reader])
    if reader in ("checkpoint", "json") and not content.startswith(b"{//") and chance.random() < 0.7:
        return edited_tree(content, chance)
    edits = []
    for _ in range(chance.randint(1, 6)):
        token = (
            chance.choice(READERS[reader].tokens) if chance.random() < 0.7 else chance.randbytes(chance.randint(0, 8))
        )
        edits.append((chance.randrange(1 << 20), chance.randrange(1 << 20), token * chance.choice((1, 1, 1, 2, 50))))
    return apply_edits(content, edits)


def _memory_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1000
    return 0.0


def _measured(attempt: Attempt, seeds: dict[str, list[bytes]], root: Path) -> tuple[float, float, float, str]:
    """Returns (processor seconds, wall-clock seconds, MB of growth, outcome) of an attempt."""
    made, read = root / "made", root / "read"
    for folder in (made, read):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    content = _content(attempt, seeds, made)
    outcome = "read"
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, cpu, clock = _memory_mb("VmRSS"), time.process_time(), time.perf_counter()
    try:
        READERS[attempt[0]].read(content, read)
    except ALLOWED as error:
        outcome = "refused" if str(error).isascii() or str(error).encode() else "unprintable"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {str(error)[:200]!r}"
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    grown = _memory_mb("VmHWM") - before
    gc.collect()
    return cpu, clock, grown, outcome


def _worker(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_NBYTES, ADDRESS_SPACE_NBYTES))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        seeds = {}
        for number, (name, reader) in enumerate(READERS.items()):
            (root / f"seeds{number}").mkdir()
            seeds[name] = list(reader.seeds(root / f"seeds{number}"))
            for content in seeds[name]:  # imports and compiles on first use
                (root / f"seeds{number}" / "read").mkdir()
                reader.read(content, root / f"seeds{number}" / "read")
                shutil.rmtree(root / f"seeds{number}" / "read")
        gc.collect()
        gc.freeze()  # a collection after each attempt then visits only objects of that attempt
        while (attempt := pipe.recv()) is not None:
            pipe.send(_measured(attempt, seeds, root))


def _run(attempts: Iterator[Attempt], tallies: dict[str, Tally]) -> None:
    """Runs the attempts in a process; starts a new one if it ends or does not answer."""
    context = multiprocessing.get_context("spawn")
    process: Any = None
    for attempt in attempts:
        if process is None:
            pipe, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
        pipe.send(attempt)
        result = (PATIENCE_SECONDS, PATIENCE_SECONDS, 0.0, "no answer")
        try:
            if pipe.poll(PATIENCE_SECONDS):
                result = pipe.recv()
        except EOFError:
            result = (0.0, 0.0, 0.0, "the process ended")
        tallies[attempt[0]].add(attempt, *result)
        if result[3] in ("no answer", "the process ended"):
            process.kill()
            process.join()
            process = None
    if process is not None:
        pipe.send(None)
        process.join()


def _attempts(reader: str, inputs: int) -> Iterator[Attempt]:
    yield from ((name, case, 0) for name, case in BOMBS if name == reader)
    yield from ((reader, "", seed) for seed in range(inputs))


def _table(tallies: dict[str, Tally]) -> list[str]:
    lines = [
        "| reader | tried | of the corpus | refused | processor s | slowest, s | on the clock, s | most, MB | beyond |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {name} | {one.tried} | {one.found} | {one.refused} | {one.cpu_seconds:.0f} | {one.slowest_cpu:.2f} "
        f"| {one.slowest_clock:.2f} | {one.most_mb:.0f} | {len(one.beyond)} |"
        for name, one in tallies.items()
    ]
    return lines


@click.command()
@click.option("--inputs", default=1000, show_default=True, help="Edited files for each reader, beside the corpus.")
@click.option("--only", multiple=True, type=click.Choice(list(READERS)), help="Name of a reader; all by default.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Also write the table to this file.")
def main(inputs: int, only: tuple[str, ...], markdown: Path | None) -> None:
    """Tries hostile files on every reader, and measures time and memory."""
    tallies = {name: Tally() for name in only or READERS}
    _run((attempt for name in tallies for attempt in _attempts(name, inputs)), tallies)
    for name, one in tallies.items():
        click.echo("\n".join([f"{name}: {len(one.beyond)} beyond the bounds", *one.beyond[:20]]), err=True)
    lines = _table(tallies)
    click.echo("\n".join(lines))
    beyond = sum(len(one.beyond) for one in tallies.values())
    if markdown is not None:
        markdown.write_text(
            f"# Hostile files, {date.today()}\n\n"
            f"`python benchmarks/fuzz_readers.py --inputs {inputs}`, torch {torch.__version__}, Python "
            f"{platform.python_version()}. Bounds: {MOST_SECONDS:.0f} s of processor time, {MOST_MB:.0f} MB above what "
            f"the process had before, no exception except those of errors.py; {beyond} of "
            f"{sum(one.tried for one in tallies.values())} exceeded one.\n\n" + "\n".join(lines) + "\n"
        )
    sys.exit(1 if beyond else 0)


if __name__ == "__main__":
    main()
