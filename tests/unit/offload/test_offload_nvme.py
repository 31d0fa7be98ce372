"""The NVMe tier: the bytes that it returns, their order, its memory, and the errors of a failing disk."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import time_limits
from zeroaccel.errors import ConfigError, OffloadError
from zeroaccel.offload import file_io
from zeroaccel.offload.file_io import IoSettings
from zeroaccel.offload.host_buffers import ALIGN_NBYTES, HostBuffers, aligned_bytes
from zeroaccel.offload.nvme import NvmeTier
from zeroaccel.offload.offload_folder import OffloadFolder, examine_folder
from zeroaccel.offload.tier import HostTier, StoredElements, Tier
from zeroaccel.zero.access.deferred_init import ShardTarget

SIZES = {"small": 1000, "large": 300_000, "empty": 0, "page": 4096}
PAGES = IoSettings(block_nbytes=4096, threads=3)


def _tier(folder: Path, settings: IoSettings = PAGES, budget: int = 1 << 20, **sizes: int) -> NvmeTier:
    facts = OffloadFolder(folder, "ext4", 1 << 40)
    return NvmeTier(sizes or SIZES, facts, "nvme_path", HostBuffers(budget), settings)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    made = _tier(tmp_path)
    yield made
    made.close()


def _store(tier: Tier, key: str, value: int) -> None:
    loan = tier.take(key)
    loan.copy_(_pattern(loan.numel(), value))
    tier.store(key, loan)


def _pattern(numel: int, value: int) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + value) % 251).to(torch.uint8)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("block", [4096, 1 << 20])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_stored_bytes_come_back(tmp_path: Path, threads: int, block: int, overlap: bool, checksum: bool) -> None:
    tier = _tier(tmp_path, IoSettings(block, threads, overlap, checksum))
    for value in (1, 2):
        for index, key in enumerate(SIZES):
            _store(tier, key, value + index)
        fetches = {key: tier.fetch(key) for key in SIZES}  # some writes are still under way
        for index, key in enumerate(SIZES):
            loan = fetches[key].wait()
            assert torch.equal(loan, _pattern(SIZES[key], value + index)), key
            tier.release(loan)
    assert torch.equal(tier.read("large", 12_345, 67_890), _pattern(300_000, 3)[12_345 : 12_345 + 67_890])
    assert tier.buffers.in_use_nbytes == 0
    assert tier.traffic["read"].nbytes >= 2 * sum(SIZES.values())
    assert tier.traffic["write"].seconds > 0
    tier.settle()
    tier.close()
    tier.close()


def test_every_tier_has_the_same_calls(tier: NvmeTier) -> None:
    kinds: list[Tier] = [tier, HostTier(SIZES, pinned=False)]
    for each in kinds:
        _store(each, "large", 5)
        each.settle()
        stored = StoredElements.under(each, "large", 40, 1000, torch.float32)
        assert [chunk.numel() for chunk in stored.chunks(3000)] == [3000, 1000]
        ends = [StoredElements.under(each, "large", start, n, torch.float32) for start, n in ((40, 10), (120, 5))]
        joined = StoredElements.joined(ends, torch.float32).copy()
        raw = _pattern(300_000, 5)[40:4040].clone().view(torch.float32)
        assert torch.equal(joined.view(torch.int32), torch.cat([raw[:10], raw[20:25]]).view(torch.int32))
        assert each.nbytes == sum(SIZES.values())


def test_a_part_of_a_key_can_be_stored_and_fetched(tier: NvmeTier) -> None:
    loan = tier.take("large")
    loan[:5000].fill_(9)
    tier.store("large", loan, 5000)
    loan = tier.fetch("large", 5000).wait()
    assert loan.numel() == 300_000
    assert bool((loan[:5000] == 9).all())
    tier.release(loan)


def test_the_budget_holds_without_a_deadlock(tmp_path: Path) -> None:
    tier = _tier(tmp_path, budget=3 * 40_960, **{str(index): 40_960 for index in range(8)}, huge=1_000_000)
    for index in range(8):
        _store(tier, str(index), index)
    tier.settle()
    assert tier.buffers.peak_nbytes <= 3 * 40_960
    fetches = [tier.fetch(str(index)) for index in range(8)]
    for index, fetch in enumerate(fetches):
        loan = fetch.wait()
        assert torch.equal(loan, _pattern(40_960, index))
        tier.release(loan)
    assert tier.buffers.peak_nbytes <= 3 * 40_960
    _store(tier, "huge", 1)  # larger than the budget
    held = [tier.fetch("0").wait(), tier.fetch("1").wait(), tier.fetch("2").wait(), tier.fetch("huge").wait()]
    assert torch.equal(held[-1], _pattern(1_000_000, 1))
    for loan in held:
        tier.release(loan)
    tier.close()


class CopyEvent:
    """The event of a copy to a device: under way until the test sets `passed` or the host waits."""

    def __init__(self) -> None:
        self.passed = False
        self.waits = 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = True


def test_a_pool_is_not_searched_while_another_thread_changes_it() -> None:
    buffers, found = HostBuffers(1 << 20), []
    search = threading.Thread(target=lambda: found.append(buffers.owns(first)))
    first = buffers.acquire(1000)
    assert first is not None
    with buffers._lock:
        search.start()
        search.join(0.1)
        assert found == []
    search.join(time_limits.seconds(10))
    assert found == [True]


def test_buffers_are_cut_from_memory_that_is_allocated_ahead() -> None:
    """In any order of sizes, buffers in use do not overlap, and the pool allocates nothing after the start."""
    pages, chance = 24, random.Random(3)
    buffers = HostBuffers(pages * ALIGN_NBYTES, ahead_nbytes=pages * ALIGN_NBYTES)
    memory = buffers.acquire(1)
    assert memory is not None
    storage = memory.untyped_storage()._cdata
    buffers.release(memory[:0])
    in_use: list[tuple[torch.Tensor, int]] = []
    refused = 0
    for number in range(400):
        if in_use and chance.random() < 0.45:
            buffer, value = in_use.pop(chance.randrange(len(in_use)))
            assert bool((buffer == value).all()), "another buffer has this memory"
            buffers.release(buffer.view(torch.uint8)[: chance.randrange(buffer.numel())])
            continue
        made = buffers.acquire(chance.randrange(1, 7 * ALIGN_NBYTES))
        refused += made is None
        if made is not None:
            assert made.untyped_storage()._cdata == storage
            assert buffers.owns(made)
            in_use.append((made.fill_(number % 251), number % 251))
    assert refused > 10
    assert buffers.peak_nbytes == pages * ALIGN_NBYTES
    beyond = buffers.acquire_over_budget(pages * ALIGN_NBYTES)
    assert beyond.untyped_storage()._cdata != storage
    buffers.release(beyond)
    for buffer, _ in in_use:
        buffers.release(buffer)
    assert buffers.in_use_nbytes == 0
    assert not buffers.owns(memory)


def test_a_buffer_that_a_device_reads_is_in_use_until_its_event(tmp_path: Path) -> None:
    tier = _tier(tmp_path, budget=8192, one=4096, two=4096, three=4096)
    for value, key in enumerate(("one", "two", "three")):
        _store(tier, key, value)
    tier.settle()
    events = CopyEvent(), CopyEvent()
    for key, event in zip(("one", "two"), events, strict=True):
        tier.release(tier.fetch(key).wait(), after=event)
    assert tier.buffers.in_use_nbytes == 8192
    third = tier.fetch("three")  # finds no free buffer, and returns without waiting
    assert [event.waits for event in events] == [0, 0]
    buffer = third.wait()
    assert torch.equal(buffer, _pattern(4096, 2))
    assert [event.waits for event in events] == [1, 0], "the host waits for the oldest copy only"
    assert tier.buffers.peak_nbytes == 8192
    tier.release(buffer)
    events[1].passed = True
    tier.fetch("one")
    assert events[1].waits == 0
    assert tier.buffers.in_use_nbytes == 4096, "the second buffer is free, the first key is being read"
    tier.close()


def test_a_tier_in_memory_waits_for_the_device_that_reads_its_bytes() -> None:
    tier, event = HostTier({"one": 4096}, pinned=False), CopyEvent()
    tier.release(tier.take("one"), after=event)
    assert event.passed


def test_many_threads_share_a_tier(tmp_path: Path) -> None:
    tier = _tier(tmp_path, budget=100_000, **{str(index): 40_960 for index in range(4)})
    wrong: list[int] = []

    def work(number: int) -> None:
        for value in range(20):
            _store(tier, str(number), value)
            loan = tier.fetch(str(number)).wait()
            if not torch.equal(loan, _pattern(40_960, value)):
                wrong.append(value)
            tier.release(loan)
            if not torch.equal(tier.read(str(number), 1, 5000), _pattern(40_960, value)[1:5001]):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(time_limits.seconds(30))
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    tier.close()


def test_without_overlap_one_transfer_goes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    for overlap in (True, False):
        tier = _tier(tmp_path, IoSettings(4096, 4, overlap), **{str(index): 4096 for index in range(4)})
        most, gate, real = 0, threading.Barrier(2), os.pwritev

        def slow(handle: int, buffers: Any, offset: int, *, gate: threading.Barrier = gate, real: Any = real) -> int:
            try:  # two writes that meet here overlap
                gate.wait(0.2)
                seen.append(1)
            except threading.BrokenBarrierError:
                gate.reset()
            return int(real(handle, buffers, offset))

        seen.clear()
        monkeypatch.setattr(file_io.os, "pwritev", slow)
        for index in range(2):
            _store(tier, str(index), index)
        tier.settle()
        monkeypatch.undo()
        most = len(seen)
        assert most == (2 if overlap else 0), overlap
        tier.close()


# -- the file and its folder


def test_the_file_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = _tier(tmp_path), _tier(tmp_path)
    _store(first, "large", 1)
    _store(second, "large", 2)
    first.settle()
    second.settle()
    assert list(tmp_path.iterdir()) == []  # the files have no names, so none remains after a crash
    assert stat.S_IMODE(os.fstat(first.file._handle).st_mode) == 0o600
    loan = first.fetch("large").wait()
    assert torch.equal(loan, _pattern(300_000, 1))
    for each in (first, second):
        each.close()


def test_a_file_system_without_nameless_files_or_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open, real_fcntl = os.open, file_io.fcntl.fcntl

    def no_tmpfile(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real_open(path, flags, *rest, **named)

    def no_direct(handle: int, command: int, flags: int = 0) -> Any:
        if command == file_io.fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_fcntl(handle, command, flags)

    monkeypatch.setattr(file_io.os, "open", no_tmpfile)
    monkeypatch.setattr(file_io.fcntl, "fcntl", no_direct)
    said: list[str] = []
    monkeypatch.setattr(file_io, "log_once", lambda level, message: said.append(message))
    tier = _tier(tmp_path)
    assert not tier.file.direct
    assert "does not support direct I/O" in said[0]
    assert list(tmp_path.iterdir()) == []
    _store(tier, "large", 4)
    loan = tier.fetch("large").wait()
    assert torch.equal(loan, _pattern(300_000, 4))
    tier.close()


def test_unsuitable_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"^nvme_path: expected a folder on a local disk, got .*missing, which"):
        examine_folder(tmp_path / "missing", "nvme_path")
    with pytest.raises(ConfigError, match="which is a file"):
        examine_folder(file, "nvme_path")
    with pytest.raises(ConfigError, match="which is a tmpfs: its files use the memory"):
        examine_folder("/dev/shm", "nvme_path")
    mounted = os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, os.ST_RDONLY, 255))
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda *_: mounted)
        with pytest.raises(ConfigError, match="which is on a read-only file system'; name another"):
            examine_folder(tmp_path, "nvme_path")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="a writable folder"):
        examine_folder(tmp_path, "nvme_path")
    monkeypatch.undo()
    facts = examine_folder(tmp_path, "nvme_path")
    assert facts.free_nbytes > 0
    assert facts.file_system not in ("unknown", "tmpfs")


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("open", errno.EROFS, r"nvme_path: expected a folder in which files can be created, got .*Read-only file"),
        ("posix_fallocate", errno.ENOSPC, r"bytes of free space for this rank.*No space left.*has not started"),
    ],
)
def test_a_disk_without_room_or_write_access_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, message: str
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file_io.os, call, refuse)
    with pytest.raises(ConfigError, match=message):
        _tier(tmp_path)


# -- faults


def _damage(tier: NvmeTier, key: str, place: int) -> None:
    """Flips one bit of a key's bytes in the file."""
    base = tier._table[key][0] + place // ALIGN_NBYTES * ALIGN_NBYTES
    page = aligned_bytes(ALIGN_NBYTES)
    os.preadv(tier.file._handle, [page.numpy().data], base)
    page[place % ALIGN_NBYTES] ^= 1
    os.pwritev(tier.file._handle, [page.numpy().data], base)


