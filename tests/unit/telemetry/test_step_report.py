"""Log lines and events of a run: their texts, their steps and ranks, and no cost when they are off."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.log_lines import log_lines
from zeroaccel.logs import logger
from zeroaccel.telemetry import step_report
from zeroaccel.telemetry.performance import OffloadCounters, PerformanceMeter, PhaseClock
from zeroaccel.telemetry.step_report import (
    MemoryUse,
    StepFacts,
    StepReport,
    format_memory,
    format_phases,
    format_step,
    memory_now,
    step_events,
)
from zeroaccel.zero.precision import LossScale, StaticLossScale

CPU = torch.device("cpu")
GIB = 2**30


class FakeEngine:
    """An engine whose steps have 8 samples each."""

    def __init__(self, loss_scale: LossScale | None = None) -> None:
        self.global_steps = self.skipped_steps = self.global_samples = 0
        self.loss_scale = loss_scale or LossScale()

    def get_lr(self) -> list[float]:
        return [0.1 / self.global_steps]

    def get_global_grad_norm(self) -> float | None:
        return 2.0

    def advance(self, report: StepReport, steps: int = 1) -> None:
        for _ in range(steps):
            self.global_steps += 1
            self.global_samples += 8
            report.step(self)


class Sink:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def __len__(self) -> int:
        return 1

    def write(self, events: Sequence[tuple[str, float, int]]) -> None:
        self.told.append({name: (value, step) for name, value, step in events})

    def flush(self) -> None:
        self.told.append("flush")

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The lines of zeroaccel's logger."""
    with log_lines() as shown:
        yield shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in the list's one element; it stands still until the test sets it."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


# -- text


@pytest.mark.parametrize(
    ("facts", "rate", "line"),
    [
        (
            StepFacts(100, 2, 6400, [1e-4, 5e-5], grad_norm=0.512, loss_scale=65536.0),
            123.44,
            "step 100 | skipped 2 | lr 1.000e-04, 5.000e-05 | grad norm 0.5120 | loss scale 65536 | 123.4 samples/s",
        ),
        (StepFacts(1, 0, 8, [0.0]), None, "step 1 | skipped 0 | lr 0.000e+00"),
        (StepFacts(1, 1, 8, [0.0], grad_norm=math.inf), None, "step 1 | skipped 1 | lr 0.000e+00 | grad norm inf"),
    ],
)
def test_a_step_line_has_all_that_is_known(facts: StepFacts, rate: float | None, line: str) -> None:
    assert format_step(facts, rate) == line


def test_phases_and_memory_as_lines() -> None:
    assert format_phases({"forward": 12.3, "step": 4.2}, 10) == "ms per step over 10 steps: forward 12.30 | step 4.20"
    assert format_phases({"forward": 12.3}, 1) == "ms per step over 1 step: forward 12.30"
    after = {"forward": MemoryUse(2 * GIB, 3 * GIB), "step": MemoryUse(GIB, 5 * GIB)}
    assert format_memory(after, "allocated") == "allocated GiB after: forward 2.00 | step 1.00 | peak 5.00"


def test_events_count_in_samples_and_leave_out_unknown_facts() -> None:
    assert step_events(StepFacts(1, 0, 8, [0.1, 0.2], grad_norm=2.0, loss_scale=4.0, loss=3.0)) == [
        ("Train/loss", 3.0, 8),
        ("Train/lr", 0.1, 8),
        ("Train/lr/group1", 0.2, 8),
        ("Train/grad_norm", 2.0, 8),
        ("Train/loss_scale", 4.0, 8),
    ]
    assert step_events(StepFacts(1, 0, 8, [0.1])) == [("Train/lr", 0.1, 8)]


# -- time and memory


