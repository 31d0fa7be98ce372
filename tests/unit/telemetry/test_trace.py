"""The file and the page of a trace, from spans written by hand: the counted times, and refusals."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from zeroaccel.cli import verify as verify_module
from zeroaccel.cli.main import main
from zeroaccel.cli.pages.frame import MOST_NBYTES
from zeroaccel.cli.trace import trace_page
from zeroaccel.errors import UsageError
from zeroaccel.telemetry import timeline
from zeroaccel.telemetry.timeline import Timeline, clock_offsets
from zeroaccel.telemetry.trace_file import (
    RankSpans,
    Span,
    StepTraceFile,
    TraceFacts,
    read_trace,
    trace_events,
    write_trace,
)
from zeroaccel.zero.step_trace import TimelineHooks

MS = 1_000_000  # nanoseconds
GATHER = "gather/all_gather/forward/"
REDUCE = "reduce/reduce_scatter/backward/"


def _facts(**changes: Any) -> TraceFacts:
    facts = {"engine": "stage 3", "units": ("layers.0", "head"), "first_step": 4, "clock_errors": (0, 0)}
    return TraceFacts(**{**facts, "one_group": True, **changes})  # type: ignore[arg-type]


def _span(
    kind: Any, name: str, begin: float, end: float, detail: str = "", serial: int = 0, lane: str = "main"
) -> Span:
    return Span(kind, name, lane, round(begin * MS), round(end * MS), detail, serial)


def _two_ranks() -> StepTraceFile:
    """Returns a step of 20 ms. Rank 0 waits 5 ms for a gather that rank 1 issues late, and for a reduction."""
    first = (
        _span("phase", "forward", 0, 10),
        _span("flight", "unshard layers.0", 1, 6, GATHER, 7, lane="gathers"),
        _span("wait", "unshard layers.0", 1, 6, GATHER, 7),
        _span("compute", "layers.0", 6, 10, "forward"),
        _span("compute", "layers.0", 10, 14, "backward"),
        _span("flight", "reduce layers.0", 12, 17, REDUCE, 3, lane="reduces"),
        _span("wait", "reduce layers.0", 14, 17, REDUCE, 3),
        _span("sum", "reduce layers.0", 17, 18, "reduce_scatter"),
        _span("update", "head", 16, 18, lane="zeroaccel-update"),
        _span("update", "layers.0", 18, 19),
    )
    second = (
        _span("flight", "unshard layers.0", 5, 6, GATHER, 7, lane="gathers"),
        _span("compute", "layers.0", 6, 12, "forward"),
        _span("flight", "reduce layers.0", 13, 17, REDUCE, 3, lane="reduces"),
    )
    step = ((0, 20 * MS),)
    return StepTraceFile(_facts(), (RankSpans(first, step), RankSpans(second, step)))


def test_each_moment_of_a_step_counts_once() -> None:
    trace = _two_ranks()
    split = {share: round(seconds * 1e3, 6) for share, seconds in trace.split(0, 0).items()}
    assert split == {
        "compute": 8,
        # 5 for the gather and 3 for the reduction, less 1 in which another thread updates.
        "exposed communication": 7,
        "sums of gradients": 1,
        "update": 1,
        "waits for tiers": 0,
        "other": 3,
    }
    assert sum(trace.split(1, 0).values()) == pytest.approx(0.020)


def test_the_largest_waits_name_the_last_rank() -> None:
    gather, reduction = _two_ranks().largest_waits()
    assert (gather.rank, gather.label, gather.phase, gather.last_rank) == (0, "unshard layers.0", "forward", 1)
    assert (gather.seconds, gather.late_seconds) == pytest.approx((0.005, 0.004))
    assert "rank 1 arrives last, 4.00 ms into the longest wait" in str(gather)
    # Rank 1 issued the reduction before rank 0 began to wait, so the wait is the transfer alone.
    assert (reduction.seconds, reduction.late_seconds) == pytest.approx((0.002, 0.0))
    assert "this is the transfer" in str(reduction)
    apart = StepTraceFile(_facts(one_group=False), _two_ranks().ranks)
    assert [wait.last_rank for wait in apart.largest_waits()] == [None, None]


def test_the_file_is_of_the_trace_event_format_and_reads_back(tmp_path: Path) -> None:
    trace = _two_ranks()
    write_trace(tmp_path / "trace.json", trace)
    content = json.loads((tmp_path / "trace.json").read_text())
    open_ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    begun: set[str] = set()
    for event in content["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":  # complete events of one thread nest
            ends = open_ends[event["pid"], event["tid"]]
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert event["dur"] >= 0
            assert not ends or end <= ends[-1]
            ends.append(end)
        elif event["ph"] == "b":
            assert event["id"] not in begun
            begun.add(event["id"])
        else:
            assert event["ph"] == "e"
            begun.remove(event["id"])
    assert begun == set()
    again = read_trace(tmp_path / "trace.json")
    assert again.facts == trace.facts
    for one, other in zip(again.ranks, trace.ranks, strict=True):
        assert (sorted(one.spans), one.steps) == (sorted(other.spans), other.steps)
    assert [str(wait) for wait in again.largest_waits()] == [str(wait) for wait in trace.largest_waits()]


def test_overlaps_by_rounding_are_cut() -> None:
    spans = (_span("compute", "a", 0, 10), _span("wait", "b", 9, 11, GATHER))
    trace = StepTraceFile(_facts(clock_errors=(0,)), (RankSpans(spans, ((0, 12 * MS),)),))
    lengths = {event["name"]: event["dur"] for event in trace_events(trace) if event["ph"] == "X"}
    assert lengths == {"step 4": 12_000, "a": 10_000, "b": 1_000}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "no JSON"),
        ('{"traceEvents": []}', "JSON without the key zeroaccel"),
        ('{"zeroaccel": {}, "traceEvents": []}', "damaged"),
        ("[]", "JSON without the key zeroaccel"),
    ],
)
def test_other_files_are_refused_by_name(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)


def test_the_page_agrees_with_the_trace() -> None:
    text = trace_page(_two_ranks())
    assert "http" not in text
    assert '<th scope="row" class="text">1. unshard layers.0</th>' in text
    split = "".join(f"<td>{value}</td>" for value in ("8.000", "7.000", "1.000", "1.000", "-", "3.000", "20.000"))
    assert f'<th scope="row" class="text">rank 0</th>{split}' in text
    # Per unit, means over two ranks: 4 and 6 ms in forward, 4 in backward, 7 in waits, 1 in a sum, 1 in the update.
    units = "".join(f"<td>{value}</td>" for value in ("5.000", "2.000", "-", "3.500", "0.500", "0.500", "-"))
    assert f'<th scope="row" class="text">layers.0</th>{units}' in text


def test_a_page_of_many_ranks_and_units_stays_small() -> None:
    units = tuple(f"model.layers.{number}" for number in range(200))
    spans = tuple(
        _span("compute", unit, number + part / 4, number + (part + 1) / 4, "forward")
        for number, unit in enumerate(units)
        for part in range(4)
    )
    ranks = tuple(RankSpans(spans, ((0, 100 * MS), (100 * MS, 200 * MS))) for _ in range(16))
    text = trace_page(StepTraceFile(_facts(units=units, clock_errors=(0,) * 16), ranks))
    assert len(text.encode()) <= MOST_NBYTES
    assert "120 more units" in text
    assert "of 32 pairs of a rank and a step; trace.json" in text


def test_clocks_of_other_machines_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(timeline.time, "perf_counter_ns", lambda: next(ticks))

    def of_ranks(own: list[tuple[int, int]], _: str) -> list[list[tuple[int, int]]]:
        # Rank 2 is on another machine, with a clock 1000 ahead; it enters 2 later and leaves 3 earlier.
        return [own, own, [(begin + 1002, end + 997) for begin, end in own]]

    ranks: Any = SimpleNamespace(
        barrier=lambda _: None, gather_objects=of_ranks, topology=SimpleNamespace(nodes=((0, 1), (2,)))
    )
    same, near, far = clock_offsets(ranks)
    assert same == near == (0, 0)
    assert abs(far[0] + 1000) <= far[1] <= 10


class _Event:
    """A device event, which records the time of the device's clock."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.milliseconds = _Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        return later.milliseconds - self.milliseconds


