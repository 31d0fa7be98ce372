"""Scripts and calls for checkpoints, with DeepSpeed's arguments and defaults.

`deepspeed.utils.zero_to_fp32` makes unsharded weights. `deepspeed.checkpoint.ds_to_universal` writes a checkpoint once
more under the name that is asked for, so that what loads it from there finds it: any number of ranks loads it anyway.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zeroaccel.checkpoint import consolidate
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import is_deepspeed_checkpoint
from zeroaccel.checkpoint.reshard import reshard
from zeroaccel.errors import UsageError


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """All weights of a checkpoint in fp32; see `zeroaccel.checkpoint.consolidate`.

    Args:
        lazy_mode: of no effect: tensors are values at once; to stream them, convert into files.
    """
    return consolidate.get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Fills a plain model on the CPU with a checkpoint's weights; names that only one of them has are left out."""
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
        max_shard_size: of one file; with more weights there are several and an index. None for one file.
    """
    limit = "1000TB" if max_shard_size is None else max_shard_size
    return consolidate.convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint_dir, output_dir, limit, safe_serialization, tag, exclude_frozen_parameters
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs the script: `python -m deepspeed.utils.zero_to_fp32 CHECKPOINTS OUTPUT`."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32")
    parser.add_argument("checkpoint_dir", help="folder with the file `latest`")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="checkpoint; by default the one that `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="of no effect")
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    options.pop("debug")
    convert_zero_checkpoint_to_fp32_state_dict(**options)


def universal_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The script's arguments; the numbers of workers and the rest have no effect."""
    parser = argparse.ArgumentParser(prog="ds_to_universal")
    parser.add_argument("--input_folder", required=True, help="folder of the checkpoint, such as out/global_step10")
    parser.add_argument("--output_folder", required=True, help="folder to write it into, beside or elsewhere")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="of no effect")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="of no effect")
    parser.add_argument("--keep_temp_folder", action="store_true", help="of no effect: there is none")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="of no effect: all is checked")
    parser.add_argument("--inject_missing_state", action="store_true", help="of no effect")
    return parser.parse_args(arguments)


def to_universal(args: argparse.Namespace | None = None) -> None:
    """Writes the checkpoint in `args.input_folder` into `args.output_folder`, whose name becomes its tag.

    Raises:
        CheckpointError: there is none, or it is damaged.
        UsageError: it is one of DeepSpeed's, which loads as it is; or there is one in the output already.
    """
    args = universal_arguments() if args is None else args
    source, target = Path(args.input_folder), Path(args.output_folder)
    if is_deepspeed_checkpoint(source.parent, source.name):
        raise UsageError(
            "ds_to_universal(input_folder)",
            expected="a checkpoint of zeroaccel",
            got=f"one of DeepSpeed in {source}",
            fix="leave this step out: engine.load_checkpoint loads it as it is, on any number of ranks",
        )
    written = reshard(source.parent, target.parent, tag=source.name, new_tag=target.name)
    print(f"{written}: loads on any number of ranks, as {source} does")
