"""A checkpoint of torch.distributed.checkpoint, as FSDP2 users make them, in the form that `load.py` reads.

Takes the names apart: which dict is the model's, which the optimizer's (`get_state_dict`'s two, flattened or not), and
what else there is, which becomes the client state. Bytes are `dcp_files.py`'s matter; everything that loads or rewrites
our checkpoints then does these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroaccel.checkpoint.dtypes import dtype_of
from zeroaccel.checkpoint.formats.dcp_files import METADATA_NAME, DcpFolder, dcp_errors
from zeroaccel.checkpoint.formats.torch_store import TorchStore, optimizer_of_states
from zeroaccel.checkpoint.manifest import ITEMSIZE, FileRecord, Manifest, ParameterRecord, TensorRecord
from zeroaccel.checkpoint.plain_codec import encode
from zeroaccel.checkpoint.reshard import write_again
from zeroaccel.errors import CheckpointError, UsageError

__all__ = ["import_dcp", "open_dcp"]

_MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _of_a_batch_norm(name: str) -> bool:
    return name.rpartition(".")[2] in _BUFFERS


def open_dcp(
    folder: Path, *, ties: Mapping[str, str], is_buffer: Callable[[str], bool] = _of_a_batch_norm
) -> TorchStore:
    """The tensors of a DCP folder, and a manifest of them.

    Args:
        ties: alias -> name, of the model that loads it: DCP keeps both.
        is_buffer: whether a name is that of a buffer of the model, as DCP does not tell them from parameters.

    Raises:
        CheckpointError: it is damaged, incomplete, or has no dict that can be the model's.
    """
    dcp = DcpFolder(folder)
    with dcp_errors(folder):
        manifest = _Reader(dcp, ties, is_buffer).manifest()
    return TorchStore(folder, manifest, dcp.files)


def import_dcp(
    folder: Path, out: Path, *, tag: str, world_size: int, ties: Mapping[str, str], buffers: Collection[str]
) -> Path:
    """Writes a DCP folder as a checkpoint of ours into `out/<tag>`; returns that folder.

    Args:
        ties: alias -> name.
        buffers: the names of buffers that are not those of batch norms.

    Raises:
        CheckpointError: as `open_dcp`. UsageError: a name that is not in it, or the checkpoint is already in `out`.
    """
    store = open_dcp(folder, ties=ties, is_buffer=lambda name: name in buffers or _of_a_batch_norm(name))
    known = {*store.manifest.parameters, *store.manifest.buffers}
    unknown = sorted({*ties.values(), *buffers} - known)
    if unknown:
        raise UsageError(f"{folder}: ties and buffers", expected="names of its model", got=", ".join(unknown))
    renamed = Manifest(**{**vars(store.manifest), "tag": tag})
    return write_again(renamed, store.torch_files, out, world_size)


class _Reader:
    """Sorts the keys of one folder."""

    def __init__(self, dcp: DcpFolder, ties: Mapping[str, str], is_buffer: Callable[[str], bool]) -> None:
        self._dcp = dcp
        self._tensors: dict[str, TensorRecord] = {}
        self._plain: dict[int, str] = {}
        self._kept: list[Tensor] = []
        states, groups, rest = self._split()
        self._groups = [groups[index] for index in sorted(groups)]
        model, others = self._model(rest, {fqn for fqn, _ in states})
        self._ties = {alias: name for alias, name in ties.items() if name in model}
        for group in self._groups:  # whichever of its names a tied parameter has there
            group["params"] = list(dict.fromkeys(self._ties.get(fqn, fqn) for fqn in group.get("params", ())))
        states = {(self._ties.get(fqn, fqn), name): key for (fqn, name), key in states.items()}
        self._home = {fqn: index for index, group in enumerate(self._groups) for fqn in group["params"]}
        self._names = {fqn: key for fqn, key in model.items() if fqn not in self._ties}
        self._buffers = [fqn for fqn in self._names if fqn not in self._home and is_buffer(fqn)]
        self._states = states
        self._others = others

    def _split(self) -> tuple[dict[tuple[str, str], str], dict[int, dict[str, Any]], dict[str, tuple[Any, ...]]]:
        """(states by (fqn, name), param groups by number, all other keys with their paths)."""
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
        if flat and not groups:  # one dict of options per parameter: equal ones are a group
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
        """(fqn -> key of the model's tensors, all that is not the model's)."""
        dicts: dict[tuple[Any, ...], dict[str, str]] = {}
        for key, path in rest.items():
            if self._dcp.is_tensor(key):
                dicts.setdefault(path[:-1], {})[str(path[-1])] = key
        named = [found for prefix, found in dicts.items() if prefix and prefix[-1] in _MODEL_KEYS]
        fitting = [found for found in dicts.values() if optimized and set(optimized) <= found.keys()]
        chosen = (fitting or named or (list(dicts.values()) if len(dicts) == 1 else []))[:1]
        if not chosen:
            there = ", ".join(".".join(map(str, prefix)) or "(top)" for prefix in dicts) or "none"
            raise CheckpointError(
                f"{self._dcp.folder}: which of its dicts is the model's?",
                expected=f"one called {', '.join(_MODEL_KEYS)}",
                got=there,
            )
        model = chosen[0]
        return model, {key: path for key, path in rest.items() if key not in set(model.values())}

    def manifest(self) -> Manifest:
        """Everything, as our own save of the same run would have put it."""
        parameters = {}
        for fqn, key in self._names.items():
            record = self._dcp.record(key)
            if fqn in self._buffers:
                self._tensors[f"buffer/{fqn}"] = record
                continue
            trained = fqn in self._home
            self._tensors[f"{'master' if trained else 'value'}/{fqn}"] = record
            parameters[fqn] = ParameterRecord(record.dtype, record.shape, trained, self._home.get(fqn))
        optimizer = self._optimizer() if self._groups else None
        steps = (
            [int(state["step"]["value"]) for state in optimizer["scalars"].values() if "step" in state]
            if optimizer
            else []
        )
        client_state = self._encode(self._nested(), "client_state")
        files = tuple(FileRecord(file.path.name, file.nbytes, 0, "") for file in self._dcp.files)
        content = (self._dcp.folder / METADATA_NAME).read_bytes()
        step = max(steps, default=0)
        return Manifest(
            id=hashlib.sha256(content).hexdigest()[:8],
            tag=self._dcp.folder.name,
            saved_at=(self._dcp.folder / METADATA_NAME).stat().st_mtime,
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
        """What is neither the model's nor the optimizer's, as it was nested."""
        tree: dict[str, Any] = {}
        for key, path in self._others.items():
            at = tree
            for part in path[:-1]:
                at = at.setdefault(part, {})
            at[path[-1]] = self._value(key)
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
        self._plain[id(tensor)] = f"plain/0/{len(self._plain)}"
        self._kept.append(tensor)
        self._tensors[self._plain[id(tensor)]] = record
        return tensor

    def _encode(self, value: Any, where: str) -> Any:
        return encode(value, where, lambda tensor: self._plain[id(tensor)])


def _unflattened(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """`("optim", "state.layers.0.weight.exp_avg")`, as flattened state dicts have it, as if it had not been."""
    last = path[-1]
    for kind in ("state", "param_groups"):
        if isinstance(last, str) and last.startswith(f"{kind}.") and last.count(".") >= 2:
            fqn, _, name = last.removeprefix(f"{kind}.").rpartition(".")
            return (*path[:-1], kind, fqn, name)
    return path
