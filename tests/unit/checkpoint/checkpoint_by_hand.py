"""Checkpoints written from docs/checkpoint_format.md alone, without the package that reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 65536
_SIZES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8, "F64": 8}


@dataclass(frozen=True)
class Entry:
    """A tensor to be saved; the elements of `data` have the size of `dtype`, so BF16 is stored as uint16."""

    dtype: str
    data: NDArray[Any]
    trainable: bool = True
    saved: bool = True


def sums_of(data: bytes) -> NDArray[np.uint64]:
    """Returns the table of checksums by the formula of docs/checkpoint_format.md."""

    def weight(index: int) -> int:
        z = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return (z ^ (z >> 31)) | 1

    weights = np.array([weight(index) for index in range(_BLOCK // 8)], np.uint64)
    padded = data + b"\0" * (-len(data) % _BLOCK)
    words = np.frombuffer(padded, "<u8").reshape(-1, _BLOCK // 8)
    return np.array([(row * weights).sum(dtype=np.uint64) for row in words], "<u8")


def make_checkpoint(
    root: Path,
    parameters: Mapping[str, Entry],
    *,
    buffers: Mapping[str, Entry] | None = None,
    ties: Mapping[str, str] | None = None,
    world_size: int = 2,
    tag: str = "global_step1",
    stage: int = 3,
    states: bool = True,
) -> Path:
    """Writes `root/<tag>` and `root/latest`; trainable parameters become masters, with a moment if `states`."""
    folder = root / tag
    folder.mkdir(parents=True)
    tensors: dict[str, Entry] = {}
    for name, entry in parameters.items():
        if entry.saved:
            tensors[f"{'master' if entry.trainable else 'value'}/{name}"] = entry
        if states and entry.trainable:
            tensors[f"state/exp_avg/{name}"] = Entry("F32", np.full(entry.data.shape, 0.5, "<f4"))
    for name, entry in (buffers or {}).items():
        tensors[f"buffer/{name}"] = entry
    pieces: dict[str, list[list[int]]] = {key: [] for key in tensors}
    files = []
    for rank in range(world_size):
        name = f"rank{rank:05d}-of-{world_size:05d}-0123abcd.safetensors"
        nbytes, digest = _write_rank(folder / name, rank, world_size, tensors, pieces)
        files.append({"name": name, "nbytes": nbytes, "rank": rank, "table_sha256": digest})
    body = {
        "format": "zeroaccel",
        "version": 1,
        "id": "0123abcd",
        "tag": tag,
        "writer": {},
        "saved_at": 1.0,
        "world_size": world_size,
        "sharded": {"optimizer": stage > 0, "grads": stage > 1, "params": stage > 2},
        "files": files,
        "tensors": {
            key: {"dtype": entry.dtype, "shape": list(entry.data.shape), "pieces": pieces[key]}
            for key, entry in tensors.items()
        },
        "parameters": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.data.shape),
                "trainable": entry.trainable,
                "group": 0 if entry.trainable else None,
                "saved": entry.saved,
            }
            for name, entry in parameters.items()
        },
        "order": list(parameters),
        "ties": dict(ties or {}),
        "buffers": list(buffers or {}),
        "optimizer": None,
        "counters": {"global_steps": 1, "micro_steps": 1, "global_samples": 4, "skipped_steps": 0},
        "loss_scale": None,
        "lr_scheduler": None,
        "client_state": {},
        "random_state": None,
        "config": {},
    }
    seal(folder, body)
    (root / "latest").write_text(tag)
    return folder


def _write_rank(
    path: Path, rank: int, world_size: int, tensors: Mapping[str, Entry], pieces: dict[str, list[list[int]]]
) -> tuple[int, str]:
    """Writes a rank's file: rank r has elements [n * r // W, n * (r + 1) // W) of every tensor of n elements."""
    parts: list[tuple[str, int, bytes, str, int]] = []
    for key, entry in sorted(tensors.items(), key=lambda item: -_SIZES[item[1].dtype]):
        flat = np.ascontiguousarray(entry.data).reshape(-1)
        whole = key.startswith("buffer/")
        start = 0 if whole else flat.size * rank // world_size
        end = flat.size * (rank == 0) if whole else flat.size * (rank + 1) // world_size
        if start < end:
            parts.append((key, start, flat[start:end].tobytes(), entry.dtype, end - start))
    blocks = 0
    while True:
        header: dict[str, Any] = {}
        cursor = 0
        for key, _, data, dtype, length in parts:
            header[key] = {"dtype": dtype, "shape": [length], "data_offsets": [cursor, cursor + len(data)]}
            cursor += len(data)
        span = [cursor, cursor + 8 * blocks]
        header["__checksums__"] = {"dtype": "U64", "shape": [blocks], "data_offsets": span}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        needed = -(-(8 + len(text) + cursor) // _BLOCK)
        if needed == blocks:
            break
        blocks = needed
    content = len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data, _, _ in parts)
    for key, start, _, _, length in parts:
        pieces[key].append([rank, start, length, 8 + len(text) + header[key]["data_offsets"][0]])
    table = sums_of(content).tobytes()
    path.write_bytes(content + table)
    return len(content) + len(table), hashlib.sha256(table).hexdigest()


def seal(folder: Path, body: Mapping[str, Any]) -> None:
    """Writes a manifest with its checksum."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    document = {"checksum": hashlib.sha256(text.encode()).hexdigest(), "manifest": body}
    (folder / "manifest.json").write_text(json.dumps(document))


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and updates its checksum."""
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    change(body)
    seal(folder, body)
