"""The receiving side of weight streams: packets, and `WeightReceiver`, which applies a version when it is complete.

This file imports torch and nothing of zeroaccel: copy it into the inference program. It defines the packets that
`weight_stream.py` makes, and the transports that `sinks.py` uses.

A packet is a manifest of plain data and a payload of bytes. A version of the weights is a sequence of packets from each
sender; the last packet is marked `last`. An entry of a manifest describes elements of one tensor:

    name, shape, dtype   of the full tensor
    offset, numel        byte offset of the values in the payload, and number of values
    start, cut           index of the first element in the sender's part; place of the part in the full tensor
    positions            0: the elements are contiguous. Else: number of bytes with positions after the values
    high                 0: the values are plain. Else: number of bytes with coded high bytes after the low bytes

`cut` is (run, parts, part): element i of the part is element ((i // run) * parts + part) * run + i % run of the full
tensor, flattened.

[Note: positions] The encoding stores the number of skipped elements before each position, counted from `start`, as
bytes of 255 and a last byte below 255 that add up to it.

[Note: high bytes] The low bytes of 2-byte values are plain. The high bytes are coded: a table of the 15 most frequent
ones, then an index of 4 bits for each value, then the bytes that are not in the table, whose index is 15.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALIGN_NBYTES",
    "Channel",
    "Packet",
    "WeightReceiver",
    "WeightsRefusedError",
    "encode_high_bytes",
    "encode_positions",
    "receive_files",
    "receive_version",
    "refusal_file",
    "values_of",
    "write_packet",
]

ALIGN_NBYTES = 16
"""Alignment of values in a payload, in bytes."""

distributed: Any = torch.distributed

_ESCAPE = 255
_CODED = 15
_ABORTED = -1
_TEXT_NBYTES = 4096


class WeightsRefusedError(ValueError):
    """A version of the weights does not fit the receiver, which keeps its current version."""


@dataclass(frozen=True)
class Packet:
    """A manifest and the bytes that it describes.

    Attributes:
        manifest: `version`; `since`, the base version of a delta, or None for all values; `sender`, a number below
            `senders`; `index` of this packet among its sender's, and `last`, True for the last one; `tensors`, the
            entries; `ties`, alias -> name.
        payload: (n,) uint8; valid until the sender makes the next packet. None on a rank that only joins collectives.
    """

    manifest: dict[str, Any]
    payload: Tensor | None


@dataclass
class WeightReceiver:
    """Collects packets, and changes the weights when all packets of a version have arrived.

    Example:
        >>> weights = {"w": torch.zeros(3)}
        >>> receiver = WeightReceiver(weights)
        >>> entry = {"name": "w", "shape": [3], "dtype": "float32", "cut": [3, 1, 0]}
        >>> entry |= {"offset": 0, "numel": 3, "start": 0, "positions": 0}
        >>> manifest = {"version": 1, "since": None, "sender": 0, "senders": 1, "index": 0, "last": True, "ties": {}}
        >>> values = torch.ones(3)
        >>> receiver.take(Packet({**manifest, "tensors": [entry]}, values.view(torch.uint8)))
        True
        >>> receiver.version, weights["w"]
        (1, tensor([1., 1., 1.]))

    Args:
        tensors: name -> contiguous weight of the inference program; the receiver changes it in place.
        rename: maps the sender's name of a tensor to the name in `tensors`; None to skip the tensor.

    Attributes:
        version: version of the weights in `tensors`; None before the first.
        missing: names in `tensors` that have received no values yet.
    """

    tensors: Mapping[str, Tensor]
    rename: Callable[[str], str | None] = field(default=lambda name: name)
    version: int | None = None

    def __post_init__(self) -> None:
        self.missing = set(self.tensors)
        self._staged: dict[int, list[tuple[dict[str, Any], Tensor]]] = {}
        self._coming: int | None = None
        self._refused: int | None = None

    def take(self, packet: Packet) -> bool:
        """Keeps a copy of a packet. Returns True if it completed a version, which is now in the weights.

        Raises:
            WeightsRefusedError: the delta is based on a version that this receiver does not have, so that it needs all
                weights; or a name, shape or dtype does not fit, or a packet is missing. Later packets of the version
                are ignored.
        """
        manifest = packet.manifest
        version = int(manifest["version"])
        if version == self._refused:
            return False
        if version != self._coming:  # an earlier, incomplete version is obsolete
            self.drop()
            self._coming = version
        try:
            payload = self._checked(packet)
        except WeightsRefusedError:
            self.drop()
            self._refused = version
            raise
        self._staged.setdefault(manifest["sender"], []).append((manifest, payload.detach().clone()))
        complete = [packets for packets in self._staged.values() if packets[-1][0]["last"]]
        if len(complete) < manifest["senders"]:
            return False
        self._swap()
        self.version = version
        self.drop()
        return True

    def drop(self) -> None:
        """Drops the packets of an incomplete version."""
        self._staged.clear()
        self._coming = None

    def _checked(self, packet: Packet) -> Tensor:
        """Returns the payload of a packet, or raises if the packet does not fit."""
        manifest, version = packet.manifest, packet.manifest["version"]
        if packet.payload is None:
            raise WeightsRefusedError(f"version {version}: expected a packet with a payload, got None")
        since = manifest["since"]
        if since is not None and since != self.version:
            raise WeightsRefusedError(
                f"version {version} is a delta to version {since}: expected version {since} here, got {self.version}; "
                "send all weights"
            )
        earlier = len(self._staged.get(manifest["sender"], ()))
        if manifest["index"] != earlier:
            where = f"version {version}, sender {manifest['sender']}"
            raise WeightsRefusedError(f"{where}: expected packet {earlier}, got {manifest['index']}")
        for entry in manifest["tensors"]:
            own = self._own(entry["name"])
            if own is None:
                continue
            name, tensor = own
            if tensor is None:
                raise WeightsRefusedError(f"version {version}: this receiver has no tensor {name!r}")
            got = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if got != (list(entry["shape"]), entry["dtype"]):
                raise WeightsRefusedError(
                    f"version {version}, {name}: expected {got[1]} {got[0]}, got {entry['dtype']} {entry['shape']}"
                )
            if not tensor.is_contiguous():
                raise WeightsRefusedError(f"version {version}, {name}: expected a contiguous tensor")
        return packet.payload

    def _own(self, sent: str) -> tuple[str, Tensor | None] | None:
        name = self.rename(sent)
        return None if name is None else (name, self.tensors.get(name))

    def _swap(self) -> None:
        changed: dict[str, Tensor] = {}
        ties: dict[str, str] = {}
        with torch.no_grad():
            for packets in self._staged.values():
                for manifest, payload in packets:
                    ties.update(manifest["ties"])
                    for entry in manifest["tensors"]:
                        own = self._own(entry["name"])
                        if own is not None and own[1] is not None:
                            _write(own[1], entry, payload)
                            changed[entry["name"]] = own[1]
                            self.missing.discard(own[0])
            for alias, name in ties.items():  # the receiver may store tied weights separately
                own = self._own(alias)
                if own is not None and own[1] is not None and name in changed:
                    if own[1].data_ptr() != changed[name].data_ptr():
                        own[1].copy_(changed[name])
                    self.missing.discard(own[0])


def values_of(entry: Mapping[str, Any], payload: Tensor) -> Tensor:
    """Returns the values of an entry, (numel,): a view of the payload, unless they are coded."""
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    own = payload[entry["offset"] : _end_of_values(entry)]
    if not entry.get("high"):
        return own.view(dtype)
    low, coded = own[: entry["numel"]], own[entry["numel"] :]
    return torch.stack([low, _decode_high_bytes(coded, low.numel())], dim=1).view(-1).view(dtype)


def _end_of_values(entry: Mapping[str, Any]) -> int:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    nbytes = entry["numel"] + entry["high"] if entry.get("high") else entry["numel"] * dtype.itemsize
    return int(entry["offset"] + nbytes)


def _write(tensor: Tensor, entry: Mapping[str, Any], payload: Tensor) -> None:
    values, flat = values_of(entry, payload).to(tensor.device), tensor.view(-1)
    run, parts, part = entry["cut"]
    start, count = entry["start"], entry["numel"]
    if not entry["positions"] and parts == 1:
        flat[start : start + count] = values
        return
    if entry["positions"]:
        end = _end_of_values(entry)
        places = _decode_positions(payload[end : end + entry["positions"]]) + start
    else:
        places = torch.arange(start, start + count, device=payload.device)
    rows = places // run
    places = (rows * parts + part) * run + (places - rows * run)
    # Indexed assignment copies bits, so NaNs and signed zeros keep theirs in every dtype.
    flat[places.to(tensor.device)] = values


def encode_positions(positions: Tensor) -> Tensor:
    """Encodes positions as uint8, see [Note: positions].

    Args:
        positions: (n,) int64, ascending, relative to the entry's `start`.

    Example:
        >>> encode_positions(torch.tensor([0, 3, 600])).tolist()
        [0, 2, 255, 255, 86]
    """
    if not positions.numel():
        return torch.empty(0, dtype=torch.uint8, device=positions.device)
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    ends = torch.cumsum(gaps // _ESCAPE + 1, 0) - 1
    encoded = torch.full((int(ends[-1].item()) + 1,), _ESCAPE, dtype=torch.uint8, device=positions.device)
    encoded[ends] = (gaps % _ESCAPE).to(torch.uint8)
    return encoded


def _decode_positions(encoded: Tensor) -> Tensor:
    ends = encoded != _ESCAPE
    sums = torch.cumsum(encoded.to(torch.int64) + ends, 0)
    return sums[ends] - 1


def encode_high_bytes(high: Tensor) -> Tensor:
    """Encodes the high bytes of 2-byte values as uint8, see [Note: high bytes].

    Args:
        high: (n,) uint8.

    Example:
        >>> encode_high_bytes(torch.tensor([7, 9, 7], dtype=torch.uint8))[_CODED:].tolist()
        [16, 0]
    """
    table = torch.bincount(high, minlength=256).topk(_CODED).indices
    numbers = torch.full((256,), _CODED, dtype=torch.uint8, device=high.device)
    numbers[table] = torch.arange(_CODED, dtype=torch.uint8, device=high.device)
    codes = numbers[high.long()]
    pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    return torch.cat([table.to(torch.uint8), pairs[:, 0] | pairs[:, 1] << 4, high[codes == _CODED]])


def _decode_high_bytes(coded: Tensor, numel: int) -> Tensor:
    packed = coded[_CODED : _CODED + (numel + 1) // 2]
    codes = torch.stack([packed & 15, packed >> 4], dim=1).view(-1)[:numel]
    high = coded[: _CODED + 1][codes.long()]
    high[codes == _CODED] = coded[_CODED + packed.numel() :]
    return high


# -- transport by a process group of one sender and all receivers


class Channel:
    """A gloo group of one sender, as rank 0, and the receivers. It requires no other common process group.

    Args:
        store: a store that all of them can reach, such as a `torch.distributed.TCPStore`.
        sender: number of the sender; each sender has its own channel.
        rank: 0 for the sender, 1 to `receivers` for the receivers.
        receivers: number of receivers.
        timeout_seconds: limit of the wait for the other processes, per call.

    Attributes:
        broken: the error that broke the channel; "" while it is usable.
    """

    def __init__(self, store: Any, sender: int, rank: int, receivers: int, timeout_seconds: float = 300.0) -> None:
        self.sender, self.rank, self.size, self.broken = sender, rank, receivers + 1, ""
        own = distributed.PrefixStore(f"weights/{sender}", store)
        self._group: Any = distributed.ProcessGroupGloo(own, rank, self.size, timedelta(seconds=timeout_seconds))

    def send(self, packet: Packet | None) -> None:
        """Sends a packet to the receivers, from host memory; None ends the version early.

        Raises:
            ConnectionError: a receiver is gone.
        """
        if packet is None:
            self._broadcast(torch.tensor([_ABORTED, 0]))
            return
        assert packet.payload is not None, "a packet without a payload"
        manifest = torch.frombuffer(bytearray(json.dumps(packet.manifest).encode()), dtype=torch.uint8)
        self._broadcast(torch.tensor([manifest.numel(), packet.payload.numel()]))
        self._broadcast(manifest)
        if packet.payload.numel():
            self._broadcast(packet.payload.cpu())

    def receive(self) -> Packet | None:
        """Receives the next packet; returns None if the sender ends the version early.

        Raises:
            ConnectionError: the sender is gone.
        """
        manifest_nbytes, nbytes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        if manifest_nbytes == _ABORTED:
            return None
        manifest = self._broadcast(torch.empty(manifest_nbytes, dtype=torch.uint8))
        payload = torch.empty(nbytes, dtype=torch.uint8)
        return Packet(json.loads(bytes(manifest.tolist())), self._broadcast(payload) if nbytes else payload)

    def exchange(self, text: str) -> list[str]:
        """Gathers a text of at most 4096 bytes from each process, in rank order."""
        own = torch.zeros(_TEXT_NBYTES, dtype=torch.uint8)
        encoded = text.encode()[:_TEXT_NBYTES]
        own[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([rows], [own]))
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        self._wait(lambda: self._group.broadcast(tensor, 0))
        return tensor

    def _wait(self, start: Callable[[], Any]) -> None:
        if self.broken:
            raise ConnectionError(self.broken)
        try:
            start().wait()
        except RuntimeError as error:
            self.broken = f"weights of sender {self.sender}: lost the connection ({str(error)[:200]})"
            raise ConnectionError(self.broken) from error


def receive_version(receiver: WeightReceiver, channels: Sequence[Channel]) -> str:
    """Receives one version, with a channel for each sender. (all receivers)

    A receiver that refuses the version still receives it to the end, where it sends its reason to the sender.

    Returns:
        The reason why this receiver refused the version; "" if it accepted it.

    Raises:
        ConnectionError: a sender is gone; the receiver keeps its current version.
    """
    refusal = ""
    try:
        for channel in channels:
            last = False
            while not last:
                packet = channel.receive()
                if packet is None:
                    refusal, last = refusal or f"sender {channel.sender} ended the version early", True
                    continue
                last = packet.manifest["last"]
                if not refusal:
                    try:
                        receiver.take(packet)
                    except WeightsRefusedError as error:
                        refusal = str(error)
        for channel in channels:
            channel.exchange(refusal)
    except ConnectionError:
        receiver.drop()
        raise
    if refusal:
        receiver.drop()
    return refusal


# -- transport by files, in shared memory such as /dev/shm


def write_packet(packet: Packet, folder: Path) -> Path:
    """Writes a packet under a hidden name, and renames the complete file."""
    manifest = packet.manifest
    assert packet.payload is not None, "a packet without a payload"
    path = folder / f"weights-{manifest['version']:08d}-{manifest['sender']:05d}-{manifest['index']:06d}"
    text = json.dumps(manifest).encode()
    nbytes = ALIGN_NBYTES + len(text) + -len(text) % ALIGN_NBYTES
    hidden = path.with_name(f".{path.name}")
    _reserve(hidden, nbytes + packet.payload.numel())
    # Mapped rather than written, so that the payload is copied directly into the memory of the file.
    mapped = torch.from_file(str(hidden), shared=True, size=nbytes + packet.payload.numel(), dtype=torch.uint8)
    head = len(text).to_bytes(8, "little").ljust(ALIGN_NBYTES, b"\0") + text.ljust(nbytes - ALIGN_NBYTES)
    mapped[:nbytes] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    mapped[nbytes:] = packet.payload
    os.replace(hidden, path)
    return path


def _reserve(path: Path, nbytes: int) -> None:
    """Allocates a file: writing to a mapping that exceeds the free space would kill the process.

    Raises:
        OSError: the free space is too small; the file is removed.
    """
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}: no room for a packet of {nbytes} bytes", str(path)) from error


def _read_packet(path: Path) -> Packet:
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    length = int.from_bytes(bytes(mapped[:8].tolist()), "little")
    text = bytes(mapped[ALIGN_NBYTES : ALIGN_NBYTES + length].tolist())
    return Packet(json.loads(text), mapped[ALIGN_NBYTES + length + -length % ALIGN_NBYTES :])


def refusal_file(folder: Path, receiver: str) -> Path:
    """Path of the file in which the receiver `receiver` reports why it refused a version."""
    return folder / f"refused-{receiver}"


def receive_files(receiver: WeightReceiver, folder: Path | str, name: str, timeout_seconds: float = 0.0) -> bool:
    """Reads the complete versions in a folder. Returns True if the receiver now has a newer version.

    If it refuses a version, it writes the reason to `refusal_file`, which the sender reads before the next version.

    Args:
        name: name of this receiver, unique in the folder.
        timeout_seconds: how long to wait for a newer version.

    Raises:
        WeightsRefusedError: a version does not fit. A delta to a version that this receiver does not have raises no
            error; the file asks the sender for all weights.
    """
    folder, before = Path(folder), receiver.version
    until = time.monotonic() + timeout_seconds
    while True:
        for paths in _complete_versions(folder, receiver.version):
            try:
                for path in paths:
                    receiver.take(_read_packet(path))
            except WeightsRefusedError as error:
                refusal_file(folder, name).write_text(str(error))
                if "send all weights" not in str(error):
                    raise
            except FileNotFoundError:  # the sender removed it because it has written newer versions
                receiver.drop()
        if receiver.version != before or time.monotonic() >= until:
            return receiver.version != before
        time.sleep(0.01)


def _complete_versions(folder: Path, after: int | None) -> list[list[Path]]:
    """Returns the files of each newer version with all its packets, the oldest version first."""
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("weights-*")):
        files.setdefault(int(path.name.split("-")[1]), []).append(path)
    complete = []
    for version, paths in files.items():
        if after is not None and version <= after:
            continue
        last: dict[str, Path] = {path.name.split("-")[2]: path for path in paths}
        try:
            manifests = [_read_packet(path).manifest for path in last.values()]
        except FileNotFoundError:
            continue
        if all(manifest["last"] for manifest in manifests) and len(last) == manifests[0]["senders"]:
            complete.append(paths)
    return complete
