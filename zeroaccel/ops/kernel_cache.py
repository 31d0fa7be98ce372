"""A cache of compiled kernels in a folder of the user: loading takes milliseconds, compilation a second.

A file's name is a hash of everything that determines its content; the file begins with a checksum. Several processes
may write the same file at once: each writes a temporary file and renames it. Other users can neither read nor write the
files, because this user's processes execute them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_DIGEST_NBYTES = 32


def cached_image(key: Sequence[str], compile_image: Callable[[], bytes], folder: Path | None = None) -> bytes:
    """Returns the image from the cache if its file is intact; otherwise compiles it and caches the result.

    Args:
        key: everything that determines the result: the source, the architecture, the compiler's version and options.
        folder: default: `zeroaccel/kernels` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache).
    """
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    path = (folder or cache_folder()) / name
    image = _read(path)
    if image is None:
        image = compile_image()
        with suppress(OSError):  # if the home folder is full or read-only, the next process compiles again
            _write(path, image)
    return image


def cache_folder() -> Path:
    """Returns the folder of this user's compiled kernels (XDG Base Directory Specification)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~"), ".cache")
    return base / "zeroaccel" / "kernels"


def _is_private(folder: Path) -> bool:
    """Returns True if only this user can create files in the folder."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes() if _is_private(path.parent) else b""
    except OSError:
        return None
    digest, image = content[:_DIGEST_NBYTES], content[_DIGEST_NBYTES:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def _write(path: Path, image: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(path.parent):
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(image).digest() + image)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
