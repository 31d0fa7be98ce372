"""Presents a DeepSpeed checkpoint to `loader.py`: a manifest, and a store over DeepSpeed's files.

The same code then loads both kinds, on any number of ranks. DeepSpeed does not save the classes of the optimizer and
the scheduler: the manifest derives the optimizer's from the names of its states, and has the scheduler's from the
resuming run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroaccel.checkpoint.compatibility import optimizer_of_states
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import DeepSpeedCheckpoint, open_deepspeed_checkpoint
from zeroaccel.checkpoint.formats.pickle_machine import StandIn
from zeroaccel.checkpoint.formats.torch_pickle import StoredTensor
from zeroaccel.checkpoint.manifest import FileRecord, Manifest, ParameterRecord, TensorRecord
from zeroaccel.checkpoint.plain_codec import encode
from zeroaccel.checkpoint.tensor_store import TorchStore
from zeroaccel.errors import CheckpointError
from zeroaccel.logs import logger
from zeroaccel.zero.access.safetensors_file import dtype_of

_SHARDED = ("optimizer", "grads", "params")  # each stage shards one more


def open_to_resume(
    root: Path,
    tag: object = None,
    *,
    scheduler_type: str | None = None,
    group_of: Mapping[str, int] | None = None,
) -> tuple[Path, TorchStore]:
    """Returns (folder, tensors) of a checkpoint. See `open_deepspeed_checkpoint` and `manifest_of` for arguments and
    errors."""
    checkpoint = open_deepspeed_checkpoint(root, tag)
    manifest = manifest_of(checkpoint, scheduler_type=scheduler_type, group_of=group_of)
    return checkpoint.folder, TorchStore(checkpoint.folder, manifest, checkpoint.files)


def manifest_of(
    checkpoint: DeepSpeedCheckpoint,
    *,
    scheduler_type: str | None = None,
    group_of: Mapping[str, int] | None = None,
) -> Manifest:
    """Returns the manifest that this package's save of the same run would have.

    Args:
        scheduler_type: class name of the resuming run's scheduler.
        group_of: fqn -> index of its param group in the resuming optimizer. Required for fp32 training at stage 0 only,
            which saves states without names: they get names in the model's order, group by group.

    Raises:
        CheckpointError: states do not fit `group_of`, or do not have one value per element.
    """
    if group_of is not None:
        _name_states(checkpoint, group_of)
    # From here on, only the files that the records point into are in DeepSpeed's format.
    states = checkpoint.states
    tensors: dict[str, TensorRecord] = {**checkpoint.tensors, **states.tensors}
    plain = _PlainEncoder(checkpoint, tensors)
    group_index = {name: index for index, group in enumerate(checkpoint.groups) for name in group.names}
    shapes = {**checkpoint.frozen, **checkpoint.shapes}
    parameters = {}
    for fqn in checkpoint.order:
        key = checkpoint.weight_key(fqn)
        dtype = checkpoint.dtypes.get(fqn) or (tensors[key].dtype if key else "F32")
        parameters[fqn] = ParameterRecord(
            dtype, shapes[fqn], fqn in group_index, group_index.get(fqn), saved=key is not None
        )
    return Manifest(
        id=checkpoint.fingerprint,
        tag=checkpoint.tag,
        saved_at=max(file.path.stat().st_mtime for file in checkpoint.files),
        world_size=checkpoint.world_size,
        sharded={name: name in _SHARDED[: checkpoint.stage] for name in _SHARDED},
        files=tuple(FileRecord(file.path.name, file.nbytes, 0, "") for file in checkpoint.files),
        parameters=parameters,
        order=tuple(checkpoint.order),
        ties=dict(checkpoint.ties),
        buffers=tuple(checkpoint.buffers),
        counters=_counters(checkpoint),
        optimizer=_optimizer(checkpoint, plain) if checkpoint.groups else None,
        loss_scale=_loss_scale(checkpoint.loss_scaler),
        lr_scheduler=None
        if checkpoint.lr_scheduler is None
        else {"type": scheduler_type, "state": plain.encode(checkpoint.lr_scheduler, "lr_scheduler")},
        client_state=plain.encode(checkpoint.client_state, "client_state"),
        writer={"deepspeed": checkpoint.version},
        tensors=tensors,
    )


def _name_states(checkpoint: DeepSpeedCheckpoint, group_of: Mapping[str, int]) -> None:
    """Gives states without names the names of the resuming optimizer's parameters; see `manifest_of`."""
    if checkpoint.unread is not None:
        raise CheckpointError(
            f"{checkpoint.unread}: optimizer states of tensor or expert parallel training at stage 0, without names",
            fix="pass load_optimizer_states=False, which loads the weights",
        )
    if not checkpoint.has_positions:
        return
    logger.warning(
        "checkpoint %s: saved at stage 0, with optimizer states without names; loaded in the model's order",
        checkpoint.folder,
    )
    ranked = {name: position for position, name in enumerate(checkpoint.order)}
    names = sorted(group_of, key=lambda name: ranked.get(name, len(ranked)))
    groups = range(max(group_of.values(), default=-1) + 1)
    checkpoint.name_positions([[name for name in names if group_of[name] == group] for group in groups])


