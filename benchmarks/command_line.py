"""Measures how long `zeroaccel --help` and the help of each command take, each in a new process.

    python benchmarks/command_line.py

Prints, per command, the best and the median wall-clock time, and the processor time of the best run. Compare processor
times on a machine that runs other programs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

COMMANDS = (["--help"], ["config", "--help"], ["launch", "--help"], ["--version"])
RUNS = 9


def main() -> None:
    print(f"{'command':<28}{'best, s':>10}{'median, s':>12}{'processor, s':>14}")
    for words in COMMANDS:
        taken = sorted(_once(words) for _ in range(RUNS))
        median = statistics.median(wall for wall, _ in taken)
        print(f"{'zeroaccel ' + ' '.join(words):<28}{taken[0][0]:>10.3f}{median:>12.3f}{taken[0][1]:>14.3f}")


def _once(words: list[str]) -> tuple[float, float]:
    """Runs one process; returns its (wall-clock, processor) seconds."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "zeroaccel.cli", *words], stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - start, os.times()
    return wall, after.children_user - before.children_user + after.children_system - before.children_system


if __name__ == "__main__":
    main()
