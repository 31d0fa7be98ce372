"""Two jobs save into one folder while `latest` is read repeatedly. A program: `... DIR SAVES MODE...`.

MODE is "apart" (each job has its own tags), "kept" (the same, with keep_last = 2, so each job removes checkpoints of
the other) or "same" (both jobs save under the same two tags). One job saves in the background. Prints the findings of
each mode as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.multi.checkpoint.checkpoint_kills import fork, warm_up
from tests.support.checkpoint_runs import make_engine
from tests.support.environment import free_port
from zeroaccel.checkpoint.manifest import read_manifest
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import set_log_level


def job(root: Path, name: str, saves: int, mode: str, told: int) -> None:
    """Saves repeatedly, and writes a line to `told` for each save that raised."""
    set_log_level("ERROR")
    engine = make_engine(1, checkpoint={"async_save": name == "b", "keep_last": 2 if mode == "kept" else None})
    for index in range(saves):
        try:
            engine.save_checkpoint(root, tag=f"both{index % 2}" if mode == "same" else f"{name}{index}")
            engine.wait_for_checkpoint()
        except Exception as error:
            os.write(told, f"{name}{index}: {type(error).__name__}: {error}"[:500].replace("\n", " ").encode() + b"\n")


def wrong_latest(root: Path) -> str | None:
    """Returns what is wrong with `latest`, or None; an error counts only if `latest` does not change meanwhile."""
    text = ""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            text = (root / "latest").read_text()
            if not text:
                return "latest is empty"
        if not text:
            return None  # no job has saved yet
        try:
            read_manifest(root / text)
        except CheckpointError as error:
            with contextlib.suppress(FileNotFoundError):
                if (root / "latest").read_text() == text and error_stays(root, text):
                    return f"latest names {text}: {error}"
            continue
        return None
    return "latest changed at every read"


def error_stays(root: Path, tag: str) -> bool:
    """Returns True if the checkpoint that `latest` names stays unreadable for a while, and `latest` does not change."""
    for _ in range(50):
        time.sleep(0.002)
        with contextlib.suppress(CheckpointError):
            read_manifest(root / tag)
            return False
        if (root / "latest").read_text() != tag:
            return False
    return True


def left_over(root: Path) -> Iterator[str]:
    """Lists the remaining temporary files."""
    return (str(path.relative_to(root)) for path in root.rglob("*.tmp"))


def main(folder: str, saves: str, *modes: str) -> None:
    """Runs the two jobs in each mode."""
    warm_up()
    print(json.dumps({mode: two_jobs(Path(folder, mode), int(saves), mode) for mode in modes}))


def two_jobs(root: Path, saves: int, mode: str) -> dict[str, Any]:
    """Runs two jobs and checks `latest` until both have ended."""
    root.mkdir()
    reading, writing = os.pipe()
    children = {
        name: fork(0, 1, free_port(), lambda name=name: job(root, name, saves, mode, writing))  # type: ignore[misc]
        for name in "ab"
    }
    os.close(writing)
    looks, wrong, codes = 0, [], []
    while children:
        looks += 1
        if (found := wrong_latest(root)) is not None:
            wrong.append(found)
        for name, child in list(children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes.append(os.waitstatus_to_exitcode(status))
                del children[name]
    with os.fdopen(reading) as pipe:
        raised = pipe.read().splitlines()
    seen: dict[str, Any] = {"looks": looks, "wrong": wrong[:5], "raised": raised[:5], "codes": codes}
    return seen | {"left": [*left_over(root)], "checkpoints": len([*root.glob("*/manifest.json")])}


if __name__ == "__main__":
    main(*sys.argv[1:])