def test_a_flipped_bit_is_found_on_request(tmp_path: Path) -> None:
    for checksum in (True, False):
        tier = _tier(tmp_path, IoSettings(8192, 2, True, checksum))
        _store(tier, "large", 1)
        tier.settle()
        _damage(tier, "large", 100_000)
        fetch = tier.fetch("large")
        if checksum:
            with pytest.raises(OffloadError, match=r"byte 98304: 8192 bytes are not what was written there"):
                fetch.wait()
            with pytest.raises(OffloadError, match="not what was written"):
                tier.read("large", 100_001, 1)
            tier.read("large", 0, 50_000)  # the other blocks are intact
        else:
            tier.release(fetch.wait())
        assert tier.buffers.in_use_nbytes == 0
        tier.close()


def test_a_short_read_is_an_error(tier: NvmeTier) -> None:
    _store(tier, "large", 1)
    tier.settle()
    os.ftruncate(tier.file._handle, 8192)
    with pytest.raises(OffloadError, match="a short read: expected 4096 bytes, got 0"):
        tier.fetch("large").wait()
    assert tier.buffers.in_use_nbytes == 0


def test_a_disk_without_room_for_a_shard_of_a_model_that_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reservation, the first write to a mapped page would end the process with SIGBUS."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_io.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"offload_param.nvme_path .*: no room for a shard of 8 elements .*No space"):
        ShardTarget(None, torch.device("cpu"), tmp_path).empty(8, torch.float32)


def test_a_disk_that_is_full_in_the_middle(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_io.os, "pwritev", full)
    _store(tier, "large", 1)
    with pytest.raises(OffloadError, match=r"cannot write \(No space left on device\); free some space, then resume"):
        tier.settle()
    monkeypatch.undo()
    _store(tier, "large", 2)  # works again once the disk has space
    tier.settle()
    loan = tier.fetch("large").wait()
    assert torch.equal(loan, _pattern(300_000, 2))
    tier.release(loan)


def test_a_system_call_may_move_less_than_asked(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def some(handle: int, buffers: Any, offset: int, *, real: Any = real) -> int:
            return int(real(handle, [buffers[0][: max(512, len(buffers[0]) // 2)]], offset))

        monkeypatch.setattr(file_io.os, name, some)
    _store(tier, "large", 6)
    loan = tier.fetch("large").wait()
    assert torch.equal(loan, _pattern(300_000, 6))
    tier.release(loan)
