"""Readers refuse manifests that are damaged, newer, contradictory, or name files outside their folder."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refused
from zeroaccel.checkpoint import manifest as format_
from zeroaccel.checkpoint.atomic_write import write_durably
from zeroaccel.checkpoint.find import find_checkpoint, newest_first
from zeroaccel.checkpoint.manifest import (
    FileRecord,
    Manifest,
    ParameterRecord,
    TensorRecord,
    check_tag,
    read_manifest,
    write_manifest,
)
from zeroaccel.errors import CheckpointError

NAME = "rank00000-of-00001-0123abcd.safetensors"


def example(tag: str = "one", saved_at: float = 1.0) -> Manifest:
    return Manifest(
        id="0123abcd",
        tag=tag,
        saved_at=saved_at,
        world_size=1,
        sharded={"optimizer": False, "grads": False, "params": False},
        files=(FileRecord(NAME, 4000, 0, "00"),),
        tensors={
            "master/a": TensorRecord("F32", (2, 3), ((0, 0, 4, 800), (0, 4, 2, 96))),
            "value/b": TensorRecord("BF16", (), ((0, 0, 1, 900),)),
            "state/exp_avg/a": TensorRecord("F32", (2, 3), ((0, 0, 6, 1000),)),
            "buffer/c": TensorRecord("I64", (0,), ()),
        },
        parameters={
            "a": ParameterRecord("BF16", (2, 3), True, 0),
            "b": ParameterRecord("BF16", (), False, None),
            "left_out": ParameterRecord("BF16", (4,), False, None, saved=False),
        },
        order=("b", "a", "left_out"),
        ties={"z": "a"},
        buffers=("c",),
        counters={"global_steps": 5, "micro_steps": 10, "global_samples": 40, "skipped_steps": 0},
        optimizer={"type": "AdamW", "param_groups": [{"lr": 0.1, "params": ["a"]}], "scalars": {"a": {"step": 5}}},
    )


def saved(root: Path, tag: str = "one", saved_at: float = 1.0) -> Path:
    folder = root / tag
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(bytes(4000))
    write_manifest(folder, example(tag, saved_at))
    return folder


def test_a_manifest_is_read_back_unchanged(tmp_path: Path) -> None:
    found = read_manifest(saved(tmp_path))
    assert found == example()
    assert found.canonical("z") == "a"
    assert found.canonical("nobody") is None
    assert [found.weight_key(name) for name in ("a", "b", "left_out")] == ["master/a", "value/b", None]
    assert found.state_names("a") == ("exp_avg",)
    assert found.state_names("b") == ()


def edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest and updates its checksum, for damage that a checksum does not find."""
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    edit(body)
    (folder / "manifest.json").write_text(json.dumps({"checksum": format_._checksum(body), "manifest": body}))


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(body: dict[str, Any]) -> None:
        *keys, last = path.split(".")
        for key in keys:
            body = body[int(key) if isinstance(body, list) else key]
        if value is None:
            del body[last]  # type: ignore[arg-type]
        else:
            body[int(last) if isinstance(body, list) else last] = value  # type: ignore[index]

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_set("version", 3), "at most 2, got 3; upgrade"),
        (_set("version", "1"), "at most 2"),
        (_set("format", "other"), "format 'other'"),
        (_set("files.0.name", "../../etc/passwd"), "not a plain name"),
        (_set("files.0.name", "/etc/passwd.safetensors"), "not a plain name"),
        (_set("files.0.name", "..safetensors"), "not a plain name"),
        (_set("files.0.nbytes", -1), "-1 is not a whole number"),
        (_set("files.0.nbytes", 3999), "expected 3999 bytes, got 4000"),
        (_set("tensors.master/a.pieces", [[0, 0, 4, 800]]), "4 elements saved, but its shape is"),
        (_set("tensors.master/a.pieces", [[0, 0, 4, 800], [0, 3, 3, 96]]), "a piece at element 3"),
        (_set("tensors.master/a.pieces", [[1, 0, 6, 800]]), "IndexError"),
        (_set("tensors.master/a.pieces", [[0, 0, 6, 3980]]), "a misplaced piece at byte 3980"),
        (_set("tensors.master/a.pieces", [[0, 0, 6, 802]]), "a misplaced piece at byte 802"),
        (_set("tensors.master/a.pieces", [[0, 0, 6, -8]]), "-8 is not a whole number"),
        (_set("tensors.master/a.dtype", "Q8"), "Q8"),
        (_set("tensors.master/a.shape", [6]), "its shape differs from that of its parameter"),
        (_set("tensors.master/a", None), "parameter a: its values are not in the checkpoint"),
        (_set("tensors.buffer/c", None), "buffer/c"),
        (_set("parameters.a", None), "does not name each parameter exactly once"),
        (_set("order", ["a", "b"]), "does not name each parameter exactly once"),
        (_set("counters.global_steps", None), "global_steps"),
        (_set("counters.global_steps", 1.5), "1.5 is not a whole number"),
        (_set("id", None), "id"),
        (_set("tag", "../../elsewhere"), "tag '../../elsewhere' is not a plain name"),
        (_set("tag", 3), "tag 3 is not a plain name"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, edit: Callable[[dict[str, Any]], None], told: str) -> None:
    folder = saved(tmp_path)
    edited(folder, edit)
    with refused(CheckpointError, told, str(folder)):
        read_manifest(folder)


