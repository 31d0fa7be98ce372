"""`deepspeed.checkpoint.ds_to_universal`: a checkpoint for any number of ranks, which zeroaccel's are as they are.

The script writes the checkpoint once more under the name that is asked for, so that what loads it from there finds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zeroaccel.checkpoint.formats.deepspeed_checkpoint import is_deepspeed_checkpoint
from zeroaccel.checkpoint.reshard import reshard
from zeroaccel.errors import UsageError


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
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


def main(args: argparse.Namespace | None = None) -> None:
    """Writes the checkpoint in `args.input_folder` into `args.output_folder`, whose name becomes its tag.

    Raises:
        CheckpointError: there is none, or it is damaged.
        UsageError: it is one of DeepSpeed's, which loads as it is; or there is one in the output already.
    """
    args = parse_arguments() if args is None else args
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
