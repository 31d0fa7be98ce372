"""`deepspeed.utils.zero_to_fp32`: unsharded weights of a checkpoint, with DeepSpeed's arguments and defaults."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zeroaccel.checkpoint import consolidate


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
