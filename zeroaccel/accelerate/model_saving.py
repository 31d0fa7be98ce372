"""Saves weights of prepared models for other programs: state dicts, safetensors files, `save_pretrained`.

It works at every stage and needs no setting before training: it gathers and writes the weights unit by unit. The module
`run_state.py` saves checkpoints to resume from.
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
from zeroaccel.checkpoint.source_layout import source_of
from zeroaccel.checkpoint.weights import parse_nbytes
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.engine import EngineBase
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.zero.module_names import plain_names

_MAX_SHARD_SIZE = "10GB"


def unwrap_model(model: Any, *, keep_torch_compile: bool) -> Any:
    """Returns the model inside an engine, and without `keep_torch_compile` also inside `torch.compile`'s wrapper."""
    inner = model.module if isinstance(model, EngineBase) else model
    compiled = getattr(inner, "_orig_mod", None)
    return compiled if compiled is not None and not keep_torch_compile else inner


def write_object(obj: Any, file: str | os.PathLike[str], *, safe_serialization: bool) -> None:
    """Writes with `torch.save`, or a dict of tensors as safetensors; raises CheckpointError if writing fails."""
    from safetensors import SafetensorError  # imported only when a file is written
    from safetensors.torch import save_file

    try:
        if safe_serialization:
            save_file({name: value.contiguous() for name, value in obj.items()}, file, metadata={"format": "pt"})
        else:
            torch.save(obj, file)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{os.fspath(file)}: cannot be written ({error})") from error


class ModelSaving:
    """Saves the weights of the models in `state.prepared`; a base class of `Accelerator`.

    Attributes:
        state: holds every prepared model.
        collectives: collectives over all ranks.
    """

    state: AcceleratorState
    collectives: Collectives

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Returns the model that was passed to `prepare`; the engine still manages its parameters.

        Args:
            keep_fp32_wrapper: no effect; the engine adds no such wrapper.
            keep_torch_compile: False also removes the wrapper of `torch.compile(model)`.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(4, 1)
            >>> accelerator.unwrap_model(accelerator.prepare(model)) is model
            True
        """
        return unwrap_model(model, keep_torch_compile=keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Returns the model's full state dict in host memory on rank 0, and an empty dict on other ranks. (all ranks)

        It works at every stage and gathers one unit at a time. Weights have the dtype of the computation; checkpoints
        hold the fp32 master weights. Tied parameters are one tensor under each of their names.

        Args:
            unwrap: no effect; names are always those of the unwrapped model.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator, ZeroPlugin
            >>> accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=3))
            >>> model = accelerator.prepare(torch.nn.Linear(4, 1))
            >>> accelerator.get_state_dict(model)["weight"].shape
            torch.Size([1, 4])
        """
        engine = self._saved_engine(model)
        if engine is not None:
            return engine.consolidated_state_dict() or {}  # with None, save_pretrained would read sharded weights
        if self.collectives.rank != 0:
            return {}
        plain = plain_names(model)
        return {plain(name): value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Writes an object on rank 0, with `torch.save` or, for a dict of tensors, as safetensors.

        The other ranks return at once. For the weights of a prepared model, call `get_state_dict` first.

        Raises:
            CheckpointError: the file cannot be written.
        """
        if self.collectives.rank == 0:
            write_object(obj, f, safe_serialization=safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = _MAX_SHARD_SIZE,
        safe_serialization: bool = True,
        *,
        requantize: bool | str | os.PathLike[str] = False,
    ) -> list[str]:
        """Writes the weights as `model.safetensors`, or as several files with an index. (all ranks)

        Weights are streamed from the shards: no rank has more than one unsharded unit of the model at a time. Weights
        that transformers converted when it loaded them (merged experts, split projections, other names) get the names
        and shapes of their source.

        Args:
            max_shard_size: maximum size of a file: a number of bytes, "10GB", "512MiB". A larger tensor gets its own
                file.
            safe_serialization: False writes `pytorch_model.bin` files, each of which is built in memory.
            requantize: encode weights as FP8 or MXFP4 files of the model's source do; see `docs/fp8_mxfp4.md`. A
                folder, if the source is not that of the model's config.

        Returns:
            The names of the files.

        Raises:
            UsageError: the model is not prepared, or the size is invalid.
            CheckpointError: the folder cannot be written; on every rank.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(4, 1))
            >>> accelerator.save_model(model, "exported", max_shard_size="5GB")
            ['model.safetensors']
        """
        engine = self._saved_engine(model)
        with agreed(self.collectives, "save_model"):
            max_nbytes = parse_nbytes(max_shard_size)
            if engine is None:
                raise UsageError(
                    f"accelerator.save_model({type(model).__name__})",
                    expected="a model that prepare() returned",
                    fix="prepare it, or save it with its own save_pretrained",
                )
        assert engine is not None, "a missing engine was refused on every rank"
        return engine.save_model(
            save_directory, max_nbytes=max_nbytes, pickled=not safe_serialization, requantize=requantize
        )

    def save_pretrained(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = _MAX_SHARD_SIZE,
        safe_serialization: bool = True,
        *,
        requantize: bool | str | os.PathLike[str] = False,
    ) -> list[str]:
        """Writes the weights like `save_model`, and the config files that `from_pretrained` reads. (all ranks)

        These are `config.json` and, if the model can generate, `generation_config.json`. With `requantize`,
        `config.json` has the source's quantization config.

        Raises:
            UsageError: the model has no config that can be saved.
        """
        inner = unwrap_model(model, keep_torch_compile=False)
        configs = {"config": getattr(inner, "config", None), "generation_config": None}
        if callable(getattr(inner, "can_generate", None)) and inner.can_generate():
            configs["generation_config"] = getattr(inner, "generation_config", None)
        with agreed(self.collectives, "save_pretrained: config"):
            if not callable(getattr(configs["config"], "to_dict", None)):
                raise UsageError(
                    f"accelerator.save_pretrained({type(inner).__name__})",
                    expected="a transformers model with a config",
                    fix="use save_model, which writes only the weights",
                )
            if self.collectives.rank == 0:
                for name, config in configs.items():
                    if config is not None:
                        _write_config(Path(save_directory), name, config, inner, requantize)
        return self.save_model(model, save_directory, max_shard_size, safe_serialization, requantize=requantize)

    def _saved_engine(self, model: nn.Module) -> EngineBase | None:
        inner = unwrap_model(model, keep_torch_compile=False)
        for item in self.state.prepared:
            if model is item.engine or inner is unwrap_model(item.engine, keep_torch_compile=False):
                return item.engine
        return None


def _write_config(
    folder: Path, name: str, config: Any, model: nn.Module, requantize: bool | str | os.PathLike[str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save = getattr(config, "save_pretrained", None)
    if name != "config" and save is not None:
        save(folder)
        return
    content = config.to_dict()
    if name == "config":
        content["architectures"] = content.get("architectures") or [type(model).__name__]
        if requantize:
            source = json.loads((source_of(model, requantize) / "config.json").read_bytes())
            content["quantization_config"] = source["quantization_config"]
    write_durably(folder / f"{name}.json", (json.dumps(content, indent=2, sort_keys=True, default=str) + "\n").encode())
