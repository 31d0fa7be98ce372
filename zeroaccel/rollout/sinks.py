"""Where streams of weights go: files in shared memory, a group with other programs, a safetensors file.

`send` brings a stream to a sink on all ranks alike: where a sink fails on one rank, the others go on to gather, and all
raise behind the last packet. The receivers' side is in `receiver.py`.
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
    """Takes the packets of one sender.

    A stream: `put` of each packet, then `finish`; or `abort`, after a failure anywhere.
    """

    @abstractmethod
    def put(self, packet: Packet) -> None:
        """Takes a packet, whose payload is valid during the call."""

    @abstractmethod
    def finish(self) -> list[str]:
        """The version is complete; returns why receivers refuse it, as far as they have said so."""

    @abstractmethod
    def abort(self) -> None:
        """No more packets of this version will come."""


def send(engine: EngineBase, packets: Iterator[Packet], sink: Sink | None) -> int:
    """Sends a stream of the engine to a sink. (all ranks)

    Args:
        packets: of `stream_weights` or `stream_deltas`.
        sink: on ranks whose packets are to be sent; None elsewhere.

    Returns:
        The bytes of payloads that this rank sent.

    Raises:
        UsageError: a receiver refuses the version, and says why. The next stream may be one that it can take.
        Exception: what a sink raised, on every rank. The engine goes on as before.
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
            failure = UsageError("weights: receivers refuse the version", got="; ".join(refusals))
    except Exception as error:
        failure = error
    agree_or_raise(engine.collectives.job, failure, "send weights: receivers")
    return nbytes


class FileSink(Sink):
    """A file per packet in a folder, in shared memory such as /dev/shm/run; `receive_files` takes them.

    Args:
        versions: that stay; older ones are removed. A receiver that comes later than that needs all weights.

    `finish` returns what receivers have said of earlier versions by then.
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
    """A group of torch.distributed with the receivers; `receive_version` takes what is sent."""

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
    """A safetensors file of a stream of all weights, written at its end; for one sender."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._tensors: dict[str, Tensor] = {}
        self._ties: dict[str, str] = {}

    def put(self, packet: Packet) -> None:
        manifest, payload = packet.manifest, packet.payload
        if manifest["since"] is not None or manifest["senders"] != 1:
            raise UsageError("SafetensorsSink", expected="all weights from one sender", got="a part of them")
        assert payload is not None, "a packet without a payload"
        self._ties.update(manifest["ties"])
        for entry in manifest["tensors"]:
            tensor = self._tensors.get(entry["name"])
            if tensor is None:
                tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
                self._tensors[entry["name"]] = tensor
            tensor.view(-1)[entry["start"] : entry["start"] + entry["numel"]] = values_of(entry, payload)

    def finish(self) -> list[str]:
        from safetensors.torch import save_file  # the format's library, only where a file is written

        metadata: dict[str, Any] = {"format": "pt", **self._ties}
        hidden = self._path.with_name(f".{self._path.name}")
        save_file(self._tensors, hidden, metadata=metadata)
        hidden.replace(self._path)
        self._tensors, self._ties = {}, {}
        return []

    def abort(self) -> None:
        self._tensors, self._ties = {}, {}
