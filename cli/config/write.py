"""Showing what would change in a file, and changing it: whole or not at all, with a copy of what was there.

The only file of the questionnaire that writes.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from pathlib import Path

from zeroaccel.errors import ConfigError

__all__ = ["backup_of", "changes", "write_file"]


def changes(path: Path, text: str) -> str:
    """The difference between a file and its new text, line by line; empty where there is none, or no file."""
    if not path.is_file():
        return ""
    before = path.read_text(errors="replace").splitlines()
    return "\n".join(difflib.unified_diff(before, text.splitlines(), str(path), "new", lineterm="", n=2))


def backup_of(path: Path) -> Path:
    """Where the former text of a file is kept."""
    return path.with_name(f"{path.name}.bak")


def write_file(path: Path, text: str) -> Path | None:
    """Writes a file, so that at any moment either the old or the new one is there.

    Returns:
        The copy of what was there, if something else was.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", fix="name a file")
        kept = None
        if path.is_file() and path.read_bytes() != text.encode():
            kept = backup_of(path)
            _replace(kept, path.read_bytes(), path.stat().st_mode)
        _replace(path, text.encode(), path.stat().st_mode if path.is_file() else None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}", fix="--config_file PATH") from None
    return kept


def _replace(path: Path, content: bytes, mode: int | None) -> None:
    target = path.resolve()  # the file a link leads to, not the link
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask if mode is None else mode & 0o777)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
