"""Soak test for lost ranks: kills and stops seeded runs repeatedly, which resume from states in memory.

    python benchmarks/lost_ranks.py --minutes 10 --seed 0
    python benchmarks/lost_ranks.py --minutes 150 --faults 1000 --jobs 3

Each run has two or three ranks, any stage, and four to eight faults. A fault kills one or two ranks before a step,
during the write of a state, or as soon as the run has resumed; or it stops a rank (SIGSTOP), which the watchdog names
after its limit. Several runs go side by side, because starts and limits are mostly waits. The program counts runs whose
final weights differ from those of the same run without faults, runs that hang, and leftover processes and files in
memory. The ranks run `tests/e2e/lost_ranks.py`.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import date
from pathlib import Path

import click
import psutil

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests" / "e2e" / "lost_ranks.py"
KINDS = ("kill", "kill two", "save", "load", "stop")
STEPS, LIMIT_SECONDS, HANG_SECONDS = 28, 4.0, 120.0


def faults_of(draw: random.Random, num_ranks: int) -> list[tuple[str, str]]:
    """Returns (kind, order for the program) of each attempt."""
    found, step = [], 3
    for _ in range(draw.randint(4, 8)):
        kind = draw.choice(KINDS)
        who = draw.sample(range(num_ranks), 2 if kind == "kill two" else 1)
        found.append((kind, f"{kind.split()[0]}:{step}:{'+'.join(map(str, who))}"))
        step += draw.randint(2, 3)
    return found


def launched(folder: Path, num_ranks: int, seed: int, faults: list[str]) -> tuple[bool, str, str]:
    """Runs a job; returns (True if it ended in time, the digest of its weights, its output)."""
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


def recoveries(folder: Path, kinds: list[str]) -> list[tuple[str, float, int]]:
    """Returns (kind, seconds from the fault to the first step after it, lost steps) of each fault."""
    found = []
    for attempt, kind in enumerate(kinds):
        begin, then = folder / f"fault.{attempt}", folder / f"resumed.{attempt + 1}"
        if begin.exists() and then.exists():
            when, step = then.read_text().split()
            found.append((kind, float(when) - float(begin.read_text().split()[0]), int(step)))
    return found


class Soak:
    """Results of the runs so far.

    Attributes:
        whole: digests of the runs without faults, by (ranks, seed of the program, which also sets the stage).
    """

    def __init__(self, most: int, end: float, seed: int) -> None:
        self.counts, self.seconds = Counter[str](), dict[str, list[float]]()
        self.whole: dict[tuple[int, int], str] = {}
        self._most, self._end, self._seed = most, end, seed
        self._lock = threading.Lock()

    @property
    def num_faults(self) -> int:
        """Number of faults in all runs."""
        return sum(self.counts[kind] for kind in KINDS)

    def work(self) -> None:
        """Starts runs until the time is over or enough faults have happened; executed in a separate thread."""
        while time.monotonic() < self._end and self.num_faults < self._most:
            with self._lock:
                seed, self._seed = self._seed, self._seed + 1
            with tempfile.TemporaryDirectory(prefix="lost-") as folder:
                self.suffer(seed, Path(folder))

    def suffer(self, seed: int, folder: Path) -> None:
        """Runs one job with faults."""
        draw = random.Random(seed)
        key = draw.choice([2, 2, 3]), seed % 4
        faults = faults_of(draw, key[0])
        ended, digest, said = launched(folder / "lost", *key, [order for _, order in faults])
        suffered = [kind for attempt, (kind, _) in enumerate(faults) if Path(folder, f"lost/fault.{attempt}").exists()]
        left = left_behind(folder)
        whole = self.digest_without_faults(key, folder)
        outcome = "hang" if not ended else "wrong" if digest != whole else "right"
        with self._lock:
            self.counts.update([*suffered, "runs", outcome, *["left behind"] * bool(left)])
            for kind, took, _ in recoveries(folder / "lost", [kind for kind, _ in faults]):
                self.seconds.setdefault(kind, []).append(took)
            print(f"seed {seed}: {key[0]} ranks, {', '.join(suffered)}: {outcome}", flush=True)
            if outcome != "right" or left:
                print(f"{faults}\n{left}\n{said}", flush=True)

    def digest_without_faults(self, key: tuple[int, int], folder: Path) -> str:
        """Returns the digest of the same program without faults."""
        if key not in self.whole:
            self.whole[key] = launched(folder / "whole", *key, [])[1]
        return self.whole[key]


def left_behind(folder: Path) -> list[str]:
    """Returns the launcher's folder in memory, if a rank has started, and processes of the run in this folder."""
    for _ in range(3):  # for processes that are ending
        memory = folder / "lost/memory"
        left = [str(memory.readlink())] if memory.exists() else []
        words = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        left += [line for line in words if f"{folder}/lost" in line]
        if not left:
            break
        time.sleep(0.5)
    return left


@click.command()
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--faults", "most", default=1_000_000, metavar="N", help="End after N faults, if the time is not over.")
@click.option("--seed", default=0, show_default=True)
@click.option("--jobs", default=1, show_default=True, help="Runs side by side; 1 times a quiet machine.")
def main(minutes: float, most: int, seed: int, jobs: int) -> None:
    """Starts runs until the time is over or enough faults have happened. Exits with 1 if a run failed."""
    begin = time.monotonic()
    soak = Soak(most, begin + 60 * minutes, seed)
    workers = [threading.Thread(target=soak.work) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    counts, took = soak.counts, (time.monotonic() - begin) / 60
    print(f"{date.today()}, {os.cpu_count()} cores, {jobs} side by side, {took:.1f} minutes: ", end="")
    print(f"{counts['runs']} runs with {soak.num_faults} faults, {counts['wrong']} with other weights, ", end="")
    print(f"{counts['hang']} hung, {counts['left behind']} left something behind")
    print("| fault | number | seconds to the next step: median | largest |\n|---|---|---|---|")
    for kind in KINDS:
        found = soak.seconds.get(kind, [0.0])
        print(f"| {kind} | {counts[kind]} | {statistics.median(found):.1f} | {max(found):.1f} |")
    sys.exit(int(any(counts[name] for name in ("wrong", "hang", "left behind"))))


if __name__ == "__main__":
    main()