def test_any_changed_character_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    text = bytearray((folder / "manifest.json").read_bytes())
    for place in range(0, len(text), 7):
        damaged = copy.copy(text)
        damaged[place] ^= 1
        (folder / "manifest.json").write_bytes(damaged)
        try:
            found = read_manifest(folder)
        except CheckpointError:
            continue
        assert found == example(), place  # a change of white space between tokens is harmless


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"manifest": NaN}', "[" * 100_000])
def test_a_file_that_is_not_a_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    folder = saved(tmp_path)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(folder)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / NAME).unlink()
    with pytest.raises(CheckpointError, match="missing, but the manifest names it"):
        read_manifest(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="or its save was interrupted"):
        read_manifest(folder)


def test_a_file_that_cannot_be_flushed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_durably(tmp_path / "latest", b"one")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "latest", b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_bytes() == b"one"


def test_files_that_no_manifest_names_are_ignored(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "rank00001-of-00002-89abcdef.safetensors").write_bytes(b"left over")
    assert read_manifest(folder) == example()


def test_the_newest_comes_first_and_the_damaged_are_reported(tmp_path: Path) -> None:
    for tag, saved_at in (("b", 1.0), ("a", 3.0), ("c", 2.0)):
        saved(tmp_path, tag, saved_at)
    os.truncate(tmp_path / "c" / NAME, 10)
    (tmp_path / "never-finished").mkdir()
    (tmp_path / "never-finished" / (NAME + ".tmp")).touch()
    (tmp_path / "other").mkdir()
    found, skipped = newest_first(tmp_path)
    assert [folder.name for folder in found] == ["a", "b"]
    assert len(skipped) == 1
    assert str(tmp_path / "c") in skipped[0]


def test_a_tag_or_latest_leads_to_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    assert find_checkpoint(tmp_path, "one") == (tmp_path / "one", example())
    with pytest.raises(CheckpointError, match=r"latest: cannot be read .*one.*tag=\"auto\""):
        find_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("one\n")
    assert find_checkpoint(tmp_path)[0] == tmp_path / "one"
    (tmp_path / "latest").write_text("two")
    with pytest.raises(CheckpointError, match=r"two: no such checkpoint.*one"):
        find_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("../one")
    with pytest.raises(CheckpointError, match=r"latest: expected folder names .*got '\.\./one'"):
        find_checkpoint(tmp_path)


_NO_TAGS = ["", ".", "..", ".hidden", "a/", "/a", "a//b", "a/../b", "a/.b", "a/latest", "../a", "a\\b", "a\nb", "a\0b"]


@pytest.mark.parametrize("tag", [*_NO_TAGS, "latest", "auto"])
def test_tags_that_are_no_folder_names_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint tag"):
        check_tag(tag)


@pytest.mark.parametrize("tag", ["global_step3", "a b", "epoch/1", "ü", 7])
def test_other_tags_are_taken(tag: object) -> None:
    assert check_tag(tag) == str(tag)