def test_on_a_device_moments_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in {
        "Event": _Event,
        "synchronize": lambda device: None,
        "current_stream": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    recorded = Timeline(torch.device("cuda"))
    recorded.begin_step()
    _Event.now = 2.0
    begin = recorded.mark()
    assert isinstance(begin, _Event)
    assert isinstance(recorded.mark("zeroaccel-update"), int)
    _Event.now = 5.0
    recorded.add("compute", "layers.0", begin)
    recorded.end_step()
    own = recorded.resolved()
    assert [(span.begin - own.steps[0][0], span.end - span.begin) for span in own.spans] == [(2 * MS, 3 * MS)]


def test_a_compiled_model_gets_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    unit: Any = SimpleNamespace(name="0", modules=(model[0],))
    recorded = Timeline(torch.device("cpu"))
    hooks = TimelineHooks(model, [unit], recorded, lambda: False)
    model(torch.ones(1, 2))
    hooks.detach()
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys)  # a loaded compiler
    model[0]._compiled_call_impl = model[0].__call__  # as after compile()
    compiled = TimelineHooks(model, [unit], recorded, lambda: False)
    assert (hooks.is_attached, compiled.is_attached) == (True, False)
    assert not model[0]._forward_hooks
    recorded.begin_step()
    assert [(span.name, span.detail) for span in recorded.resolved().spans] == [("0", "forward")]


