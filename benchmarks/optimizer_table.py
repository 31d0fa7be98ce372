"""Tests which optimizers give the bits of torch at every stage, on every tier, on one to three ranks.

    python benchmarks/optimizer_table.py --markdown result.md
    python benchmarks/optimizer_table.py --only AdamW,Muon --worlds 2

Every optimizer trains a small model for some steps in the engine. The reference is the same class over a copy of the
unsharded model, which takes the engine's reduced gradients (`safe_get_full_grad`) and steps as torch does. A cell shows
if all weights have the same bits at the end on all ranks; if not, by how many units in the last place they differ, or
the reason why the engine refuses the optimizer. The table includes optimizers of packages that are importable;
`--packages` adds a folder to the import path.

The exit code is 1 if an optimizer neither has torch's bits nor is refused. Elementwise optimizers are exempt, because
torch's kernels may round the end of a vector differently in flat pieces.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroaccel
from zeroaccel.errors import ZeroAccelError
from zeroaccel.optim.optimizer_factory import build_optimizer
from zeroaccel.optim.optimizer_kinds import classify
from zeroaccel.zero.access.safe_get_set import safe_get_full_grad

STEPS = 6
TIERS = ("device", "cpu", "nvme")
SAME = "same bits"
_Make = Callable[[nn.Module], Optimizer]


class Small(nn.Module):
    """An embedding, a convolution, matrices, vectors and a scalar; no width is a multiple of a number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 10)
        self.mix = nn.Conv1d(10, 10, 3, padding=1)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 23), nn.Linear(23, 10)) for _ in "ab")
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(10, 29, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.embed(tokens[:, :-1]).mT).mT
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy((self.head(x) * self.scale).flatten(0, 1), tokens[:, 1:].flatten())


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _of_all(kind: Callable[..., Optimizer], **settings: Any) -> _Make:
    return lambda model: kind(_trained(model), **settings)


def _matrices(kind: Callable[..., Optimizer], **settings: Any) -> _Make:
    return lambda model: kind([param for param in _trained(model) if param.dim() == 2], **settings)


def _named(name: str, **settings: Any) -> _Make:
    return lambda model: build_optimizer(name, settings, _trained(model), model)


def _decayed(kind: Callable[..., Optimizer], **settings: Any) -> _Make:
    """Returns a constructor with weight decay on matrices only, as in most scripts."""

    def make(model: nn.Module) -> Optimizer:
        matrices = [param for param in _trained(model) if param.dim() > 1]
        vectors = [param for param in _trained(model) if param.dim() <= 1]
        return kind([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], **settings)

    return make


_PACKAGES: Mapping[str, str] = {
    "torch.optim": "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD Adafactor LBFGS SparseAdam",
    "transformers.optimization": "Adafactor",
    "lion_pytorch": "Lion",
    "schedulefree": "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree",
    "prodigyopt": "Prodigy",
    "dadaptation": "DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD",
    "torch_optimizer": "AdaBound AdamP AggMo Apollo DiffGrad Lamb LARS MADGRAD NovoGrad QHAdam SGDP SWATS Shampoo Yogi",
    "pytorch_optimizer": (
        "ADOPT AdEMAMix AdaBelief AdaFactor AdaGC Adai AdamS Adan AvaGrad CAME Conda FlashAdamW Fromage GaLore Grams "
        "Kate LARS LaProp Lamb MARS Nero NovoGrad Prodigy QHAdam RACS Ranger SCION SGDSaI SM3 SOAP SPlus "
        "ScalableShampoo ScheduleFreeAdamW Shampoo SignSGD StableAdamW SWATS Tiger Yogi"
    ),
}


