"""Sinks of weight streams: files in shared memory, a process group with other programs, a safetensors file.

All ranks call `send`. If a sink fails on one rank, the other ranks continue to gather, and all ranks raise after the
last packet. `receiver.py` has the receiving side.
"""

from __future__ import annotations

import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.errors import UsageError
from zeroaccel.rollout.receiver import (
    Channel,
    Packet,
    WeightsRefusedError,
    open_own,
    require_own_folder,
    values_of,
    write_packet,
)
from zeroaccel.zero.engine_core import EngineCore

__all__ = ["ChannelSink", "FileSink", "SafetensorsSink", "Sink", "send"]


_LOCK_SECONDS = 5.0  # within which the other senders of a run take over a folder
_MOST_TEXT_NBYTES = 4096


class Sink(ABC):
    """Receives the packets of one sender.

    Calls per stream: `put` for each packet, then `finish`; or `abort`, after a failure on any rank.
    """

    @abstractmethod
    def put(self, packet: Packet) -> None:
        """Writes or sends a packet, whose payload is valid only during the call."""

    @abstractmethod
    def finish(self) -> list[str]:
        """Ends a complete version. Returns the refusals that receivers have reported so far."""

    @abstractmethod
    def abort(self) -> None:
        """Ends a version before its last packet."""


def send(engine: EngineCore, packets: Iterator[Packet], sink: Sink | None) -> int:
    """Sends a stream of the engine to a sink. (all ranks)

    Args:
        packets: the result of `stream_weights` or `stream_deltas`.
        sink: this rank's sink, or None on ranks that send no packets.

    Returns:
        Number of payload bytes that this rank sent.

    Raises:
        UsageError: a receiver refused the version; the message has its reason. It may accept the next stream.
        Exception: the error that a sink raised, on every rank. The engine remains usable.
    """
    failure: Exception | None = None
    nbytes = 0
    try:
        for packet in packets:
            if sink is None or packet.payload is None or failure is not None:
                continue
            try:
                sink.put(packet)
                nbytes += packet.payload.numel()
            except Exception as error:
                failure = error
        agree_or_raise(engine.collectives.job, failure, "send weights")
    except Exception:
        if sink is not None:
            sink.abort()
        raise
    refusals: list[str] = []
    try:
        refusals = sink.finish() if sink is not None else []
        if refusals:
            failure = UsageError("weights: receivers refused the version", got="; ".join(refusals))
    except Exception as error:
        failure = error
    agree_or_raise(engine.collectives.job, failure, "send weights: receivers")
    return nbytes


class FileSink(Sink):
    """Writes a file per packet to a folder, preferably in shared memory (/dev/shm/run); `receive_files` reads them.

    A new folder and the files belong to this user alone. The first packet of a run removes the packets of earlier runs,
    so that a program that starts again replaces its own.

    Args:
        versions: number of versions to keep; older ones are removed. A receiver that missed one needs all weights.

    Raises:
        UsageError: another user could write to the folder; or, from `put`, another running program writes to it.

    `finish` returns the refusals of earlier versions that receivers have reported so far.
    """

    def __init__(self, folder: Path | str, versions: int = 2) -> None:
        self._folder, self._versions = Path(folder), versions
        self._paths: dict[int, list[Path]] = {}
        self._sender = 0
        self._writes: IO[str] | None = None  # holds this program's lock of the folder
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        try:
            require_own_folder(self._folder)
        except WeightsRefusedError as error:
            raise UsageError(f"FileSink: {error}") from None

    def put(self, packet: Packet) -> None:
        self._sender = packet.manifest["sender"]
        if self._writes is None:
            self._writes = _folder_of_run(self._folder, packet.manifest["run"])
            for path in self._folder.glob(f"weights-*-{self._sender:05d}-*"):  # of an earlier sink of this run
                path.unlink(missing_ok=True)
        path = write_packet(packet, self._folder)
        self._paths.setdefault(packet.manifest["version"], []).append(path)

    def finish(self) -> list[str]:
        while len(self._paths) > self._versions:
            self._remove(min(self._paths))
        found = []
        for path in sorted(self._folder.glob("refused-*")) if self._sender == 0 else ():
            found.append(f"{path.name.removeprefix('refused-')}: {_text_of(path)}")
            path.unlink()
        return found

    def abort(self) -> None:
        if self._paths:
            self._remove(max(self._paths))

    def close(self) -> None:
        """Lets other runs write to the folder, whose packets stay; the end of the process does the same."""
        if self._writes is not None:
            self._writes.close()
            self._writes = None

    def _remove(self, version: int) -> None:
        for path in self._paths.pop(version):
            path.unlink(missing_ok=True)


