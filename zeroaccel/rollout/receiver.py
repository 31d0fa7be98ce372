"""The receiving side of weight streams: packets, and `WeightReceiver`, which applies a version when it is complete.

This file imports torch and nothing of zeroaccel: copy it into the inference program. It defines the packets that
`weight_stream.py` makes, and the transports that `sinks.py` uses.

A packet is a manifest of plain data and a payload of bytes. A version of the weights is a sequence of packets from each
sender; the last packet is marked `last`. Versions are numbered within a run of the trainer, which has an id: a delta
never applies to the weights of another run. The receiver trusts no byte of a packet: it checks all packets of a version
before it changes a weight, and keeps at most about the size of its own tensors.

An entry of a manifest describes elements of one tensor:

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
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
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
    "checked_manifest",
    "encode_high_bytes",
    "encode_positions",
    "open_own",
    "receive_files",
    "receive_version",
    "refusal_file",
    "require_own_folder",
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
_MOST_MANIFEST_NBYTES = 1 << 28
_MOST_NUMBER = 1 << 62
_FILE = re.compile(r"weights-(?P<version>\d{8,18})-(?P<sender>\d{5,18})-(?P<index>\d{6,18})")


class WeightsRefusedError(ValueError):
    """A version of the weights is damaged or does not fit the receiver, which keeps its current version."""


@dataclass(frozen=True)
class Packet:
    """A manifest and the bytes that it describes.

    Attributes:
        manifest: `run`, the trainer's id; `version`; `since`, the base version of a delta, or None for all values;
            `sender`, a number below `senders`; `index` of this packet among its sender's, and `last`, True for the last
            one; `tensors`, the entries; `ties`, alias -> name.
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
        >>> manifest = {"run": "a", "version": 1, "since": None, "sender": 0, "senders": 1, "index": 0, "last": True}
        >>> manifest["ties"], values = {}, torch.ones(3)
        >>> receiver.take(Packet({**manifest, "tensors": [entry]}, values.view(torch.uint8)))
        True
        >>> receiver.version, weights["w"]
        (1, tensor([1., 1., 1.]))

    Args:
        tensors: name -> contiguous weight of the inference program; the receiver changes it in place.
        rename: maps the sender's name of a tensor to the name in `tensors`; None to skip the tensor.
        stream: on an accelerator, the stream on which the program computes with the weights, if it is neither the
            current nor the default one at the time of `take`: earlier kernels of these streams read the earlier
            version, and later ones the new version.

    Attributes:
        version: version of the weights in `tensors`; None before the first.
        run: id of the trainer's run that has sent it.
        missing: names in `tensors` that have received no values yet.
    """

    tensors: Mapping[str, Tensor]
    rename: Callable[[str], str | None] = field(default=lambda name: name)
    version: int | None = None
    run: str = ""
    stream: Any = None

    def __post_init__(self) -> None:
        self.missing = set(self.tensors)
        self._staged: dict[str, list[_Elements]] = {}  # by the sender's names
        self._ties: dict[str, str] = {}
        self._senders: dict[int, tuple[int, bool]] = {}  # number of packets, and whether the last one has come
        self._coming: dict[str, Any] | None = None  # the facts that all packets of the version share
        self._refused: tuple[str, int] | None = None

    def take(self, packet: Packet) -> bool:
        """Keeps a copy of a packet. Returns True if it completed a version, which is now in the weights.

        Raises:
            WeightsRefusedError: the delta is based on a version that this receiver does not have, so that it needs all
                weights; or a name, shape or dtype does not fit, or a packet is missing or damaged. Later packets of the
                version are ignored.
        """
        try:
            manifest = checked_manifest(packet.manifest)
        except WeightsRefusedError:
            self.drop()
            raise
        number = (manifest["run"], manifest["version"])
        if number == self._refused:
            return False
        shared = {key: manifest[key] for key in ("run", "version", "since", "senders")}
        if self._coming is not None and number != (self._coming["run"], self._coming["version"]):
            self.drop()  # an earlier, incomplete version is obsolete
        try:
            self._check_order(manifest, shared)
            pieces = self._pieces(manifest, packet.payload)
            for name, piece in pieces:
                self._staged.setdefault(name, []).append(piece)
            self._ties.update(manifest["ties"])
            self._coming = shared
            self._senders[manifest["sender"]] = (manifest["index"] + 1, manifest["last"])
            if sum(is_last for _, is_last in self._senders.values()) < manifest["senders"]:
                return False
            self._check_version()
        except WeightsRefusedError:
            self.drop()
            self._refused = number
            raise
        self.version = None  # if writing fails, for want of a device's memory, no delta may follow
        with self._between_kernels():
            self._swap()
        self.run, self.version = number
        self.drop()
        return True

    def drop(self) -> None:
        """Drops the packets of an incomplete version."""
        self._staged.clear()
        self._ties.clear()
        self._senders.clear()
        self._coming = None

    @property
    def most_nbytes(self) -> int:
        """Most bytes of a packet: the sender may have more tensors than this receiver."""
        return max(1 << 32, 4 * sum(tensor.nbytes for tensor in self.tensors.values()))

    def _check_order(self, manifest: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        """Checks the place of a packet among the others of its version, and the base of a delta."""
        since, version = manifest["since"], f"version {manifest['version']}"
        if since is not None and (since, manifest["run"]) != (self.version, self.run):
            got = self.version if self.run == manifest["run"] else f"{self.version} of another run of the trainer"
            raise WeightsRefusedError(
                f"{version} is a delta to version {since}: expected version {since} here, got {got}; send all weights"
            )
        if self._coming is not None and self._coming != shared:
            raise WeightsRefusedError(f"{version}: expected packets of {self._coming}, got {shared}")
        earlier, is_over = self._senders.get(manifest["sender"], (0, False))
        if manifest["index"] != earlier or is_over:
            expected = "no packet after the last" if is_over else f"packet {earlier}"
            raise WeightsRefusedError(
                f"{version}, sender {manifest['sender']}: expected {expected}, got {manifest['index']}"
            )

    def _pieces(self, manifest: Mapping[str, Any], payload: Tensor | None) -> list[tuple[str, _Elements]]:
        """Returns the checked entries of a packet that this receiver has tensors for, with copies of their bytes."""
        version = f"version {manifest['version']}"
        if payload is None:
            raise WeightsRefusedError(f"{version}: expected a packet with a payload, got None")
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise WeightsRefusedError(f"{version}: expected a payload of bytes, got {payload.dtype}")
        payload = payload.cpu()  # the checks read values: of a device's payload, many
        found: list[tuple[str, _Elements]] = []
        numel: dict[str, int] = {}
        for entry in manifest["tensors"]:
            target = self._own(entry["name"])
            if target is None:
                continue
            name, tensor = target
            where = f"{version}, {name}"
            if tensor is None:
                raise WeightsRefusedError(f"{version}: this receiver has no tensor {name!r}")
            got = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if got != (entry["shape"], entry["dtype"]):
                raise WeightsRefusedError(f"{where}: expected {got[1]} {got[0]}, got {entry['dtype']} {entry['shape']}")
            if not tensor.is_contiguous():
                raise WeightsRefusedError(f"{where}: expected a contiguous tensor")
            piece = _checked_piece(entry, payload, tensor, where)
            numel[name] = numel.get(name, 0) + entry["numel"]
            if numel[name] + sum(each.numel for each in self._staged.get(entry["name"], ())) > tensor.numel():
                raise WeightsRefusedError(f"{where}: expected at most {tensor.numel()} elements, got more")
            found.append((entry["name"], piece))
        pinned = any(tensor.device.type != "cpu" for tensor in self.tensors.values())
        return [(name, piece.copied(pinned=pinned)) for name, piece in found]

    def _own(self, sent: str) -> tuple[str, Tensor | None] | None:
        name = self.rename(sent)
        return None if name is None else (name, self.tensors.get(name))

    def _check_version(self) -> None:
        """Checks all packets of a version together: values for each element, once, and ties of one shape."""
        coming = self._coming
        assert coming is not None, "a version without packets"
        version, is_whole = f"version {coming['version']}", coming["since"] is None
        if is_whole and not self._staged:
            raise WeightsRefusedError(f"{version}: expected all weights, got no tensor of this receiver")
        for name, pieces in self._staged.items():
            key = self._own(name)
            assert key is not None and key[1] is not None, "a piece without a tensor"
            cuts = {(piece.entry["cut"][0], piece.entry["cut"][1]) for piece in pieces}
            ranges = sorted((piece.entry["cut"][2], piece.first, piece.last) for piece in pieces if piece.numel)
            overlap = any(index == other and first <= last for (index, _, last), (other, first, _) in pairwise(ranges))
            if len(cuts) > 1 or overlap:
                raise WeightsRefusedError(f"{version}, {key[0]}: expected each element once, got parts that overlap")
            count = sum(piece.numel for piece in pieces)
            if is_whole and count != key[1].numel():
                raise WeightsRefusedError(
                    f"{version}, {key[0]}: expected {key[1].numel()} elements, got {count}: a part is missing"
                )
        for alias, name in self._ties.items():
            tied, source = self._own(alias), self._own(name)
            if tied is None or tied[1] is None or source is None or source[1] is None:
                continue
            if (tied[1].shape, tied[1].dtype) != (source[1].shape, source[1].dtype):
                raise WeightsRefusedError(
                    f"{version}, {tied[0]}: expected {list(source[1].shape)} as its tied tensor {source[0]}, "
                    f"got {list(tied[1].shape)}"
                )

    @contextmanager
    def _between_kernels(self) -> Iterator[None]:
        """Orders the writes, on the current stream, after the kernels of the other streams and before their next."""
        device = next((tensor.device for tensor in self.tensors.values() if tensor.device.type != "cpu"), None)
        if device is None:
            yield
            return
        module = torch.get_device_module(device)
        current, others = module.current_stream(device), [module.default_stream(device)]
        others += [] if self.stream is None else [self.stream]
        for other in others:
            current.wait_stream(other)
        yield
        for other in others:
            other.wait_stream(current)

    def _swap(self) -> None:
        changed: dict[str, Tensor] = {}
        with torch.no_grad():
            for sent, pieces in self._staged.items():
                key = self._own(sent)
                assert key is not None and key[1] is not None, "a piece without a tensor"
                for piece in pieces:
                    _write(key[1], piece.entry, piece.data)
                changed[sent] = key[1]
                self.missing.discard(key[0])
            for alias, name in self._ties.items():  # the receiver may store tied weights separately
                key = self._own(alias)
                if key is not None and key[1] is not None and name in changed:
                    if key[1].data_ptr() != changed[name].data_ptr():
                        key[1].copy_(changed[name])
                    self.missing.discard(key[0])


@dataclass(frozen=True)
class _Elements:
    """Checked elements of a tensor.

    Attributes:
        entry: entry of the manifest, with offsets in `data`.
        data: (n,) uint8, the bytes of values and positions.
        first, last: indices of the first and the last element in the sender's part.
    """

    entry: dict[str, Any]
    data: Tensor
    first: int
    last: int

    @property
    def numel(self) -> int:
        return int(self.entry["numel"])

    def copied(self, *, pinned: bool) -> _Elements:
        """Copies the bytes, for an accelerator to page-locked memory, from which the host need not wait for copies."""
        copy = torch.empty(self.data.shape, dtype=torch.uint8, pin_memory=pinned).copy_(self.data)
        return _Elements(self.entry, copy, self.first, self.last)


def checked_manifest(manifest: Any) -> dict[str, Any]:
    """Returns a manifest whose keys have values of the right kinds; `run` is "" if it is absent.

    Raises:
        WeightsRefusedError: a key is missing, or has another kind of value.
    """

    def require(holds: bool, key: str, got: object) -> None:
        if not holds:
            raise WeightsRefusedError(f"damaged manifest: {key} is {str(got)[:80]!r}")

    require(isinstance(manifest, dict), "it", type(manifest).__name__)
    found = {"run": "", **manifest}
    run, since, ties, tensors = (found.get(key) for key in ("run", "since", "ties", "tensors"))
    require(isinstance(run, str) and len(run) <= 64, "run", run)
    for key in ("version", "sender", "senders", "index"):
        require(_is_number(found.get(key)), key, found.get(key))
    require("since" in found and (since is None or _is_number(since)), "since", since)
    require(found["sender"] < found["senders"], "sender", found["sender"])
    require(isinstance(found.get("last"), bool), "last", found.get("last"))
    require(isinstance(ties, dict) and all(isinstance(name, str) for name in ties.values()), "ties", ties)
    require(isinstance(tensors, list), "tensors", tensors)
    for entry in tensors or ():
        require(isinstance(entry, dict), "an entry", entry)
        require(isinstance(entry.get("name"), str), "name", entry.get("name"))
        where = f"{entry['name'][:200]}: "
        require(isinstance(entry.get("dtype"), str), f"{where}dtype", entry.get("dtype"))
        for key in ("offset", "numel", "start", "positions"):
            require(_is_number(entry.get(key)), where + key, entry.get(key))
        require(_is_number(entry.get("high", 0)), f"{where}high", entry.get("high"))
        for key in ("shape", "cut"):
            require(isinstance(entry.get(key), list) and all(map(_is_number, entry[key])), where + key, entry.get(key))
        cut = entry["cut"]
        require(len(cut) == 3 and cut[0] > 0 and cut[2] < cut[1], f"{where}cut", cut)
    return found


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_NUMBER


def _checked_piece(entry: Mapping[str, Any], payload: Tensor, tensor: Tensor, where: str) -> _Elements:
    """Returns the elements of an entry, without copying them, or raises if the bytes are not those of the entry."""

    def refuse(what: str, expected: object, got: object) -> WeightsRefusedError:
        return WeightsRefusedError(f"{where}: damaged: {what}: expected {expected}, got {got}")

    numel, start, offset = entry["numel"], entry["start"], entry["offset"]
    high, encoded_nbytes, itemsize = entry.get("high", 0), entry["positions"], tensor.dtype.itemsize
    if numel > tensor.numel() or (tensor.numel() and not numel):
        raise refuse("number of elements", f"1 to {tensor.numel()}", numel)
    if not high and offset % itemsize:
        raise refuse("offset", f"a multiple of {itemsize}", offset)
    middle = _end_of_values(entry)
    end = middle + encoded_nbytes
    if end > payload.numel():
        raise refuse("payload", f"{end} bytes or more", payload.numel())
    if encoded_nbytes > numel + tensor.numel() // _ESCAPE + 1:
        raise refuse("positions", f"at most {numel + tensor.numel() // _ESCAPE + 1} bytes", encoded_nbytes)
    data = payload[offset:end]
    if high:
        packed = (numel + 1) // 2
        if itemsize != 2 or high < _CODED + packed:
            raise refuse("coded bytes", f"{_CODED + packed} or more, for values of 2 bytes", high)
        codes = data[numel + _CODED : numel + _CODED + packed]
        literal = int(((codes & 15) == _CODED).sum() + ((codes >> 4) == _CODED)[: numel // 2].sum())
        if high != _CODED + packed + literal:
            raise refuse("coded bytes", _CODED + packed + literal, high)
    first, last = start, start + numel - 1
    if encoded_nbytes:
        encoded = data[middle - offset :]
        count = int((encoded != _ESCAPE).sum())
        if count != numel or int(encoded[-1]) == _ESCAPE:
            raise refuse("positions", numel, count)
        places = _decode_positions(encoded)
        first, last = start + int(places[0]), start + int(places[-1])
    run, parts, index = entry["cut"]
    if numel and (last // run * parts + index) * run + last % run >= tensor.numel():
        raise refuse("place of the elements", f"in a tensor of {tensor.numel()}", f"element {last} of part {index}")
    return _Elements({**entry, "offset": 0}, data, first, last)


def values_of(entry: Mapping[str, Any], payload: Tensor) -> Tensor:
    """Returns the values of an entry, (numel,): a view of the payload, unless they are coded."""
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    values = payload[entry["offset"] : _end_of_values(entry)]
    if not entry.get("high"):
        return values.view(dtype)
    low, coded = values[: entry["numel"]], values[entry["numel"] :]
    return torch.stack([low, _decode_high_bytes(coded, low.numel())], dim=1).view(-1).view(dtype)


def _end_of_values(entry: Mapping[str, Any]) -> int:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    nbytes = entry["numel"] + entry["high"] if entry.get("high") else entry["numel"] * dtype.itemsize
    return int(entry["offset"] + nbytes)


def _write(tensor: Tensor, entry: Mapping[str, Any], payload: Tensor) -> None:
    values, flat = values_of(entry, payload).to(tensor.device, non_blocking=True), tensor.view(-1)
    run, parts, index = entry["cut"]
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
    places = (rows * parts + index) * run + (places - rows * run)
    # Indexed assignment copies bits, so NaNs and signed zeros keep theirs in every dtype.
    flat[places.to(tensor.device, non_blocking=True)] = values


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
        prefixed = distributed.PrefixStore(f"weights/{sender}", store)
        self._group: Any = distributed.ProcessGroupGloo(prefixed, rank, self.size, timedelta(seconds=timeout_seconds))

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

    def receive(self, most_nbytes: int = _MOST_NUMBER) -> Packet | None:
        """Receives the next packet; returns None if the sender ends the version early.

        Args:
            most_nbytes: most bytes of a payload.

        Raises:
            ConnectionError: the sender is gone, or sends more.
            WeightsRefusedError: the packet has no valid manifest; the next packet can be received.
        """
        manifest_nbytes, nbytes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        if manifest_nbytes == _ABORTED:
            return None
        if not (0 <= manifest_nbytes <= _MOST_MANIFEST_NBYTES and 0 <= nbytes <= most_nbytes):
            self.broken = f"weights of sender {self.sender}: a packet of {manifest_nbytes} and {nbytes} bytes"
            raise ConnectionError(self.broken)
        manifest = self._broadcast(torch.empty(manifest_nbytes, dtype=torch.uint8))
        payload = torch.empty(nbytes, dtype=torch.uint8)
        payload = self._broadcast(payload) if nbytes else payload
        return Packet(_parsed(manifest.numpy().tobytes()), payload)

    def exchange(self, text: str) -> list[str]:
        """Gathers a text of at most 4096 bytes from each process, in rank order."""
        sent = torch.zeros(_TEXT_NBYTES, dtype=torch.uint8)
        encoded = text.encode(errors="backslashreplace")[:_TEXT_NBYTES]
        sent[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
        rows = [torch.empty_like(sent) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([rows], [sent]))
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
                try:
                    packet = channel.receive(receiver.most_nbytes)
                    if packet is None:
                        refusal, last = refusal or f"sender {channel.sender} ended the version early", True
                        continue
                    last = packet.manifest["last"]
                    if not refusal:
                        receiver.take(packet)
                except WeightsRefusedError as error:
                    refusal = refusal or str(error)
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
    """Writes a packet under a hidden name, and renames the complete file, which only its owner may read."""
    manifest = packet.manifest
    assert packet.payload is not None, "a packet without a payload"
    path = folder / f"weights-{manifest['version']:08d}-{manifest['sender']:05d}-{manifest['index']:06d}"
    text = json.dumps(manifest).encode()
    nbytes = ALIGN_NBYTES + len(text) + -len(text) % ALIGN_NBYTES
    head = len(text).to_bytes(8, "little").ljust(ALIGN_NBYTES, b"\0") + text.ljust(nbytes - ALIGN_NBYTES)
    hidden = path.with_name(f".{path.name}")
    handle = _reserve(hidden, nbytes + packet.payload.numel())
    try:
        # Mapped rather than written, so that the payload is copied directly into the memory of the file.
        mapped = torch.frombuffer(mmap.mmap(handle, nbytes + packet.payload.numel()), dtype=torch.uint8)
    finally:
        os.close(handle)
    mapped[:nbytes] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    mapped[nbytes:] = packet.payload
    os.replace(hidden, path)
    return path


def _reserve(path: Path, nbytes: int) -> int:
    """Creates a file and allocates it: writing to a mapping that exceeds the free space would kill the process.

    Returns:
        The open file.

    Raises:
        OSError: the free space is too small; the file is removed.
    """
    path.unlink(missing_ok=True)  # of a sender that was killed
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.truncate(handle, nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        os.close(handle)
        path.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}: no room for a packet of {nbytes} bytes", str(path)) from error
    return handle


def open_own(path: Path) -> int:
    """Opens a file for reading, which must be a regular file of this user, or of the owner of its folder.

    Raises:
        FileNotFoundError: there is none.
        WeightsRefusedError: it cannot be opened, is a link or another kind of file, or of another user.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WeightsRefusedError(f"{path}: cannot be opened ({error.strerror})") from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        os.close(handle)
        raise WeightsRefusedError(f"{path}: expected a regular file of this user, got another")
    return handle