def contenders() -> dict[str, _Make]:
    """Returns name -> constructor of all optimizers that can be imported."""
    found: dict[str, _Make] = {}
    found["torch.AdamW, two groups"] = _decayed(torch.optim.AdamW, lr=0.01)
    if hasattr(torch.optim, "Muon"):
        found["torch.Muon, matrices"] = _matrices(torch.optim.Muon, lr=0.01)
    for name in ("AdamW", "Lion", "Adagrad", "SGD", "Lamb", "Muon"):
        found[name] = _named(name, **({} if name == "Muon" else {"lr": 0.01}))
    for package, names in _PACKAGES.items():
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        for name in names.split():
            if (kind := getattr(module, name, None)) is not None:
                found[f"{package.split('.')[0]}.{name}"] = _of_all(kind)
    return found


# ---- one rank ----


def _settings(stage: int, tier: str, folder: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 512}
    if tier != "device":
        zero["offload_optimizer"] = {"device": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}


def _made(make: _Make, model: nn.Module) -> Optimizer:
    with contextlib.redirect_stdout(io.StringIO()):
        optimizer = make(model)
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def _ulps(one: Tensor, other: Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    if not bool(one.isfinite().all() and other.isfinite().all()):
        return math.inf
    unit = torch.maximum(one.abs(), other.abs()).clamp(min=2.0**-126).log2().floor().exp2() * 2.0**-23
    return float(((one - other).abs() / unit).max())


def _compared(make: _Make, stage: int, tier: str, folder: str) -> str:
    """Returns the text of a cell, on all ranks."""
    torch.manual_seed(7)
    whole = Small()
    plain = _made(make, whole)
    torch.manual_seed(7)
    model = Small()
    optimizer = _made(make, model)
    engine, *_ = zeroaccel.initialize(model, optimizer=optimizer, config=_settings(stage, tier, folder))
    generator = torch.Generator().manual_seed(1000 + engine.collectives.rank)
    try:
        for _ in range(STEPS):
            engine.backward(engine(torch.randint(0, 29, (2, 8), generator=generator)))
            for param, plain_param in zip(model.parameters(), whole.parameters(), strict=True):
                plain_param.grad = safe_get_full_grad(param)
            engine.step()
            plain.step()
    finally:
        engine.destroy()
    worst = max(_ulps(a.detach(), b.detach()) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    return SAME if worst == 0 else f"{worst:.0f} ulp"


def _rank(job: Mapping[str, Any]) -> None:
    warnings.simplefilter("ignore")
    for folder in job["packages"]:
        sys.path.append(folder)
    made = contenders()
    for name in job["names"]:
        for stage, tier in _placements():
            try:
                found = _compared(made[name], stage, tier, job["folder"])
            except ZeroAccelError as error:
                found = f"refused: {error}"
            except Exception as error:
                found = f"error: {type(error).__name__}: {error}"
            found_by = [""] * int(os.environ["WORLD_SIZE"])
            if len(found_by) > 1:
                zeroaccel.comm.topology.init_process_group()
                torch.distributed.all_gather_object(found_by, found)
            else:
                found_by = [found]
            if os.environ["RANK"] == "0":
                words = found if all(text == found for text in found_by) else "ranks differ: " + " | ".join(found_by)
                print(json.dumps({"name": name, "stage": stage, "tier": tier, "found": words}), flush=True)


def _placements() -> Iterator[tuple[int, str]]:
    yield 0, "device"
    for stage in (1, 2, 3):
        for tier in TIERS:
            yield stage, tier


# ---- the driver ----


def _run(world_size: int, names: list[str], packages: tuple[str, ...], seconds: int) -> dict[tuple[str, int, str], str]:
    found: dict[tuple[str, int, str], str] = {}
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        job = json.dumps({"names": names, "packages": packages, "folder": folder})
        ranks = []
        for rank in range(world_size):
            shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--rank-job", job]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, stdout=output, env={**os.environ, **shared, **variables}, text=True))
        try:
            lines, _ = ranks[0].communicate(timeout=seconds)
        finally:
            for process in ranks:
                process.kill()
    for line in lines.splitlines():
        if line.startswith("{"):
            fact = json.loads(line)
            found[fact["name"], fact["stage"], fact["tier"]] = fact["found"]
    return found


def _kind_of(make: _Make) -> tuple[str, str]:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            kinds = classify(_made(make, Small()))
        except ZeroAccelError as error:
            return "refused", str(error)
    return " and ".join(dict.fromkeys(kind.value for kind in kinds.groups)), kinds.reason


def _summary(cells: Mapping[tuple[int, str, int], str]) -> str:
    """Returns one cell for all runs: each result with its stages, tiers and numbers of ranks, unless all agree."""
    by_words: dict[str, list[tuple[int, str, int]]] = {}
    for place, words in cells.items():
        by_words.setdefault(re.sub(r" at stage \d| \[ranks? [^]]*\]|; (use|give) .*", "", words), []).append(place)
    if len(by_words) == 1:
        return next(iter(by_words))
    parts = []
    for words, places in by_words.items():
        stages = ",".join(str(stage) for stage in sorted({stage for stage, _, _ in places}))
        tiers = "/".join(sorted({tier for _, tier, _ in places}))
        worlds = ",".join(str(world) for world in sorted({world for _, _, world in places}))
        parts.append(f"{words} (stage {stages}; {tiers}; {worlds} ranks)")
    return "; ".join(parts)


def _versions() -> str:
    """Returns the versions of the available packages."""
    found = importlib.metadata.packages_distributions()
    names = dict.fromkeys(package.split(".")[0] for package in _PACKAGES)
    installed = {name: found[name][0] for name in names if name in found}
    return ", ".join(f"{name} {importlib.metadata.version(package)}" for name, package in installed.items())


@click.command()
@click.option("--only", default="", help="Names, separated by commas.")
@click.option("--worlds", default="1,2,3", help="Numbers of ranks.")
@click.option("--packages", multiple=True, help="Folder with packages of optimizers.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the table to this file.")
@click.option("--seconds", default=3000, help="Time limit of the runs with one number of ranks.")
@click.option("--rank-job", default="", hidden=True)
def main(only: str, worlds: str, packages: tuple[str, ...], markdown: Path | None, seconds: int, rank_job: str) -> None:
    """Prints the table."""
    if rank_job:
        _rank(json.loads(rank_job))
        return
    warnings.simplefilter("ignore")
    sys.path.extend(packages)
    made = contenders()
    names = [name for name in made if not only or name in only.split(",")]
    kinds = {name: _kind_of(made[name]) for name in names}
    cells: dict[str, dict[tuple[int, str, int], str]] = {name: {} for name in names}
    for world in [int(word) for word in worlds.split(",")]:
        for (name, stage, tier), words in _run(world, names, packages, seconds).items():
            cells[name][stage, tier, world] = words
    lines = [
        f"# Optimizers beside torch, {date.today()}",
        "",
        f"{STEPS} steps in fp32; {_versions()}; Python {platform.python_version()}, {platform.machine()}.",
        f"Stages 0 to 3, masters and states on device, cpu and nvme, {worlds} ranks.",
        "",
        "| optimizer | kind | weights |",
        "|---|---|---|",
        *(f"| {name} | {kinds[name][0]} | {_summary(cells[name])} |".replace("\n", " ") for name in names),
    ]
    print("\n".join(lines))
    if markdown is not None:
        markdown.write_text("\n".join(lines) + "\n")
    wrong = [
        name
        for name in names
        if kinds[name][0] != "elementwise"
        and any(words != SAME and not words.startswith("refused") for words in cells[name].values())
    ]
    expected = len(list(_placements())) * len(worlds.split(","))
    missing = [name for name in names if len(cells[name]) < expected]
    for text, which in (("neither torch's bits nor refused", wrong), ("not finished", missing)):
        if which:
            print(f"{text}: {', '.join(which)}", file=sys.stderr)
    sys.exit(1 if wrong or missing else 0)


if __name__ == "__main__":
    main()
