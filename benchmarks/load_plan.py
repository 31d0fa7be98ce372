"""Predicts how long a job takes to load a model, and compares the prediction with loads on this machine.

    python benchmarks/load_plan.py
    python benchmarks/load_plan.py --rounds 5 --check

A rank's load at stage 3 is a sum of terms: a constant, a time per tensor of the files (headers, names, conversions
that the library plans; every rank does this for all tensors), the bytes of the rank's ranges over the rates of disk,
copy and conversion, and the exchanges. The constants come from checkpoints with narrow layers, the rate of copies from
a plain program that reads into new memory, and the rate of FP8 conversions from the smallest FP8 checkpoint. The check
is on others, on two ranks, in seconds of a rank's processor, which other programs on the machine change less than
seconds of the clock. Their files are in the page cache, so that the disk adds nothing. Then a table: large models on
stated disks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import load_models

BAR = 0.15
RANKS = 2
THIN = (8, 64)  # layers
SIZES = {"dense": (100, 200, 400), "mixture": (100, 200, 400), "fp8": (100, 200)}  # MB
MODELS = {  # tensors in the files, their bytes, bytes of weights in bf16, kind
    "70B, dense": (723, 141e9, 141e9, "dense"),
    "235B, mixture of 128 experts": (37_000, 470e9, 470e9, "mixture"),
    "671B, mixture of 256 experts in FP8": (91_000, 689e9, 1342e9, "mixture"),
}
PER_MACHINE, NVME, SHARED, TO_DEVICE = 8, 5e9, 20e9, 25e9  # ranks; bytes per second: machine, job, rank
MESSAGE_SECONDS, EXCHANGES, IMPORT_SECONDS = 50e-6, 6, 15.0
HEADER_NBYTES = 110  # of a tensor


@dataclass
class Terms:
    """The constants of a machine: seconds, seconds per tensor by kind, seconds per byte read and per byte decoded."""

    constant: float
    tensor: dict[str, float]
    copy: float
    decode: float

    def busy(self, kind: str, tensors: int, nbytes: float) -> float:
        """Returns seconds of a rank's processor for a load of which the rank keeps `nbytes` of the files."""
        per_byte = self.copy + (self.decode if kind == "fp8" else 0)
        return self.constant + self.tensor.get(kind, self.tensor["dense"]) * tensors + per_byte * nbytes

    def large(self, name: str, ranks: int, *, shared: bool) -> float:
        """Returns seconds from the start of the processes until a large model is loaded."""
        tensors, nbytes, weights, kind = MODELS[name]
        machines = max(ranks // PER_MACHINE, 1)
        headers = tensors * HEADER_NBYTES  # each machine reads all of them
        disk = (nbytes + machines * headers) / SHARED if shared else (nbytes / machines + headers) / NVME
        decoded = self.decode * nbytes / ranks if weights > nbytes else 0
        exchanges = EXCHANGES * ranks * MESSAGE_SECONDS
        busy = self.busy(kind, tensors, nbytes / ranks)
        return IMPORT_SECONDS + busy + decoded + disk + weights / ranks / TO_DEVICE + exchanges


def copy_seconds(folder: Path) -> float:
    """Returns seconds of the processor per byte that a plain program reads from cached files into new memory."""
    script = (
        "import pathlib, sys, time, torch\n"
        "files = sorted(pathlib.Path(sys.argv[1]).glob('*.safetensors'))\n"
        "start = time.process_time()\n"
        "for file in files:\n"
        "    with open(file, 'rb', buffering=0) as opened:\n"
        "        into = torch.empty(file.stat().st_size, dtype=torch.uint8)\n"
        "        opened.readinto(memoryview(into.numpy()))\n"
        "print((time.process_time() - start) / sum(file.stat().st_size for file in files))\n"
    )
    runs = [subprocess.check_output([sys.executable, "-c", script, str(folder)], text=True) for _ in range(5)]
    return statistics.median(map(float, runs))


@dataclass
class Load:
    """A load of a checkpoint: number of tensors, a rank's bytes of the files, and seconds of a rank's processor."""

    tensors: int
    nbytes: float
    busy: float


def measure(work: Path, rounds: int) -> dict[tuple[str, int, int], Load]:
    """Writes checkpoints and loads each on two ranks; returns loads by kind, size in MB, and width of layers."""
    names = [(kind, 25 * layers, 128) for kind in ("mixture", "dense") for layers in THIN]
    names += [(kind, mb, 1024) for kind, sizes in SIZES.items() for mb in sizes]
    load_models.write("dense", 25, work / "warm-up")
    folders = [work / "-".join(map(str, name)) for name in names]
    for (kind, mb, width), folder in zip(names, folders, strict=True):
        load_models.write(kind, mb, folder, width)
    seconds: list[list[float]] = [[] for _ in names]
    for _ in range(rounds):
        command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(RANKS), __file__]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        text = subprocess.check_output([*command, *map(str, folders)], text=True, cwd=load_models.ROOT, env=environment)
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("[{")]
        for each, ranks in zip(seconds, lines, strict=True):
            each += [rank["busy"] for rank in ranks]
    made = {}
    for name, folder, each in zip(names, folders, seconds, strict=True):
        files = list(folder.glob("*.safetensors"))
        tensors = sum(file.read_bytes().count(b'"data_offsets"') for file in files)
        made[name] = Load(tensors, sum(file.stat().st_size for file in files) / RANKS, statistics.median(each))
    return made


