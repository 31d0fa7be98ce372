"""The file `latest` in a folder of checkpoints: one line, the tag of the one to load. No torch, no ranks."""

from __future__ import annotations

from pathlib import Path

from zeroaccel.checkpoint.manifest import check_tag
from zeroaccel.config.bounds import read_at_most
from zeroaccel.errors import CheckpointError

__all__ = ["LATEST_NAME", "read_latest"]

LATEST_NAME = "latest"
_MOST_NBYTES = 4096


def read_latest(root: Path, name: str = LATEST_NAME, *, there: str = "", fix: str = "pass a tag") -> str:
    """The tag that `latest` names.

    Args:
        name: of the file.
        there: which checkpoints there are, for the message that it names none; fix: what to do then.

    Raises:
        CheckpointError: the file is missing, cannot be read, or what it says is no tag.
    """
    path = root / name
    text, wrong = "", "it is empty"
    try:
        text = read_at_most(path, _MOST_NBYTES, regular=True).decode("utf-8").strip()
    except OSError as error:
        wrong = str(error.strerror)
    except UnicodeDecodeError:
        wrong = "not UTF-8"
    if text:
        return check_tag(text, str(path))
    what = f"{path}: cannot be read ({wrong})"
    raise CheckpointError(what, got=there, fix=fix) if there else CheckpointError(what, fix=fix)
