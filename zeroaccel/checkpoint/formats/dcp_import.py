"""Converts checkpoints of torch.distributed.checkpoint (DCP), such as FSDP2 users write, for `loader.py`.

`DcpFolder` reads the format: `.metadata`, a pickle that the restricted reader of `torch_pickle.py` reads with stand-ins
for torch's classes, and tensors in `*.distcp`. `_DcpReader` finds the model's and the optimizer's dict (the two of
`get_state_dict`, flattened or not) by their keys; the rest is client state.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroaccel.checkpoint.compatibility import optimizer_of_states
from zeroaccel.checkpoint.find import DCP_METADATA_NAME
from zeroaccel.checkpoint.formats.pickle_machine import StandIn
from zeroaccel.checkpoint.formats.torch_file import TorchFile
from zeroaccel.checkpoint.formats.torch_pickle import DtypeName, StoredTensor, load_pickle, stand_in_of
from zeroaccel.checkpoint.manifest import (
    FileRecord,
    Manifest,
    ParameterRecord,
    Piece,
    TensorRecord,
    check_tag,
    read_latest,
)
from zeroaccel.checkpoint.plain_codec import encode
from zeroaccel.checkpoint.reshard import rewrite
from zeroaccel.checkpoint.tensor_store import TorchStore
from zeroaccel.config.bounds import read_at_most
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.zero.access.safetensors_file import ITEMSIZE, dtype_of

_MOST_METADATA_NBYTES = 128 << 20
_LONGEST_PATH = 4096
_MOST_PIECES = 1 << 21
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_MODULE = "torch.distributed.checkpoint.metadata"


def _field(stand_in: StandIn, name: str) -> Any:
    """Returns an attribute; raises CheckpointError if it is missing."""
    if name not in vars(stand_in):
        raise CheckpointError(f"{DCP_METADATA_NAME}: {stand_in.class_name} without {name}")
    return vars(stand_in)[name]


def find_dcp(root: Path, tag: object = None) -> Path | None:
    """Returns the folder of a DCP checkpoint: `root` itself, or the folder of the tag in it; None if it is not DCP.

    Without a tag, the file `latest` names it.
    """
    if tag is None and (root / DCP_METADATA_NAME).is_file():
        return root
    try:
        folder = root / (read_latest(root) if tag is None else check_tag(tag))
    except CheckpointError:
        return None
    return folder if (folder / DCP_METADATA_NAME).is_file() else None


@dataclass(frozen=True)
class _Item:
    """One stored object in a `*.distcp` file."""

    path: Path
    start: int
    nbytes: int


class DcpFolder:
    """One DCP checkpoint.

    Attributes:
        paths: key -> path of keys in the nested dicts, such as ("model", "layers.0.weight").
        files: the objects opened so far; pieces refer to them by index.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or its pickle names a forbidden class.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[TorchFile] = []
        where = folder / DCP_METADATA_NAME
        try:
            content = read_at_most(where, _MOST_METADATA_NBYTES, regular=True)
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error
        metadata = load_pickle(content, str(where), _admitted())
        if not isinstance(metadata, StandIn):
            raise CheckpointError(f"{where}", expected="torch.distributed.checkpoint's metadata", got=type(metadata))
        self._entries: Mapping[str, Any] = _field(metadata, "state_dict_metadata")
        self._opened: dict[_Item, int] = {}
        self._items: dict[tuple[str, tuple[int, ...] | None], _Item] = {}
        with dcp_errors(folder):
            paths = vars(metadata).get("planner_data") or {}
            self.paths = {key: tuple(paths.get(key) or key.split(".", 1)) for key in self._entries}
            self._read_locations(metadata, where)

    def _read_locations(self, metadata: StandIn, where: Path) -> None:
        """Fills `_items`: (key, offsets of the chunk) -> the stored object."""
        folder = self.folder
        for index, info in _field(metadata, "storage_data").items():
            if vars(info).get("transform_descriptors"):
                raise CheckpointError(f"{folder}: {_field(index, 'fqn')} is compressed", expected="a plain *.distcp")
            name = _field(info, "relative_path")
            if Path(name).name != name or name in ("", ".", ".."):
                raise CheckpointError(f"{where}: a file name", expected="a file in the same folder", got=name)
            offset = vars(index).get("offset")
            key = _field(index, "fqn"), None if offset is None else tuple(offset)
            start, nbytes = _field(info, "offset"), _field(info, "length")
            if type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
                raise CheckpointError(f"{where}: place of {key[0]}", expected="an offset and a length", got=start)
            self._items[key] = _Item(folder / name, start, nbytes)

    def is_tensor(self, key: str) -> bool:
        """Returns True if the key has a tensor, False if it has a plain value."""
        return "size" in vars(self._entries[key])

    def record(self, key: str) -> TensorRecord:
        """Returns the shape and dtype of a tensor, and the pieces that cover it."""
        entry = self._entries[key]
        shape = tuple(_field(entry, "size"))
        pieces: list[Piece] = []
        dtype = ""
        # DCP's chunks are boxes of any number of dims. Each is split into runs of the flattened tensor, and the sorted
        # runs must cover it exactly once. The file is untrusted, so this is not certain.
        if len({tuple(_field(chunk, "offsets")) for chunk in _field(entry, "chunks")}) != len(_field(entry, "chunks")):
            raise CheckpointError(f"{self.folder}: tensor {key}: its parts do not cover it exactly once")
        for chunk in _field(entry, "chunks"):
            offsets, sizes = tuple(_field(chunk, "offsets")), tuple(_field(chunk, "sizes"))
            if not math.prod(sizes):
                continue
            file = self._open(key, offsets)
            stored = self.files[file].content
            if not isinstance(stored, StoredTensor) or stored.shape != sizes:
                raise CheckpointError(f"{self.folder}: tensor {key}", expected=f"a part of shape {sizes}", got=stored)
            dtype = stored.dtype
            pieces += _pieces(file, shape, offsets, sizes, list(self.files[file].runs(stored)), ITEMSIZE[dtype])
        pieces.sort(key=lambda piece: piece[1])
        end = 0
        for _, start, length, _ in pieces:
            if start != end:
                raise CheckpointError(f"{self.folder}: tensor {key}: its parts do not cover it exactly once")
            end += length
        if end != math.prod(shape):
            raise CheckpointError(f"{self.folder}: tensor {key}", expected=f"{math.prod(shape)} elements", got=end)
        return TensorRecord(dtype or _dtype_of(entry), shape, tuple(pieces))

    def value(self, key: str) -> Any:
        """Returns the plain value of a key."""
        return self.files[self._open(key, None)].content

    def _open(self, key: str, offset: tuple[int, ...] | None) -> int:
        item = self._items.get((key, offset)) or (self._items.get((key, None)) if not offset else None)
        if item is None:
            raise CheckpointError(f"{self.folder}: incomplete: no file has {key} at {offset}")
        if item not in self._opened:
            self.files.append(TorchFile(item.path, (item.start, item.nbytes)))
            self._opened[item] = len(self.files) - 1
        return self._opened[item]


