"""Exports checkpoints to folders of torch.distributed.checkpoint (DCP), with the keys that FSDP2 users load.

The keys are those of `get_state_dict`: `model.<fqn>` in the dtype of the masters, `optim.state.<fqn>.<name>`,
`optim.param_groups.<i>.<option>`. The export holds one tensor in memory at a time, and writes `.metadata` last.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from zeroaccel.checkpoint.atomic_write import NewFile, remove_abandoned, write_durably, writing_to
from zeroaccel.checkpoint.find import DCP_METADATA_NAME, find_checkpoint
from zeroaccel.checkpoint.manifest import Manifest
from zeroaccel.checkpoint.plain_codec import decode
from zeroaccel.checkpoint.tensor_store import TensorStore
from zeroaccel.errors import UsageError

_FILE_NAME = "__0_0.distcp"


def export_dcp(checkpoint_dir: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None) -> Path:
    """Writes a checkpoint of this format as a DCP folder, for `torch.distributed.checkpoint.load`.

    A tied parameter is stored under each of its names. Parameters without saved values are omitted.

    Args:
        out: a folder without a DCP checkpoint.
        tag: tag of the checkpoint; None for the tag in `latest`.

    Returns:
        `out`.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged, or the disk is full.
        UsageError: `out` already has a DCP checkpoint.

    Example::

        export_dcp("checkpoints", "dcp", tag="global_step1000")
        model_state, optim_state = get_state_dict(model, optimizer)  # of torch.distributed.checkpoint.state_dict
        dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id="dcp")
    """
    folder, manifest = find_checkpoint(Path(checkpoint_dir), tag)
    target = Path(out)
    if (target / DCP_METADATA_NAME).exists():
        raise UsageError(f"{target}", expected="a folder without a checkpoint", fix="choose another folder")
    with writing_to(target):
        target.mkdir(parents=True, exist_ok=True)
        with (
            NewFile(target / _FILE_NAME) as new,
            os.fdopen(new.handle, "wb", closefd=False) as file,
            TensorStore(folder, manifest) as store,
        ):
            metadata = _DcpWriter(file, store).write()
            file.flush()
            new.publish()
        remove_abandoned(target / _FILE_NAME)
        # Last, like DCP itself: without `.metadata` a folder is not a checkpoint.
        write_durably(target / DCP_METADATA_NAME, pickle.dumps(metadata))
    return target


class _DcpWriter:
    """Appends tensors and values to one `.distcp` file and collects their metadata."""

    def __init__(self, file: BinaryIO, store: TensorStore) -> None:
        self._file, self._store = file, store
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}

    def write(self) -> Metadata:
        """Writes all tensors and values; returns the content of `.metadata`."""
        manifest = self._store.manifest
        aliases: dict[str, list[str]] = {}
        for alias, name in manifest.ties.items():
            aliases.setdefault(name, []).append(alias)
        for fqn in manifest.order:
            key = manifest.weight_key(fqn)
            if key is not None:
                # DCP has no ties: store one object under each name of the parameter.
                self._tensor([("model", name) for name in (fqn, *aliases.get(fqn, ()))], self._store.fetch(key))
        for name in manifest.buffers:
            self._tensor([("model", name)], self._store.fetch(f"buffer/{name}"))
        for path, value in self._optimizer(manifest):
            if isinstance(value, Tensor):
                self._tensor([path], value)
            else:
                self._value(path, value)
        return Metadata(
            state_dict_metadata=self._entries,
            planner_data=self._paths,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
        )

    def _optimizer(self, manifest: Manifest) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        if manifest.optimizer is None:
            return
        scalars = manifest.optimizer["scalars"]
        for fqn in manifest.order:
            for name, value in decode(scalars.get(fqn, {}), self._store.fetch).items():
                is_count = name == "step" and not isinstance(value, Tensor)  # torch's optimizers have a tensor
                yield ("optim", "state", fqn, name), torch.tensor(float(value)) if is_count else value
            for name in manifest.state_names(fqn):
                yield ("optim", "state", fqn, name), self._store.fetch(f"state/{name}/{fqn}")
        for index, group in enumerate(manifest.optimizer["param_groups"]):
            options = decode({name: value for name, value in group.items() if name != "params"}, self._store.fetch)
            for name, value in _options_of_torch(manifest.optimizer["type"], options).items():
                yield ("optim", "param_groups", index, name), value
            yield ("optim", "param_groups", index, "params"), list(group["params"])

    def _tensor(self, paths: list[tuple[str | int, ...]], value: Tensor) -> None:
        info = self._put(value)
        size = value.size()
        origin = torch.Size([0] * value.dim())
        for path in paths:
            key = self._key(path)
            properties = TensorProperties.create_from_tensor(value)
            self._entries[key] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(origin, size)])
            self._storage[MetadataIndex(key, origin, 0)] = info

    def _value(self, path: tuple[str | int, ...], value: Any) -> None:
        key = self._key(path)
        self._entries[key] = BytesStorageMetadata()
        self._storage[MetadataIndex(key)] = self._put(value)

    def _key(self, path: tuple[str | int, ...]) -> str:
        key = ".".join(str(component) for component in path)
        self._paths[key] = path
        return key

    def _put(self, value: Any) -> _StorageInfo:
        start = self._file.tell()
        content = io.BytesIO()
        torch.save(value, content)
        self._file.write(content.getbuffer())
        return _StorageInfo(_FILE_NAME, start, self._file.tell() - start)


def _options_of_torch(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of torch's optimizer `kind` with the saved values: DCP loads exactly the template's keys."""
    make = getattr(torch.optim, kind, None)
    if make is None:
        return options
    template = {k: v for k, v in make([nn.Parameter(torch.empty(0))]).param_groups[0].items() if k != "params"}
    extra = {name: options[name] for name in ("initial_lr",) if name in options}
    return {name: options.get(name, value) for name, value in template.items()} | extra
