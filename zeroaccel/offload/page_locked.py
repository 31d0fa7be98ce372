"""Page-locked host memory of exactly the requested size; a CUDA device copies from and to it asynchronously.

Memory that only the host reads and writes, such as the moments of an update on the host, is not locked. It has the same
huge pages, which all threads allocate at once.

torch's allocator of page-locked memory rounds a request up to a power of two and never frees it: 64 GiB for a state
buffer of 33. Here a slab consists of whole, separate pages: mapped, then locked by the CUDA runtime, and unlocked and
unmapped after its last view and the copies that use it. `host_buffers.py` makes slabs; this file handles pages and the
causes of failed locking.

If memory cannot be locked, it stays pageable, and one warning names the limits in force: a copy between it and the
device blocks the host, but has the same result.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from zeroaccel.logs import logger
from zeroaccel.ops.device_threads import CPU, executor

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process
_GIGA = 1e9
_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; Python has no name for it
_LEAST_SPAN = 8 << 20  # bytes that a thread populates
_SAID_NBYTES = 4_000_000_000  # locking this much takes a second or more
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_said: set[str] = set()
_streams: set[Any] = set()  # of `copying_stream`; torch has few streams for a device, and hands them out again


def register_pages(address: int, nbytes: int) -> str:
    """Locks pages for all CUDA devices of this process; returns the reason if it failed, else ""."""
    with torch.cuda.device(_device_of_process()):
        runtime = torch.cuda.cudart()
        result = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(result) == 0:
            return ""
        # CUDA reports an error again at the next, unrelated kernel launch; this launch absorbs it.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        return f"CUDA error {int(result)}: {runtime.cudaGetErrorString(result)}"


def unregister_pages(address: int) -> None:
    """Unlocks the pages that `register_pages` locked at this address, after all copies from or to them are complete."""
    with torch.cuda.device(_device_of_process()):
        torch.cuda.cudart().cudaHostUnregister(address)


def copying_stream(device: torch.device) -> torch.Stream:
    """Returns a new stream for copies from and to page-locked memory, which stays locked until they are complete."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    _streams.add(stream)
    return stream


def _copies_so_far() -> list[torch.Event]:
    """Returns events after all copies that may use page-locked memory: those of the package, and of the program."""
    device = torch.device("cuda", _device_of_process())
    streams = {torch.cuda.current_stream(device), torch.cuda.default_stream(device), *tuple(_streams)}
    return [stream.record_event() for stream in streams if stream.device == device]


_last_device: int | None = None


def _device_of_process() -> int:
    """Returns the current device of the main thread at its last call of this function."""
    # In a new thread the first device is current, and a call to CUDA would create a context of half a gigabyte there,
    # in the memory of another rank.
    global _last_device
    if _last_device is None or threading.current_thread() is threading.main_thread():
        _last_device = torch.cuda.current_device()
    return _last_device


