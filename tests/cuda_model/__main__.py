"""`python -m tests.cuda_model [PART OF A NAME...]` runs cases and prints the table; `--bugs` the planted bugs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tests.cuda_model import guard_library
from tests.cuda_model.communicators import deadlocks
from tests.cuda_model.configurations import CASES, PEAKS, case_of
from tests.cuda_model.planted_bugs import BUGS

if TYPE_CHECKING:
    from tests.cuda_model import run

_COLUMNS = (
    "findings",
    "kernels",
    "boundary",
    "B/param",
    "waits",
    "control",
    "late",
    "peak MB",
    "ms",
    "first",
    "mallocs",
    "reserved",
    "expandable",
)
_MARKDOWN_HEAD = (
    "| case | findings | kernels | boundary | B/param | waits | control | late | ms |\n|---" + "|---" * 8 + "|"
)
_HEAD = f"{'case':66}" + "".join(f"{column:>{max(9, len(column) + 1)}}" for column in _COLUMNS)


def _row(name: str, outcome: run.Outcome) -> str:
    numbers = (
        f"{sum(outcome.findings.values()):9}{outcome.kernels:9}{outcome.boundary_kernels:9}"
        f"{outcome.boundary_bytes:9.1f}{outcome.num_waits:9}{outcome.num_control:9}{sum(outcome.late.values()):9}"
        f"{outcome.peak_nbytes / 1e6:9.2f}{outcome.ms:9.2f}{sum(outcome.first_calls.values()):9}{outcome.mallocs:9}"
        f"{outcome.reserved_nbytes / 1e6:9.1f}{outcome.expandable_nbytes / 1e6:11.1f}"
    )
    return f"{name:66}{numbers}"


def _markdown(name: str, outcome: run.Outcome) -> str:
    numbers = (
        sum(outcome.findings.values()),
        outcome.kernels,
        outcome.boundary_kernels,
        outcome.boundary_bytes,
        outcome.num_waits,
        outcome.num_control,
        sum(outcome.late.values()),
        round(outcome.ms, 2),
    )
    return f"| {name} | {' | '.join(str(number) for number in numbers)} |"


def _show_logs(name: str) -> None:
    """Prints the calls of all ranks of a case or a bug."""
    from tests.cuda_model import run

    bug = BUGS.get(name)
    logs = run.call_logs(case_of(bug.case if bug else name), bug.plant if bug else None)
    for rank, calls in logs.items():
        print(f"rank {rank} of {name}: {len(calls)} calls; those at which the host waits for the others:")
        for call in calls:
            if call.key.what.startswith("connect") or call.key.what == "host collective":
                print(f"    {call}")
    print("\n".join(deadlocks(logs)) or "all ranks complete their calls")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_model", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of cases or bugs; all by default")
    parser.add_argument("--bugs", action="store_true", help="plant bugs instead of running the cases as they are")
    parser.add_argument("--serve", action="store_true", help="answer requests of the tests")
    parser.add_argument("--details", action="store_true", help="show findings, waits and collectives with their places")
    parser.add_argument("--logs", action="store_true", help="show what every rank of a case or bug calls")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    parser.add_argument("--device", choices=("cuda", "xpu"), default="cuda", help="the kind of devices")
    options = parser.parse_args()
    guard_library.device_type = options.device
    from tests.cuda_model import run  # creates the devices, and imports torch

    if options.serve:
        run.serve()
        return
    if options.logs:
        for name in options.names:
            _show_logs(name)
        return
    print(_MARKDOWN_HEAD if options.markdown else _HEAD)
    for name in BUGS if options.bugs else [*CASES, *PEAKS]:
        if options.names and not any(part in name for part in options.names):
            continue
        bug = BUGS[name] if options.bugs else None
        outcome = run.run_case(case_of(bug.case if bug else name), bug.plant if bug else None)
        print(_markdown(name, outcome) if options.markdown else _row(name, outcome), flush=True)
        if options.markdown and not outcome.error:
            continue
        details = {
            **outcome.findings,
            **(outcome.early_frees | outcome.late | outcome.waits | outcome.control if options.details else {}),
        }
        for text, count in list(details.items())[: None if options.details else 3]:
            print(f"    {count} x {text}")
        if outcome.error:
            print(outcome.error)


if __name__ == "__main__":
    main()
