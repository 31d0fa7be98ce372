"""Computes the expected time that failures cost per day, with states in peers' memory and with checkpoints on a disk.

    python benchmarks/lost_time.py

A job of M machines fails at the rate f = M / MTBF. Per day, checkpoints that stop training for C seconds every T
seconds cost

    86400 * C / (T + C)  +  f * (T / 2 + R)

where R is the time from the failure to the next step. For the disk, T is Daly's optimum (A higher order estimate of the
optimum checkpoint interval, 2006, equation 20): sqrt(2 C m) * (1 + sqrt(C / 2m) / 3 + C / 2m / 9) - C for m = 1 / f. In
memory there are two rows: "auto" spends 2 % of the time on saves, and the other uses the same optimum. A state in
memory is lost if the next machine fails before all have started again, R seconds; the state on disk replaces it. C is
bytes divided by rates. Rates, R and failures are arguments, which the program prints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date

import click

DAY = 86400.0
MOST_COST = 0.02  # `zeroaccel/accelerate/memory_states.py`


@dataclass(frozen=True)
class Place:
    """A place for states.

    Attributes:
        cost: seconds for which training stops to save a state.
        recovery: seconds from a failure to the next step.
    """

    cost: float
    recovery: float


def daly(cost: float, mtbf: float) -> float:
    """Returns the seconds between two checkpoints that minimize the lost time.

    Example:
        >>> round(daly(60.0, 86400.0))  # Young's sqrt(2 C m) is 3220
        3180
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def lost_per_day(place: Place, interval: float, failures: float) -> float:
    """Returns the seconds lost per day.

    Args:
        failures: failures of the job per day.
    """
    return DAY * place.cost / (interval + place.cost) + failures * (interval / 2 + place.recovery)


def in_memory(memory: Place, interval: float, disk: Place, machines: int, failures: float) -> float:
    """Returns the seconds lost per day with states in memory, and on disk for failures that memory does not cover."""
    mtbf = DAY / failures
    # Share of failures in which one particular machine fails within the seconds of a recovery.
    both = failures * memory.recovery / DAY / machines
    behind = daly(disk.cost, mtbf / both) if both else math.inf
    return lost_per_day(memory, interval, failures * (1 - both)) + lost_per_day(disk, behind, failures * both)


@click.command()
@click.option("--ranks_per_machine", default=8, show_default=True)
@click.option("--bytes_per_parameter", default=12.0, show_default=True, help="By default masters and two moments.")
@click.option("--disk_rate", default=2e9, show_default=True, help="Bytes per second from a machine to the disk.")
@click.option("--shared_rate", default=100e9, show_default=True, help="Bytes per second to the disk that all share.")
@click.option("--memory_rate", default=8e9, show_default=True, help="Bytes per second of a machine into its memory.")
@click.option("--network_rate", default=10e9, show_default=True, help="Bytes per second from machine to machine.")
@click.option("--disk_recovery", default=300.0, show_default=True, help="Seconds to the next step, without reads.")
@click.option("--memory_recovery", default=15.0, show_default=True, help="The same, with states in memory.")
@click.option("--mtbf_days", default=264.0, show_default=True, help="Days between failures of a machine.")
def main(ranks_per_machine: int, bytes_per_parameter: float, mtbf_days: float, **seconds: float) -> None:
    """Prints the arguments and the table."""
    arguments = {"bytes per parameter": bytes_per_parameter, "days between failures of a machine": mtbf_days, **seconds}
    print(f"{date.today()}; {ranks_per_machine} ranks per machine", end="")
    print("".join(f"; {name.replace('_', ' ')} {value:g}" for name, value in arguments.items()))
    print("| parameters | ranks | failures per day | states | a state takes | every | lost per day |")
    print("|---|---|---|---|---|---|---|")
    for numel, ranks in ((7e9, 64), (7e9, 1024), (70e9, 1024), (405e9, 16384)):
        machines, nbytes = ranks // ranks_per_machine, numel * bytes_per_parameter
        of_machine, failures = nbytes / machines, machines / mtbf_days
        write = max(of_machine / seconds["disk_rate"], nbytes / seconds["shared_rate"])
        disk = Place(write, seconds["disk_recovery"] + write)
        copy = of_machine / seconds["memory_rate"] + of_machine / seconds["network_rate"]
        memory = Place(copy, seconds["memory_recovery"] + nbytes / machines / seconds["network_rate"])
        mtbf = DAY / failures
        for name, place, interval in (
            ("disk, optimum", disk, daly(disk.cost, mtbf)),
            ('memory, "auto"', memory, memory.cost / MOST_COST - memory.cost),
            ("memory, optimum", memory, daly(memory.cost, mtbf)),
        ):
            behind = in_memory(memory, interval, disk, machines, failures)
            lost = lost_per_day(disk, interval, failures) if place is disk else behind
            print(f"| {numel / 1e9:.0f} B | {ranks:,} | {failures:.2f} | {name} | {place.cost:.2f} s | ", end="")
            print(f"{interval:.0f} s | {lost / 60:.1f} min |")


if __name__ == "__main__":
    main()
