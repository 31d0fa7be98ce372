"""`python -m zeroaccel.cli`, for where the `zeroaccel` command is not on the path."""

from __future__ import annotations

from .main import main

__all__: list[str] = []

main(prog_name="zeroaccel")
