"""Functions that read the unsharded weights of a checkpoint into a state dict, a model, or files.

They read with `zero_to_fp32`, the file that `drop_script` copies into folders of checkpoints. This module adds the
parts that need imports: torch modules, this package's errors and, through `open_source`, DeepSpeed's checkpoints. It
needs no engine, config, GPU or process group.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zeroaccel.checkpoint import zero_to_fp32
from zeroaccel.checkpoint.atomic_write import remove_abandoned, write_durably
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import open_source
from zeroaccel.checkpoint.source_layout import as_in_files
from zeroaccel.config.bounds import read_at_most
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.zero.access.safetensors_file import are_other_codes, dtype_name
from zeroaccel.zero.module_names import for_model, plain_names
from zeroaccel.zero.quantized_weights import LAYOUT, PACKED, load_state, state_tensors
from zeroaccel.zero.tensor_subclasses import is_wrapper

__all__ = [
    "SCRIPT_NAME",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "drop_script",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "named_errors",
]

SCRIPT_NAME = "zero_to_fp32.py"
_PART_NBYTES = 1 << 30  # weights in memory at a time, besides the model, while loading


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Converts errors of the standalone file to errors of this package."""
    try:
        yield
    except zero_to_fp32.ArgumentsError as error:
        raise UsageError(str(error)) from error
    except zero_to_fp32.ConversionError as error:
        raise CheckpointError(str(error)) from error


def drop_script(folder: Path) -> None:
    """Writes `zero_to_fp32.py`, executable, into a folder of checkpoints unless it is there and up to date."""
    content = Path(zero_to_fp32.__file__).read_bytes()
    path = folder / SCRIPT_NAME
    with contextlib.suppress(OSError):
        if not path.is_symlink() and read_at_most(path, len(content), regular=True) == content:
            return
    write_durably(path, content, mode=0o755)
    remove_abandoned(path)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor]:
    """Returns all weights and persistent buffers on the CPU: floating-point ones in fp32, except 8-bit floats.

    Args:
        checkpoint_dir: the folder with `latest`.
        tag: tag of a checkpoint in the folder; None for the tag in `latest`.

    Returns:
        name -> tensor, in the model's order; all names of a tied parameter map to the same tensor.

    Raises:
        CheckpointError: the checkpoint does not exist, or is damaged or incomplete.

    Example::

        engine.save_checkpoint("checkpoints")  # on any number of ranks, at any stage
        state = get_fp32_state_dict_from_zero_checkpoint("checkpoints")  # later, in a single process
        model.load_state_dict(state)
    """
    options = zero_to_fp32.Options(exclude_frozen=exclude_frozen_parameters)
    with named_errors():
        source = open_source(checkpoint_dir, tag)
        return zero_to_fp32.read_tensors(source, zero_to_fp32.select(source, options)).state_dict()


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None, *, strict: bool = True
) -> nn.Module:
    """Copies a checkpoint's weights into a plain model, rounded to the model's dtypes, part by part.

    Args:
        model: a plain model, not an engine's; its tensors stay on their devices.
        strict: if True, every name must be in both, except parameters that were saved without values.

    Returns:
        `model`.

    Raises:
        CheckpointError: names or shapes differ; the message lists them, and the model is unchanged. Or the checkpoint
            is damaged, and the model may contain a part of it.
    """
    with named_errors():
        source = open_source(checkpoint_dir, tag)
        _check_fit(model, source, strict=strict)
        targets = zero_to_fp32.select(source, zero_to_fp32.Options())
        for shard in zero_to_fp32.shard_plan(targets, "bin", _PART_NBYTES):
            values = zero_to_fp32.read_tensors(source, shard.targets).state_dict()
            # Quantization libraries load codes by name, but ignore or reject the scales that layers hold.
            scales = {name: values.pop(name) for name, _ in state_tensors(model) if name in values}
            model.load_state_dict(for_model(values, model), strict=False)
            load_state(model, scales)
    return model


def _check_fit(model: nn.Module, source: zero_to_fp32.Source, *, strict: bool) -> None:
    """Raises CheckpointError unless the shapes, and if `strict` the names, agree."""
    named, plain = model.state_dict(keep_vars=True).items(), plain_names(model)
    tensors = {plain(name): value for name, value in named if isinstance(value, Tensor) and not is_wrapper(value)}
    tensors |= dict(state_tensors(model))
    saved = {weight.name: weight.shape for weight in source.weights}
    saved |= {alias: saved[name] for alias, name in source.ties.items()}
    differences = [
        f"{name} is {list(saved[name])} in the checkpoint and {list(tensors[name].shape)} in the model"
        for name in sorted(saved.keys() & tensors.keys())
        if saved[name] != tuple(tensors[name].shape) and PACKED not in name
    ]
    dtypes = {weight.name: weight.dtype for weight in source.weights}
    differences += [
        f"{name} is {dtypes[name]} in the checkpoint and {dtype_name(tensors[name].dtype)} in the model"
        for name in sorted(dtypes.keys() & tensors.keys())
        if are_other_codes(dtypes[name], dtype_name(tensors[name].dtype))
    ]
    if strict:
        filled = {id(tensors[name]) for name in saved.keys() & tensors.keys()}  # one name of a tied parameter is enough
        missing = {name for name in tensors if name.removesuffix(LAYOUT) not in saved} - set(source.left_out)
        differences += [
            f"{name} is not in the checkpoint" for name in sorted(missing) if id(tensors[name]) not in filled
        ]
        differences += [f"{name} is not in the model" for name in sorted(saved.keys() - tensors.keys())]
    if differences:
        fix = "" if not strict else "; load it into the same model, or pass strict=False to load the names in common"
        raise CheckpointError(f"checkpoint {source.tag} does not fit the model: {'; '.join(differences)}{fix}")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int = "5GB",
    safe_serialization: bool | None = None,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    like: str | os.PathLike[str] | None = None,
    allow_differences: bool = False,
    requantize: bool = False,
    **options: Any,
) -> list[Path]:
    """Writes a checkpoint's unsharded weights to files, streaming, like `zeroaccel zero-to-fp32`.

    Args:
        output_dir: a folder, or a file name with the suffix .safetensors, .bin or .pt.
        safe_serialization: True or None for safetensors files in a folder, False for .bin files.
        like: a folder or index of model files; the output gets their names, shapes and layout.
        allow_differences: with `like`, print which names differ instead of raising an error.
        requantize: with `like`, encode weights in the format of these files.
        options: `dtype`, `only`, `workers` of `zero_to_fp32.Options`.

    Returns:
        The paths of the weight files.

    Raises:
        CheckpointError: the checkpoint is damaged, or the output folder is not writable.
        UsageError: an argument is wrong.
    """
    form = None if safe_serialization is None else "safetensors" if safe_serialization else "bin"
    with named_errors():
        limit = zero_to_fp32.parse_nbytes(str(max_shard_size))
        conversion = zero_to_fp32.Options(
            form=form, max_shard_nbytes=limit, exclude_frozen=exclude_frozen_parameters, **options
        )
        source = open_source(checkpoint_dir, tag)
        if like is not None:
            source = as_in_files(source, Path(like), allow_differences=allow_differences, requantize=requantize)
        return zero_to_fp32.convert(source, Path(output_dir), conversion)
