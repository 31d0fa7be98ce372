"""Runs small cases under DDP and at stages 2 and 3, in forks of one process, and compares losses and files.

`adapters.py` and `pretrained.py` have the cases. A case is a function of (mode, folder); mode is "ddp", "2" or "3". It
runs on two CPU ranks, returns its losses, and writes files below the folder. Stage 3 has to have the bits of stage 2;
DDP adds gradients in another order, so its results may differ by rounding.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zeroaccel.compat

zeroaccel.compat.install()  # before accelerate and transformers are imported; hence E402 below

# isort: split
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tests.support.environment import free_port, rank_environment  # noqa: E402

MODES = ("ddp", "2", "3")
VOCAB = 96
_RANKS = 2

Case = Callable[[str, Path], Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """Result of a case in one mode: the values that rank 0 returned, or the error of the first rank that failed."""

    values: Mapping[str, Any] | None
    error: str
    folder: Path


def zero_config(mode: str) -> dict[str, Any] | None:
    """Returns the config of a mode, with tiny parameters sharded too; None for DDP."""
    if mode == "ddp":
        return None
    zero: dict[str, Any] = {"stage": int(mode)}
    if mode == "3":
        zero["stage3_param_persistence_threshold"] = 0
    autos = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {**dict.fromkeys(autos, "auto"), "zero_optimization": zero}


def arguments(mode: str, folder: Path, **more: Any) -> Any:
    """Returns the settings of a Trainer; at stage 3, models that are made after this call are sharded."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        "deepspeed": zero_config(mode),
        "use_cpu": mode == "ddp",
    }
    return transformers.TrainingArguments(str(folder / "run"), **{**settings, **more})


class Samples(torch.utils.data.Dataset[Any]):
    """Items by number, made once by `make(generator)`."""

    def __init__(self, make: Callable[[torch.Generator], Any], count: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        self._items = [make(generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def tokens(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns one sample of a language model."""
    ids = torch.randint(5, VOCAB, (12,), generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def train(trainer: Any, folder: Path) -> dict[str, Any]:
    """Trains, saves into `folder`/final, and returns losses and norms."""
    trainer.train()
    trainer.save_model(str(folder / "final"))
    logged = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in logged if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in logged if "grad_norm" in entry],
    }


def run(case: Case, name: str, work: Path, seconds: float = 90) -> dict[str, Outcome]:
    """Runs a case in all modes."""
    return {mode: _run_mode(case, mode, work / name / mode, seconds) for mode in MODES}


def _run_mode(case: Case, mode: str, folder: Path, seconds: float) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    port, children = free_port(), []
    sys.stdout.flush()
    for rank in range(_RANKS):
        child = os.fork()
        if child == 0:
            _rank(case, mode, folder, rank, port)
        children.append(child)
    limit = time.monotonic() + seconds
    running = set(children)
    failed = False
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                running.discard(child)
                if status and not failed:
                    failed, limit = True, min(limit, time.monotonic() + 5)
        if running and time.monotonic() > limit:
            for child in running:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            failed = True
            break
        time.sleep(0.02)
    results = [folder / f"result-{rank}.json" for rank in range(_RANKS)]
    found = [json.loads(path.read_text()) if path.exists() else {"error": "no result: it hung"} for path in results]
    error = next((entry["error"] for entry in found if "error" in entry), "")
    return Outcome(None if error or failed else found[0], error or ("a rank failed" if failed else ""), folder)


def _rank(case: Case, mode: str, folder: Path, rank: int, port: int) -> None:
    code = 1
    try:
        log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(rank_environment(rank, _RANKS, port))
        torch.manual_seed(0)
        result: dict[str, Any] = {}
        try:
            result = dict(case(mode, folder))
            code = 0
        except BaseException as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def verdict(outcomes: Mapping[str, Outcome]) -> str:
    """Returns "equal", or the differences between the modes, or the errors."""
    failed = {mode: outcome.error for mode, outcome in outcomes.items() if outcome.values is None}
    if failed:
        return "; ".join(f"{mode}: {error}"[:400] for mode, error in failed.items()).replace("\n", " ")
    plain, two, three = (outcomes[mode] for mode in MODES)
    assert plain.values is not None
    assert two.values is not None
    assert three.values is not None
    faults = []
    for name, value in two.values.items():
        if three.values[name] != value:
            faults.append(f"{name}: stage 2 {value}, stage 3 {three.values[name]}")
        if not _close(plain.values[name], value):
            faults.append(f"{name}: DDP {plain.values[name]}, stage 2 {value}")
    faults += _compare(plain.folder, two.folder, "DDP", "stage 2", exact=False)
    faults += _compare(two.folder, three.folder, "stage 2", "stage 3", exact=True)
    return "; ".join(faults)[:400] or "equal"


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=2e-4, abs_tol=1e-6)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    return bool(one == other)


def _compare(one: Path, other: Path, first: str, second: str, *, exact: bool) -> list[str]:
    faults = []
    files = [sorted(str(p.relative_to(f)) for p in f.glob("final*/**/*.safetensors")) for f in (one, other)]
    if files[0] != files[1]:
        return [f"files: {first} {files[0]}, {second} {files[1]}"]
    if not files[0]:
        return ["no files"]
    for name in files[0]:
        left, right = load_file(one / name), load_file(other / name)
        if left.keys() != right.keys():
            lacks, more = sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys())
            faults.append(f"{name}: {second} lacks {lacks[:3]}, has also {more[:3]}")
            continue
        for key, value in left.items():
            new = right[key]
            same = value.shape == new.shape and value.dtype == new.dtype
            if same and exact:
                same = torch.equal(value, new)
            elif same:
                same = torch.allclose(value.float(), new.float(), rtol=1e-3, atol=2e-5)
            if not same:
                change = (
                    "" if value.shape != new.shape else f" by {float((value.float() - new.float()).abs().max()):.1e}"
                )
                faults.append(
                    f"{name}: {key} of {first} {tuple(value.shape)} and {second} {tuple(new.shape)} differ{change}"
                )
    return faults


def table(rows: Sequence[tuple[str, str]], head: tuple[str, str], path: Path | None) -> None:
    """Prints a Markdown table, or writes it."""
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {a} | {b.replace('|', '/')} |" for a, b in rows)]
    text = "\n".join(lines) + "\n"
    if path is not None:
        path.write_text(text)
    else:
        print(text)
