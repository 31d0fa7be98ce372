"""A soak of lost ranks: seeded runs are killed and stopped again and again, and resume from the memory of the machine.

    python benchmarks/lost_ranks.py --minutes 10 --seed 0
    python benchmarks/lost_ranks.py --minutes 150 --faults 1000   # about 80 minutes of a quiet machine with 2 cores

Each run has two or three ranks, any stage, and two to four faults: a rank or two are killed before a step, while a
state is written, or as soon as the run has resumed; or a rank is stopped (SIGSTOP), which the watchdog names after its
limit. Counted are runs whose final weights differ from those of the same run without faults, runs that hang, and
processes and files in memory that are left. The program of the ranks is `tests/e2e/lost_ranks.py`.
"""

from __future__ import annotations

import fcntl
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

import click
import psutil

ROOT = Path(__file__).resolve().parent.parent
MEMORY = Path("/dev/shm")
PROGRAM = ROOT / "tests" / "e2e" / "lost_ranks.py"
KINDS = ("kill", "kill two", "save", "load", "stop")
STEPS, LIMIT_SECONDS, HANG_SECONDS = 14, 4.0, 120.0


def faults_of(draw: random.Random, num_ranks: int) -> list[tuple[str, str]]:
    """(kind, order for the program) of each attempt."""
    found, step = [], 3
    for _ in range(draw.randint(2, 4)):
        kind = draw.choice(KINDS)
        who = draw.sample(range(num_ranks), 2 if kind == "kill two" else 1)
        found.append((kind, f"{kind.split()[0]}:{step}:{'+'.join(map(str, who))}"))
        step += draw.randint(2, 3)
    return found


def launched(folder: Path, num_ranks: int, seed: int, faults: list[str]) -> tuple[bool, str, str]:
    """(whether it ended in time, the digest of its weights, what it said)."""
    folder.mkdir()
    flags = ["--max_restarts", str(len(faults)), "--timeout", str(LIMIT_SECONDS)]
    words = [PROGRAM, folder, STEPS, 2, seed, ",".join(faults)]
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", num_ranks, *flags, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        _, said = job.communicate(timeout=HANG_SECONDS * (len(faults) + 1))
    except subprocess.TimeoutExpired:
        job.kill()
        return False, "", job.communicate()[1]
    digest = folder / "digest"
    return True, digest.read_text() if digest.exists() else "", said


def is_locked(folder: Path) -> bool:
    """Whether a launcher has the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def recoveries(folder: Path, kinds: list[str]) -> list[tuple[str, float, int]]:
    """(kind, seconds from the fault to the first step after it, steps lost) of each fault."""
    found = []
    for attempt, kind in enumerate(kinds):
        begin, then = folder / f"fault.{attempt}", folder / f"resumed.{attempt + 1}"
        if begin.exists() and then.exists():
            when, step = then.read_text().split()
            found.append((kind, float(when) - float(begin.read_text()), int(step)))
    return found


@click.command()
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--faults", "most", default=1_000_000, metavar="N", help="End after so many, if the time is not over.")
@click.option("--seed", default=0, show_default=True)
def main(minutes: float, most: int, seed: int) -> None:
    """Runs until the time is over, or the faults are many enough. Exits with 1 where any run went wrong."""
    end, counts, seconds = time.monotonic() + 60 * minutes, Counter[str](), dict[str, list[float]]()
    whole: dict[tuple[int, int], str] = {}
    while time.monotonic() < end and sum(counts[kind] for kind in KINDS) < most:
        draw = random.Random(seed)
        num_ranks = draw.choice([2, 2, 3])
        with tempfile.TemporaryDirectory(prefix="lost-") as folder:
            key = num_ranks, seed % 4  # the seed of the program, which is its stage as well
            if key not in whole:
                _, whole[key], _ = launched(Path(folder, "whole"), *key, [])
            faults = faults_of(draw, num_ranks)
            ended, digest, said = launched(Path(folder, "lost"), *key, [order for _, order in faults])
            suffered = [
                kind for attempt, (kind, _) in enumerate(faults) if Path(folder, f"lost/fault.{attempt}").exists()
            ]
            counts.update(suffered)
            for kind, took, _ in recoveries(Path(folder, "lost"), [kind for kind, _ in faults]):
                seconds.setdefault(kind, []).append(took)
        left = [path for path in MEMORY.glob("*zeroaccel-memory-*") if not is_locked(path)]
        alive = [one for one in psutil.process_iter(["cmdline"]) if str(PROGRAM) in (one.info["cmdline"] or [])]
        outcome = "hang" if not ended else "wrong" if digest != whole[key] else "right"
        counts.update(["runs", outcome, *["left behind"] * bool(left or alive)])
        print(f"seed {seed}: {num_ranks} ranks, {', '.join(suffered)}: {outcome}", flush=True)
        if outcome != "right" or left or alive:
            print(f"{faults}\n{left} {alive}\n{said}", flush=True)
        seed += 1
    print(
        f"{date.today()}, {os.cpu_count()} cores: {counts['runs']} runs, {counts['wrong']} with other weights, ", end=""
    )
    print(f"{counts['hang']} hung, {counts['left behind']} left something behind")
    print("| fault | number | seconds to the next step: median | largest |\n|---|---|---|---|")
    for kind in KINDS:
        took = seconds.get(kind, [0.0])
        print(f"| {kind} | {counts[kind]} | {statistics.median(took):.1f} | {max(took):.1f} |")
    sys.exit(int(any(counts[name] for name in ("wrong", "hang", "left behind"))))


if __name__ == "__main__":
    main()