@contextlib.contextmanager
def dcp_errors(folder: Path) -> Iterator[None]:
    """Converts Python's errors over unexpected metadata to one CheckpointError that names the folder."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise CheckpointError(
            f"{folder}: not in the format of torch.distributed.checkpoint ({type(error).__name__}: {str(error)[:200]})",
            fix="use another checkpoint",
        ) from error


def _admitted() -> dict[str, Any]:
    """Returns the names that `.metadata` may contain in addition to those of `torch_pickle.py`."""
    paths = ("PosixPath", "WindowsPath", "PurePosixPath", "Path")
    return {
        **{f"{_MODULE}.{name}": stand_in_of(name) for name in _CLASSES},
        "torch.distributed.checkpoint.filesystem._StorageInfo": stand_in_of("_StorageInfo"),
        "torch.serialization._get_layout": _path,
        **{f"{module}.{name}": _path for module in ("pathlib", "pathlib._local") for name in paths},
    }


def _path(*parts: Any) -> str:
    if any(type(component) is not str for component in parts) or sum(map(len, parts)) > _LONGEST_PATH:
        raise TypeError("expected the parts of a path")
    return "/".join(parts)


def _dtype_of(entry: Any) -> str:
    """Returns the dtype of a tensor without elements, which may have no file."""
    state = vars(_field(entry, "properties")).get("state") or ()
    return next((str(value) for value in state if isinstance(value, DtypeName)), "F32")


def _pieces(
    file: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    runs: list[tuple[int, int, int]],
    itemsize: int,
) -> list[Piece]:
    """Returns the pieces of a chunk, which is a box at `offsets` in a tensor of `shape`.

    Args:
        runs: (first element in the chunk, number of elements, byte offset in the file) of its contiguous runs.
    """
    inner = 1  # number of the chunk's elements that are contiguous in the full tensor too: the trailing dims agree
    dim = len(shape)
    while dim and inner == math.prod(shape[dim:]):
        dim -= 1
        inner *= sizes[dim]
    outer = sizes[:dim]
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    pieces: list[Piece] = []
    if math.prod(outer) * len(runs) > _MOST_PIECES:
        raise ValueError(f"a part of shape {sizes} consists of {math.prod(outer)} times {len(runs)} pieces")
    for number in range(math.prod(outer)):
        start, rest = base, number
        for d in range(dim - 1, -1, -1):
            rest, index = divmod(rest, outer[d])
            start += index * strides[d]
        low, high = number * inner, (number + 1) * inner
        for first, length, byte in runs:
            a, b = max(low, first), min(high, first + length)
            if a < b:
                pieces.append((file, start + a - low, b - a, byte + (a - first) * itemsize))
    return pieces


_MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _of_a_batch_norm(name: str) -> bool:
    return name.rpartition(".")[2] in _BUFFERS


def open_dcp(
    folder: Path, *, ties: Mapping[str, str], is_buffer: Callable[[str], bool] = _of_a_batch_norm
) -> TorchStore:
    """Opens a DCP folder: returns a store of its tensors, with a manifest.

    Args:
        ties: alias -> name in the model that loads the checkpoint; DCP stores both.
        is_buffer: returns True for names of buffers, which DCP does not distinguish from parameters.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or no dict in it can be the model's.
    """
    dcp = DcpFolder(folder)
    with dcp_errors(folder):
        manifest = _DcpReader(dcp, ties, is_buffer).manifest()
    return TorchStore(folder, manifest, dcp.files)


def import_dcp(
    folder: Path, out: Path, *, tag: str, world_size: int, ties: Mapping[str, str], buffers: Collection[str]
) -> Path:
    """Converts a DCP folder to a checkpoint of this format in `out/<tag>`; returns that folder.

    Args:
        ties: alias -> name.
        buffers: the names of buffers other than those of batch norms.

    Raises:
        CheckpointError: see `open_dcp`.
        UsageError: `ties` or `buffers` have a name that is not in the folder, or the checkpoint is already in `out`.
    """
    store = open_dcp(folder, ties=ties, is_buffer=lambda name: name in buffers or _of_a_batch_norm(name))
    names = {*store.manifest.parameters, *store.manifest.buffers}
    unknown = sorted({*ties.values(), *buffers} - names)
    if unknown:
        raise UsageError(f"{folder}: ties and buffers", expected="names of its model", got=", ".join(unknown))
    renamed = Manifest(**{**vars(store.manifest), "tag": tag})
    return rewrite(renamed, store.torch_files, out, world_size)


class _DcpReader:
    """Sorts the keys of one folder into parameters, buffers, optimizer states, param groups and client state."""

    def __init__(self, dcp: DcpFolder, ties: Mapping[str, str], is_buffer: Callable[[str], bool]) -> None:
        self._dcp = dcp
        self._tensors: dict[str, TensorRecord] = {}
        self._plain_keys: dict[int, str] = {}  # id of a tensor -> its key; `_plain_tensors` keeps the ids unique
        self._plain_tensors: list[Tensor] = []
        states, groups, rest = self._split()
        self._groups = [groups[index] for index in sorted(groups)]
        model, others = self._model(rest, {fqn for fqn, _ in states})
        self._ties = {alias: name for alias, name in ties.items() if name in model}
        for group in self._groups:  # groups may have a tied parameter under any of its names
            group["params"] = list(dict.fromkeys(self._ties.get(fqn, fqn) for fqn in group.get("params", ())))
        states = {(self._ties.get(fqn, fqn), name): key for (fqn, name), key in states.items()}
        self._group_of = {fqn: index for index, group in enumerate(self._groups) for fqn in group["params"]}
        self._names = {fqn: key for fqn, key in model.items() if fqn not in self._ties}
        self._buffers = [fqn for fqn in self._names if fqn not in self._group_of and is_buffer(fqn)]
        self._states = states
        self._others = others

    def _split(self) -> tuple[dict[tuple[str, str], str], dict[int, dict[str, Any]], dict[str, tuple[Any, ...]]]:
        """Returns (states by (fqn, name), param groups by number, all other keys with their paths)."""
        states: dict[tuple[str, str], str] = {}
        groups: dict[int, dict[str, Any]] = {}
        flat: dict[str, dict[str, Any]] = {}
        rest: dict[str, tuple[Any, ...]] = {}
        for key, path in self._dcp.paths.items():
            parts = _unflattened(path)
            if "state" in parts[:-1] and len(parts) - parts.index("state") == 3:
                states[str(parts[-2]), str(parts[-1])] = key
            elif "param_groups" in parts[:-1] and len(parts) - parts.index("param_groups") == 3:
                of = groups.setdefault(parts[-2], {}) if type(parts[-2]) is int else flat.setdefault(parts[-2], {})
                of[str(parts[-1])] = self._value(key)
            else:
                rest[key] = path
        if flat and not groups:  # one dict of options per parameter: parameters with equal options are a group
            for fqn, options in flat.items():
                same = next(
                    (g for g in groups.values() if {k: v for k, v in g.items() if k != "params"} == options), None
                )
                if same is None:
                    same = groups[len(groups)] = {**options, "params": []}
                same["params"].append(fqn)
        return states, groups, rest

    def _model(
        self, rest: Mapping[str, tuple[Any, ...]], optimized: Collection[str]
    ) -> tuple[dict[str, str], dict[str, tuple[Any, ...]]]:
        """Returns (fqn -> key for the model's tensors, all other keys with their paths)."""
        dicts: dict[tuple[Any, ...], dict[str, str]] = {}
        for key, path in rest.items():
            if self._dcp.is_tensor(key):
                dicts.setdefault(path[:-1], {})[str(path[-1])] = key
        # Prefer the dict with all optimized parameters, because names of dicts are not reliable.
        named = [keys for prefix, keys in dicts.items() if prefix and prefix[-1] in _MODEL_KEYS]
        fitting = [keys for keys in dicts.values() if optimized and set(optimized) <= keys.keys()]
        chosen = (fitting or named or (list(dicts.values()) if len(dicts) == 1 else []))[:1]
        if not chosen:
            there = ", ".join(".".join(map(str, prefix)) or "(top)" for prefix in dicts) or "none"
            raise CheckpointError(
                f"{self._dcp.folder}: cannot tell which dict is the model's",
                expected=f"one called {', '.join(_MODEL_KEYS)}",
                got=there,
            )
        model = chosen[0]
        return model, {key: path for key, path in rest.items() if key not in set(model.values())}

    def manifest(self) -> Manifest:
        """Returns the manifest that this package's save of the same run would have."""
        parameters = {}
        # DCP does not mark masters: a parameter in a param group is trained, so its value is a master.
        for fqn, key in self._names.items():
            record = self._dcp.record(key)
            if fqn in self._buffers:
                self._tensors[f"buffer/{fqn}"] = record
                continue
            trained = fqn in self._group_of
            self._tensors[f"{'master' if trained else 'value'}/{fqn}"] = record
            parameters[fqn] = ParameterRecord(record.dtype, record.shape, trained, self._group_of.get(fqn))
        optimizer = self._optimizer() if self._groups else None
        steps = (
            [int(state["step"]["value"]) for state in optimizer["scalars"].values() if "step" in state]
            if optimizer
            else []
        )
        client_state = self._encode(self._nested(), "client_state")
        files = tuple(FileRecord(file.path.name, file.nbytes, 0, "") for file in self._dcp.files)
        content = (self._dcp.folder / DCP_METADATA_NAME).read_bytes()
        step = max(steps, default=0)
        return Manifest(
            id=hashlib.sha256(content).hexdigest()[:8],
            tag=self._dcp.folder.name,
            saved_at=(self._dcp.folder / DCP_METADATA_NAME).stat().st_mtime,
            world_size=max(1, len({file.path for file in self._dcp.files})),
            sharded={"optimizer": True, "grads": True, "params": True},
            files=files,
            tensors=self._tensors,
            parameters=parameters,
            order=tuple(parameters),
            ties=self._ties,
            buffers=tuple(self._buffers),
            counters={"global_steps": step, "micro_steps": step, "global_samples": 0, "skipped_steps": 0},
            optimizer=optimizer,
            loss_scale={"type": "LossScale", "state": {"value": 1.0}},
            client_state=client_state,
            config={},
            writer={"torch.distributed.checkpoint": ""},
        )

    def _optimizer(self) -> dict[str, Any]:
        scalars: dict[str, dict[str, Any]] = {}
        kinds = set()
        for (fqn, name), key in self._states.items():
            if self._dcp.is_tensor(key):
                record = self._dcp.record(key)
                if record.shape:
                    kinds.add(name)
                    self._tensors[f"state/{name}/{fqn}"] = record
                    continue
            scalars.setdefault(fqn, {})[name] = self._encode(self._value(key), f"state of {fqn}")
        groups = []
        for group in self._groups:
            options = {k: self._encode(v, f"param group: {k}") for k, v in group.items() if k != "params"}
            groups.append({**options, "params": group["params"]})
        kind = optimizer_of_states(kinds) or "SGD"
        if kind == "AdamW" and not all(group.get("decoupled_weight_decay", True) for group in groups):
            kind = "Adam"
        return {"type": kind, "param_groups": groups, "scalars": scalars}

    def _nested(self) -> dict[str, Any]:
        """Returns the values other than the model's and the optimizer's, in their nested dicts."""
        tree: dict[str, Any] = {}
        for key, path in self._others.items():
            branch = tree
            for component in path[:-1]:
                branch = branch.setdefault(component, {})
            branch[path[-1]] = self._value(key)
        return tree

    def _value(self, key: str) -> Any:
        if not self._dcp.is_tensor(key):
            return self._dcp.value(key)
        record = self._dcp.record(key)
        flat = torch.empty(record.numel, dtype=dtype_of(record.dtype))
        for file, start, length, offset in record.pieces:
            data = self._dcp.files[file].read(offset, length * ITEMSIZE[record.dtype])
            flat[start : start + length] = torch.from_numpy(data).view(flat.dtype)
        tensor = flat.view(record.shape)
        key_of_plain = f"plain/0/{len(self._plain_keys)}"
        self._plain_keys[id(tensor)] = key_of_plain
        self._plain_tensors.append(tensor)
        self._tensors[key_of_plain] = record
        return tensor

    def _encode(self, value: Any, where: str) -> Any:
        return encode(value, where, lambda tensor: self._plain_keys[id(tensor)])


def _unflattened(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Splits the last key of a path in a flattened state dict, such as `("optim", "state.0.weight.exp_avg")`."""
    last = path[-1]
    for kind in ("state", "param_groups"):
        if isinstance(last, str) and last.startswith(f"{kind}.") and last.count(".") >= 2:
            fqn, _, name = last.removeprefix(f"{kind}.").rpartition(".")
            return (*path[:-1], kind, fqn, name)
    return path
