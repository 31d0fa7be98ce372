"""Scripts and calls for checkpoints, with DeepSpeed's arguments and defaults.

`deepspeed.utils.zero_to_fp32` converts to unsharded weights. `deepspeed.checkpoint.ds_to_universal` copies a checkpoint
to the requested name, so that programs find it there; any number of ranks can load the original too.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import io
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeroaccel.checkpoint import consolidate
from zeroaccel.checkpoint.find import find_checkpoint
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import is_deepspeed_checkpoint
from zeroaccel.checkpoint.plain_codec import decode
from zeroaccel.checkpoint.reshard import reshard
from zeroaccel.checkpoint.tensor_store import TensorStore
from zeroaccel.errors import UsageError
from zeroaccel.logs import logger

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Returns all weights of a checkpoint in fp32; see `zeroaccel.checkpoint.consolidate`.

    Args:
        lazy_mode: no effect: all tensors are read at once; to stream them, convert into files.
    """
    return consolidate.get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Fills a plain model on the CPU with a checkpoint's weights; ignores names that only one of them has."""
    return consolidate.load_state_dict_from_zero_checkpoint(model.cpu(), checkpoint_dir, tag, strict=False)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """Writes a checkpoint's weights to `pytorch_model.bin` in a folder, or with `safe_serialization` to safetensors.

    Args:
        max_shard_size: size limit of a file; larger weights become several files and an index. None for one file.
    """
    return convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, "float32", max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: Any = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """Like `convert_zero_checkpoint_to_fp32_state_dict`, in a dtype: a torch dtype or its name."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError("convert_zero_checkpoint_to_state_dict(dtype)", expected=f"one of {[*_DTYPES]}", got=name)
    limit = "1000TB" if max_shard_size is None else max_shard_size
    return consolidate.convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint_dir, output_dir, limit, safe_serialization, tag, exclude_frozen_parameters, dtype=_DTYPES[name]
    )


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[io.BytesIO]:
    """Returns in-memory files for `torch.load` from a folder such as `out/global_step10`; DeepSpeed returns paths.

    Returns:
        One file, with the entry that Lightning reads: `["optimizer_state_dict"]["zero_stage"]`.
    """
    _, manifest = find_checkpoint(Path(checkpoint_dir).parent, Path(checkpoint_dir).name)
    stage = sum(map(bool, manifest.sharded.values()))
    return [_torch_file({"optimizer_state_dict": {"zero_stage": stage, "partition_count": len(manifest.files)}})]


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> io.BytesIO:
    """Returns an in-memory file for `torch.load`: `client_state` and the counters of a checkpoint folder."""
    folder, manifest = find_checkpoint(Path(checkpoint_dir).parent, Path(checkpoint_dir).name)
    with TensorStore(folder, manifest) as store:
        client_state = decode(manifest.client_state, store.fetch)
    return _torch_file({**client_state, "dp_world_size": len(manifest.files), **manifest.counters})


def _torch_file(content: Mapping[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(dict(content), file)
    file.seek(0)
    return file


def plain_client_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Converts `client_state` to plain data; omits objects of unknown kinds, each with a warning.

    Enums become their values, dataclasses an `argparse.Namespace`, OmegaConf's containers and subclasses of dict, list
    and tuple the plain types, and numpy's numbers and arrays become numbers and tensors.

    Example:
        >>> import enum
        >>> Mode = enum.Enum("Mode", {"FAST": "fast"})
        >>> plain_client_state({"mode": Mode.FAST, "epoch": 3, "sizes": torch.Size([2, 3])})
        {'mode': 'fast', 'epoch': 3, 'sizes': (2, 3)}
    """
    return dict(_plain_items(state.items(), "client_state"))


_OMITTED = object()


def _plain_items(items: Iterable[tuple[Any, Any]], where: str) -> Iterator[tuple[Any, Any]]:
    for key, value in items:
        plain = _plain(value, f"{where}[{key!r}]")
        if plain is not _OMITTED:
            yield key, plain


