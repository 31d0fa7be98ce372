"""Temporary files: one writer creates each, never through a link, and later writers remove abandoned ones."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from zeroaccel.checkpoint import atomic_write
from zeroaccel.checkpoint.atomic_write import FolderLock, NewFile, remove_abandoned, write_all, write_durably
from zeroaccel.errors import CheckpointError


def test_a_planted_link_is_neither_followed_nor_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = iter(["00000000", "00000001"])
    monkeypatch.setattr(atomic_write.secrets, "token_hex", lambda _: next(names))
    (tmp_path / "latest.00000000.tmp").symlink_to(victim)
    (tmp_path / "latest").symlink_to(victim)
    write_durably(tmp_path / "latest", b"one")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "latest").is_symlink()
    assert (tmp_path / "latest").read_bytes() == b"one"
    (tmp_path / "rank.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError) as caught:
        NewFile(tmp_path / "rank", unique=False)
    assert caught.value.filename == str(tmp_path / "rank")
    assert victim.read_text() == "precious"


def test_writers_of_one_file_do_not_interfere(tmp_path: Path) -> None:
    with NewFile(tmp_path / "latest") as one, NewFile(tmp_path / "latest") as other:
        os.write(one.handle, b"one")
        os.write(other.handle, b"other")
        one.publish()
        assert (tmp_path / "latest").read_bytes() == b"one"
        other.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_bytes() == b"other"


def test_unpublished_files_are_removed(tmp_path: Path) -> None:
    with NewFile(tmp_path / "latest"):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError) as caught:
        NewFile(tmp_path / "absent" / "latest")
    assert caught.value.filename == str(tmp_path / "absent" / "latest")


def test_abandoned_files_are_removed_and_no_others(tmp_path: Path) -> None:
    old = time.time() - 3600
    names = ("latest.01234567.tmp", "latest.tmp", "latest.89abcdef.tmp", "other.01234567.tmp", "latest.txt")
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (old, old))
    (tmp_path / "latest.fedcba98.tmp").touch()  # too new to be abandoned, and not locked yet
    write_durably(tmp_path / "latest", b"one")
    with (tmp_path / "latest.89abcdef.tmp").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_abandoned(tmp_path / "latest")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"latest", "latest.89abcdef.tmp", "latest.fedcba98.tmp", "other.01234567.tmp", "latest.txt"}


def test_a_folder_behind_a_link_is_not_saved_into(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "tag").symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match=r"tag: a symbolic link: expected a real folder"):
        FolderLock(tmp_path / "tag")


def test_a_lock_is_of_the_folder_that_is_there(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "tag")  # creates the folder
    assert FolderLock.if_free(tmp_path / "tag") is None
    (tmp_path / "tag").rmdir()
    (tmp_path / "tag").mkdir()
    other = FolderLock.if_free(tmp_path / "tag")  # another folder of the same name
    assert other is not None
    other.release()
    lock.release()
    assert FolderLock.if_free(tmp_path / "absent") is None
    assert not (tmp_path / "absent").exists()


def test_an_older_file_is_overwritten(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"longer than the new one")
    number = old.stat().st_ino
    with NewFile(new, unique=False, over=old) as file:
        write_all(file.handle, memoryview(b"new"))
        assert not new.exists()
        file.publish()
    assert (new.read_bytes(), new.stat().st_ino) == (b"new", number)
    assert list(tmp_path.iterdir()) == [new]