def _optimizer(checkpoint: DeepSpeedCheckpoint, plain: _PlainEncoder) -> dict[str, Any]:
    return {
        "type": _optimizer_type(checkpoint),
        "param_groups": [
            {**{k: plain.encode(v, f"param group: {k}") for k, v in group.options.items()}, "params": group.names}
            for group in checkpoint.groups
        ],
        "scalars": {
            fqn: {kind: plain.encode(value, f"state of {fqn}") for kind, value in scalars.items()}
            for fqn, scalars in checkpoint.states.scalars.items()
        },
    }


class _PlainEncoder:
    """Encodes plain data for the manifest; the records of its tensors point into DeepSpeed's files."""

    def __init__(self, checkpoint: DeepSpeedCheckpoint, tensors: dict[str, TensorRecord]) -> None:
        self._checkpoint = checkpoint
        self._tensors = tensors
        # id -> (tensor, record); the reference keeps the id unique until `encode` passes the tensor to `_keep`.
        self._records: dict[int, tuple[Tensor, TensorRecord]] = {}

    def encode(self, value: Any, where: str) -> Any:
        return encode(self._with_tensors(value), where, self._keep)

    def _keep(self, tensor: Tensor) -> str:
        key = f"plain/deepspeed/{id(tensor)}"
        self._tensors[key] = self._records[id(tensor)][1]
        return key

    def _with_tensors(self, value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], StoredTensor):
            return self._tensor(value[0], value[1])
        if isinstance(value, StoredTensor):  # client state is in the first model file
            return self._tensor(self._checkpoint.model_file, value)
        if isinstance(value, dict):
            return type(value)({key: self._with_tensors(item) for key, item in value.items()})
        if isinstance(value, (list, tuple)):
            return type(value)(self._with_tensors(item) for item in value)
        if isinstance(value, StandIn):
            return {"class": value.class_name, **{k: v for k, v in vars(value).items() if k != "class_name"}}
        return str(value) if isinstance(value, str) else value

    def _tensor(self, file: int, stored: StoredTensor) -> Tensor:
        record = self._checkpoint.record((file, stored))
        tensor = torch.from_numpy(self._checkpoint.read(record)).view(dtype_of(record.dtype)).view(record.shape)
        self._records[id(tensor)] = (tensor, record)
        return tensor


def _optimizer_type(checkpoint: DeepSpeedCheckpoint) -> str:
    """Derives the class from the states if possible, because DeepSpeed's optimizer names differ from torch's."""
    if any(group.options.get("use_muon") for group in checkpoint.groups):
        return "Muon"
    kinds = {key.split("/", 2)[1] for key in checkpoint.states.tensors}
    named = (checkpoint.config.get("optimizer") or {}).get("type")
    return optimizer_of_states(kinds) or str(named or "an optimizer without states")


def _counters(checkpoint: DeepSpeedCheckpoint) -> dict[str, int]:
    # DeepSpeed does not save the number of micro-steps; compute it from the steps and the config's accumulation.
    counters = checkpoint.counters
    config = checkpoint.config
    accumulation = config.get("gradient_accumulation_steps")
    if not isinstance(accumulation, int):
        train, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
        accumulation = 1
        if isinstance(train, int) and isinstance(micro, int):
            accumulation = max(1, train // max(1, micro * checkpoint.world_size))
    return {**counters, "micro_steps": counters["global_steps"] * accumulation}


def _loss_scale(scaler: Mapping[str, Any] | None) -> dict[str, Any]:
    if scaler is None or scaler["type"] != "DynamicLossScaler":
        return {"type": "StaticLossScale", "state": {"value": float((scaler or {}).get("cur_scale", 1.0))}}
    state = {
        "value": float(scaler["cur_scale"]),
        "steps": int(scaler["cur_iter"]),
        "last_overflow": int(scaler["last_overflow_iter"]),
        "tolerance": int(scaler.get("cur_hysteresis", 1)),
    }
    return {"type": "DynamicLossScale", "state": state}
