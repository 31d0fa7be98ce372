"""`zeroaccel checkpoint` and `zero-to-fp32`: inspect, verify, reshard, convert and consolidate checkpoints.

The commands use `zeroaccel.checkpoint`; they read weights only to check or move them, and import torch only for
torch.distributed.checkpoint and .bin files. The standalone program declares the options of `zero-to-fp32`; unlike that
program, this command also reads DeepSpeed's checkpoints. The page of `inspect` shows which rank's file holds which
interval of each tensor.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from zeroaccel.checkpoint import zero_to_fp32 as program
from zeroaccel.checkpoint.find import checkpoint_folders, find_checkpoint, refuse_trainers_folder
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import (
    is_deepspeed_checkpoint,
    open_deepspeed_checkpoint,
    open_source,
)
from zeroaccel.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, Manifest, read_latest, read_manifest
from zeroaccel.checkpoint.rank_file import RankFileReader
from zeroaccel.checkpoint.reshard import reshard
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.zero.access.safetensors_file import ITEMSIZE

from .pages.frame import COLOURS, Table, bar, check_page_path, escaped, figure, legend, page, write_page

_FOLDER = click.Path(path_type=Path)
_TAG = click.option("-t", "--tag", help="Only the checkpoint of this tag.")


@click.group()
def checkpoint() -> None:
    """Inspect, verify, reshard and convert checkpoints.

    \b
    Examples:
      zeroaccel checkpoint inspect run/checkpoints
      zeroaccel checkpoint verify run/checkpoints
    """


@checkpoint.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@_TAG
@click.option("--html", "html_path", type=click.Path(dir_okay=False), metavar="FILE", help="Write an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print every interval of every tensor as JSON.")
def inspect(folder: Path, tag: str | None, html_path: str | None, as_json: bool) -> None:
    """Show the checkpoints in DIR: contents per rank, and completeness. Reads no weights.

    For a checkpoint of DeepSpeed, lists its files. --html and --json show which rank's file has which interval of each
    tensor, for one checkpoint: that of --tag, or by default the one that `latest` names.

    \b
    Examples:
      zeroaccel checkpoint inspect out
      zeroaccel checkpoint inspect out --tag step100 --html step100.html
    """
    check_page_path(html_path)
    if html_path is not None or as_json:
        if is_deepspeed_checkpoint(folder, tag):
            fix = "load and save it with zeroaccel first, or omit --html and --json to list its files"
            raise UsageError(f"{folder}", expected="a checkpoint of zeroaccel", got="one of DeepSpeed", fix=fix)
        is_one = tag is None and (folder / MANIFEST_NAME).exists()
        manifest = read_manifest(folder) if is_one else find_checkpoint(folder, tag)[1]
        if html_path is not None:
            where = folder if is_one else folder / manifest.tag
            write_page(Path(html_path), checkpoint_page(manifest, where))
            click.echo(f"zeroaccel: page written to {html_path}", err=True)
        if as_json:
            click.echo(json.dumps(checkpoint_facts(manifest), indent=1))
        return
    if is_deepspeed_checkpoint(folder, tag):
        theirs = open_deepspeed_checkpoint(folder, tag)
        click.echo(
            f"{theirs.tag}: DeepSpeed {theirs.version}, zero stage {theirs.stage}, world_size {theirs.world_size}, "
            f"step {theirs.counters['global_steps']}"
        )
        click.echo("\n".join(f"  {file.path.relative_to(theirs.folder)}: {file.nbytes} bytes" for file in theirs.files))
        return
    for each in _chosen(folder, tag):
        try:
            manifest = read_manifest(each)
        except CheckpointError as error:
            click.echo(f"{each.name}: not valid: {error}")
        else:
            click.echo("\n".join(_described(each, manifest)))
    if (folder / LATEST_NAME).exists():
        click.echo(f"latest: {read_latest(folder)}")


@checkpoint.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@_TAG
def verify(folder: Path, tag: str | None) -> None:
    """Read every byte of the checkpoints in DIR and check the checksums.

    Exits with 1 if one is damaged. For DeepSpeed's checkpoints, checks that of --tag or the one that `latest` names.

    \b
    Examples:
      zeroaccel checkpoint verify run/checkpoints --tag global_step100
    """
    if is_deepspeed_checkpoint(folder, tag):
        theirs = open_deepspeed_checkpoint(folder, tag)
        theirs.verify()
        click.echo(f"{theirs.tag}: valid, {sum(file.nbytes for file in theirs.files)} bytes read, written by DeepSpeed")
        return
    damaged = []
    for each in _chosen(folder, tag):
        try:
            manifest = read_manifest(each)
        except CheckpointError as error:
            click.echo(f"{each.name}: not valid: {error}")
            damaged.append(each.name)
            continue
        problems = []
        for record, pieces in zip(manifest.files, manifest.pieces_by_file(), strict=True):
            try:
                with RankFileReader(each, record) as file:
                    file.check_pieces(pieces)
                    file.verify()
            except CheckpointError as error:
                problems.append(f"  {error}")
        click.echo(f"{each.name}: {'damaged' if problems else 'valid'}, {manifest.nbytes} bytes read")
        if problems:
            click.echo("\n".join(problems))
            damaged.append(each.name)
    if not damaged and tag is None and not (folder / MANIFEST_NAME).exists():
        find_checkpoint(folder)  # `latest` must name an existing checkpoint
    if damaged:
        raise CheckpointError(f"{folder}: damaged or incomplete: {', '.join(damaged)}")


@checkpoint.command("reshard")
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@click.option("--world_size", "--world-size", type=click.IntRange(1), required=True, help="New number of ranks.")
@_TAG
def reshard_command(folder: Path, out: Path, world_size: int, tag: str | None) -> None:
    """Write the checkpoint in DIR into OUT for another number of ranks, with the same values bit by bit.

    \b
    Examples:
      zeroaccel checkpoint reshard run/checkpoints for_8_ranks --world_size 8
    """
    folder_written = reshard(folder, out, world_size, tag)
    click.echo(f"{folder_written}: {world_size} files, {read_manifest(folder_written).nbytes} bytes")


@checkpoint.command("import")
@click.argument("folder", metavar="DCP_DIR", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@click.option("-t", "--tag", help="Name of the checkpoint in OUT; by default that of the folder.")
@click.option("--world_size", "--world-size", type=click.IntRange(1), default=1, help="Ranks of the checkpoint in OUT.")
@click.option("--tie", "ties", multiple=True, metavar="ALIAS=NAME", help="Two names of one tied parameter.")
@click.option("--buffer", "buffers", multiple=True, metavar="NAME", help="Name of a buffer, which DCP does not mark.")
def import_command(
    folder: Path, out: Path, tag: str | None, world_size: int, ties: tuple[str, ...], buffers: tuple[str, ...]
) -> None:
    """Convert a checkpoint of torch.distributed.checkpoint (FSDP2) to zeroaccel's format in OUT.

    An engine can also load such a folder without conversion.

    \b
    Examples:
      zeroaccel checkpoint import fsdp2_checkpoint ours --world_size 4
    """
    from zeroaccel.checkpoint.formats.dcp_import import import_dcp

    pairs = dict(_pair(tie) for tie in ties)
    name = tag or folder.resolve().name
    folder_written = import_dcp(folder, out, tag=name, world_size=world_size, ties=pairs, buffers=buffers)
    click.echo(f"{folder_written}: {world_size} files, {read_manifest(folder_written).nbytes} bytes")


@checkpoint.command("export")
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.argument("out", metavar="DCP_DIR", type=_FOLDER)
@_TAG
def export_command(folder: Path, out: Path, tag: str | None) -> None:
    """Convert the checkpoint in DIR to a folder of torch.distributed.checkpoint, for FSDP2.

    \b
    Examples:
      zeroaccel checkpoint export run/checkpoints fsdp2_checkpoint
    """
    from zeroaccel.checkpoint.formats.dcp_export import export_dcp

    click.echo(f"{export_dcp(folder, out, tag)}: written for torch.distributed.checkpoint.load")


def _pair(tie: str) -> tuple[str, str]:
    alias, equals, name = tie.partition("=")
    if not (alias and equals and name):
        raise UsageError("--tie", expected="ALIAS=NAME", got=tie)
    return alias, name


def _chosen(folder: Path, tag: str | None) -> list[Path]:
    if (folder / MANIFEST_NAME).exists() and tag is None:
        return [folder]
    folders = [each for each in checkpoint_folders(folder) if tag in (None, each.name)]
    if not folders:
        refuse_trainers_folder(folder)
        what = "a checkpoint" if tag is None else f"a checkpoint {tag}"
        raise UsageError(f"{folder}", expected=f"a folder with {what} in it")
    return folders


def _described(folder: Path, manifest: Manifest) -> list[str]:
    stage = sum(manifest.sharded.values())
    numel = sum(manifest.tensors[key].numel for fqn in manifest.order if (key := manifest.weight_key(fqn)) is not None)
    frozen = sum(not parameter.trainable for parameter in manifest.parameters.values())
    kinds: Counter[str] = Counter()
    nbytes_by_file: Counter[int] = Counter()
    for key, tensor in manifest.tensors.items():
        kind = "/".join(key.split("/")[: 2 if key.startswith("state/") else 1])
        kinds[kind] += tensor.numel * ITEMSIZE[tensor.dtype]
        for file, _, length, _ in tensor.pieces:
            nbytes_by_file[file] += length * ITEMSIZE[tensor.dtype]
    optimizer = manifest.optimizer["type"] if manifest.optimizer else "none"
    return [
        f"{folder.name}: zero stage {stage}, world_size {manifest.world_size}, step {manifest.global_steps}, "
        f"optimizer {optimizer}",
        f"  {len(manifest.parameters)} parameters ({frozen} frozen, {len(manifest.ties)} ties), {numel} elements; "
        f"{len(manifest.buffers)} buffers",
        *(f"  {kind}: {nbytes} bytes" for kind, nbytes in sorted(kinds.items())),
        *(
            f"  rank {record.rank}: {record.name}, {record.nbytes} bytes, {nbytes_by_file[index]} of tensors"
            for index, record in enumerate(manifest.files)
        ),
    ]


@click.command(
    "zero-to-fp32", context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def zero_to_fp32(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Convert a sharded checkpoint to full weights, on one machine without a GPU."""
    try:
        program.run(arguments, ctx.command_path, open_source, _as_in_files)
    except program.ArgumentsError as error:
        raise click.UsageError(str(error), ctx) from error
    except program.ConversionError as error:
        raise CheckpointError(str(error)) from error


