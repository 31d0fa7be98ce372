"""A rank's file is a valid safetensors file, and its checksums find every changed bit."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zeroaccel.checkpoint import rank_file_writer
from zeroaccel.checkpoint.manifest import FileRecord
from zeroaccel.checkpoint.rank_file import (
    CHECKSUMS_KEY,
    RankFileReader,
    block_sums,
    is_part_of_a_save,
    lay_out_rank_file,
    rank_file_name,
)
from zeroaccel.checkpoint.rank_file_writer import RankFileWriter, Staging
from zeroaccel.checkpoint.save_plan import SaveItem
from zeroaccel.checkpoint.zero_to_fp32 import BLOCK_NBYTES, CHUNK_NBYTES
from zeroaccel.errors import CheckpointError
from zeroaccel.offload.tier import StoredElements
from zeroaccel.zero.access.safetensors_file import dtype_name


def write_file(folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[FileRecord, RankFileWriter]:
    writer = RankFileWriter(folder / rank_file_name(0, 1, "0123abcd"), entries_of(tensors), Staging(1))
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
    requests: list[tuple[int, Tensor]] = []
    for key, tensor in tensors.items():
        offset = writer.layout.offsets[key]
        assert offset % tensor.itemsize == 0
        for start in range(0, found[key].numel(), CHUNK_NBYTES):
            part = found[key][start : start + CHUNK_NBYTES]
            requests.append((offset + start, part))
    random.Random(0).shuffle(requests)
    with RankFileReader(tmp_path, record) as file:
        for start, part in requests:
            part.copy_(torch.from_numpy(file.read(start, part.numel())))
    assert all(torch.equal(found[key], t.view(-1).view(torch.uint8)) for key, t in tensors.items())


def entries_of(tensors: dict[str, torch.Tensor]) -> list[SaveItem]:
    return [SaveItem(key, dtype_name(t.dtype), tuple(t.shape), 0, t.view(-1)) for key, t in tensors.items()]


def test_a_file_in_memory_takes_the_copies_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors may change before the first checksum, and the writer maps each of two files once."""
    mapped: list[int] = []
    allocate = rank_file_writer.aligned_bytes

    def counted(nbytes: int, *, pinned: bool, file: int) -> Tensor:
        mapped.append(file)
        return allocate(nbytes, pinned=pinned, file=file)

    monkeypatch.setattr(rank_file_writer, "aligned_bytes", counted)
    staging, tensors = Staging(1), {"master/huge": torch.randn(9 * CHUNK_NBYTES // 4 + 17), "state": torch.ones(3)}
    files: list[Path] = []
    for number in range(6):  # two files take turns, as those of states do
        over = files[number - 2] if number >= 2 else None
        path = tmp_path / rank_file_name(0, 1, f"0123abc{number}")
        wanted = {key: tensor.clone() for key, tensor in tensors.items()}
        writer = RankFileWriter(path, entries_of(tensors), staging, over=over)
        writes = writer._write

        def write_late(handle: int, writer: RankFileWriter = writer, writes: Callable[[int], bytes] = writes) -> bytes:
            assert writer.copied.wait(60), "the copy waits for the checksums"
            for tensor in tensors.values():
                tensor.add_(1)
            return writes(handle)

        if over is not None:
            monkeypatch.setattr(writer, "_write", write_late)
        copier = Thread(target=writer.copy)
        copier.start()
        record = writer.write(0)
        copier.join()
        files.append(path)
        assert over is None or not over.exists()
        with RankFileReader(tmp_path, record) as file:
            file.verify()
            for key, tensor in wanted.items():
                read = np.concatenate(
                    [
                        file.read(writer.layout.offsets[key] + start, min(CHUNK_NBYTES, tensor.nbytes - start))
                        for start in range(0, tensor.nbytes, CHUNK_NBYTES)
                    ]
                )
                assert read.tobytes() == tensor.numpy().tobytes()
        assert path.stat().st_size == record.nbytes
    assert len(mapped) == 2


def test_a_file_in_memory_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = tmp_path / "obsolete"
    over.write_bytes(b"0" * 100)

    def full(handle: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensors = some_tensors()
    writer = RankFileWriter(tmp_path / rank_file_name(0, 1, "0123abcd"), entries_of(tensors), Staging(1), over=over)
    copier = Thread(target=writer.copy)
    copier.start()
    with pytest.raises(CheckpointError, match="cannot be written \\(No space left"):
        writer.write(0)
    copier.join(60)
    assert not copier.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_only_the_blocks_asked_for_are_read(tmp_path: Path) -> None:
    record, writer = write_file(tmp_path, some_tensors())
    table = record.nbytes - writer.layout.offsets[CHECKSUMS_KEY]
    with RankFileReader(tmp_path, record) as file:
        file.read(5 * BLOCK_NBYTES + 8, 16)
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
    with pytest.raises(CheckpointError, match="the file is incomplete"):
        RankFileReader(tmp_path, record)
    with pytest.raises(CheckpointError, match="missing"):
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


class Deferred(rank_file_writer.ChunkCopies):
    """A device's copies, each of which takes effect only when a caller waits for a mark recorded after it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._done = 0
        self.within = 0

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        self.within += 1
        yield

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert self.within == 1, "a copy was issued outside of its stream"
        target.fill_(0xAA)
        with self._lock:
            self._queue.append((target, source))

    def mark(self) -> Callable[[], object]:
        behind = len(self._queue)

        def wait() -> None:
            with self._lock:
                for target, source in self._queue[self._done : behind]:
                    target.copy_(source)
                self._done = max(self._done, behind)

        return wait

    @property
    def is_done(self) -> bool:
        return self._done == len(self._queue)


def test_chunks_of_a_device_are_read_after_their_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("host", "device"):
        (tmp_path / folder).mkdir()
    tensors = {name: torch.randn(900_000) for name in ("a", "b", "c", "d")}  # four chunks, with a pool of two buffers
    expected, _ = write_file(tmp_path / "host", tensors)
    copies, done_when_told = Deferred(), []
    monkeypatch.setattr(rank_file_writer, "copies_of", lambda entries: copies)

    class Told(threading.Event):
        def set(self) -> None:
            done_when_told.append(copies.is_done)
            super().set()

    monkeypatch.setattr(RankFileWriter, "copied", Told(), raising=False)
    monkeypatch.setattr(RankFileWriter, "__setattr__", _all_but_copied)
    found, writer = write_file(tmp_path / "device", tensors)
    assert writer.path.read_bytes() == (tmp_path / "host" / writer.path.name).read_bytes()
    assert found == expected
    assert done_when_told == [True], "the tensors were released while copies still read them"


def _all_but_copied(writer: RankFileWriter, name: str, value: object) -> None:
    if name != "copied":
        object.__setattr__(writer, name, value)


def test_a_stream_of_copies_begins_behind_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            events.append(f"stream of {device}")

        def wait_event(self, event: Event) -> None:
            events.append(f"wait for {event.of}")

    class Event:
        of = ""

        def record(self, stream: object) -> None:
            self.of = "training" if stream == "training" else "copies"

        def synchronize(self) -> None:
            events.append(f"the host waits for {self.of}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "training")
    rank_file_writer.DeviceChunkCopies(torch.device("cuda", 1)).mark()()
    assert events == ["stream of cuda:1", "wait for training", "the host waits for copies"]


def test_tensors_of_a_device_take_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = SaveItem("a", "F32", (3,), 0, torch.ones(3))
    assert type(rank_file_writer.copies_of([on_host])) is rank_file_writer.ChunkCopies
    monkeypatch.setattr(rank_file_writer, "DeviceChunkCopies", lambda device: device)
    tier = StoredElements(3, torch.float32, lambda first, count: torch.ones(count))
    there = SaveItem("b", "F32", (3,), 0, FakeTensor(FakeTensorMode(), torch.empty(3, device="meta"), "cuda:1"))
    entries = [on_host, SaveItem("c", "F32", (3,), 0, tier), there]
    assert str(rank_file_writer.copies_of(entries)) == "cuda:1"
