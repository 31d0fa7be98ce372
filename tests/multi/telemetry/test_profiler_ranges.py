"""torch's profiler shows the engine's work by name, and profiling changes no bit."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, finished, offloaded, train_step
from zeroaccel.telemetry.timeline import named_range, span


def _train(settings: dict[str, Any], folder: Path, *, profiled: bool) -> tuple[Run, dict[str, int], list[str]]:
    """Trains two steps, the second in the profiler if asked; returns run, counts of ranges and names of units."""
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    data = batches(engine.collectives.rank, 2)
    run = Run()
    run.losses.append(train_step(engine, engine(data[0])))
    with torch.profiler.profile() if profiled else nullcontext() as recorded:
        run.losses.append(train_step(engine, engine(data[1])))
        engine.save_checkpoint(folder, tag="last")
        engine.load_checkpoint(folder, tag="last")
    run.norms.append(engine.get_global_grad_norm())
    names = [] if recorded is None else [event.name for event in recorded.events()]
    ranges = Counter(name.removeprefix("zeroaccel::") for name in names if name.startswith("zeroaccel::"))
    return finished(engine, run), dict(ranges), [unit.name for unit in engine.units]


def _both(settings: dict[str, Any], folder: Path) -> tuple[list[str], dict[str, int], list[str]]:
    plain, none, _ = _train(settings, folder / "plain", profiled=False)
    assert not none
    profiled, ranges, units = _train(settings, folder / "profiled", profiled=True)
    return differences(plain, profiled), ranges, units


@pytest.mark.parametrize(
    "settings",
    [config(3, optimizer=ADAMW), config(3, optimizer=SGD, **offloaded(Path(), "cpu"))],
    ids=["adamw", "sgd-cpu"],
)
def test_the_profiler_names_each_action_of_each_unit(ranks: Ranks, tmp_path: Path, settings: dict[str, Any]) -> None:
    for different, ranges, units in ranks(2).run(_both, settings, tmp_path):
        assert not different
        for unit in units:
            assert ranges[f"unshard {unit}"] == ranges[f"wait for unshard {unit}"] == ranges[f"reshard {unit}"] >= 1
        of = Counter(re.match(r"(wait for )?\w+", name)[0] for name in ranges)  # type: ignore[index]
        assert of["reduce"] == of["wait for reduce"] == of["update"] >= len(units)
        assert ranges["norm"] == 1
        assert ranges["save checkpoint last"] == ranges["load checkpoint last"] == 1


def test_without_a_profiler_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"record_function({name!r}) without a profiler")

    monkeypatch.setattr(profiler, "record_function", refuse)
    with named_range("unshard", "layers.0"), span("update", "layers.0"):
        pass
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    with pytest.raises(AssertionError, match=r"zeroaccel::update layers\.0"):
        span("update", "layers.0")
