#!/usr/bin/env python3
"""Converts a sharded checkpoint to one model file, or a folder of them, without a config, GPU or process group.

This file stands alone: it needs Python and numpy, and torch only to write .bin. Every folder of checkpoints has a copy
of it, so it may import nothing from the package that wrote them. It reads the format of docs/checkpoint_format.md and
checks every byte. It streams, with a few chunks in memory, or one output file for .bin.
`read_source` reads this format; `convert` also accepts a `Source` of another format.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import errno
import fcntl
import fnmatch
import functools
import hashlib
import json
import math
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ArgumentsError",
    "ByteFile",
    "ConversionError",
    "Options",
    "Source",
    "Tensors",
    "Weight",
    "convert",
    "main",
    "parse_nbytes",
    "read_source",
    "read_tensors",
    "run",
    "select",
    "shard_plan",
]

Item = TypeVar("Item")
Bytes = NDArray[np.uint8]
Piece = tuple[int, int, int, int]  # (file, start, length, offset): elements from `start` begin at byte `offset`

FORMAT_VERSION = 2
MOST_MANIFEST_NBYTES = 1 << 30
MOST_HEADER_NBYTES = 256 << 20
LARGEST = (1 << 63) - 1
BLOCK_NBYTES = 1 << 16  # bytes that one checksum covers
CHUNK_NBYTES = 64 * BLOCK_NBYTES  # size of the pieces that each reader reads, converts and writes
ITEMSIZE = {
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1},
    **{"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2},
    **{"I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8},
}
FLOATS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}  # dtypes to convert; 8-bit floats stay unchanged
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
TORCH_NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F16": "float16", "BF16": "bfloat16", "F32": "float32"},
    **{"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
    **{"C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64"},
}
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
STEMS = {"safetensors": "model", "bin": "pytorch_model"}
JOURNAL_NAME = "zero_to_fp32.progress.json"
TEMPORARY_SUFFIX = ".tmp"
ABANDONED_SECONDS = 10.0  # an older temporary file without a lock has no writer


class ConversionError(RuntimeError):
    """The checkpoint is damaged, incomplete or missing, or writing the output failed. No written value is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= 9000 else f"{message[:8500]} ... {message[-500:]}")


class ArgumentsError(ConversionError):
    """An argument is invalid, or the arguments contradict each other."""


# ---- reading a checkpoint ----


class ByteFile(Protocol):
    """A file of a checkpoint. `read` returns bytes [start, start + nbytes); several threads call it at once."""

    def read(self, start: int, nbytes: int) -> Bytes: ...


@dataclass(frozen=True)
class Weight:
    """A tensor of the model and the location of its bytes.

    Attributes:
        excludable: True for a parameter that no optimizer updates.
        is_code: True for codes of a quantized weight, whose dtype and bits must not change.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_buffer: bool = False
    excludable: bool = False
    is_code: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert.

    Attributes:
        stage: ZeRO stage 0 to 3, for the output.
        fingerprint: a digest that depends on every byte of the checkpoint.
        ties: alias -> name in `weights`.
        left_out: names of parameters whose values are not in the checkpoint.
        at_end: called with the output folder after the last file.
    """

    tag: str
    stage: int
    world_size: int
    fingerprint: str
    weights: tuple[Weight, ...]
    ties: Mapping[str, str]
    files: tuple[ByteFile, ...]
    left_out: tuple[str, ...] = ()
    at_end: Callable[[Path], None] | None = None


