"""Runs the `zeroaccel` command in this process; captures its exit code, stdout and stderr."""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from zeroaccel.cli.main import main  # type: ignore[import-not-found]  # a folder of its own in the tree


@dataclass(frozen=True)
class Said:
    """Output of a command."""

    out: str
    err: str


def typed(line: str, *words: object, code: int = 0) -> Said:
    """Runs ``zeroaccel LINE WORDS`` and asserts that it ends with the exit code `code`."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([*shlex.split(line), *map(str, words)], prog_name="zeroaccel")
    said = Said(*(stream.buffer.getvalue().decode() for stream in (out, err)))
    assert int(ended.value.code or 0) == code, said
    return said
