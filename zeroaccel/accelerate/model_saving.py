"""The half of `Accelerator` that hands models out: state dicts, files, the model without its engine.

A mixin over what is prepared. Works at every stage and needs no setting decided before training; weights are streamed
unit by unit. Checkpoints to resume from are another thing (`save_state`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.accelerate.accelerator_state import AcceleratorState
from zeroaccel.accelerate.preparation import Prepared
from zeroaccel.checkpoint.atomic_write import write_durably
from zeroaccel.checkpoint.weights import parse_nbytes
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.zero.engine import Engine

__all__ = ["ModelSaving"]

_MAX_SHARD_SIZE = "10GB"


class ModelSaving:
    """Mixed into `Accelerator`, which sets the attributes.

    Attributes:
        state: of the accelerator.
        prepared: every model that went through `prepare`, in order.
        collectives: of the process.
    """

    state: AcceleratorState
    prepared: list[Prepared]
    collectives: Collectives

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model that was given to `prepare`; its parameters still are the engine's.

        Args:
            keep_fp32_wrapper: there is none.
            keep_torch_compile: False also takes off the wrapper of `torch.compile(model)`.
        """
        inner = model.module if isinstance(model, Engine) else model
        compiled = getattr(inner, "_orig_mod", None)
        return compiled if compiled is not None and not keep_torch_compile else inner

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole model's state dict in host memory, on the main process; an empty one on the others. (all ranks)

        At every stage; one unit at a time is gathered. Weights have the dtypes they are computed in; the exact fp32
        ones are in checkpoints. Tied parameters are one tensor under each of their names.

        Args:
            unwrap: accepted; names are those of the model itself in either case.
        """
        engine = self._engine_behind(model)
        if engine is not None:
            return engine.consolidated_state_dict() or {}  # None would make save_pretrained look for weights
        if self.collectives.rank != 0:
            return {}
        return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Writes an object, on the main process: by `torch.save`, or a dict of tensors as safetensors.

        The others return at once; for the values of a prepared model, `get_state_dict` first.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self.collectives.rank != 0:
            return
        from safetensors import SafetensorError  # the format's library, only where a file is written
        from safetensors.torch import save_file

        try:
            if safe_serialization:
                save_file({name: value.contiguous() for name, value in obj.items()}, f, metadata={"format": "pt"})
            else:
                torch.save(obj, f)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{os.fspath(f)}: cannot be written ({error})") from error

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = _MAX_SHARD_SIZE,
        safe_serialization: bool = True,
    ) -> list[str]:
        """Writes the weights as `model.safetensors`, or as several with an index, streamed from the shards. (all ranks)

        No rank holds more than one unit of the model at a time.

        Args:
            max_shard_size: of a file: bytes, "10GB", "512MiB". A larger tensor has a file of its own.
            safe_serialization: False writes `pytorch_model.bin`, a file of which passes through memory whole.

        Returns:
            The names of the files.

        Raises:
            UsageError: a model that is not prepared, or a size that is none.
            CheckpointError: the folder cannot be written; on every rank.
        """
        engine = self._engine_behind(model)
        with agreed(self.collectives, "save_model"):
            max_nbytes = parse_nbytes(max_shard_size)
            if engine is None:
                raise UsageError(
                    f"accelerator.save_model({type(model).__name__})",
                    expected="a model that prepare() returned",
                    fix="prepare it, or save it with its own save_pretrained",
                )
        assert engine is not None, "a missing engine was refused on every rank"
        return engine.save_model(save_directory, max_nbytes=max_nbytes, pickled=not safe_serialization)

    def save_pretrained(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = _MAX_SHARD_SIZE,
        safe_serialization: bool = True,
    ) -> list[str]:
        """As `save_model`, with the files beside the weights that `from_pretrained` looks for. (all ranks)

        Those are `config.json`, and `generation_config.json` where the model has one.

        Raises:
            UsageError: the model has no config that can be saved.
        """
        inner = self.unwrap_model(model, keep_torch_compile=False)
        configs = {"config": getattr(inner, "config", None), "generation_config": None}
        if callable(getattr(inner, "can_generate", None)) and inner.can_generate():
            configs["generation_config"] = getattr(inner, "generation_config", None)
        with agreed(self.collectives, "save_pretrained: config"):
            if not callable(getattr(configs["config"], "to_dict", None)):
                raise UsageError(
                    f"accelerator.save_pretrained({type(inner).__name__})",
                    expected="a model of transformers, with a config",
                    fix="use save_model, which writes the weights only",
                )
            if self.collectives.rank == 0:
                for name, config in configs.items():
                    if config is not None:
                        _write_config(Path(save_directory), name, config, inner)
        return self.save_model(model, save_directory, max_shard_size, safe_serialization)

    def _engine_behind(self, model: nn.Module) -> Engine | None:
        for item in self.prepared:
            if model is item.engine or self.unwrap_model(model, keep_torch_compile=False) is self.unwrap_model(
                item.engine, keep_torch_compile=False
            ):
                return item.engine
        return None


def _write_config(folder: Path, name: str, config: Any, model: nn.Module) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = config.to_dict()
    if name == "config":
        content.setdefault("architectures", None)
        content["architectures"] = content["architectures"] or [type(model).__name__]
    save: Callable[..., Any] | None = getattr(config, "save_pretrained", None)
    if name != "config" and save is not None:
        save(folder)
        return
    write_durably(folder / f"{name}.json", (json.dumps(content, indent=2, sort_keys=True, default=str) + "\n").encode())
