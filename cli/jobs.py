"""Jobs that commands run for themselves: `zeroaccel launch` in a process of its own, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["launch_command", "run_job"]


def launch_command(arguments: Sequence[str]) -> list[str]:
    """The words of a `zeroaccel launch` by this interpreter."""
    return [sys.executable, "-m", "zeroaccel.cli", "launch", *arguments]


def run_job(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Runs a job that prints JSON lines.

    Returns:
        (the lines, why it failed): the second is empty after a success.
    """
    try:
        done = subprocess.run(
            launch_command(arguments),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"it did not end within {seconds:g} s"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines, "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