def require_own_folder(folder: Path) -> None:
    """Raises WeightsRefusedError if another user could write into a folder."""
    found = os.lstat(folder)
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0) and not found.st_mode & stat.S_IWOTH
    if not is_ours:
        raise WeightsRefusedError(
            f"{folder}: expected a folder of this user that others cannot write to, got mode "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}; choose another folder, or `chmod 700` it"
        )


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return checked_manifest(json.loads(text))
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeightsRefusedError):
            raise
        raise WeightsRefusedError(f"damaged manifest: not JSON ({type(error).__name__})") from None


def _read_packet(path: Path) -> Packet:
    """Returns the packet of a file, which stays mapped.

    Raises:
        FileNotFoundError: there is none.
        WeightsRefusedError: it is damaged, or the program may not open it.
    """
    handle = open_own(path)
    try:
        nbytes = os.fstat(handle).st_size
        if nbytes < ALIGN_NBYTES:
            raise WeightsRefusedError(f"{path}: damaged: {nbytes} bytes")
        mapped = torch.frombuffer(mmap.mmap(handle, nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(handle)
    length = int.from_bytes(mapped[:8].numpy().tobytes(), "little")
    begin = ALIGN_NBYTES + length + -length % ALIGN_NBYTES
    if length > _MOST_MANIFEST_NBYTES or begin > nbytes:
        raise WeightsRefusedError(f"{path}: damaged: a manifest of {length} bytes in a file of {nbytes}")
    try:
        manifest = _parsed(mapped[ALIGN_NBYTES : ALIGN_NBYTES + length].numpy().tobytes())
    except WeightsRefusedError as error:
        raise WeightsRefusedError(f"{path}: {error}") from None
    return Packet(manifest, mapped[begin:])


def refusal_file(folder: Path, receiver: str) -> Path:
    """Path of the file in which the receiver `receiver` reports why it refused a version.

    Raises:
        ValueError: the name is not one of letters, digits, ".", "_" and "-".
    """
    if not re.fullmatch(r"[\w.-]{1,100}", receiver):
        raise ValueError(f"name of a receiver: expected letters, digits, '.', '_' and '-', got {receiver!r}")
    return folder / f"refused-{receiver}"


def _refuse(folder: Path, receiver: str, why: str) -> None:
    path = refusal_file(folder, receiver)
    hidden = path.with_name(f".{path.name}-{os.getpid()}")
    hidden.unlink(missing_ok=True)
    handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(why[:_TEXT_NBYTES])
    os.replace(hidden, path)


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
    folder, before = Path(folder), (receiver.run, receiver.version)
    refusal_file(folder, name)
    until = time.monotonic() + timeout_seconds
    while True:
        versions, refused = _complete_versions(folder, receiver)
        for paths in versions:
            try:
                for path in paths:
                    refused = None if receiver.take(_read_packet(path)) else refused
            except WeightsRefusedError as error:
                receiver.drop()
                refused = error
            except FileNotFoundError:  # the sender removed it because it has written newer versions
                receiver.drop()
        if refused is not None:
            _refuse(folder, name, str(refused))
            if "send all weights" not in str(refused):
                raise refused
        if (receiver.run, receiver.version) != before or time.monotonic() >= until:
            return (receiver.run, receiver.version) != before
        time.sleep(0.01)


def _complete_versions(folder: Path, receiver: WeightReceiver) -> tuple[list[list[Path]], WeightsRefusedError | None]:
    """Returns the files of each version with all its packets that the receiver does not have, the oldest first.

    The second value is the reason why a version cannot be read.
    """
    complete: list[list[Path]] = []
    refused: WeightsRefusedError | None = None
    if not os.path.lexists(folder):
        return complete, refused
    require_own_folder(folder)
    files: dict[int, dict[int, dict[int, Path]]] = {}
    for path in folder.iterdir():
        if (match := _FILE.fullmatch(path.name)) is not None:
            version, sender, index = (int(match[key]) for key in ("version", "sender", "index"))
            files.setdefault(version, {}).setdefault(sender, {})[index] = path
    for version, senders in sorted(files.items()):
        try:
            last = [_read_packet(paths[max(paths)]).manifest for paths in senders.values()]
        except FileNotFoundError:
            continue
        except WeightsRefusedError as error:
            refused = error
            continue
        same_run = all(manifest["run"] == receiver.run for manifest in last)
        if same_run and receiver.version is not None and version <= receiver.version:
            continue
        if all(manifest["last"] for manifest in last) and len(last) == last[0]["senders"]:
            complete.append([path for _, paths in sorted(senders.items()) for _, path in sorted(paths.items())])
    return complete, refused
