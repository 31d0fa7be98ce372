"""`zeroaccel doctor`: what works here, what is replaced by something slower, what is missing, and how to mend it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from .findings import Finding, findings

__all__ = ["doctor"]

_COLOURS = {"works": "green", "falls back": "yellow", "missing": "yellow", "BROKEN": "red"}


@click.command(short_help="What works on this machine, what does not, and how to mend it.")
@click.option("--quick", is_flag=True, help="Measure nothing: no copies, no disks, no processes.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(quick: bool, as_json: bool) -> int:
    """Try what zeroaccel uses on this machine, measure it, and say what would mend the rest.

    Exits with 1 if something is BROKEN: needed, and not working. What is missing or replaced is no failure.
    """
    seen = []
    for finding in findings(os.environ, Path.cwd(), measure=not quick):
        seen.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in seen], indent=2))
    return int(any(finding.verdict == "BROKEN" for finding in seen))


def _show(finding: Finding) -> None:
    # click leaves colours out where they cannot be shown; NO_COLOR is for us to heed
    verdict = f"{finding.verdict:<10}"
    if not os.environ.get("NO_COLOR"):
        verdict = click.style(verdict, fg=_COLOURS[finding.verdict])
    click.echo(f"{finding.feature:<24} {verdict} {finding.detail}".rstrip())
    if finding.fix:
        click.echo(f"{'':<24} {'':<10} -> {finding.fix}")
