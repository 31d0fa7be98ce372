"""How long the processes of a job live on when a rank is stopped, or when the cable between two machines is pulled.

    python benchmarks/trouble.py                       # all cases, about ten minutes
    python benchmarks/trouble.py --limits 5 --only cut

The training, its starters and the two machines (network namespaces, so run it as root) are those of the tests,
`tests/e2e/trouble.py`. Seconds are from the signal, or from the pulling, to the end of each process.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.trouble import Aftermath, Starter, network, starting  # noqa: E402

PROMISE_SECONDS = 15.0
_GIVE_UP_SECONDS = 100.0  # after the limit; a process that is still there then counts as endless

Case = tuple[str, Starter, int, int]
"""What befalls the job, who starts it, how many ranks, and which rank is stopped."""


def cases(only: str) -> Iterator[Case]:
    starters: tuple[Starter, ...] = ("ranks", "torchrun", "launch")
    for starter in starters:
        for ranks in (2, 3):
            for rank in (0, 1):
                yield "stop", starter, ranks, rank
    for starter in starters:
        for ranks in (2, 4):
            yield "cut", starter, ranks, 0


def run(case: Case, limit: float) -> Aftermath:
    what, starter, ranks, rank = case
    patience = limit + _GIVE_UP_SECONDS
    with tempfile.TemporaryDirectory(prefix="trouble-") as folder:
        if what == "stop":
            with starting(Path(folder), starter, ranks, limit) as job:
                return job.after(lambda: job.stop(rank), patience)
        with network() as net, starting(Path(folder), starter, ranks, limit, net=net) as job:
            return job.after(net.cut, patience)


def name_of(case: Case) -> str:
    what, starter, ranks, rank = case
    by = {"ranks": "by themselves", "torchrun": "torchrun", "launch": "zeroaccel launch"}[starter]
    return f"{ranks} ranks, {by}: " + (f"rank {rank} stopped" if what == "stop" else "cable pulled")


@click.command()
@click.option("--limits", default="2,5,10", show_default=True, help="Seconds a collective may wait, by commas.")
@click.option("--only", default="", help="Cases whose name contains this.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where to keep the numbers.")
@click.option("--show", is_flag=True, help="Print what the processes said.")
@click.option(
    "--check", is_flag=True, help=f"Exit with 1 if a job takes longer than the limit and {PROMISE_SECONDS:g} s."
)
def main(limits: str, only: str, json_path: Path | None, show: bool, check: bool) -> None:
    """Measures how jobs in trouble end."""
    print(f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}")
    results = []
    for case in cases(only):
        if only not in name_of(case):
            continue
        for limit in map(float, limits.split(",")):
            aftermath = run(case, limit)
            over = aftermath.last - limit
            each = ", ".join(f"{name} {_seconds(t)}" for name, t in sorted(aftermath.seconds.items()))
            print(f"limit {limit:4g} s  {name_of(case):48} last {_seconds(over)} after the limit  ({each})", flush=True)
            if show:
                print(
                    "\n".join(
                        f"--- {name}: exit code {aftermath.codes[name]}\n{said}"
                        for name, said in aftermath.said.items()
                    )
                )
            results.append({"case": name_of(case), "limit": limit, "over": over, "seconds": dict(aftermath.seconds)})
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1))
    late = [result["case"] for result in results if result["over"] > PROMISE_SECONDS]
    print(f"within {PROMISE_SECONDS:g} s of the limit: {len(results) - len(late)} of {len(results)}")
    if check and late:
        sys.exit(1)


def _seconds(value: float) -> str:
    return f"{value:5.1f} s" if math.isfinite(value) else "endless"


if __name__ == "__main__":
    main()