# -- the command, with a stand-in for the launcher that writes the ranks' files

SCRIPT = """
import json, os, sys
from pathlib import Path
order = json.loads(os.environ["ZEROACCEL_TRACE"])
if sys.argv[1] == "exit":
    sys.exit(7)
if sys.argv[1] != "none":
    Path(order["progress"]).write_text(sys.argv[1])
if int(sys.argv[1] if sys.argv[1] != "none" else 0) == order["warmup"] + order["steps"]:
    Path(order["path"]).write_bytes(Path("made.json").read_bytes())
"""


def _trace(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(verify_module, "launch_command", lambda words: [sys.executable, "-S", *words])
    Path("train.py").write_text(SCRIPT)
    write_trace(Path("made.json"), _two_ranks())
    return CliRunner().invoke(main, ["trace", *words])


def test_the_command_names_the_waits_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _trace(tmp_path, monkeypatch, "--steps", "1", "--warmup", "3", "-o", "out", "train.py", "4")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "1 step of 2 ranks, 20.00 ms each"
    assert lines[4].startswith('  1. 5.00 ms per step: rank 0 waits for all_gather "unshard layers.0" in forward')
    assert lines[-2:] == ["out/trace.html: page written", "out/trace.json: the same for Perfetto and Chrome"]
    again = CliRunner().invoke(main, ["trace", "out/trace.json"])
    assert again.stdout.splitlines()[-1] == "out/trace.html: page written"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("train.py", "none"), 2, "the script created no training engine"),
        (("train.py", "2"), 2, "the script ended after 2 optimizer steps: expected 3 to warm up and 3 to record"),
        (("train.py", "5"), 2, "pass --warmup 2 --steps 3"),
        (("--steps", "90", "train.py", "16"), 2, "pass --warmup 3 --steps 13"),
        (("train.py", "0"), 2, "train for longer"),
        (("train.py", "exit"), 7, ""),
        (("-o", "train.py/in", "train.py", "6"), 2, "--out train.py/in: Not a directory"),
        (("none.json",), 2, "none.json: expected a trace written by zeroaccel"),
    ],
)
def test_scripts_that_cannot_be_traced_are_reported(
    words: tuple[str, ...], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _trace(tmp_path, monkeypatch, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert not Path("zeroaccel-trace").exists()
