"""Sinks of weight streams: files in shared memory, a process group with other programs, a safetensors file.

All ranks call `send`. If a sink fails on one rank, the other ranks continue to gather, and all ranks raise after the
last packet. `receiver.py` has the receiving side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.errors import UsageError
from zeroaccel.rollout.receiver import Channel, Packet, values_of, write_packet
from zeroaccel.zero.engine_base import EngineBase

__all__ = ["ChannelSink", "FileSink", "SafetensorsSink", "Sink", "send"]


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


def send(engine: EngineBase, packets: Iterator[Packet], sink: Sink | None) -> int:
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

    Args:
        versions: number of versions to keep; older ones are removed. A receiver that missed one needs all weights.

    `finish` returns the refusals of earlier versions that receivers have reported so far.
    """

    def __init__(self, folder: Path | str, versions: int = 2) -> None:
        self._folder, self._versions = Path(folder), versions
        self._paths: dict[int, list[Path]] = {}
        self._sender = 0
        self._folder.mkdir(parents=True, exist_ok=True)

    def put(self, packet: Packet) -> None:
        self._sender = packet.manifest["sender"]
        if not self._paths and (old := next(self._folder.glob(f"weights-*-{self._sender:05d}-*"), None)):
            raise UsageError(f"FileSink({self._folder})", expected="a folder of this run", got=old.name)
        path = write_packet(packet, self._folder)
        self._paths.setdefault(packet.manifest["version"], []).append(path)

    def finish(self) -> list[str]:
        while len(self._paths) > self._versions:
            self._remove(min(self._paths))
        found = []
        for path in sorted(self._folder.glob("refused-*")) if self._sender == 0 else ():
            found.append(f"{path.name.removeprefix('refused-')}: {path.read_text()}")
            path.unlink()
        return found

    def abort(self) -> None:
        if self._paths:
            self._remove(max(self._paths))

    def _remove(self, version: int) -> None:
        for path in self._paths.pop(version):
            path.unlink(missing_ok=True)


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

    def finish(self) -> list[str]:
        from safetensors.torch import save_file  # only writing a file requires the library

        metadata: dict[str, Any] = {"format": "pt", **self._ties}
        hidden = self._path.with_name(f".{self._path.name}")
        save_file(self._tensors, hidden, metadata=metadata)
        hidden.replace(self._path)
        self._tensors, self._ties = {}, {}
        return []

    def abort(self) -> None:
        self._tensors, self._ties = {}, {}
