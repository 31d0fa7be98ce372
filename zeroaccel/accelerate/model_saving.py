"""Weights of prepared models for other programs: state dicts, safetensors files, `save_pretrained`.

Part of an `Accelerator`. Works at every stage without a setting before training: weights are gathered and written unit
by unit. Checkpoints to resume from are `run_state.py`'s.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.accelerate.accelerator_state import AcceleratorState
from zeroaccel.checkpoint.atomic_write import write_durably
from zeroaccel.checkpoint.weights import parse_nbytes
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.zero.engine_base import EngineBase


def unwrap_model(model: Any, *, keep_torch_compile: bool) -> Any:
    """The model as it was before `prepare`, and before `torch.compile(model)` without `keep_torch_compile`."""
    inner = model.module if isinstance(model, EngineBase) else model
    compiled = getattr(inner, "_orig_mod", None)
    return compiled if compiled is not None and not keep_torch_compile else inner


def write_object(obj: Any, file: str | os.PathLike[str], *, safe_serialization: bool) -> None:
    """Writes by `torch.save`, or a dict of tensors as safetensors; CheckpointError where it cannot."""
    from safetensors import SafetensorError  # the format's library, only where a file is written
    from safetensors.torch import save_file

    try:
        if safe_serialization:
            save_file({name: value.contiguous() for name, value in obj.items()}, file, metadata={"format": "pt"})
        else:
            torch.save(obj, file)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{os.fspath(file)}: cannot be written ({error})") from error


class ModelSaving:
    """Reads the weights of `state.prepared`; the methods are documented at `Accelerator`."""

    def __init__(self, state: AcceleratorState, collectives: Collectives) -> None:
        self._state = state
        self._collectives = collectives

    def get_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        engine = self._engine_of(model)
        if engine is not None:
            return engine.consolidated_state_dict() or {}  # None would make save_pretrained read the sharded weights
        if self._collectives.rank != 0:
            return {}
        return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}

    def save(self, obj: Any, file: str | os.PathLike[str], *, safe_serialization: bool) -> None:
        if self._collectives.rank == 0:
            write_object(obj, file, safe_serialization=safe_serialization)

    def save_model(
        self, model: nn.Module, folder: str | os.PathLike[str], max_shard_size: int | str, *, safe_serialization: bool
    ) -> list[str]:
        engine = self._engine_of(model)
        with agreed(self._collectives, "save_model"):
            max_nbytes = parse_nbytes(max_shard_size)
            if engine is None:
                raise UsageError(
                    f"accelerator.save_model({type(model).__name__})",
                    expected="a model that prepare() returned",
                    fix="prepare it, or save it with its own save_pretrained",
                )
        assert engine is not None, "a missing engine was refused on every rank"
        return engine.save_model(folder, max_nbytes=max_nbytes, pickled=not safe_serialization)

    def save_pretrained(
        self, model: nn.Module, folder: str | os.PathLike[str], max_shard_size: int | str, *, safe_serialization: bool
    ) -> list[str]:
        inner = unwrap_model(model, keep_torch_compile=False)
        configs = {"config": getattr(inner, "config", None), "generation_config": None}
        if callable(getattr(inner, "can_generate", None)) and inner.can_generate():
            configs["generation_config"] = getattr(inner, "generation_config", None)
        with agreed(self._collectives, "save_pretrained: config"):
            if not callable(getattr(configs["config"], "to_dict", None)):
                raise UsageError(
                    f"accelerator.save_pretrained({type(inner).__name__})",
                    expected="a model of transformers, with a config",
                    fix="use save_model, which writes the weights only",
                )
            if self._collectives.rank == 0:
                for name, config in configs.items():
                    if config is not None:
                        _write_config(Path(folder), name, config, inner)
        return self.save_model(model, folder, max_shard_size, safe_serialization=safe_serialization)

    def _engine_of(self, model: nn.Module) -> EngineBase | None:
        inner = unwrap_model(model, keep_torch_compile=False)
        for item in self._state.prepared:
            if model is item.engine or inner is unwrap_model(item.engine, keep_torch_compile=False):
                return item.engine
        return None


def _write_config(folder: Path, name: str, config: Any, model: nn.Module) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save = getattr(config, "save_pretrained", None)
    if name != "config" and save is not None:
        save(folder)
        return
    content = config.to_dict()
    if name == "config":
        content["architectures"] = content.get("architectures") or [type(model).__name__]
    write_durably(folder / f"{name}.json", (json.dumps(content, indent=2, sort_keys=True, default=str) + "\n").encode())