@functools.lru_cache(maxsize=1)
def block_weights() -> NDArray[np.uint64]:
    """Returns (8192,) odd numbers: splitmix64 of 1, 2, ..."""
    with np.errstate(over="ignore"):
        z = np.arange(1, BLOCK_NBYTES // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def sums_of_blocks(data: Bytes) -> NDArray[np.uint64]:
    """Returns the checksum of each block of `data`, which must consist of complete blocks.

    A checksum is a weighted sum modulo 2**64 of the block's 64-bit words. The weights are odd, so invertible modulo
    2**64: a change of any single word changes the sum. They are distinct, so that swapped words change it too.
    """
    sums: NDArray[np.uint64] = np.einsum("ij,j->i", data.view("<u8").reshape(-1, BLOCK_NBYTES // 8), block_weights())
    return sums


def _pread(
    handle: int,
    path: Path,
    start: int,
    nbytes: int,
    capacity: int = 0,
    error: Callable[[str], Exception] = ConversionError,
) -> Bytes:
    """Reads `nbytes` bytes and returns them as (max(nbytes, capacity),) uint8, padded with zeros."""
    data = np.empty(max(nbytes, capacity), np.uint8)
    data[nbytes:] = 0
    view, done = data.data[:nbytes], 0
    while done < nbytes:
        count = os.preadv(handle, [view[done:]], start + done)
        if not count:
            raise error(f"{path}: ends at byte {start + done}, expected {start + nbytes} or more")
        done += count
    return data


class RankFile:
    """A rank's file. `read` checks every byte that it returns against the table of checksums."""

    def __init__(self, path: Path, nbytes: int, table_sha256: str) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            if size != nbytes:
                raise self.error(f"{path}: expected {nbytes} bytes, got {size}: the file is incomplete")
            self._handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self.error(f"{path}: missing, but the manifest names it") from None
        except OSError as error:
            raise self.error(f"{path}: cannot be read ({error.strerror})") from error
        self._end = nbytes - 8 * -(-nbytes // (BLOCK_NBYTES + 8))
        table = self._pread(self._end, nbytes - self._end)
        if hashlib.sha256(table.tobytes()).hexdigest() != table_sha256:
            raise self.error(f"{path}: damaged: its table of checksums does not match the manifest")
        self._table = table.view("<u8")

    @staticmethod
    def error(message: str) -> Exception:
        """Returns the exception to raise."""
        return ConversionError(message)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if hasattr(self, "_handle"):
            os.close(self._handle)
            del self._handle

    __del__ = close

    @functools.cached_property
    def _header(self) -> tuple[int, Mapping[str, Any]]:
        """The header: (first byte of the data, name -> entry)."""
        start = 8 + int.from_bytes(self.read(0, min(8, self._end)).tobytes(), "little")
        if not 8 < start <= min(self._end, MOST_HEADER_NBYTES):
            raise self.error(f"{self.path}: damaged: a header of {start - 8} bytes")
        try:
            entries = json.loads(self.read(8, start - 8).tobytes())
        except (ValueError, RecursionError) as error:
            raise self.error(f"{self.path}: damaged: its header is not JSON ({error})") from error
        return start, entries if isinstance(entries, dict) else {}

    def check_pieces(self, pieces: Mapping[str, tuple[str, int, int]]) -> None:
        """Compares the manifest's pieces, (dtype, elements, first byte), with the file's own header.

        If they differed, bytes would be read as another dtype, or as part of another tensor.
        """
        for key, (dtype, length, offset) in pieces.items():
            start, entries = self._header
            first = offset - start
            expected = {"dtype": dtype, "shape": [length], "data_offsets": [first, first + length * ITEMSIZE[dtype]]}
            if entries.get(key) != expected:
                entry = str(entries.get(key))[:200]
                raise self.error(
                    f"{self.path}: tensor {key}: expected {expected}, from the manifest, got {entry} in its header"
                )

    def read(self, start: int, nbytes: int) -> Bytes:
        """Returns bytes [start, start + nbytes). Reads complete blocks, because a checksum covers a block."""
        first, last = start // BLOCK_NBYTES, -(-(start + nbytes) // BLOCK_NBYTES)
        origin, end = first * BLOCK_NBYTES, min(last * BLOCK_NBYTES, self._end)
        if start + nbytes > self._end:
            raise self.error(f"{self.path}: the manifest places data in the table of checksums")
        data = self._pread(origin, end - origin, capacity=(last - first) * BLOCK_NBYTES)
        wrong = np.flatnonzero(sums_of_blocks(data) != self._table[first:last])
        if wrong.size:
            where = origin + int(wrong[0]) * BLOCK_NBYTES
            raise self.error(f"{self.path}: damaged between bytes {where} and {min(where + BLOCK_NBYTES, end)}")
        return data[start - origin : start - origin + nbytes]

    def _pread(self, start: int, nbytes: int, capacity: int = 0) -> Bytes:
        try:
            return _pread(self._handle, self.path, start, nbytes, capacity, self.error)
        except OSError as error:
            raise self.error(f"{self.path}: cannot be read ({error.strerror})") from error


def read_source(checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> Source:
    """Opens the checkpoint with `tag`, or with the tag in `latest`; `checkpoint_dir` may also be a checkpoint itself.

    Raises:
        ConversionError: the checkpoint does not exist, or is damaged, incomplete or in a newer format.
    """
    folder = _find(Path(checkpoint_dir), tag)
    path = folder / "manifest.json"
    try:
        document = json.loads(_read_regular(path, MOST_MANIFEST_NBYTES))
        body, checksum = document["manifest"], document["checksum"]
        version = body["version"]
        if body["format"] != "zeroaccel" or type(version) is not int:
            raise ConversionError(f"{path}: not a manifest of this format")
        if version > FORMAT_VERSION:
            raise ConversionError(
                f"{path}: expected version {FORMAT_VERSION} at most, got {version}; use the zero_to_fp32.py beside it"
            )
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        if hashlib.sha256(text.encode("ascii")).hexdigest() != checksum:
            raise ConversionError(f"{path}: damaged: its checksum does not match its contents")
        return _source(folder, body, checksum)
    except FileNotFoundError:
        raise ConversionError(f"{path}: missing: not a checkpoint, or its save was interrupted") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise ConversionError(f"{path}: damaged: {type(error).__name__}: {str(error)[:300]}") from error
    except OSError as error:
        raise ConversionError(f"{error.filename or path}: cannot be read ({error.strerror})") from error


def _read_regular(path: Path, most_nbytes: int) -> bytes:
    """Returns the content of a regular file of at most `most_nbytes`; raises OSError for other files."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most_nbytes + 1)
    if len(content) > most_nbytes:
        raise OSError(errno.EFBIG, f"larger than {most_nbytes} bytes", str(path))
    return content


def _find(root: Path, tag: str | None) -> Path:
    if not root.is_dir():
        raise ConversionError(f"{root}: no such folder")
    there = ", ".join(sorted(path.parent.name for path in root.glob("*/manifest.json"))) or "none"
    where = "tag"
    if tag is None:
        if (root / "manifest.json").exists():
            return root
        try:
            tag = _read_regular(root / "latest", 4096).decode("utf-8").strip()
        except FileNotFoundError:
            if below := _folders_below(root):
                listed = ", ".join(path.name for path in below)
                raise ConversionError(
                    f"{root}: its folders have the checkpoints: {listed}; convert one, such as {below[-1]}"
                ) from None
            raise ConversionError(f"{root / 'latest'}: missing; pass --tag; checkpoints here: {there}") from None
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConversionError(
                f"{root / 'latest'}: cannot be read ({what}); pass --tag; checkpoints here: {there}"
            ) from None
        where = str(root / "latest")
    # No name has a leading dot, so the tag cannot lead out of the folder.
    names = tag.split("/")
    plain = tag.isprintable() and all(re.fullmatch(r"[^./\\\0][^/\\\0]*", name) is not None for name in names)
    if not plain or max(len(os.fsencode(name)) for name in names) > 255:
        raise ConversionError(f"{where}: expected the name of a folder in {root}, got {tag[:300]!r}; here: {there}")
    if not (root / tag).is_dir():
        raise ConversionError(f"{root / tag}: no such checkpoint; here: {there}")
    return root / tag


def _folders_below(root: Path) -> list[Path]:
    """Returns the folders of checkpoints in a trainer's output folder, in order of their steps."""
    folders = {path.parent for path in root.glob("*/latest")}
    return sorted(folders, key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)])


def plain_name(name: str) -> str:
    """Returns a tensor's name without the segments that torch's wrappers add, such as `torch.compile`."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def _source(folder: Path, body: Mapping[str, Any], checksum: str) -> Source:
    records = body["files"]
    for record in records:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{,240}\.safetensors", record["name"]):
            raise ValueError(f"file name {record['name'][:300]!r} is not a plain name")
        if type(record["nbytes"]) is not int or not 0 <= record["nbytes"] <= LARGEST:
            raise ValueError(f"file {record['name']}: an invalid size")
    ranks = sorted(record["rank"] for record in records)
    if ranks != list(range(len(records))) or body["world_size"] != len(records):
        raise ValueError(f"{len(records)} files, expected one for each of {body['world_size']} ranks")
    tensors, parameters = body["tensors"], body["parameters"]
    if sorted(body["order"]) != sorted(parameters):
        raise ValueError("the order does not name each parameter exactly once")
    weights, left_out = [], []
    pieces: list[dict[str, tuple[str, int, int]]] = [{} for _ in records]  # of each file
    for fqn in body["order"]:
        parameter = parameters[fqn]
        key = next((key for key in (f"master/{fqn}", f"value/{fqn}") if key in tensors), None)
        if parameter["saved"] != (key is not None):
            raise ValueError(f"parameter {fqn}: the manifest contradicts itself about its values")
        if key is None:
            left_out.append(fqn)
            continue
        if tensors[key]["shape"] != parameter["shape"]:
            raise ValueError(f"tensor {key}: its shape differs from that of its parameter")
        weights.append(_weight(fqn, key, tensors, records, pieces, excludable=not parameter["trainable"]))
    weights += [_weight(name, f"buffer/{name}", tensors, records, pieces, is_buffer=True) for name in body["buffers"]]
    codes = frozenset(body.get("codes", ()))
    weights = [replace(weight, name=plain_name(weight.name), is_code=weight.name in codes) for weight in weights]
    if unknown := [alias for alias, name in body["ties"].items() if name not in parameters]:
        raise ValueError(f"ties of {unknown} to unknown parameters")
    files = tuple(RankFile(folder / item["name"], item["nbytes"], item["table_sha256"]) for item in records)
    for file, of_file in zip(files, pieces, strict=True):
        file.check_pieces(of_file)
    return Source(
        tag=folder.resolve().name,
        stage=sum(bool(body["sharded"][state]) for state in ("optimizer", "grads", "params")),
        world_size=body["world_size"],
        fingerprint=checksum,
        weights=tuple(weights),
        ties={plain_name(alias): plain_name(name) for alias, name in body["ties"].items() if name not in left_out},
        files=files,
        left_out=tuple(left_out),
    )


def _weight(
    name: str, key: str, tensors: Any, records: Any, by_file: list[dict[str, tuple[str, int, int]]], **kind: bool
) -> Weight:
    tensor = tensors[key]
    shape = tuple(tensor["shape"])
    if len(shape) > 64 or any(type(size) is not int or not 0 <= size <= LARGEST for size in shape):
        raise ValueError(f"tensor {key}: an impossible shape")
    if math.prod(max(1, size) for size in shape) > LARGEST:
        raise ValueError(f"tensor {key}: an impossible shape")
    pieces = tuple(tuple(piece) for piece in tensor["pieces"])
    end, itemsize = 0, ITEMSIZE[tensor["dtype"]]
    for file, start, length, offset in pieces:
        if any(type(number) is not int or number < 0 for number in (file, start, length, offset)):
            raise ValueError(f"tensor {key}: a piece with numbers that are not whole numbers")
        if start != end or not length or offset % itemsize or offset + length * itemsize > records[file]["nbytes"]:
            raise ValueError(f"tensor {key}: a misplaced piece at element {start}, byte {offset}")
        end += length
        by_file[file][key] = (tensor["dtype"], length, offset)
    if end != math.prod(shape):
        raise ValueError(f"tensor {key}: {end} elements saved, but its shape is {shape}")
    if tensor.get("split") is not None:
        pieces = row_major(shape, pieces, itemsize, _checked_split(key, shape, tensor["split"]))
    return Weight(name, tensor["dtype"], shape, pieces, **kind)


def _checked_split(key: str, shape: tuple[int, ...], split: Any) -> tuple[int, int, int]:
    dim, parts, blocks = (*split, 1) if len(split) == 2 else split
    sizes = dim, parts, blocks
    if any(type(number) is not int or number < 0 for number in sizes) or dim >= len(shape) or not parts * blocks:
        raise ValueError(f"tensor {key}: an invalid split")
    if shape[dim] % (parts * blocks):
        raise ValueError(f"tensor {key}: {parts} parts of {blocks} blocks do not divide shape {shape}")
    return sizes


def row_major(
    shape: tuple[int, ...], pieces: tuple[Piece, ...], itemsize: int, split: tuple[int, int, int]
) -> tuple[Piece, ...]:
    """Returns the pieces of a tensor that was saved part after part, as runs of elements in row-major order.

    Args:
        split: (dim, parts, blocks): part i has the i-th of `parts` equal slices in each of `blocks` equal blocks.
    """
    dim, parts, blocks = split
    run, part_numel = math.prod(shape[dim:]) // (parts * blocks), math.prod(shape) // parts
    runs = []
    for file, start, length, offset in pieces:
        done = 0
        while done < length:
            index, within = divmod(start + done, part_numel)
            row, first = divmod(within, run)
            count = min(run - first, length - done)
            runs.append((file, (row * parts + index) * run + first, count, offset + done * itemsize))
            done += count
    return tuple(sorted(runs, key=lambda piece: piece[1]))


# ---- the output ----


@dataclass(frozen=True)
class Options:
    """Options of a conversion.

    Attributes:
        dtype: fp32, bf16 or fp16; applies to floating-point tensors of 16 bits or more, except codes.
        form: safetensors or bin; None to derive it from the output's name.
        max_shard_nbytes: largest size of a file in an output folder.
        only: patterns such as `*.lora_*`, one of which the name of a tensor must match; empty for all tensors.
    """

    dtype: str = "fp32"
    form: str | None = None
    max_shard_nbytes: int = 5 * 10**9
    exclude_frozen: bool = False
    only: tuple[str, ...] = ()
    workers: int = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Target:
    """A tensor of the output: its name, and the other names of a tied parameter."""

    name: str
    weight: Weight
    dtype: str
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.weight.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Shard:
    """A file of the output."""

    name: str
    targets: tuple[Target, ...]

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)


Tallies = dict[str, list[int]]  # name -> [exclusive or of its elements' bits, number of NaNs]; `_add` combines parts


def select(source: Source, options: Options) -> list[Target]:
    """Returns the tensors that the options select; a tied parameter is one tensor with several names.

    Raises:
        ConversionError: the options select no tensor.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in source.ties.items():
        aliases.setdefault(name, []).append(alias)
    targets = []
    for weight in source.weights:
        names = [
            name
            for name in (weight.name, *aliases.get(weight.name, ()))
            if not options.only or any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only)
        ]
        if names and not (options.exclude_frozen and weight.excludable):
            dtype = DTYPES[options.dtype] if weight.dtype in FLOATS and not weight.is_code else weight.dtype
            targets.append(Target(names[0], weight, dtype, tuple(names[1:])))
    if not targets:
        some = ", ".join(weight.name for weight in source.weights[:5]) or "none"
        raise ConversionError(f"{source.tag}: the options select no tensor; the checkpoint has {some}, ...")
    return targets


def shard_plan(targets: Sequence[Target], form: str, max_nbytes: int) -> list[Shard]:
    """Plans files of at most `max_nbytes` each, in order; a larger tensor gets its own file."""
    groups = runs_within(targets, lambda target: target.nbytes, max_nbytes)
    return [Shard(name, tuple(group)) for name, group in zip(names_of_files(form, len(groups)), groups, strict=True)]


def runs_within(items: Sequence[Item], nbytes_of: Callable[[Item], int], max_nbytes: int) -> list[list[Item]]:
    """Groups consecutive items into runs of at most `max_nbytes`; a larger item gets its own run."""
    runs: list[list[Item]] = []
    room = 0
    for item in items:
        nbytes = nbytes_of(item)
        if not runs or nbytes > room:
            runs.append([])
            room = max_nbytes
        runs[-1].append(item)
        room -= nbytes
    return runs


def names_of_files(form: str, count: int) -> list[str]:
    """Returns the names that transformers gives to the files of a model."""
    stem = STEMS[form]
    if count == 1:
        return [f"{stem}.{form}"]
    return [f"{stem}-{index:05d}-of-{count:05d}.{form}" for index in range(1, count + 1)]


class Tensors:
    """Tensors in memory, filled from several threads."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = targets
        self._bytes = {target.name: np.empty(target.nbytes, np.uint8) for target in targets}

    def put(self, target: Target, start: int, data: Bytes) -> None:
        """Stores the bytes of elements from `start` on."""
        first = start * ITEMSIZE[target.dtype]
        self._bytes[target.name][first : first + data.size] = data

    def state_dict(self) -> dict[str, Any]:
        """Returns name -> torch tensor; all names of a tied parameter map to one tensor. Needs torch."""
        torch = _torch()
        state = {}
        for target in self.targets:
            data = self._bytes[target.name]
            dtype = getattr(torch, TORCH_NAMES[target.dtype])
            flat = torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)
            tensor = flat.view(target.weight.shape)
            state.update(dict.fromkeys((target.name, *target.aliases), tensor))
        return state


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path`, flushed to the disk, when the block ends; removes it if the block raises.

    The file has a unique name in the same folder and is locked. It is never opened through a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        with contextlib.suppress(FileExistsError):
            handle = os.open(temporary, flags, 0o666)
            break
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_abandoned(folder: Path, names: Iterable[str]) -> None:
    """Removes temporary files of killed conversions. Running conversions hold a lock on theirs."""
    of_these = re.compile(rf"({'|'.join(map(re.escape, names))})(\.[0-9a-f]{{8}})?{re.escape(TEMPORARY_SUFFIX)}")
    for path in folder.iterdir():
        if of_these.fullmatch(path.name) and path.lstat().st_mtime < time.time() - ABANDONED_SECONDS:
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(handle)


Put = Callable[[Target, int, Bytes], None]  # (target, first element, bytes from it on); called by several threads


@contextlib.contextmanager
def _bin_output(path: Path, targets: Sequence[Target]) -> Iterator[Put]:
    """Collects tensors in memory and writes them with torch.save."""
    tensors = Tensors(targets)
    yield tensors.put
    with _replacing(path) as file:
        try:
            _torch().save(tensors.state_dict(), file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch hides the error of a full disk behind its own
                raise error.__context__ from None
            raise


@contextlib.contextmanager
def _safetensors_output(path: Path, targets: Sequence[Target]) -> Iterator[Put]:
    """Writes a safetensors file, tensors in any order."""
    metadata = {"format": "pt", **{alias: target.name for target in targets for alias in target.aliases}}
    header: dict[str, Any] = {"__metadata__": metadata}
    starts, cursor = {}, 0
    for target in sorted(targets, key=lambda target: -ITEMSIZE[target.dtype]):  # keeps every tensor aligned
        starts[target.name] = cursor
        span = [cursor, cursor + target.nbytes]
        header[target.name] = {"dtype": target.dtype, "shape": target.weight.shape, "data_offsets": span}
        cursor += target.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with _replacing(path) as file:
        handle = file.fileno()
        _pwrite(handle, memoryview(len(text).to_bytes(8, "little") + text), 0)
        os.truncate(handle, begin + cursor)
        yield lambda target, start, data: _pwrite(
            handle, data.data, begin + starts[target.name] + start * ITEMSIZE[target.dtype]
        )


def _pwrite(handle: int, data: memoryview, offset: int) -> None:
    start, nbytes = offset, data.nbytes
    while data:
        count = os.pwrite(handle, data, offset)
        data, offset = data[count:], offset + count
    if hasattr(os, "posix_fadvise"):  # starts writeback, so that the final fsync has less to do
        os.posix_fadvise(handle, start, nbytes, os.POSIX_FADV_DONTNEED)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ConversionError("writing .bin requires torch; write safetensors instead, or install torch") from None
    return torch


# ---- conversion ----


@dataclass(frozen=True)
class _Request:
    """`length` elements of a target from `start` on, at byte `offset` of a file."""

    target: Target
    start: int
    length: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.length * ITEMSIZE[self.target.weight.dtype]


def _spans(targets: Iterable[Target]) -> Iterator[tuple[int, list[_Request]]]:
    """Yields (file, requests): runs of requests that are close together in a file, about a chunk each."""
    by_file: dict[int, list[_Request]] = {}
    for target in targets:
        most = CHUNK_NBYTES // ITEMSIZE[target.weight.dtype]
        for file, start, length, offset in target.weight.pieces:
            for done in range(0, length, most):
                at = offset + done * ITEMSIZE[target.weight.dtype]
                by_file.setdefault(file, []).append(_Request(target, start + done, min(most, length - done), at))
    for file, requests in sorted(by_file.items()):
        requests.sort(key=lambda request: request.offset)
        span: list[_Request] = []
        for request in requests:
            if span and (
                request.offset > span[-1].end + BLOCK_NBYTES or request.end > span[0].offset + 3 * CHUNK_NBYTES // 2
            ):
                yield file, span
                span = []
            span.append(request)
        yield file, span


def _convert(data: Bytes, target: Target) -> Bytes:
    """Converts elements to the target's dtype, rounded to nearest even."""
    if target.weight.dtype == target.dtype:
        return data
    values: NDArray[Any] = data.view(FLOATS[target.weight.dtype])
    if target.weight.dtype == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype("<f4", copy=False)
        if target.dtype == "BF16":
            values = _rounded_to_bf16(values)
        elif target.dtype == "F16":
            values = values.astype("<f2")
    result = values.view(np.uint8)
    if _finite_and_nans(result, target.dtype)[0] < _finite_and_nans(data, target.weight.dtype)[0]:
        raise ConversionError(
            f"{target.name}: has values that {target.dtype} cannot represent; choose --dtype bf16 or fp32"
        )
    return result


def _rounded_to_bf16(values: NDArray[Any]) -> NDArray[Any]:
    """Rounds fp32 to bf16; NaNs stay NaNs. Works on pieces that fit a cache."""
    result = np.empty(values.size, "<u2")
    for start in range(0, values.size, 1 << 14):
        bits = values[start : start + (1 << 14)].view("<u4")
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        nans = np.isnan(bits.view("<f4"))
        rounded[nans] = (bits[nans] >> 16) | 0x40
        result[start : start + bits.size] = rounded
    return result


def _finite_and_nans(data: Bytes, dtype: str) -> tuple[int, int]:
    """Returns (number of finite elements, number of NaNs)."""
    if dtype == "BF16":
        magnitudes = data.view("<u2") & 0x7FFF
        return int(np.count_nonzero(magnitudes < 0x7F80)), int(np.count_nonzero(magnitudes > 0x7F80))
    values = data.view(FLOATS[dtype])
    return int(np.count_nonzero(np.isfinite(values))), int(np.count_nonzero(np.isnan(values)))


def _tally(data: Bytes, dtype: str) -> list[int]:
    """Returns the two numbers of `Tallies` for a chunk; `_add` can combine chunks in any order."""
    bits = int(np.bitwise_xor.reduce(data.view(f"<u{ITEMSIZE[dtype]}")))
    if dtype not in FLOATS:
        return [bits, 0]
    if dtype == "F32":  # any NaN makes the dot product NaN, which is several times as fast as counting
        values = data.view("<f4")
        with np.errstate(over="ignore", invalid="ignore"):
            if math.isfinite(np.dot(values, values)):
                return [bits, 0]
    return [bits, _finite_and_nans(data, dtype)[1]]


def _add(tallies: Tallies, name: str, tally: Sequence[int]) -> None:
    total = tallies.setdefault(name, [0, 0])
    total[0] ^= tally[0]
    total[1] += tally[1]


def _in_parallel(tasks: Iterable[Callable[[], tuple[Tallies, int]]], workers: int, progress: _Progress) -> Tallies:
    tallies: Tallies = {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for future in concurrent.futures.as_completed([pool.submit(task) for task in tasks]):
                task_tallies, nbytes = future.result()
                for name, tally in task_tallies.items():
                    _add(tallies, name, tally)
                progress.advance(nbytes)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return tallies


def _fill(source: Source, targets: Sequence[Target], put: Put, workers: int, progress: _Progress) -> Tallies:
    """Reads, checks and converts every element of the targets, and passes it to `put`."""

    def work(file: int, span: list[_Request]) -> tuple[Tallies, int]:
        origin = span[0].offset
        data = source.files[file].read(origin, max(request.end for request in span) - origin)
        tallies: Tallies = {}
        nbytes = 0
        for request in span:
            converted = _convert(data[request.offset - origin : request.end - origin], request.target)
            put(request.target, request.start, converted)
            _add(tallies, request.target.name, _tally(converted, request.target.dtype))
            nbytes += converted.size
        return tallies, nbytes

    return _in_parallel((functools.partial(work, *span) for span in _spans(targets)), workers, progress)


def read_tensors(source: Source, targets: Sequence[Target], workers: int = Options.workers) -> Tensors:
    """Reads the targets into memory.

    Raises:
        ConversionError: the checkpoint is damaged, or the dtype cannot represent a value.
    """
    tensors = Tensors(targets)
    _fill(source, targets, tensors.put, workers, _Progress(0, show=False))
    return tensors


@dataclass
class _Journal:
    """The finished files of an output folder, which a second run after an interruption does not write again."""

    path: Path | None
    plan: str
    finished: dict[str, Tallies] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, plan: str) -> _Journal:
        journal = cls(path, plan)
        if path is not None and path.exists():
            try:
                document = json.loads(_read_regular(path, MOST_MANIFEST_NBYTES))
                finished = document["finished"] if document["plan"] == plan else {}
                tallies = [tally for of in finished.values() for tally in of.values()]
                if all(len(tally) == 2 and all(type(number) is int for number in tally) for tally in tallies):
                    journal.finished = finished
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                journal.finished = {}  # an incomplete journal: write all files again
        return journal

    def add(self, name: str, tallies: Tallies) -> None:
        self.finished[name] = tallies
        if self.path is not None:
            _write_json(self.path, {"plan": self.plan, "finished": self.finished})

    def close(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _write_json(path: Path, document: Any) -> None:
    with _replacing(path) as file:
        file.write(f"{json.dumps(document, indent=2)}\n".encode())


class _Progress:
    """A progress bar with throughput on stderr: redrawn on a terminal, else a line per tenth."""

    def __init__(self, nbytes: int, *, show: bool) -> None:
        self._nbytes, self._done, self._shown = nbytes, 0, 0
        self._show, self._started = show and nbytes > 0, time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        steps = 100 if sys.stderr.isatty() else 10
        reached = steps * self._done // max(self._nbytes, 1)
        if not self._show or reached == self._shown:
            return
        self._shown = reached
        bar = "#" * (30 * self._done // self._nbytes)
        text = f"[{bar:<30}] {_size(self._done)} of {_size(self._nbytes)}, {_size(self._done / self.seconds)}/s"
        end = ("" if self._done < self._nbytes else "\n") if sys.stderr.isatty() else "\n"
        print(f"\r{text:<78}" if sys.stderr.isatty() else text, end=end, file=sys.stderr, flush=True)


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


# ---- the steps of a conversion ----


def convert(
    source: Source, output: Path, options: Options, *, dry_run: bool = False, show_progress: bool = False
) -> list[Path]:
    """Writes the source's weights to `output`, a file if its name has a suffix for one, else a folder; verifies them.

    In a folder, it keeps files that an interrupted run of the same conversion has finished. Each file appears complete
    or not at all; `index.json` comes last.

    Raises:
        ConversionError: see the class.
        ArgumentsError: the options contradict each other.
    """
    targets = select(source, options)
    form, folder = _form_of(output, options)
    if folder is None:
        folder, shards = output.parent, [Shard(output.name, tuple(targets))]
    else:
        shards = shard_plan(targets, form, options.max_shard_nbytes)
    _announce(source, output, options, targets, shards, dry_run=dry_run)
    if dry_run:
        return []
    if form == "bin":
        _torch()  # raises before the first byte is written
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = _write(source, folder, shards, form, options, single=folder != output, show_progress=show_progress)
        if source.at_end is not None:
            source.at_end(folder)
        return files
    except OSError as error:
        raise ConversionError(f"{error.filename or output}: {error.strerror or error}; output is incomplete") from error


def _form_of(output: Path, options: Options) -> tuple[str, Path | None]:
    """Returns (safetensors or bin, the folder or None for a single file)."""
    if output.is_dir() or output.suffix not in (".bin", ".pt", ".pth", ".safetensors"):
        return options.form or "safetensors", output
    form = "safetensors" if output.suffix == ".safetensors" else "bin"
    if options.form not in (None, form):
        raise ArgumentsError(f"{output}: expected a file name for --format {options.form}, or a folder")
    return form, None


def _announce(
    source: Source, output: Path, options: Options, targets: list[Target], shards: list[Shard], *, dry_run: bool
) -> None:
    if source.left_out:
        print(f"Omitted, because the checkpoint was saved without them: {len(source.left_out)} frozen parameters")
    numel = sum(target.weight.numel for target in targets if not target.weight.is_buffer)
    verb = "Would save" if dry_run else "Saving"
    print(f"{verb} {options.dtype} state dict to {output} (total_numel={numel})")
    if dry_run:
        for shard in shards:
            print(f"  {shard.name}: {len(shard.targets)} tensors, {shard.nbytes} bytes")
        print(f"  in all: {len(shards)} files, {len(targets)} tensors, {sum(shard.nbytes for shard in shards)} bytes")


def _write(
    source: Source,
    folder: Path,
    shards: list[Shard],
    form: str,
    options: Options,
    *,
    single: bool,
    show_progress: bool,
) -> list[Path]:
    index_path = folder / f"{STEMS[form]}.{form}.index.json"
    if not single:
        _refuse_other_weights(folder, {shard.name for shard in shards} | {index_path.name})
        index_path.unlink(missing_ok=True)
    _remove_abandoned(folder, [*(shard.name for shard in shards), index_path.name, JOURNAL_NAME])
    journal = _Journal.open(None if single else folder / JOURNAL_NAME, _signature(source, shards))
    progress = _Progress(sum(shard.nbytes for shard in shards), show=show_progress)
    for shard in shards:
        path = folder / shard.name
        if shard.name in journal.finished and path.exists():
            print(f"{shard.name}: already written by an interrupted run")
            progress.advance(shard.nbytes)
            continue
        with (_bin_output if form == "bin" else _safetensors_output)(path, shard.targets) as put:
            tallies = _fill(source, shard.targets, put, options.workers, progress)
        del put  # frees a .bin's tensors
        journal.add(shard.name, tallies)
    seconds = progress.seconds
    for shard in shards:
        _verify(folder / shard.name, shard, form, journal.finished[shard.name], options.workers)
    if len(shards) > 1:
        _write_json(index_path, _index(shards, form))
    journal.close()
    _report(shards, journal, seconds)
    return [folder / shard.name for shard in shards]


def _refuse_other_weights(folder: Path, planned: set[str]) -> None:
    """Refuses a folder with weights under other names: a loader that finds two sets of weights may read either."""
    pattern = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(bin|safetensors)(\.index\.json)?")
    if others := sorted(
        path.name for path in folder.iterdir() if pattern.fullmatch(path.name) and path.name not in planned
    ):
        raise ConversionError(f"{folder}: has other weights: {', '.join(others)}; remove them or choose another folder")


def _signature(source: Source, shards: Sequence[Shard]) -> str:
    plan = [[shard.name, [[t.name, t.dtype, t.weight.shape, t.aliases] for t in shard.targets]] for shard in shards]
    return hashlib.sha256(json.dumps([source.fingerprint, plan]).encode()).hexdigest()


def _index(shards: Sequence[Shard], form: str) -> dict[str, Any]:
    """Returns the index that transformers reads; for .bin with all names of ties, which safetensors cannot store."""
    names = {
        name: shard.name
        for shard in shards
        for target in shard.targets
        for name in (target.name, *(target.aliases if form == "bin" else ()))
    }
    return {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": names}


def _verify(path: Path, shard: Shard, form: str, expected: Tallies, workers: int) -> None:
    """Reads a written file back and compares names, dtypes, shapes and the tally of every tensor."""
    with (_bin_file if form == "bin" else _safetensors_file)(path, shard) as read:

        def work(target: Target, first: int) -> tuple[Tallies, int]:
            data = read(target, first, min(CHUNK_NBYTES, target.nbytes - first))
            return {target.name: _tally(data, target.dtype)}, data.size

        tasks = (
            functools.partial(work, target, first)
            for target in shard.targets
            for first in range(0, target.nbytes, CHUNK_NBYTES)
        )
        tallies = _in_parallel(tasks, workers, _Progress(0, show=False))
    if wrong := sorted(name for name in {*tallies, *expected} if tallies.get(name) != expected.get(name)):
        raise ConversionError(f"{path}: differs from the written data in {', '.join(wrong)}; remove it and run again")


Reader = Callable[[Target, int, int], Bytes]  # (target, first byte, bytes)


@contextlib.contextmanager
def _safetensors_file(path: Path, shard: Shard) -> Iterator[Reader]:
    with open(path, "rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        try:
            header = json.loads(raw.read(length))
            spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            written = {name: (header[name]["dtype"], tuple(header[name]["shape"])) for name in spans}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(f"{path}: not readable after writing ({error}); remove it and run again") from error
        _compare(path, shard.targets, written)
        # Tensors fill the file without gaps or overlaps, as every reader of the format requires.
        edges = [0, *(edge for span in sorted(spans.values()) for edge in span), path.stat().st_size - 8 - length]
        sizes = {target.name: target.nbytes for target in shard.targets}
        if edges[::2] != edges[1::2] or any(end - start != sizes[name] for name, (start, end) in spans.items()):
            raise ConversionError(f"{path}: its tensors do not fill it; remove it and run again")

        def read(target: Target, first: int, nbytes: int) -> Bytes:
            start = 8 + length + spans[target.name][0]
            return _pread(raw.fileno(), path, start + first, nbytes)

        yield read


@contextlib.contextmanager
def _bin_file(path: Path, shard: Shard) -> Iterator[Reader]:
    torch = _torch()
    state = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    names = {getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items() if hasattr(torch, torch_name)}
    _compare(path, shard.targets, {name: (names[t.dtype], tuple(t.shape)) for name, t in state.items()}, aliases=True)

    def read(target: Target, first: int, nbytes: int) -> Bytes:
        data: Bytes = state[target.name].view(-1).view(torch.uint8)[first : first + nbytes].numpy()
        return data

    yield read


def _compare(path: Path, targets: Iterable[Target], written: Mapping[str, Any], *, aliases: bool = False) -> None:
    expected = {
        name: (target.dtype, target.weight.shape)
        for target in targets
        for name in (target.name, *(target.aliases if aliases else ()))
    }
    if wrong := sorted(name for name in {*written, *expected} if written.get(name) != expected.get(name)):
        raise ConversionError(f"{path}: names, dtypes or shapes differ: {', '.join(wrong)}; remove it and run again")


def _report(shards: Sequence[Shard], journal: _Journal, seconds: float) -> None:
    nbytes = sum(shard.nbytes for shard in shards)
    tensors = sum(len(shard.targets) for shard in shards)
    print(
        f"Saved {tensors} tensors, {_size(nbytes)}, in {len(shards)} files; "
        f"{seconds:.1f} s, {_size(nbytes / seconds)}/s; verified"
    )
    for shard in shards:
        for name, (_, nans) in journal.finished[shard.name].items():
            if nans:
                print(f"Warning: {name} has {nans} NaNs in the checkpoint", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ArgumentsError(message)


def parse_nbytes(text: str) -> int:
    """Returns the bytes of a size such as 5GB or 500MiB; raises ArgumentsError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", text.strip().lower())
    base = 1024 if match and match[3] else 1000
    nbytes = int(float(match[1]) * base ** " kmgt".index(match[2] or " ")) if match else 0
    if not nbytes:
        raise ArgumentsError(f"max_shard_size: expected a size such as 5GB or 500MiB, got {text!r}")
    return nbytes


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return int(text)


def _make_parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        program,
        description="Converts a sharded checkpoint to full weights, on one machine without a GPU.",
        epilog=f"examples:\n  {program} run/checkpoints weights\n  {program} -t global_step8 run/checkpoints out.bin",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint_dir", type=Path, metavar="CHECKPOINT_DIR", help="folder with `latest`, or a checkpoint in it")
    add("output", type=Path, metavar="OUTPUT", help="folder, or file name: *.safetensors, *.bin, *.pt")
    add("-t", "--tag", help="tag of the checkpoint in CHECKPOINT_DIR (default: the tag in the file `latest`)")
    add("--dtype", choices=sorted(DTYPES), default=Options.dtype, help="dtype of floating-point tensors (default fp32)")
    add("--format", choices=sorted(STEMS), help="format of the files in a folder (default safetensors)")
    add("--safe_serialization", "--safe-serialization", action="store_true", help="same as --format safetensors")
    add("--max_shard_size", "--max-shard-size", type=parse_nbytes, default="5GB", help="largest file in a folder (5GB)")
    add("--exclude_frozen_parameters", "--exclude-frozen-parameters", action="store_true", help="omit frozen weights")
    add("--only", action="append", default=[], metavar="PATTERN", help="names to write, e.g. '*lora_*'; repeatable")
    add("--like", type=Path, metavar="MODEL", help="write names, shapes and layout of these files: a folder or index")
    add("--allow-differences", "--allow_differences", action="store_true", help="list names that differ from MODEL's")
    add("--requantize", action="store_true", help="with --like, encode weights in the format of MODEL's files")
    add("--workers", type=_positive, default=Options.workers, help="number of parallel readers (default: %(default)s)")
    add("--dry-run", "--dry_run", action="store_true", help="print the files and their sizes without writing them")
    return parser


def run(
    arguments: Sequence[str],
    program: str,
    open_source: Callable[[Path, str | None], Source] = read_source,
    as_in_files: Callable[[Source, Path, bool, bool], Source] | None = None,
) -> list[Path]:
    """Runs a command line; returns the files that it wrote.

    Args:
        as_in_files: implements --like, which needs torch and transformers.

    Raises:
        ConversionError, ArgumentsError: see `convert`.
    """
    parsed = _make_parser(program).parse_args(arguments)
    if parsed.safe_serialization and parsed.format == "bin":
        raise ArgumentsError("--safe_serialization and --format bin contradict each other; pass one of them")
    if parsed.allow_differences and parsed.like is None:
        raise ArgumentsError("--allow-differences compares names with those of --like MODEL; pass both")
    if parsed.requantize and parsed.like is None:
        raise ArgumentsError("--requantize encodes weights as in the files of --like MODEL; pass both")
    if parsed.like is not None and as_in_files is None:
        raise ArgumentsError("--like needs the package: run `zeroaccel zero-to-fp32` with the same arguments")
    source = open_source(parsed.checkpoint_dir, parsed.tag)
    if parsed.like is not None and as_in_files is not None:
        source = as_in_files(source, parsed.like, parsed.allow_differences, parsed.requantize)
    print(f"Processing zero checkpoint at {source.tag}")
    print(f"Detected checkpoint of type zero stage {source.stage}, world_size: {source.world_size}", flush=True)
    options = Options(
        dtype=parsed.dtype,
        form="safetensors" if parsed.safe_serialization else parsed.format,
        max_shard_nbytes=parsed.max_shard_size,
        exclude_frozen=parsed.exclude_frozen_parameters,
        only=tuple(parsed.only),
        workers=parsed.workers,
    )
    return convert(source, parsed.output, options, dry_run=parsed.dry_run, show_progress=True)


def main() -> int:
    program = Path(sys.argv[0]).name
    try:
        run(sys.argv[1:], program)
    except ConversionError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentsError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
