"""Seconds that the loss of a machine costs under `zeroaccel launch --num_machines MIN:MAX`, to the next training step.

    python benchmarks/lost_machine.py --waiting 1
    python benchmarks/lost_machine.py --rdzv_conf last_call_timeout=5

Two simulated machines of one rank train on this one; the second is killed with its rank, in the fifth step. Further
machines may wait for a place. The ranks run `tests/e2e/lost_ranks.py`, with states in memory every second step.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests" / "e2e" / "lost_ranks.py"
LIMIT_SECONDS = 120.0


def wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.05)


def lose_a_machine(folder: Path, conf: str, waiting: int) -> str:
    """Returns a row: seconds from the loss to the next step, its source, and the exit codes of all machines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", "2"]
    command += [
        "--num_machines",
        "1:2",
        "--max_restarts",
        "2",
        "--timeout",
        "5",
        *(["--rdzv_conf", conf] if conf else []),
    ]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--machine_rank"]
    words = [str(PROGRAM), str(folder), "12", "2", "3", "later:5:0+1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    machines: list[subprocess.Popen[str]] = []

    def start(count: int) -> None:
        for rank in range(len(machines), len(machines) + count):
            words_of = [*command, str(rank), *words]
            machines.append(subprocess.Popen(words_of, env=environment, stderr=subprocess.PIPE, text=True))

    try:
        start(2)
        wait_for(folder / "fault.0")
        start(waiting)
        time.sleep(8.0 if waiting else 0.0)
        (folder / "cut").touch()
        lost = time.time()
        wait_for(folder / "resumed.1")
        when, step = (folder / "resumed.1").read_text().split()
        said = [machine.communicate(timeout=LIMIT_SECONDS)[1] for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()
    source = {found for text in said for found in re.findall(r"resuming from ([^,;]*)", text)}
    codes = [machine.returncode for machine in machines]
    return f"| {waiting} | {conf or 'default'} | {float(when) - lost:.1f} | step {step} | {sorted(source)} | {codes} |"


@click.command()
@click.option("--rdzv_conf", default="")
@click.option("--waiting", default=0, help="machines that wait for a place")
@click.option("--runs", default=1)
def main(rdzv_conf: str, waiting: int, runs: int) -> None:
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            print(lose_a_machine(Path(folder), rdzv_conf, waiting), flush=True)


if __name__ == "__main__":
    main()