def _as_in_files(source: program.Source, path: Path, allow_differences: bool, requantize: bool) -> program.Source:
    from zeroaccel.checkpoint.source_layout import as_in_files  # imports torch and transformers

    return as_in_files(source, path, allow_differences=allow_differences, requantize=requantize)


_LEFT, _WIDTH, _BAR, _GAP = 330, 640, 14, 6
_MOST_BARS, _MOST_ROWS = 150, 500


def checkpoint_facts(manifest: Manifest) -> dict[str, Any]:
    """Returns the manifest as plain data: elements [start, stop) of each tensor, and the rank whose file has them."""
    tensors = {
        key: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "intervals": [
                {
                    "rank": manifest.files[file].rank,
                    "file": manifest.files[file].name,
                    "start": start,
                    "stop": start + length,
                    "byte": offset,
                }
                for file, start, length, offset in tensor.pieces
            ],
        }
        for key, tensor in manifest.tensors.items()
    }
    return {
        "tag": manifest.tag,
        "stage": sum(manifest.sharded.values()),
        "world_size": manifest.world_size,
        "step": manifest.global_steps,
        "optimizer": manifest.optimizer["type"] if manifest.optimizer else None,
        "files": [{"rank": file.rank, "name": file.name, "bytes": file.nbytes} for file in manifest.files],
        "tensors": tensors,
    }