def _populate(address: int, nbytes: int) -> None:
    """Makes the system allocate pages on all threads; the CUDA runtime would do it on one, in most of its time."""
    count = min(torch.get_num_threads(), nbytes // _LEAST_SPAN)
    if count < 2:
        return
    madvise = ctypes.CDLL(None).madvise  # unlike that of `mmap`, this call releases the interpreter's lock
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    span = -(-nbytes // (count * _HUGE_PAGE)) * _HUGE_PAGE
    spans = [(address + start, min(span, nbytes - start)) for start in range(0, nbytes, span)]
    with executor(
        count, "zeroaccel-pages", CPU
    ) as threads:  # a kernel that cannot do this leaves the pages to the runtime
        list(threads.map(lambda pages: madvise(*pages, _POPULATE_WRITE), spans))


class _Pages(mmap.mmap):
    """Anonymous pages, unlocked before the system unmaps them; their views own them.

    Attributes:
        locked_nbytes: bytes that this process has locked.
    """

    locked_nbytes = 0
    _address = 0
    _process = 0

    def populate(self, address: int) -> None:
        """Makes the system allocate the pages now, in huge ones and on all threads."""
        # A forked process, such as a data loader's worker, does not get these pages: copying locked memory takes
        # time in proportion to its size, and if it were shared, a write could move a page away from the device. Of
        # other memory, each page that an update writes while the worker lives would be copied.
        if hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)
        # Locking takes about 0.3 s per GB in pages of 4 KiB, and much less in huge ones.
        if hasattr(mmap, "MADV_HUGEPAGE") and len(self) >= _HUGE_PAGE:
            with suppress(OSError):  # a kernel without huge pages
                self.madvise(mmap.MADV_HUGEPAGE)
        _populate(address, len(self))

    def lock(self, address: int) -> str:
        """Locks the pages; returns the reason if it failed, else ""."""
        if len(self) >= _SAID_NBYTES:
            logger.info("page-locking %.1f GB of host memory", len(self) / _GIGA)
        self.populate(address)
        reason = register_pages(address, len(self))
        if not reason:
            self._address, self._process = address, os.getpid()
            _Pages.locked_nbytes += len(self)
        return reason

    # The end of the process unlocks them, too; modules may be gone by then, hence the default arguments.
    def __del__(
        self, is_ending: Callable[[], bool] = sys.is_finalizing, process: Callable[[], int] = os.getpid
    ) -> None:
        if self._address and not is_ending() and self._process == process():
            with suppress(Exception):  # the device may have failed
                _dropped.append((self, _copies_so_far()))
                unlock_dropped()


_dropped: deque[tuple[_Pages, list[torch.Event]]] = deque()  # without views, but copies may use them


def unlock_dropped(*, wait: bool = False) -> None:
    """Unlocks the pages without views whose copies are complete.

    Where pages are locked or dropped, in the middle of a step, the host does not wait: a copy may be behind a
    collective that other ranks join later, and they may wait for a collective that this rank has yet to launch.

    Args:
        wait: wait for the copies, between steps.
    """
    for _ in range(len(_dropped)):
        with suppress(IndexError):  # another thread has unlocked them
            pages, copies = _dropped.popleft()
            for copy in copies if wait else ():
                copy.synchronize()
            if all(copy.query() for copy in copies):
                unregister_pages(pages._address)
                _Pages.locked_nbytes -= len(pages)
            else:
                _dropped.append((pages, copies))


def mapped_bytes(nbytes: int, *, pinned: bool, populated: bool = False, file: int = -1) -> Tensor:
    """Returns (nbytes,) uint8, zeros, in separate pages that are freed with the last view of them.

    Args:
        nbytes: a multiple of the page size, above 0.
        pinned: page-locked; pageable with a warning if locking fails.
        populated: allocated now, as page-locked memory is, if that much is free.
        file: handle of a file in memory with at least `nbytes`, whose own pages these are; then any number of bytes.
    """
    pages = _Pages(file, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file < 0 else mmap.MAP_SHARED)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        unlock_dropped()
        room = free_nbytes() if file < 0 else nbytes  # the pages of a file are allocated
        # Locking allocates the pages at once: beyond the free memory, the system would kill the process silently.
        reason = f"{room / _GIGA:.2f} GB are free" if nbytes > room else pages.lock(memory.data_ptr())
        if reason:
            _warn(nbytes, reason)
    elif populated and _HUGE_PAGE <= nbytes <= free_nbytes():
        pages.populate(memory.data_ptr())
    return memory


def lock_trouble(nbytes: int) -> str:
    """Returns the reason why `nbytes`, a multiple of the page size, cannot be page-locked now; "" if they can."""
    pages = _Pages(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return pages.lock(torch.frombuffer(pages, dtype=torch.uint8).data_ptr())


def free_nbytes(root: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Returns the bytes of host memory that this process may still use, limited by machine and control groups.

    Args:
        root: mount point of the control groups (version 2).
        membership: file that names this process's control group.
    """
    available = int(psutil.virtual_memory().available)
    for group in _control_groups(root, membership):
        with suppress(OSError, ValueError):  # a group without a limit
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            # The page cache counts as used, but the kernel frees it on demand.
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            available = min(available, limit - used + int(facts["inactive_file"]) + int(facts["active_file"]))
    return max(available, 0)


def _control_groups(root: Path, membership: Path) -> Iterator[Path]:
    """Yields the folders of this process's control group and its ancestors: each of them may set a limit."""
    group = ""
    with suppress(OSError):  # a system without control groups
        group = next((line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")), "")
    folder = root / group.strip("/")
    yield folder
    for parent in folder.parents:
        if folder == root or not parent.is_relative_to(root):
            return
        yield parent


def lock_limit() -> str:
    """Returns the limit of `ulimit -l` as text."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"


def locked_nbytes() -> int:
    """Returns the bytes of host memory that this process has page-locked for offload."""
    return _Pages.locked_nbytes


def _warn(nbytes: int, reason: str) -> None:
    """Warns once, on any rank: other ranks may have had enough memory."""
    if "pageable" not in _said:
        _said.add("pageable")
        logger.warning(
            "pin_memory: %.2f GB of host memory cannot be page-locked (%s; `ulimit -l` is %s) and stay pageable: copies"
            " between them and the device block the host and do not overlap; raise `ulimit -l` or the memory limit of"
            " the container, run fewer ranks here, offload less, or set pin_memory to false (locked so far: %.2f GB)",
            nbytes / _GIGA,
            reason,
            lock_limit(),
            _Pages.locked_nbytes / _GIGA,
            extra={"all_ranks": True},
        )
