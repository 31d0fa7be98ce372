"""`manifest.json`: the place of each tensor's bytes in the files, and everything that is not a tensor; and `latest`.

Plain data and checks on it, for the engine and for tools: no torch, no ranks. docs/checkpoint_format.md describes the
format. `read_manifest` checks all values of a manifest before any of them is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from zeroaccel.checkpoint.atomic_write import write_durably
from zeroaccel.checkpoint.zero_to_fp32 import row_major
from zeroaccel.config.bounds import LARGEST_SIZE, MOST_LEVELS, is_size, levels_of, read_at_most
from zeroaccel.errors import CheckpointError
from zeroaccel.zero.access.safetensors_file import ITEMSIZE
from zeroaccel.zero.module_names import finder

FORMAT = "zeroaccel"
VERSION = 2
"""Newest version that can be read. A save writes version 1, or 2 if a tensor has a `split` (tensor parallelism)."""
MANIFEST_NAME = "manifest.json"

_MOST_NBYTES = 1 << 30
_MOST_DIMS = 64
_LONGEST_TAG_NBYTES = 255
_LONGEST_PATH_NBYTES = 1024
_RESERVED_TAGS = ("latest", "auto")
_RESERVED_NEW_TAGS = ("latest_universal", "run_state.json", "zero_to_fp32.py")
"""Names of files beside the folders of checkpoints."""

Piece = tuple[int, int, int, int]
"""(file, start, length, offset): elements [start, start + length) are at byte `offset` of file number `file`."""


@dataclass(frozen=True)
class FileRecord:
    """A rank's file: its name, its size in bytes, and the SHA-256 of the table of checksums at its end."""

    name: str
    nbytes: int
    rank: int
    table_sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: its dtype by safetensors' name, its shape, and the pieces that cover it in order.

    Attributes:
        split: (dim, parts, blocks): `dim` is divided into `blocks` equal blocks, and part i has the i-th of `parts`
            equal slices in each block. The elements are stored part after part, each part in row-major order, and the
            pieces count elements in that order. None for row-major order of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    split: tuple[int, int, int] | None = None

    @cached_property
    def runs(self) -> tuple[Piece, ...]:
        """The pieces in row-major order, also for a tensor that is split."""
        if self.split is None:
            return self.pieces
        return row_major(self.shape, self.pieces, ITEMSIZE[self.dtype], self.split)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter of the model: `group` is the index of its param group; `saved` is False if the values are omitted."""

    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    group: int | None
    saved: bool = True


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint except the tensors' elements. docs/checkpoint_format.md has the fields; `Any` is encoded."""

    id: str
    tag: str
    saved_at: float
    world_size: int
    sharded: Mapping[str, bool]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    parameters: Mapping[str, ParameterRecord]
    order: tuple[str, ...]
    ties: Mapping[str, str]
    buffers: tuple[str, ...]
    counters: Mapping[str, int]
    optimizer: Mapping[str, Any] | None = None
    loss_scale: Any = None
    lr_scheduler: Any = None
    client_state: Any = field(default_factory=dict)
    random_state: Any = None
    config: Any = None
    writer: Mapping[str, str] = field(default_factory=dict)
    base_model: str = ""
    codes: tuple[str, ...] = ()

    @property
    def global_steps(self) -> int:
        """Number of steps before the save."""
        return int(self.counters["global_steps"])

    @property
    def saved_optimizer(self) -> Mapping[str, Any]:
        """The field `optimizer`, for a checkpoint that has an optimizer."""
        assert self.optimizer is not None, "states of a checkpoint without an optimizer"
        return self.optimizer

    @property
    def nbytes(self) -> int:
        """Size of all rank files in bytes."""
        return sum(file.nbytes for file in self.files)

    def canonical(self, fqn: str) -> str | None:
        """Returns a parameter's name in `parameters`, following ties; None if it is not in the checkpoint."""
        found = self._find("parameters", fqn)
        if found is None and (alias := self._find("ties", fqn)) is not None:
            found = self._find("parameters", self.ties[alias])
        return found

    def buffer(self, name: str) -> str | None:
        """Returns a buffer's name in `buffers`; None if it is not in the checkpoint."""
        return self._find("buffers", name)

    def _find(self, field_name: str, name: str) -> str | None:
        """Returns the name in one of the fields of a tensor with this plain name, which may have wrappers there."""
        key = f"_find_{field_name}"
        if key not in self.__dict__:
            self.__dict__[key] = finder(getattr(self, field_name))
        found: str | None = self.__dict__[key](name)
        return found

    def weight_key(self, fqn: str) -> str | None:
        """Returns the key of a parameter's values, those of its master if it has one; None if they are not saved."""
        return next((key for key in (f"master/{fqn}", f"value/{fqn}") if key in self.tensors), None)

    def state_names(self, fqn: str) -> tuple[str, ...]:
        """Returns the names of the optimizer's state tensors for a parameter."""
        return self._states.get(fqn, ())

    def has_state(self, fqn: str) -> bool:
        """Returns True if the checkpoint has any optimizer state of a parameter."""
        return fqn in (self.optimizer or {"scalars": {}})["scalars"] or bool(self.state_names(fqn))

    def pieces_by_file(self) -> list[dict[str, tuple[str, int, int]]]:
        """Returns for each file: key -> (dtype, elements, first byte) of its piece, which the header must match.

        If a key has several pieces in one file, it maps to the last.
        """
        by_file: list[dict[str, tuple[str, int, int]]] = [{} for _ in self.files]
        for key, tensor in self.tensors.items():
            for file, _, length, offset in tensor.pieces:
                by_file[file][key] = (tensor.dtype, length, offset)
        return by_file

    @property
    def _states(self) -> Mapping[str, tuple[str, ...]]:
        cached: dict[str, tuple[str, ...]] | None = self.__dict__.get("_states_by_fqn")
        if cached is None:
            cached = {}
            for key in self.tensors:
                if key.startswith("state/"):
                    _, name, fqn = key.split("/", 2)
                    cached[fqn] = (*cached.get(fqn, ()), name)
            self.__dict__["_states_by_fqn"] = cached
        return cached


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest atomically. With the manifest, the folder is a checkpoint."""
    version = 2 if any(tensor.split for tensor in manifest.tensors.values()) else 1
    body = {"format": FORMAT, "version": version, **asdict(manifest)}
    for record in body["tensors"].values():
        if record["split"] is None:
            del record["split"]
    text = json.dumps({"checksum": _checksum(body), "manifest": body}, allow_nan=False)
    write_durably(folder / MANIFEST_NAME, text.encode())


def read_manifest(folder: Path, *, complete: bool = True) -> Manifest:
    """Returns the manifest in a checkpoint's folder, after it has checked the manifest and the sizes of the files.

    Args:
        complete: if False, does not check the files, which may be missing from the folder.

    Raises:
        CheckpointError: the manifest is missing, damaged, contradictory or of a newer version, or a file is missing or
            has a wrong size.
    """
    manifest = parse_manifest(_read(folder / MANIFEST_NAME), str(folder / MANIFEST_NAME))
    for record in manifest.files if complete else ():
        path = folder / record.name
        try:
            size = os.stat(path).st_size
        except OSError:
            raise CheckpointError(f"{path}: missing, but the manifest names it", fix=OTHER_CHECKPOINT) from None
        if size != record.nbytes:
            raise CheckpointError(f"{path}", expected=f"{record.nbytes} bytes", got=size, fix=OTHER_CHECKPOINT)
    return manifest


OTHER_CHECKPOINT = 'load another checkpoint, or pass tag="auto" for the newest valid one'


def _read(path: Path) -> str:
    try:
        return read_at_most(path, _MOST_NBYTES, regular=True).decode("utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: missing: the folder is not a checkpoint, or its save was interrupted", fix=OTHER_CHECKPOINT
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", fix=OTHER_CHECKPOINT) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: byte {error.start} is not UTF-8", fix=OTHER_CHECKPOINT) from error


def parse_manifest(text: str, where: str) -> Manifest:
    """Parses and checks a manifest from its JSON; does not look at the files."""
    try:
        document = json.loads(text, parse_constant=lambda name: _refuse(where, f"the JSON constant {name}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: damaged: it is not JSON ({error})", fix=OTHER_CHECKPOINT) from error
    body: dict[str, Any] = document.get("manifest", {}) if isinstance(document, dict) else {}
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        format_name = body.get("format") if isinstance(body, dict) else body
        _refuse(where, f"format {str(format_name)[:100]!r}, expected {FORMAT!r}")
    version = body.get("version")
    if type(version) is not int or version > VERSION:
        raise CheckpointError(
            f"{where}: format version", expected=f"at most {VERSION}", got=version, fix="upgrade zeroaccel to load it"
        )
    # Check the checksum first: if it is right, a contradiction between fields is an error of the writer, not the disk.
    try:
        checksum = _checksum(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: damaged: it is not a manifest ({error})", fix=OTHER_CHECKPOINT) from error
    if document.get("checksum") != checksum:
        _refuse(where, "its checksum does not match its contents")
    try:
        manifest = _from_body(body)
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{where}: damaged: {type(error).__name__}: {error}", fix=OTHER_CHECKPOINT) from error
    return manifest


def _refuse(where: str, what: str) -> Any:
    raise CheckpointError(f"{where}: damaged: {what}", fix=OTHER_CHECKPOINT)


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _from_body(body: dict[str, Any]) -> Manifest:
    # Unknown fields are ignored; a change that readers must not ignore gets a higher version.
    names = {item.name for item in fields(Manifest)}
    values = {key: value for key, value in body.items() if key in names}
    values["files"] = tuple(FileRecord(**record) for record in body["files"])
    values["tensors"] = {
        key: TensorRecord(
            record["dtype"],
            tuple(record["shape"]),
            tuple(_piece(item) for item in record["pieces"]),
            None if record.get("split") is None else _split(record["split"]),
        )
        for key, record in body["tensors"].items()
    }
    values["parameters"] = {
        fqn: ParameterRecord(**{**record, "shape": tuple(record["shape"])})
        for fqn, record in body["parameters"].items()
    }
    values["order"] = tuple(body["order"])
    values["buffers"] = tuple(body["buffers"])
    values["codes"] = tuple(body.get("codes", ()))
    return Manifest(**values)


def _piece(item: Iterable[Any]) -> Piece:
    file, start, length, offset = (_natural(number) for number in item)
    return file, start, length, offset


def _split(item: Iterable[Any]) -> tuple[int, int, int]:
    dim, parts, *rest = (_natural(number) for number in item)
    (blocks,) = rest or (1,)
    return dim, parts, blocks


def _natural(number: Any) -> int:
    if not is_size(number):
        raise ValueError(f"{str(number)[:40]} is not a whole number of 0 to {LARGEST_SIZE}")
    return number


def _check(manifest: Manifest) -> None:
    """Checks the invariants between the fields; raises ValueError if one is violated."""
    if not _is_tag(manifest.tag):
        raise ValueError(f"tag {repr(manifest.tag)[:300]} is not a plain name")
    _check_kinds(manifest)
    _check_files(manifest)
    for key, tensor in manifest.tensors.items():
        _check_pieces(key, tensor, manifest.files)
    _check_parameters(manifest)
    for name in manifest.buffers:
        manifest.tensors[f"buffer/{name}"]
    for name in ("global_steps", "micro_steps", "global_samples", "skipped_steps"):
        _natural(manifest.counters[name])


def _check_files(manifest: Manifest) -> None:
    for record in manifest.files:
        check_file_name(record.name)
        _natural(record.nbytes)
    if sorted(_natural(record.rank) for record in manifest.files) != list(range(len(manifest.files))):
        raise ValueError("expected exactly one file per rank")
    if manifest.world_size != len(manifest.files):
        raise ValueError(f"{len(manifest.files)} files, expected one for each of {manifest.world_size} ranks")


def _check_parameters(manifest: Manifest) -> None:
    if sorted(manifest.order) != sorted(manifest.parameters):
        raise ValueError("the order does not name each parameter exactly once")
    for fqn, parameter in manifest.parameters.items():
        weight = manifest.weight_key(fqn)
        if parameter.saved != (weight is not None):
            raise ValueError(f"parameter {fqn}: its values are {'not ' if parameter.saved else ''}in the checkpoint")
        if parameter.dtype not in ITEMSIZE:
            raise ValueError(f"parameter {fqn}: unknown dtype {parameter.dtype!r}")
        if weight is not None and manifest.tensors[weight].shape != parameter.shape:
            raise ValueError(f"tensor {weight}: its shape differs from that of its parameter")


def _check_pieces(key: str, tensor: TensorRecord, files: Sequence[FileRecord]) -> None:
    """Raises ValueError unless the pieces are contiguous, lie within their files, and cover the tensor."""
    if tensor.dtype not in ITEMSIZE:
        raise ValueError(f"tensor {key}: unknown dtype {tensor.dtype!r}")
    if len(tensor.shape) > _MOST_DIMS or math.prod(max(1, _natural(size)) for size in tensor.shape) > LARGEST_SIZE:
        raise ValueError(f"tensor {key}: an impossible shape of {len(tensor.shape)} dims")
    if tensor.split is not None:
        dim, parts, blocks = tensor.split
        if dim >= len(tensor.shape) or not parts * blocks or tensor.shape[dim] % (parts * blocks):
            raise ValueError(f"tensor {key}: {parts} parts of {blocks} blocks do not fit dim {dim} of {tensor.shape}")
    itemsize = ITEMSIZE[tensor.dtype]
    end = 0
    for file, start, length, offset in tensor.pieces:
        if start != end or length == 0:
            raise ValueError(f"tensor {key}: a piece at element {start}, expected one at {end}")
        if offset % itemsize or offset + length * itemsize > files[file].nbytes:
            raise ValueError(f"tensor {key}: a misplaced piece at byte {offset} of {files[file].name}")
        end += length
    if end != tensor.numel:
        raise ValueError(f"tensor {key}: {end} elements saved, but its shape is {tensor.shape}")


def _check_kinds(manifest: Manifest) -> None:
    """Raises ValueError unless the fields with a fixed type have that type."""
    _natural(manifest.world_size)
    # One flat list, so that a wrong type anywhere is reported by name before any field is used.
    kinds: list[tuple[str, object, type]] = [("id", manifest.id, str)]
    kinds += [(f"order: {name!r}", name, str) for name in manifest.order]
    kinds += [(f"buffers: {name!r}", name, str) for name in manifest.buffers]
    kinds += [(f"ties: {alias}", name, str) for alias, name in manifest.ties.items()]
    kinds += [(f"sharded: {state}", manifest.sharded[state], bool) for state in ("optimizer", "grads", "params")]
    for fqn, parameter in manifest.parameters.items():
        kinds += [(f"{fqn}: trainable", parameter.trainable, bool), (f"{fqn}: saved", parameter.saved, bool)]
    if manifest.optimizer is not None:
        groups = manifest.optimizer["param_groups"]
        kinds += [("optimizer: type", manifest.optimizer["type"], str), ("optimizer: param_groups", groups, list)]
        kinds += [("optimizer: scalars", manifest.optimizer["scalars"], dict)]
        kinds += [(f"optimizer: scalars: {fqn}", of, dict) for fqn, of in manifest.optimizer["scalars"].items()]
        kinds += [(f"optimizer: parameter {name!r}", name, str) for group in groups for name in group["params"]]
    kinds += [("base_model", manifest.base_model, str)]
    kinds += [(f"codes: {name!r}", name, str) for name in manifest.codes]
    if manifest.random_state is not None:
        kinds += [("random_state", manifest.random_state, list)]
    for what, value, kind in kinds:
        if not isinstance(value, kind):
            raise ValueError(f"{what[:200]}: expected {kind.__name__}, got {type(value).__name__}")
    if type(manifest.saved_at) not in (int, float) or not 0 <= manifest.saved_at < 1e15:
        raise ValueError(f"saved_at: {str(manifest.saved_at)[:40]} is not a time")
    plain = ("optimizer", "loss_scale", "lr_scheduler", "client_state", "random_state", "config", "writer")
    for name in plain:
        if levels_of(getattr(manifest, name), MOST_LEVELS) > MOST_LEVELS:
            raise ValueError(f"{name}: nested more than {MOST_LEVELS} levels deep")


def check_file_name(name: str) -> None:
    """Raises ValueError unless `name` is a file name of the format, so that it cannot lead out of the folder."""
    if len(name) > _LONGEST_TAG_NBYTES or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", name):
        raise ValueError(f"file name {name!r} is not a plain name")


def check_tag(tag: object, where: str = "checkpoint tag") -> str:
    """Returns the tag as text: a folder name, or several names separated by slashes.

    Args:
        where: the source of the tag, for the message.

    Raises:
        CheckpointError: a name in it is empty, starts with a dot, is "latest" or "auto", or is too long for a file
            name. Thus a tag cannot lead out of the folder of the checkpoints.
    """
    text = str(tag)
    if not _is_tag(text):
        raise CheckpointError(
            where,
            expected=f"folder names of at most {_LONGEST_TAG_NBYTES} bytes that do not start with a dot, "
            'not "latest" or "auto"',
            got=text,
        )
    return text


def check_new_tag(tag: object, where: str = "checkpoint tag") -> str:
    """Checks the tag of a new save like `check_tag`; in addition, the file `latest` must be able to hold it.

    Raises:
        CheckpointError: also if the tag has blanks at its ends, or is the name of a file beside the checkpoints.
    """
    text = check_tag(tag, where)
    if text != text.strip():
        raise CheckpointError(
            where, expected="a tag without blanks at its ends, which `latest` cannot hold", got=text, fix="remove them"
        )
    if text.split("/")[0] in _RESERVED_NEW_TAGS:
        raise CheckpointError(where, expected="a name that no file beside the checkpoints has", got=text)
    return text


def _is_tag(text: Any) -> bool:
    if not isinstance(text, str) or not text.isprintable() or len(text.encode()) > _LONGEST_PATH_NBYTES:
        return False
    return all(
        re.fullmatch(r"[^./\\\0][^/\\\0]*", name) is not None
        and name not in _RESERVED_TAGS
        and len(name.encode()) <= _LONGEST_TAG_NBYTES
        for name in text.split("/")
    )


LATEST_NAME = "latest"
_LATEST_MOST_NBYTES = 4096


def read_latest(root: Path, name: str = LATEST_NAME, *, fix: str = "pass a tag") -> str:
    """Returns the tag in the file `latest`.

    Args:
        name: name of the file.
        fix: the remedy, for the message if reading fails.

    Raises:
        CheckpointError: the file is missing, cannot be read, or its content is not a tag.
    """
    path = root / name
    text, wrong = "", "it is empty"
    try:
        text = read_at_most(path, _LATEST_MOST_NBYTES, regular=True).decode("utf-8").strip()
    except OSError as error:
        wrong = str(error.strerror)
    except UnicodeDecodeError:
        wrong = "not UTF-8"
    if text:
        return check_tag(text, str(path))
    raise CheckpointError(f"{path}: cannot be read ({wrong})", fix=fix)