def checkpoint_page(manifest: Manifest, folder: Path) -> str:
    """Returns the page of a checkpoint as HTML. With many tensors it shows the first ones and the number of others."""
    facts = checkpoint_facts(manifest)
    title = f"Checkpoint {facts['tag']}: stage {facts['stage']}, {facts['world_size']} ranks, step {facts['step']}"
    # One bar per parameter: its master and its states are sharded in the same way.
    drawn = [key for fqn in manifest.order if (key := manifest.weight_key(fqn)) is not None][:_MOST_BARS]
    ranks = sorted({file["rank"] for file in facts["files"]})
    files = Table(
        "Files", ["file", "rank", "bytes"], [[entry["name"], entry["rank"], entry["bytes"]] for entry in facts["files"]]
    )
    rows = [
        [
            key,
            tensor["dtype"],
            " x ".join(map(str, tensor["shape"])) or "one value",
            interval["rank"],
            interval["start"],
            interval["stop"],
            (interval["stop"] - interval["start"]) * ITEMSIZE[tensor["dtype"]],
            interval["file"],
        ]
        for key, tensor in facts["tensors"].items()
        for interval in tensor["intervals"]
    ]
    left_out = len(rows) - _MOST_ROWS
    headings = ["tensor", "dtype", "shape", "rank", "from element", "to", "bytes", "file"]
    intervals = Table("Elements [from, to) of each tensor", headings, rows[:_MOST_ROWS], texts=(0, 1, 2, 7))
    weights = len([fqn for fqn in manifest.order if manifest.weight_key(fqn) is not None])
    body = [
        *_summary(manifest, folder),
        "<h2>Intervals by rank</h2>",
        f"<p>Each bar is one parameter from its first element to its last; {len(drawn)} of {weights} are drawn.</p>",
        legend({f"rank {rank}": _colour(rank) for rank in ranks[: len(COLOURS)]}),
        _bars(facts, drawn),
        "<h2>Files</h2>",
        files.html(),
        "<h2>Intervals</h2>",
        intervals.html(),
    ]
    if left_out > 0:
        body.append(f"<p>{left_out} more intervals are left out; --json has all of them.</p>")
    return page(title, body, about=f"Optimizer: {facts['optimizer'] or 'none'}.")


