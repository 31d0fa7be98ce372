"""Compiled kernels, which a later process loads from the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroaccel.ops.device_kernels import SOURCE
from zeroaccel.ops.kernel_cache import cache_folder, cached_image
from zeroaccel.ops.nvrtc import KernelError, open_nvrtc

KEY = ("source", "sm_80", "NVRTC 12.9")


class Compiling:
    """Counts the compilations."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return b"image %d" % self.count


def test_a_second_process_loads_the_image_of_the_first(tmp_path: Path) -> None:
    compiling, folder = Compiling(), tmp_path / "home" / "kernels"
    assert [cached_image(KEY, compiling, folder) for _ in range(2)] == [b"image 1"] * 2
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]  # no temporary file remains


@pytest.mark.parametrize("place", range(len(KEY)))
def test_all_that_decides_the_image_is_in_the_key(place: int, tmp_path: Path) -> None:
    compiling = Compiling()
    other = tuple("other" if index == place else part for index, part in enumerate(KEY))
    images = [cached_image(key, compiling, tmp_path / "kernels") for key in (KEY, other, KEY)]
    assert images == [b"image 1", b"image 2", b"image 1"]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100])
def test_a_damaged_file_is_replaced(content: bytes, tmp_path: Path) -> None:
    compiling, folder = Compiling(), tmp_path / "kernels"
    cached_image(KEY, compiling, folder)
    [file] = folder.iterdir()
    file.write_bytes(content)
    assert [cached_image(KEY, compiling, folder) for _ in range(2)] == [b"image 2"] * 2


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    compiling, folder = Compiling(), tmp_path / "kernels"
    cached_image(KEY, compiling, folder)
    folder.chmod(0o777)
    assert [cached_image(KEY, compiling, folder) for _ in range(2)] == [b"image 2", b"image 3"]
    assert len(list(folder.iterdir())) == 1


def test_kernels_work_without_a_writable_home(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiling = Compiling()
    assert cached_image(KEY, compiling, tmp_path / "file" / "kernels") == b"image 1"
    assert compiling.count == 1


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "zeroaccel" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # ignored, as the specification requires
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "zeroaccel" / "kernels"


def test_a_compiled_image_is_read_back(tmp_path: Path) -> None:
    try:
        compiler = open_nvrtc()
    except KernelError as error:
        pytest.skip(str(error))
    source = SOURCE.read_text()
    key = [source, "sm_80", *compiler.facts()]
    made = cached_image(key, lambda: compiler.compile(source, SOURCE.name, "sm_80"), tmp_path / "kernels")

    def never() -> bytes:
        raise AssertionError("compiled again")

    assert cached_image(key, never, tmp_path / "kernels") == made