def _text_of(path: Path) -> str:
    try:
        with open(open_own(path), "rb") as file:
            return file.read(_MOST_TEXT_NBYTES).decode(errors="replace")
    except (OSError, WeightsRefusedError) as error:
        return f"a refusal that cannot be read ({error})"


def _folder_of_run(folder: Path, run: str) -> IO[str]:
    """Locks a folder for the senders of a run; the first of them removes the files of earlier runs.

    Returns:
        The file that holds the lock as long as it is open: shared by the senders of a run.

    Raises:
        UsageError: another run writes to the folder.
    """
    handle = os.open(folder / ".run", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    file = open(handle, "r+", errors="replace")  # noqa: SIM115 - the sink keeps it open
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        with suppress(BlockingIOError):
            # Locks of this kind end with the process, and forks of it do not inherit them.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() != run:
                for path in (*folder.glob("weights-*"), *folder.glob(".weights-*"), *folder.glob("refused-*")):
                    path.unlink(missing_ok=True)
                file.seek(0)
                file.truncate()
                file.write(run)
                file.flush()
            fcntl.lockf(handle, fcntl.LOCK_SH)
            return file
        with suppress(BlockingIOError):
            fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            file.seek(0)
            if file.read() == run:
                return file
            fcntl.lockf(handle, fcntl.LOCK_UN)
        if time.monotonic() >= until:
            file.close()
            raise UsageError(
                f"FileSink({folder})",
                expected="a folder of this run",
                got="a folder that another running program writes to",
                fix="end that program or close() its sink, or choose another folder",
            )
        file.seek(0)
        time.sleep(0.01)


class ChannelSink(Sink):
    """Sends packets through a process group with the receivers, which call `receive_version`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def put(self, packet: Packet) -> None:
        self._channel.send(packet)

    def finish(self) -> list[str]:
        said = self._channel.exchange("")
        return [f"receiver {rank}: {text}" for rank, text in enumerate(said) if text]

    def abort(self) -> None:
        if not self._channel.broken:
            self._channel.send(None)
            self._channel.exchange("")


class SafetensorsSink(Sink):
    """Writes a safetensors file at the end of a stream of all weights from one sender."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._tensors: dict[str, Tensor] = {}
        self._numel: Counter[str] = Counter()  # elements so far
        self._ties: dict[str, str] = {}

    def put(self, packet: Packet) -> None:
        manifest, payload = packet.manifest, packet.payload
        if manifest["since"] is not None or manifest["senders"] != 1:
            raise UsageError("SafetensorsSink", expected="all weights from one sender", got="a part of the weights")
        assert payload is not None, "a packet without a payload"
        self._ties.update(manifest["ties"])
        for entry in manifest["tensors"]:
            tensor = self._tensors.get(entry["name"])
            if tensor is None:
                tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
                self._tensors[entry["name"]] = tensor
            tensor.view(-1)[entry["start"] : entry["start"] + entry["numel"]] = values_of(entry, payload)
            self._numel[entry["name"]] += entry["numel"]

    def finish(self) -> list[str]:
        from safetensors.torch import save_file  # only writing a file requires the library

        for name, tensor in self._tensors.items():
            if self._numel[name] != tensor.numel():
                got = f"{self._numel[name]} of {tensor.numel()} elements"
                raise UsageError(f"SafetensorsSink: {name}", expected="a stream of all weights", got=got)
        metadata: dict[str, Any] = {"format": "pt", **self._ties}
        hidden = self._path.with_name(f".{self._path.name}")
        save_file(self._tensors, hidden, metadata=metadata)
        hidden.replace(self._path)
        self.abort()
        return []

    def abort(self) -> None:
        self._tensors, self._ties, self._numel = {}, {}, Counter()
