"""The tier in a file: a table of offsets, loans of host memory, and the order of what is on its way.

[Note: no deadlock] A fetch waits for room in the budget only while something is being written, whose buffer will come
back by itself. If nothing is, whoever waits may be the one that holds the rest, so it is granted beyond the budget.

[Note: order] A fetch of a key starts after the store of it that is on its way, and so does another store. Otherwise
transfers are independent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from zeroaccel.offload.file_io import BlockFile, Direction, IoSettings, Traffic
from zeroaccel.offload.host_buffers import ALIGN_NBYTES, HostBuffers, aligned_nbytes
from zeroaccel.offload.offload_folder import OffloadFolder

__all__ = ["NvmeTier"]


class _Fetch:
    """Parked until there is room and nothing of its key is being written; then on its way."""

    def __init__(self, tier: NvmeTier, key: str, nbytes: int) -> None:
        self.tier = tier
        self.key = key
        self.nbytes = nbytes  # what is read; the loan is of the key's size
        self.loan: Tensor | None = None
        self.done = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> Tensor:
        if not self.done.is_set():
            self.tier._make_way(self)
            self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.loan is not None, f"{self.key}: fetched nothing"
        return self.loan


class NvmeTier:
    """See `Tier`. Safe to use from several threads.

    Args:
        sizes: key -> bytes.
        folder: examined before.
        where: the config key of the folder, for errors.
        buffers: what is lent.
        settings: how the file is read and written.

    Attributes:
        file: where it all is.
        buffers: with how much is on loan.

    Raises:
        ConfigError: the folder does not take the file, or has not the space.
    """

    def __init__(
        self, sizes: Mapping[str, int], folder: OffloadFolder, where: str, buffers: HostBuffers, settings: IoSettings
    ) -> None:
        self._table: dict[str, tuple[int, int]] = {}
        end = 0
        for key, nbytes in sizes.items():
            self._table[key] = end, nbytes
            end += aligned_nbytes(nbytes)
        self.nbytes = sum(sizes.values())
        self.file = BlockFile(folder, max(end, ALIGN_NBYTES), where, settings)  # a file of nothing cannot be reserved
        self.buffers = buffers
        self.name = f"{folder.path} ({folder.file_system})"
        self.traffic: Mapping[Direction, Traffic] = self.file.traffic
        self._state = threading.Condition()
        self._parked: deque[_Fetch] = deque()
        self._writing: set[str] = set()
        self._failure: Exception | None = None

    def fetch(self, key: str, nbytes: int | None = None) -> _Fetch:
        """See `Tier.fetch`."""
        fetch = _Fetch(self, key, self._table[key][1] if nbytes is None else nbytes)
        with self._state:
            self._parked.append(fetch)
            self._unpark()
        return fetch

    def take(self, key: str) -> Tensor:
        """See `Tier.take`; waits for room as [Note: no deadlock] says."""
        with self._state:
            return self._room(self._table[key][1])

    def store(self, key: str, loan: Tensor, nbytes: int | None = None) -> None:
        """See `Tier.store`."""
        offset, size = self._table[key]
        assert loan.numel() == size and self.buffers.owns(loan), f"{key}: stored what this tier did not lend"

        def stored(error: Exception | None) -> None:
            with self._state:
                self._failure = self._failure or error
                self._writing.discard(key)
                self.buffers.release(loan)
                self._unpark()
                self._state.notify_all()

        with self._state:
            self._state.wait_for(lambda: key not in self._writing)
            self._writing.add(key)
        self.file.start("write", _whole_blocks(loan, size if nbytes is None else nbytes), offset, stored)

    def release(self, loan: Tensor) -> None:
        """See `Tier.release`."""
        with self._state:
            self.buffers.release(loan)
            self._unpark()

    def read(self, key: str, start: int, nbytes: int) -> Tensor:
        """See `Tier.read`. With checksums whole blocks are read, so that there is a sum to compare."""
        unit = self.file.settings.block_nbytes if self.file.settings.checksum else ALIGN_NBYTES
        base, size = self._table[key]
        first = max((base + start) // unit * unit, base)
        last = min(-(-(base + start + nbytes) // unit) * unit, base + aligned_nbytes(size))
        with self._state:
            self._state.wait_for(lambda: key not in self._writing)
            loan = self._room(last - first)
        arrived, errors = threading.Event(), []

        def done(error: Exception | None) -> None:
            errors.append(error)
            arrived.set()

        self.file.start("read", loan, first, done)
        arrived.wait()
        try:
            if errors[0] is not None:
                raise errors[0]
            return loan[base + start - first :][:nbytes].clone()
        finally:
            self.release(loan)

    def settle(self) -> None:
        """See `Tier.settle`."""
        with self._state:
            self._state.wait_for(lambda: not self._writing)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """See `Tier.close`."""
        self.file.close()
        self.buffers.clear()

    # -- room, and order; all of it under the lock

    def _unpark(self) -> None:
        """Starts the fetches that may go now, first come first served as far as room goes."""
        for fetch in list(self._parked):
            if fetch.key in self._writing:
                continue
            loan = self.buffers.acquire(self._table[fetch.key][1])
            if loan is None:
                return
            self._start(fetch, loan)

    def _make_way(self, fetch: _Fetch) -> None:
        """Somebody waits for this fetch: if it is still parked it goes as soon as it can, and before the others."""
        with self._state:
            self._state.wait_for(lambda: fetch not in self._parked or fetch.key not in self._writing)
            if fetch in self._parked:
                loan = self._room(self._table[fetch.key][1])
                if fetch in self._parked:
                    self._start(fetch, loan)
                else:  # granted while it waited for room
                    self.buffers.release(loan)

    def _room(self, nbytes: int) -> Tensor:
        while (loan := self.buffers.acquire(nbytes)) is None:
            if not self._writing:
                return self.buffers.acquire_over_budget(nbytes)
            self._state.wait()
        return loan

    def _start(self, fetch: _Fetch, loan: Tensor) -> None:
        self._parked.remove(fetch)
        fetch.loan = loan

        def done(error: Exception | None) -> None:
            if error is not None:
                fetch.error = error
                self.release(loan)
            fetch.done.set()

        offset = self._table[fetch.key][0]
        self.file.start("read", _whole_blocks(loan, fetch.nbytes), offset, done)


def _whole_blocks(loan: Tensor, nbytes: int) -> Tensor:
    """The loan's first `nbytes`, and what is behind them up to the next multiple of the alignment."""
    return torch.as_strided(loan, (aligned_nbytes(nbytes),), (1,))
