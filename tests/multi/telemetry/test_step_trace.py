"""Recording a trace changes no bit and no collective, and the file matches the ranks' actions."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import (
    ADAMW,
    SGD,
    Run,
    Toy,
    batches,
    config,
    differences,
    finished,
    offloaded,
    recording,
    train_step,
)
from zeroaccel.comm.recording import CollectiveCall
from zeroaccel.errors import ConfigError, EngineStateError, UsageError
from zeroaccel.telemetry import timeline
from zeroaccel.telemetry.trace_file import StepTraceFile, read_trace
from zeroaccel.zero import step_trace


def _train(settings: dict[str, Any], path: Path | None) -> tuple[Run, list[CollectiveCall], tuple[str, ...]]:
    """Trains two steps, then two that are recorded if there is a path; returns run, collectives and units."""
    torch.manual_seed(7)
    counted = recording()
    model = Toy()
    engine, *_ = zeroaccel.initialize(model, config=settings, collectives=counted)
    data = batches(engine.collectives.rank, 4 * engine.gradient_accumulation_steps())
    run = Run()

    def steps(half: int) -> None:
        for batch in data[half * len(data) // 2 : (half + 1) * len(data) // 2]:
            run.losses.append(train_step(engine, engine(batch)))
        run.norms.append(engine.get_global_grad_norm())

    steps(0)
    with nullcontext() if path is None else engine.record_trace(path):
        counted.reset()
        steps(1)
        calls = list(counted.calls)
    units = tuple(unit.name for unit in engine.units)
    assert timeline.active is None
    assert counted.topology.flight_recorder.listener is None
    return finished(engine, run), calls, units


@pytest.mark.parametrize(
    ("settings", "tier"),
    [
        (config(0, "bf16", 2, optimizer=SGD), ""),
        (config(3, "bf16", 2, optimizer=ADAMW), ""),
        (config(3, "fp32", optimizer=SGD, zero_hpz_partition_size=1, zero_quantized_weights=True), ""),
        (config(3, "fp32", optimizer=ADAMW), "nvme"),
    ],
    ids=["stage 0", "stage 3", "quantized", "files"],
)
def test_recording_changes_no_bit_and_no_collective(
    ranks: Ranks, settings: dict[str, Any], tier: str, tmp_path: Path
) -> None:
    if tier:
        settings["zero_optimization"] |= offloaded(tmp_path, tier, tier)
    plain = ranks(2).run(_train, settings, None)
    traced = ranks(2).run(_train, settings, tmp_path / "trace.json")
    for (one, calls, _), (other, again, _) in zip(plain, traced, strict=True):
        assert differences(one, other) == []
        assert calls == again
    _check(read_trace(tmp_path / "trace.json"), traced[0][1], traced[0][2], tier)


def _check(trace: StepTraceFile, calls: list[CollectiveCall], units: tuple[str, ...], tier: str) -> None:
    assert (trace.num_steps, trace.facts.first_step, trace.facts.units) == (2, 3, units)
    for rank in (0, 1):
        spans = trace.ranks[rank].spans
        # Objects are gathered by two collectives: their sizes, then the objects.
        flights = Counter(span.name for span in spans if span.kind == "flight" and not span.name.endswith(", sizes"))
        assert flights == Counter(call.label for call in calls)
        computed = {(span.name, span.detail) for span in spans if span.kind == "compute"}
        # A unit without a differentiable output, or whose output hides its tensors, has no backward.
        assert {name for name, detail in computed if detail == "forward"} == set(units)
        assert len({name for name, detail in computed if detail == "backward"}) >= len(units) - 1
        assert {span.name for span in spans if span.kind == "update"} <= set(units)
        assert {span.name for span in spans if span.kind == "phase"} == {"forward", "backward", "reduce", "step"}
        assert all(span.end >= span.begin for span in spans)
        assert any(span.kind == "sum" for span in spans)
        waited = [span for span in spans if span.kind == "copy" and span.detail == "wait for a tier"]
        moved = {span.lane for span in spans if span.kind == "copy" and span.detail == "in flight"}
        assert bool(waited) == bool(tier)
        lanes = {f"{kind}, nvme: {way}" for kind in ("params", "optimizer") for way in ("read", "write")}
        assert moved == (lanes if tier else set())
        for step in (0, 1):
            begin, end = trace.ranks[rank].steps[step]
            split = trace.split(rank, step)
            assert sum(split.values()) == pytest.approx((end - begin) / 1e9)
            assert min(split.values()) >= 0
            assert split["compute"] > 0
    assert 0 < len(trace.largest_waits()) <= 3


def _mistakes(folder: Path) -> list[str]:
    settings = config(3)
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    said = []

    def record(path: Path, steps: int, *, nested: bool) -> None:
        with engine.record_trace(path), engine.record_trace(path) if nested else nullcontext():
            for batch in batches(engine.collectives.rank, steps):
                train_step(engine, engine(batch))

    def refused(path: Path, kind: type[Exception], steps: int, nested: bool = False) -> None:
        said.append(message(kind, record, path, steps, nested=nested))

    refused(folder / "file" / "trace.json", UsageError, 1)
    refused(folder / "trace.json", EngineStateError, 0)
    refused(folder / "trace.json", EngineStateError, 1, nested=True)
    with pytest.raises(KeyError), engine.record_trace(folder / "trace.json"):
        raise KeyError("the program's own")
    assert timeline.active is None
    assert not (folder / "trace.json").exists()
    with engine.record_trace(folder / "trace.json") as recorded:  # and the engine continues
        for batch in batches(engine.collectives.rank, 1):
            train_step(engine, engine(batch))
    assert recorded.num_steps == 1
    engine.destroy()
    return said


def _follow(order: dict[str, Any]) -> tuple[int, int, int]:
    """Runs a program under `zeroaccel trace`; returns (step of the exit, its code, steps of a second engine)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(step_trace.VARIABLE, json.dumps(order))
        patch.setattr(step_trace, "_followed", False)
        recorded, *_ = zeroaccel.initialize(Toy(), config=config(3))
        other, *_ = zeroaccel.initialize(Toy(), config=config(0))
        for engine in (other, recorded):
            try:
                for batch in batches(engine.collectives.rank, 9):
                    train_step(engine, engine(batch))
            except SystemExit as exit_:
                code = exit_.code
    outcome = recorded.global_steps, code, other.global_steps
    for engine in (recorded, other):
        engine.destroy()
    return outcome  # type: ignore[return-value]


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_first_engine_of_a_traced_program_is_recorded(ranks: Ranks, warmup: int, tmp_path: Path) -> None:
    path, progress = tmp_path / "trace.json", tmp_path / "steps"
    order = {"path": str(path), "progress": str(progress), "warmup": warmup, "steps": 3}
    assert ranks(2).run(_follow, order) == [(warmup + 3, 0, 9)] * 2
    trace = read_trace(path)
    assert (trace.num_steps, trace.facts.first_step) == (3, warmup + 1)
    assert progress.read_text() == str(warmup + 3)


def _misordered() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(step_trace.VARIABLE, "{}")
        return message(ConfigError, zeroaccel.initialize, Toy(), config=config(3))


def test_an_order_of_another_program_is_refused(ranks: Ranks) -> None:
    assert all("expected a value from `trace`, got '{}'" in said for said in ranks(2).run(_misordered))


def test_mistakes_are_named_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for said in ranks(2).run(_mistakes, tmp_path):
        folder, no_step, nested = said
        assert f"{tmp_path}/file/trace.json" in folder
        assert "name a file in a writable folder" in folder
        assert "expected at least one engine.step() that updates, got 'none'" in no_step
        assert "expected one recording at a time" in nested
