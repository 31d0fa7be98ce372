"""A rank's file is plain safetensors, and the checksums find every changed bit of it."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from zeroaccel.checkpoint.manifest import FileRecord
from zeroaccel.checkpoint.rank_file import (
    BLOCK_NBYTES,
    CHECKSUMS_KEY,
    CHUNK_NBYTES,
    RankFileReader,
    ReadRequest,
    block_sums,
    is_part_of_a_save,
    lay_out_rank_file,
    rank_file_name,
)
from zeroaccel.checkpoint.rank_file_writer import RankFileWriter, Staging
from zeroaccel.checkpoint.save_plan import SaveItem
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import dtype_name


def write_file(folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[FileRecord, RankFileWriter]:
    entries = [SaveItem(key, dtype_name(t.dtype), tuple(t.shape), 0, t.view(-1)) for key, t in tensors.items()]
    writer = RankFileWriter(folder / rank_file_name(0, 1, "0123abcd"), entries, Staging(1))
    copier = Thread(target=writer.copy)
    copier.start()
    record = writer.write(0)
    copier.join()
    return record, writer


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "value/odd": torch.randn(7).to(torch.bfloat16),
        "master/large": torch.randn(60_001),
        "master/none": torch.zeros(0),
        "value/flags": torch.rand(13) > 0.5,
        "state/step/x": torch.tensor([2**40]),
        "master/huge": torch.randn(CHUNK_NBYTES // 4 + 17),
    }


def test_any_reader_of_safetensors_can_open_it(tmp_path: Path) -> None:
    tensors = some_tensors()
    tensors.pop("value/odd")  # numpy has no bfloat16
    record, _ = write_file(tmp_path, tensors)
    found = load_file(tmp_path / record.name)
    assert set(found) == {*tensors, "__checksums__"}
    assert all(np.array_equal(found[key], tensor.numpy()) for key, tensor in tensors.items())
    assert found["__checksums__"].size == -(-(record.nbytes - found["__checksums__"].nbytes) // BLOCK_NBYTES)
    assert [path.name for path in tmp_path.iterdir()] == [record.name]


def test_every_tensor_is_aligned_and_comes_back(tmp_path: Path) -> None:
    tensors = some_tensors()
    record, writer = write_file(tmp_path, tensors)
    found = {key: torch.empty_like(tensor).view(-1).view(torch.uint8) for key, tensor in tensors.items()}
    requests = []
    for key, tensor in tensors.items():
        offset = writer.layout.offsets[key]
        assert offset % tensor.itemsize == 0
        for start in range(0, found[key].numel(), CHUNK_NBYTES):
            part = found[key][start : start + CHUNK_NBYTES]
            requests.append(
                ReadRequest(offset + start, part.numel(), lambda data, to=part: to.copy_(torch.from_numpy(data)))
            )  # type: ignore[misc]
    random.Random(0).shuffle(requests)
    with RankFileReader(tmp_path, record) as file:
        file.read(requests)
        assert file.read_nbytes < 1.05 * record.nbytes
    assert all(torch.equal(found[key], t.view(-1).view(torch.uint8)) for key, t in tensors.items())


def test_only_the_blocks_asked_for_are_read(tmp_path: Path) -> None:
    record, writer = write_file(tmp_path, some_tensors())
    table = record.nbytes - writer.layout.offsets[CHECKSUMS_KEY]
    with RankFileReader(tmp_path, record) as file:
        file.read([ReadRequest(5 * BLOCK_NBYTES + 8, 16, lambda data: None)])
        assert file.read_nbytes == table + BLOCK_NBYTES


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    record, writer = write_file(tmp_path, some_tensors())
    path = tmp_path / record.name
    size, table = record.nbytes, writer.layout.offsets[CHECKSUMS_KEY]
    chance = random.Random(1)
    places = [0, 7, 8, table - 1, table, size - 1, *(chance.randrange(size) for _ in range(40))]
    for place in places:
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << chance.randrange(8))]))
        with pytest.raises(CheckpointError, match="damaged"), RankFileReader(tmp_path, record) as opened:
            opened.verify()
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))
    with RankFileReader(tmp_path, record) as opened:
        opened.verify()


def test_the_checksum_is_the_one_of_the_format(tmp_path: Path) -> None:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    data = np.frombuffer(random.Random(2).randbytes(1000), np.uint8)
    words = np.frombuffer(data.tobytes(), "<u8")
    expected = sum((mix((i + 1) * 0x9E3779B97F4A7C15 % 2**64) | 1) * int(x) for i, x in enumerate(words)) % 2**64
    assert block_sums(data).tolist() == [expected]
    swapped = words.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert block_sums(swapped.view(np.uint8)).tolist() != [expected]


def test_a_short_file_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    record, _ = write_file(tmp_path, some_tensors())
    os.truncate(tmp_path / record.name, record.nbytes // 2)
    with pytest.raises(CheckpointError, match="ends at byte"):
        RankFileReader(tmp_path, record)
    with pytest.raises(CheckpointError, match="cannot be read"):
        RankFileReader(tmp_path, FileRecord("absent.safetensors", 100, 0, hashlib.sha256().hexdigest()))


def test_an_error_while_writing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    written = []

    def filling(handle: int, data: memoryview) -> int:
        if sum(written) > CHUNK_NBYTES:
            raise OSError(28, "No space left on device")
        written.append(len(data))
        return write(handle, data)

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(CheckpointError, match="No space left"):
        write_file(tmp_path, {"master/x": torch.zeros(CHUNK_NBYTES)})
    assert list(tmp_path.iterdir()) == []


def test_the_header_lists_a_table_of_the_right_size() -> None:
    chance = random.Random(3)
    for limit in (1, 40, 20_000, 1 << 20):
        for count in range(12):
            layout = lay_out_rank_file([(f"master/{i}", "F32", chance.randrange(limit)) for i in range(count)])
            blocks = (layout.nbytes - layout.offsets[CHECKSUMS_KEY]) // 8
            assert (
                blocks == -(-layout.offsets[CHECKSUMS_KEY] // BLOCK_NBYTES) == -(-layout.nbytes // (BLOCK_NBYTES + 8))
            )


def test_names_of_files_are_reported_from_others() -> None:
    assert is_part_of_a_save(rank_file_name(3, 16, "0123abcd"))
    assert is_part_of_a_save(rank_file_name(3, 16, "0123abcd") + ".tmp")
    for other in ("model.safetensors", "manifest.json", "zero_to_fp32.py", "rank0.safetensors", "notes.tmp"):
        assert not is_part_of_a_save(other)
