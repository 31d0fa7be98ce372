"""Measures how long the processes of a job outlive a stopped rank, or a pulled cable between two machines.

    python benchmarks/fault_injection.py                       # all cases, about ten minutes
    python benchmarks/fault_injection.py --limits 5 --only cut

The training, its launchers and the two machines (network namespaces, so run it as root) are those of the tests,
`tests/e2e/fault_injection.py`. Seconds count from the signal, or from the pulling, to the end of each process.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.fault_injection import Aftermath, Starter, network, starting  # noqa: E402

PROMISE_SECONDS = 15.0
_GIVE_UP_SECONDS = 100.0  # after the limit; a process that is still running then counts as endless


@dataclass(frozen=True)
class Case:
    """A fault, the launcher of the job, and its machines.

    Attributes:
        stopped: rank to stop; None pulls the cable.
        machines: number of machines; each has the same number of ranks.
        flags: flags of the launcher.
    """

    starter: Starter
    ranks: int
    stopped: int | None
    machines: int = 1
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        by = {"ranks": "by themselves", "torchrun": "torchrun", "launch": "zeroaccel launch"}[self.starter]
        where = f"{self.ranks} ranks" + (f" on {self.machines} machines" if self.machines > 1 else "")
        what = "cable pulled" if self.stopped is None else f"rank {self.stopped} stopped"
        return f"{where}, {' '.join((by, *self.flags))}: {what}"

    def run(self, limit: float) -> Aftermath:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fault-")))
            net = stack.enter_context(network()) if self.machines > 1 else None
            job = stack.enter_context(starting(folder, self.starter, self.ranks, limit, net=net, flags=self.flags))
            if self.stopped is not None:
                fault = partial(job.stop, self.stopped)
            else:
                assert net is not None, "there is a cable between machines only"
                fault = net.cut
            return job.after(fault, limit + _GIVE_UP_SECONDS)


def cases() -> Iterator[Case]:
    starters: tuple[Starter, ...] = ("ranks", "torchrun", "launch")
    for starter in starters:
        for ranks in (2, 3):
            for stopped in (0, 1):
                yield Case(starter, ranks, stopped)
    for starter in starters:
        for ranks in (2, 4):
            yield Case(starter, ranks, None, machines=2)
    yield Case("launch", 2, None, machines=2, flags=("--rdzv_backend", "c10d"))
    for stopped in (0, 1):
        yield Case("launch", 2, stopped, machines=2)


@click.command()
@click.option("--limits", default="2,5,10", show_default=True, help="Limits of a collective in seconds, by commas.")
@click.option("--only", default="", help="Run the cases whose name contains this.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the numbers to this file.")
@click.option("--show", is_flag=True, help="Print the output of the processes.")
@click.option(
    "--check", is_flag=True, help=f"Exit with 1 if a job takes longer than the limit and {PROMISE_SECONDS:g} s."
)
def main(limits: str, only: str, json_path: Path | None, show: bool, check: bool) -> None:
    """Measures how jobs end after a fault."""
    print(f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}")
    results = []
    for case in [case for case in cases() if only in str(case)]:
        for limit in map(float, limits.split(",")):
            aftermath = case.run(limit)
            over = aftermath.last - limit
            each = ", ".join(f"{name} {_seconds(t)}" for name, t in sorted(aftermath.seconds.items()))
            print(f"limit {limit:4g} s  {case!s:62} last {_seconds(over)} after the limit  ({each})", flush=True)
            if show:
                print(
                    "\n".join(
                        f"--- {name}: exit code {aftermath.codes[name]}\n{said}"
                        for name, said in aftermath.said.items()
                    )
                )
            results.append({"case": str(case), "limit": limit, "over": over, "seconds": dict(aftermath.seconds)})
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