def _summary(manifest: Manifest, folder: Path) -> list[str]:
    """Returns size, parameters and date of a checkpoint, and the commands to check, resume and convert it."""
    numel = sum(manifest.tensors[key].numel for fqn in manifest.order if (key := manifest.weight_key(fqn)) is not None)
    saved = datetime.fromtimestamp(manifest.saved_at, timezone.utc)
    facts = Table(
        "Summary",
        ["fact", "value"],
        [
            ["size", f"{manifest.nbytes / 1e9:.3g} GB in {len(manifest.files)} files"],
            ["parameters", f"{numel:,} in {len(manifest.parameters)} tensors"],
            ["saved", f"{saved:%Y-%m-%d %H:%M} UTC"],
            ["verified", "no: this page reads the manifest only; `zeroaccel checkpoint verify` reads every byte"],
        ],
        texts=(0, 1),
    )
    root, tag = shlex.quote(str(folder.parent)), shlex.quote(folder.name)
    commands = [
        f"zeroaccel checkpoint verify {root} --tag {tag}",
        f"zeroaccel zero-to-fp32 {root} weights --tag {tag}",
        f"engine.load_checkpoint({str(folder.parent)!r}, tag={folder.name!r})  # in the script, to resume",
    ]
    return [
        "<h2>Summary</h2>",
        facts.html(),
        "<h2>Verify, convert, resume</h2>",
        f"<pre>{escaped(chr(10).join(commands))}</pre>",
    ]


def _bars(facts: dict[str, Any], drawn: list[str]) -> str:
    parts = []
    for index, key in enumerate(drawn):
        y, tensor = 4 + index * (_BAR + _GAP), facts["tensors"][key]
        name = key.partition("/")[2]
        shown = name if len(name) <= 46 else f"...{name[-43:]}"
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 11}" class="end">{escaped(shown)}</text>')
        numel = max([interval["stop"] for interval in tensor["intervals"]], default=1)
        for interval in tensor["intervals"]:
            width = (interval["stop"] - interval["start"]) / numel * _WIDTH
            at, said = (
                _LEFT + interval["start"] / numel * _WIDTH,
                f"rank {interval['rank']}: {interval['start']} to {interval['stop']}",
            )
            parts.append(bar(at, y, width, _BAR, _colour(interval["rank"]), said))
    label = "Intervals of each parameter by rank; the table below has the numbers"
    return figure("".join(parts), _LEFT + _WIDTH + 10, 8 + len(drawn) * (_BAR + _GAP), label)


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]