def calibrated(loads: Mapping[tuple[str, int, int], Load], copy: float) -> Terms:
    """Returns the terms from loads that the check does not use."""
    terms = Terms(0, {}, copy, 0)
    for kind in ("mixture", "dense"):
        few, many = (loads[kind, 25 * layers, 128] for layers in THIN)
        terms.tensor[kind] = (many.busy - few.busy - copy * (many.nbytes - few.nbytes)) / (many.tensors - few.tensors)
        terms.constant = few.busy - terms.tensor[kind] * few.tensors - copy * few.nbytes
    smallest = loads["fp8", SIZES["fp8"][0], 1024]
    terms.decode = (smallest.busy - terms.busy("fp8", smallest.tensors, smallest.nbytes)) / smallest.nbytes
    return terms


@click.command()
@click.option("--work", type=click.Path(path_type=Path, exists=True), default=None, help="Folder for the checkpoints.")
@click.option("--check", is_flag=True, help="Exit with 1 if a prediction is more than 15 % off.")
@click.option("--rounds", default=3, show_default=True)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
def main(work: Path | None, check: bool, rounds: int, folders: Sequence[Path]) -> None:
    """Compares predictions with loads, and prints the table of large models."""
    for folder in folders:  # as a rank
        load_models.rank(folder, "ranges")
    if folders:
        return
    missed = False
    with tempfile.TemporaryDirectory(dir=work) as made:
        loads = measure(Path(made), rounds)
        terms = calibrated(loads, copy_seconds(Path(made, f"dense-{SIZES['dense'][-1]}-1024")))
        click.echo(f"{terms}, load of the machine {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}\n")
        click.echo("| checkpoint | tensors | predicted, s | measured, s | off |\n| --- | ---: | ---: | ---: | ---: |")
        for kind, sizes in SIZES.items():
            for mb in sizes[kind == "fp8" :]:  # the smallest one is calibration
                load = loads[kind, mb, 1024]
                predicted = terms.busy(kind, load.tensors, load.nbytes)
                off = predicted / load.busy - 1
                missed |= abs(off) > BAR
                size = f"{kind}, {load.nbytes * RANKS / 1e6:.0f} MB"
                click.echo(f"| {size} | {load.tensors} | {predicted:.2f} | {load.busy:.2f} | {off:+.0%} |")
    click.echo("\n| model | ranks | a copy per machine, s | a shared folder, s |\n| --- | ---: | ---: | ---: |")
    for name in MODELS:
        for ranks in (8, 64, 1024):
            local, shared = (terms.large(name, ranks, shared=each) for each in (False, True))
            click.echo(f"| {name} | {ranks:,} | {local:.0f} | {shared:.0f} |")
    sys.exit(check and missed)


if __name__ == "__main__":
    main()
