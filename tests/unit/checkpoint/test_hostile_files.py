"""Malicious and damaged files: each reader raises one error that names the place, within a bound on processor time.

`tests/hostile/bombs.py` is a corpus of the files that earlier searches found; hypothesis also edits valid files of
every kind. `benchmarks/fuzz_readers.py` measures time and memory on many more files.
"""

from __future__ import annotations

import collections
import json
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile.bombs import BOMBS, bomb
from tests.hostile.readers import ALLOWED, READERS, apply_edits, edited_tree, resealed
from tests.support.refusals import refused
from tests.unit.checkpoint.checkpoint_by_hand import rewrite_manifest
from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.find import find_checkpoint
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import load_pickle
from zeroaccel.checkpoint.manifest import check_new_tag, check_tag, read_latest
from zeroaccel.cli.launch.hostfile import read_hostfile
from zeroaccel.config.bounds import levels_of, parse_plain_json, read_at_most
from zeroaccel.config.launch.launch_file import parse_launch_file, text_of_file
from zeroaccel.config.load_config_file import load_config
from zeroaccel.errors import CheckpointError, ConfigError, ZeroAccelError
from zeroaccel.zero.access.safetensors_file import tensor_locations

MOST_SECONDS = 2.0
EXAMPLES = 30
NOTHING_WRONG = {
    ("pickle", "a memo of 32 GB"),  # the memo has two entries
    ("pickle", "dicts"),
    ("hostfile", "100000 machines"),
}


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """Limits the address space to 4 GB above its current size."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + (4 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize(("reader", "name"), list(BOMBS))
def test_files_of_the_corpus_raise_one_error(reader: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "read").mkdir()
    content = bomb(reader, name, tmp_path / "made")
    started = time.process_time()
    told = ""
    try:
        READERS[reader].read(content, tmp_path / "read")
    except ALLOWED as error:
        told = str(error)
    assert time.process_time() - started < MOST_SECONDS
    if (reader, name) in NOTHING_WRONG:
        assert told == ""
        return
    places = (str(tmp_path), "launch.yaml", "<json>", "<base64>", "plain data of kind")
    assert told.startswith(places), "the error does not name the place"
    assert len(told) < 10_000
    assert told.encode()


@lru_cache(maxsize=len(READERS))
def seeds(reader: str) -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder:
        return tuple(READERS[reader].seeds(Path(folder)))


def read_in_a_folder(reader: str, content: bytes) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        READERS[reader].read(content, folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("reader", list(READERS))
def test_valid_files_are_read(reader: str) -> None:
    for content in seeds(reader):
        read_in_a_folder(reader, content)


@pytest.mark.parametrize("reader", list(READERS))
def test_edited_files_are_read_or_refused_by_name(reader: str) -> None:
    places = st.integers(0, 1 << 16)
    edit = st.tuples(places, places, st.sampled_from(list(READERS[reader].tokens)) | st.binary(max_size=6))

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from(seeds(reader)), st.lists(edit, min_size=1, max_size=4))
    def fuzzed(content: bytes, edits: list[tuple[int, int, bytes]]) -> None:
        told = ""
        try:
            read_in_a_folder(reader, apply_edits(content, edits))
        except ALLOWED as error:
            told = str(error)
        assert len(told) < 10_000

    fuzzed()


def test_manifests_with_other_values_are_read_or_refused_by_name() -> None:
    chance = random.Random(5)
    refused = 0
    for _ in range(2 * EXAMPLES):
        try:
            read_in_a_folder("checkpoint", edited_tree(chance.choice(seeds("checkpoint")), chance))
        except ALLOWED:
            refused += 1
    assert EXAMPLES < refused < 2 * EXAMPLES


# -- single files


def test_a_pickle_changes_no_class() -> None:
    for target in (
        b"ccollections\nCounter\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch\nSize\n",
        b"ctorch\nFloatStorage\n",
    ):
        with pytest.raises(
            CheckpointError, match=r"f: its pickle, at byte \d+: expected attributes for an object that supports them"
        ):
            load_pickle(b"\x80\x02" + target + b"}X\x06\0\0\0updateNsb.", "f")
    assert callable(collections.Counter.update)
    with pytest.raises(CheckpointError, match=r"LossScaler that|attributes of <.*LossScaler> \(class_name cannot"):
        load_pickle(b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}X\x0a\0\0\0class_nameNsb.", "f")


def test_a_built_tensor_stays_as_it_was_checked() -> None:
    tensor = BOMBS["pickle", "attributes of a tensor"](Path())
    with pytest.raises(CheckpointError, match='got "attributes of StoredTensor'):
        load_pickle(tensor, "f")
    whole = load_pickle(tensor[: tensor.index(b"}X\x05")] + b".", "f")
    assert whole.shape == (2,)
    with pytest.raises(AttributeError):
        whole.shape = (3,)
    with pytest.raises(TypeError):
        vars(whole)


def test_numbers_relabelled_in_the_manifest_are_found_by_every_reader(tmp_path: Path) -> None:
    for name, dtype in (("F32 taken for BOOL", "BOOL"), ("F32 taken for I32", "I32")):
        root = tmp_path / dtype
        (tmp_path / "made").mkdir()
        resealed(bomb("checkpoint", name, tmp_path / "made"), root)
        shutil.rmtree(tmp_path / "made")
        with pytest.raises(CheckpointError, match=rf"rank00000.*tensor master/w.*'{dtype}'.*got .*'F32'"):
            READERS["checkpoint"].read(
                bomb("checkpoint", name, tmp_path / f"made {dtype}"), tmp_path / f"again {dtype}"
            )
        with pytest.raises(zero_to_fp32.ConversionError, match=rf"tensor master/w: expected .*'{dtype}'.*'F32'"):
            zero_to_fp32.read_source(root)


def test_a_piece_of_another_length_is_found(tmp_path: Path) -> None:
    (tmp_path / "seeds").mkdir()
    resealed(READERS["checkpoint"].seeds(tmp_path / "seeds")[0], tmp_path / "root")

    def longer(body: dict[str, Any]) -> None:
        pieces = body["tensors"]["state/exp_avg/w"]["pieces"]
        pieces[0][3] = body["tensors"]["master/w"]["pieces"][0][3]  # the state refers to the bytes of the master

    rewrite_manifest(tmp_path / "root" / "global_step1", longer)
    found, manifest = find_checkpoint(tmp_path / "root")
    from zeroaccel.checkpoint.tensor_store import TensorStore

    with TensorStore(found, manifest) as store:
        assert store.fetch("master/w").shape == (3, 4)
        with pytest.raises(CheckpointError, match="tensor state/exp_avg/w: expected"):
            store.fetch("state/exp_avg/w")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"latest: cannot be read \(it is empty\)"),
        (b" \n\t ", r"latest: cannot be read \(it is empty\)"),
        (b"x" * 300, "latest: expected folder names of at most 255 bytes"),
        (b"x" * 5000, r"latest: cannot be read \(5000 bytes, the maximum is 4096\)"),
        (b"\xff\xfe", r"latest: cannot be read \(not UTF-8\)"),
        (b"a\0b", "latest: expected folder names"),
        (b"../elsewhere", r"latest: expected folder names .*got '\.\./elsewhere'"),
        (b"one\ntwo", "latest: expected folder names"),
        ("ü".encode() * 200, "latest: expected folder names of at most 255 bytes"),
        (b"gone", "gone: no such checkpoint"),
    ],
)
def test_any_other_content_of_latest_is_an_error(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        find_checkpoint(tmp_path)
    with pytest.raises(zero_to_fp32.ConversionError, match=str(tmp_path)):
        zero_to_fp32.read_source(tmp_path)


def test_a_latest_that_is_no_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(CheckpointError, match=r"latest: cannot be read \(not a regular file\)"):
        read_latest(tmp_path)
    with pytest.raises(zero_to_fp32.ConversionError, match="not a regular file"):
        zero_to_fp32.read_source(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match=r"latest: cannot be read \(Is a directory\)"):
        read_latest(tmp_path)


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "file.json"
    os.mkfifo(pipe)
    readers: list[Callable[[], object]] = [
        lambda: TorchFile(pipe),
        lambda: load_config(str(pipe)),
        lambda: text_of_file(pipe),
        lambda: read_hostfile(str(pipe)),
    ]
    for read in readers:
        with pytest.raises(ZeroAccelError, match="not a regular file"):
            read()
    with pytest.raises(OSError, match="not a regular file"):
        next(tensor_locations(pipe))
    reader, writer = os.pipe()  # as in the shell's <(command)
    os.write(writer, b"node1 slots=2")
    with pytest.raises(OSError, match="more than the maximum of 5 bytes"):
        read_at_most(f"/dev/fd/{reader}", 5)
    os.close(writer)
    assert read_at_most(f"/dev/fd/{reader}", 100) == b"slots=2"
    os.close(reader)


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        (" step", "without blanks at its ends"),
        ("step ", "without blanks at its ends"),
        ("x" * 256, "at most 255 bytes"),
        ("ü" * 128, "at most 255 bytes"),
        ("zero_to_fp32.py", "a name that no file beside the checkpoints has"),
        ("\ud800", "folder names"),
        ("a\u2028", "folder names"),
    ],
)
def test_a_tag_that_would_not_come_back_is_refused_when_saving(tag: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_new_tag(tag)


@pytest.mark.parametrize("tag", ["x" * 255, "ü" * 127, "a b", 7])
def test_other_tags_come_back(tag: object, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(check_new_tag(tag))
    assert read_latest(tmp_path) == str(tag)
    assert check_tag(" of an earlier version") == " of an earlier version"


def test_plain_json_is_bounded(tmp_path: Path) -> None:
    assert parse_plain_json('{"a": [1]}') == {"a": [1]}
    assert [levels_of(value, 9) for value in (1, [], [1], {"a": []}, [[[]]])] == [0, 1, 1, 2, 3]
    for text in ("[" * 101 + "]" * 101, "[" * 100_000, "9" * 5000, "{"):
        with pytest.raises(ValueError, match=r"nested|digits|Expecting"):
            parse_plain_json(text)
    (tmp_path / "file").write_bytes(b"12345")
    assert read_at_most(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, the maximum is 4"):
        read_at_most(tmp_path / "file", 4)
    with pytest.raises(OSError, match="not a regular file"):
        read_at_most("/dev/zero", 1000)
    with pytest.raises(OSError, match="not a regular file"):
        read_at_most("/dev/zero", 1000, regular=True)


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (load_config, '{"a":\n ' + "[" * 40 + "]" * 40 + "}", "<json>:2:33: nested more than 32 levels deep"),
        (load_config, '{"train_batch_size": ' + "9" * 101 + "}", "<json>:1:22: a number of 101 characters"),
        (lambda text: parse_launch_file(text, "f"), "a: &a [1]\nb: &b [*a]\nc: !!int ''", "f:3:4: not valid YAML: "),
        (lambda text: parse_launch_file(text, "f"), "[" * 40, "f:1:33: not valid YAML: nested more than 32"),
    ],
)
def test_bounds_are_reported_with_their_place(read: Callable[[str], object], text: str, words: str) -> None:
    with refused(ConfigError, words):
        read(text)


def test_an_error_can_show_any_value_and_be_printed() -> None:
    endless: list[Any] = []
    for _ in range(100_000):
        endless = [endless]
    for value in (10**5000, endless, "x" * 10_000, "\ud800"):
        error = ConfigError("here", got=value)
        assert len(str(error)) < 300
        assert str(error).encode()
    assert json.dumps(str(ConfigError("\ud800")))
