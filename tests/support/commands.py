"""The `zeroaccel` command in this process: its exit code, and what it writes to stdout and stderr."""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from zeroaccel.cli.main import main  # type: ignore[import-not-found]  # a folder of its own in the tree


@dataclass(frozen=True)
class Said:
    """What a command has written."""

    out: str
    err: str


def typed(line: str, *words: object, code: int = 0) -> Said:
    """Runs ``zeroaccel LINE WORDS``, which must end with that code."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([*shlex.split(line), *map(str, words)], prog_name="zeroaccel")
    said = Said(*(stream.buffer.getvalue().decode() for stream in (out, err)))
    assert int(ended.value.code or 0) == code, said
    return said