def _plain(value: Any, where: str) -> Any:
    """Returns `value` as plain data, or `_OMITTED` with a warning if it has no plain form."""
    value = _unwrapped(value)
    if value is None or isinstance(value, (bytes, Tensor, PurePath)):
        return value
    for scalar in (bool, int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**dict(_plain_items(vars(value).items(), where)))
    if isinstance(value, Mapping):
        items = dict(_plain_items(value.items(), where))
        if type(value) is OrderedDict:
            return OrderedDict(items)
        return Counter(items) if type(value) is Counter else items
    for sequence, kinds in ((list, list), (tuple, tuple), (set, (set, frozenset))):
        if isinstance(value, kinds):
            return sequence(item for _, item in _plain_items(enumerate(value), where))
    logger.warning(
        "save_checkpoint: omits %s, since a %s.%s is not plain data; save its state_dict(), or use torch.save",
        where,
        type(value).__module__,
        type(value).__qualname__,
    )
    return _OMITTED


def _unwrapped(value: Any) -> Any:
    """Returns the contents of an object of a known kind; any other object unchanged."""
    if isinstance(value, enum.Enum):
        return value.value
    if type(value).__module__.startswith("omegaconf."):
        # A program that passes such objects has installed it.
        return importlib.import_module("omegaconf").OmegaConf.to_container(value)
    if is_dataclass(value) and not isinstance(value, type):
        return argparse.Namespace(**{field.name: getattr(value, field.name) for field in fields(value)})
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    return value


def main(arguments: list[str] | None = None) -> None:
    """Runs the script: `python -m deepspeed.utils.zero_to_fp32 CHECKPOINTS OUTPUT`."""
    _convert(argparse.ArgumentParser(prog="zero_to_fp32"), arguments)


def to_torch(arguments: list[str] | None = None) -> None:
    """Runs the script: `python -m deepspeed.utils.zero_to_torch CHECKPOINTS OUTPUT --dtype bfloat16`."""
    parser = argparse.ArgumentParser(prog="zero_to_torch")
    parser.add_argument("--dtype", choices=[*_DTYPES], required=True, help="dtype of floating-point tensors")
    _convert(parser, arguments)


def _convert(parser: argparse.ArgumentParser, arguments: list[str] | None) -> None:
    parser.add_argument("checkpoint_dir", help="folder that contains the file `latest`")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="tag of the checkpoint; by default the one in `latest`")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="omit frozen parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    options.pop("debug")
    convert_zero_checkpoint_to_state_dict(**options)


def universal_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the script's arguments; most of them have no effect."""
    parser = argparse.ArgumentParser(prog="ds_to_universal")
    parser.add_argument("--input_folder", required=True, help="folder of the checkpoint, such as out/global_step10")
    parser.add_argument("--output_folder", required=True, help="folder to write the copy into")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="has no effect")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="has no effect")
    parser.add_argument("--keep_temp_folder", action="store_true", help="has no effect: there is none")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="no effect: everything is checked")
    parser.add_argument("--inject_missing_state", action="store_true", help="has no effect")
    return parser.parse_args(arguments)


def to_universal(args: argparse.Namespace | None = None) -> None:
    """Writes the checkpoint in `args.input_folder` to `args.output_folder`, whose name becomes its tag.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        UsageError: it is a DeepSpeed checkpoint, which loads directly; or the output already contains a checkpoint.
    """
    args = universal_arguments() if args is None else args
    source, target = Path(args.input_folder), Path(args.output_folder)
    if is_deepspeed_checkpoint(source.parent, source.name):
        raise UsageError(
            "ds_to_universal(input_folder)",
            expected="a checkpoint of zeroaccel",
            got=f"a DeepSpeed checkpoint in {source}",
            fix="skip this step: engine.load_checkpoint loads it directly, on any number of ranks",
        )
    written = reshard(source.parent, target.parent, tag=source.name, new_tag=target.name)
    print(f"{written}: loads on any number of ranks, like {source}")
