"""`python -m zeroaccel.cli`, for when the `zeroaccel` command is not on PATH."""

from __future__ import annotations

from .main import main

__all__: list[str] = []

if __name__ == "__main__":
    main(prog_name="zeroaccel")