class Phases(PhaseClock):
    """Plays phases: "+name" begins a phase, "-name" ends it, a number advances the clock by seconds."""

    def play(self, clock: list[float], moves: str) -> None:
        for move in moves.split():
            if move[0] in "+-":
                (self.begin if move[0] == "+" else self.end)(move[1:])
            else:
                clock[0] += float(move)


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ("+forward 1 -forward +forward 3 -forward", {"forward": 4.0}),
        ("+backward 1 +reduce 2 -reduce 4 -backward", {"reduce": 2.0, "backward": 7.0}),  # nested phases
        ("+forward 50 +forward 1 -forward -forward -step", {"forward": 1.0}),  # a phase without an end
    ],
)
def test_phases_are_summed_and_start_anew(clock: list[float], moves: str, expected: dict[str, float]) -> None:
    phases = Phases(CPU)
    phases.play(clock, moves)
    assert phases.take() == expected
    assert phases.take() == {}


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda:0", 2)])
def test_only_a_cuda_device_is_waited_for(device: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    phases = PhaseClock(torch.device(device))
    phases.begin("forward")
    phases.end("forward")
    assert waited == [torch.device(device)] * waits


def test_memory_on_the_cpu_has_the_current_size_and_the_peak() -> None:
    before = memory_now(CPU)
    # Pages of its own: the C library may still have those that an earlier test freed.
    taken = mmap.mmap(-1, 64 * 2**20)
    taken[:: mmap.PAGESIZE] = b"1" * (64 * 2**20 // mmap.PAGESIZE)
    held = memory_now(CPU)
    assert held.current - before.current > 48 * 2**20
    taken.close()
    after = memory_now(CPU)
    assert after.current < held.current
    assert after.peak > held.current - 8 * 2**20  # the kernel's two counts differ by a few pages
    assert after.peak < 2**40


def test_memory_on_cuda_is_that_of_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    assert memory_now(torch.device("cuda", 0)) == MemoryUse(5, 7)


# -- the report


def test_step_lines_come_every_so_many_steps_with_the_rate_between(lines: list[str], clock: list[float]) -> None:
    report, engine = StepReport(steps_per_print=3), FakeEngine()
    for _ in range(6):
        clock[0] += 2.0 if engine.global_steps < 3 else 4.0
        engine.advance(report)
    # the first rate excludes the first step: two steps with 8 samples in 4 s
    assert lines == [
        "step 3 | skipped 0 | lr 3.333e-02 | grad norm 2.0000 | 4.0 samples/s",
        "step 6 | skipped 0 | lr 1.667e-02 | grad norm 2.0000 | 2.0 samples/s",
    ]


def test_a_line_at_the_first_step_has_no_rate(lines: list[str], clock: list[float]) -> None:
    report, engine = StepReport(steps_per_print=1), FakeEngine(StaticLossScale(1.0))
    engine.advance(report)
    clock[0] += 1
    engine.advance(report)
    assert lines == [
        "step 1 | skipped 0 | lr 1.000e-01 | grad norm 2.0000 | loss scale 1",
        "step 2 | skipped 0 | lr 5.000e-02 | grad norm 2.0000 | loss scale 1 | 8.0 samples/s",
    ]


def test_lines_show_at_the_default_log_level(lines: list[str]) -> None:
    assert logger.level == logging.WARNING
    FakeEngine().advance(StepReport(steps_per_print=1))
    assert len(lines) == 1


def test_wall_clock_breakdown_is_per_step_over_the_interval(lines: list[str], clock: list[float]) -> None:
    report, engine = StepReport(steps_per_print=2, wall_clock_breakdown=True), FakeEngine()
    for _ in range(4):
        for seconds in (0.001, 0.003):  # two micro-steps
            report.begin("forward")
            clock[0] += seconds
            report.end("forward")
        engine.advance(report)
    assert [line for line in lines if line.startswith("ms")] == ["ms per step over 2 steps: forward 4.00"] * 2


def test_breakdowns_alone_come_every_ten_steps(
    lines: list[str], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_report, "memory_now", lambda device: MemoryUse(GIB, 2 * GIB))
    report, engine = StepReport(wall_clock_breakdown=True, memory_breakdown=True), FakeEngine()
    for _ in range(10):
        for phase in ("forward", "backward"):
            report.begin(phase)
            clock[0] += 0.002
            report.end(phase)
        engine.advance(report)
    assert lines == [
        "ms per step over 10 steps: forward 2.00 | backward 2.00",
        "resident GiB after: forward 1.00 | backward 1.00 | peak 2.00",
    ]


def test_a_report_without_settings_measures_nothing(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("measured something")

    monkeypatch.setattr(step_report, "memory_now", never)
    monkeypatch.setattr(PhaseClock, "_now", never)
    monkeypatch.setattr(FakeEngine, "get_global_grad_norm", never)
    report = StepReport()
    report.begin("forward")
    report.end("forward")
    report.loss(torch.zeros(()))
    FakeEngine().advance(report, 20)
    report.close()
    assert lines == []


def test_other_ranks_report_nothing(lines: list[str]) -> None:
    sink = Sink()
    report = StepReport(rank=1, steps_per_print=1, wall_clock_breakdown=True, memory_breakdown=True, monitors=sink)
    report.begin("forward")
    report.end("forward")
    FakeEngine().advance(report, 10)
    report.close()
    assert (lines, sink.told) == ([], [])


def test_monitors_get_every_step_with_the_mean_loss_of_its_micro_steps() -> None:
    sink = Sink()
    report, engine = StepReport(steps_per_print=2, monitors=sink), FakeEngine(StaticLossScale(64.0))
    for losses in ((1.0, 2.0), (5.0,), ()):
        for loss in losses:
            report.loss(torch.tensor(loss, requires_grad=True))
        engine.advance(report)
    report.close()
    report.close()
    rest = {"Train/grad_norm": 2.0, "Train/loss_scale": 64.0}
    told = [
        one if isinstance(one, str) else {name: value for name, value in one.items() if name.startswith("Train/")}
        for one in sink.told
    ]
    assert told == [
        {name: (value, 8) for name, value in {"Train/loss": 1.5, "Train/lr": 0.1, **rest}.items()},
        {name: (value, 16) for name, value in {"Train/loss": 5.0, "Train/lr": 0.05, **rest}.items()},
        "flush",
        {name: (value, 24) for name, value in {"Train/lr": pytest.approx(0.1 / 3), **rest}.items()},
        "close",
    ]


def test_monitors_get_the_time_of_each_phase_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 11.5, 13.5, 14.0, 20.0, 20.25, 24.0])
    monkeypatch.setattr("zeroaccel.telemetry.performance.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    sink = Sink()
    report, engine = StepReport(monitors=sink), FakeEngine(StaticLossScale(1.0))
    for phases in (("forward", "step"), ("forward",)):
        for phase in phases:
            report.begin(phase)
            report.end(phase)
        report.end("backward")  # a phase that has not begun
        engine.advance(report)
    times = [
        {name: value for name, (value, _) in one.items() if name.startswith("Time/")}
        for one in sink.told
        if isinstance(one, dict)
    ]
    assert times == [
        {"Time/forward_seconds": 1.0, "Time/update_seconds": 2.0},
        {"Time/step_seconds": 10.0, "Time/samples_per_second": 0.8, "Time/forward_seconds": 0.25},
    ]
    peak, _ = sink.told[0]["Memory/peak_bytes"]
    assert peak >= sink.told[0]["Memory/current_bytes"][0] > 1e6


def test_on_a_device_phases_are_timed_only_where_the_host_waits() -> None:
    for synchronizes, expected in ((False, []), (True, ["Time/forward_seconds"])):
        meter = PerformanceMeter(torch.device("cuda"), synchronizes=synchronizes)
        if meter.phases is not None:
            meter.phases.begin("forward")
            meter.phases.end("forward")
        assert [name for name in meter.events(8, (1, 2)) if name.startswith("Time/")] == expected


def test_offload_is_counted_from_the_end_of_set_up_on() -> None:
    traffic, update = SimpleNamespace(nbytes=100, seconds=1.0), [2.0, 0.5, 0.0]
    tiers: Any = {"optimizer, nvme": SimpleNamespace(traffic={"read": traffic})}
    counters = OffloadCounters(tiers, lambda: (update[0], update[1], update[2]))
    traffic.nbytes, traffic.seconds, update[:] = 160, 1.5, [3.0, 0.75, 0.25]
    assert counters.take() == ((1.0, 0.25, 0.25), {("optimizer, nvme", "read"): (60, 0.5)})
    assert counters.take() == ((0.0, 0.0, 0.0), {("optimizer, nvme", "read"): (0, 0.0)})


def test_a_loss_is_kept_without_its_graph() -> None:
    report = StepReport(monitors=Sink())
    loss = torch.ones((), requires_grad=True) * 2
    report.loss(loss)
    assert not report._losses[0].requires_grad
