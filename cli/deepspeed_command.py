"""The `deepspeed` and `ds_report` commands, for scripts that call them by name; `zeroaccel compat install` writes both.

`deepspeed` is `zeroaccel launch` with zeroaccel as its engine, and with the hostfile that DeepSpeed looks for by
itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .main import main as run

__all__ = ["DEFAULT_HOSTFILE", "main", "report"]

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed looks for the machines of a job when it is not told."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `deepspeed ARGUMENTS`; does not return.

    Args:
        arguments: the words behind the command's name; by default this process's.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    hosts = ["--hostfile", str(DEFAULT_HOSTFILE)] if DEFAULT_HOSTFILE.is_file() else []
    # In front: what was typed comes later and counts more.
    run(["launch", "--engine", "zeroaccel", *hosts, *words], prog_name="zeroaccel")


def report() -> None:
    """Runs `ds_report`: versions, machine and settings. Does not return."""
    run(["env"], prog_name="zeroaccel")
