"""Records steps of an engine: attaches the recorder to its parts, and collects the spans of all ranks.

`StepTrace` attaches `telemetry/timeline.py` to the engine's parts and detaches it again. Ranks align their clocks
before the first step and collect their spans after the last; in between, a recording adds no collective, and the
computing code does not depend on it. `TraceOrder` is the request of `zeroaccel trace`, which a script gets through the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.environment import command_order
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.logs import logger
from zeroaccel.telemetry import timeline
from zeroaccel.telemetry.step_report import StepReport
from zeroaccel.telemetry.timeline import CollectiveSpans, Mark, Timeline, clock_offsets
from zeroaccel.telemetry.trace_file import RankSpans, StepTraceFile, TraceFacts, Wait, write_trace
from zeroaccel.zero.compiled import is_compiled_within
from zeroaccel.zero.hooks import producers
from zeroaccel.zero.module_copies import LiveHook
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.storage.placement import TierSet

VARIABLE = "ZEROACCEL_TRACE"
"""JSON: the path to write, the numbers of steps before and in the recording, and the file for progress."""

_CALL = "engine.record_trace"


@dataclass(frozen=True)
class TracedParts:
    """The parts of an engine that a recording observes.

    Attributes:
        collectives: collectives of the engine; their job has all ranks.
        in_backward: returns True if a backward is running.
        title: returns a description of the engine: "stage 3, 2 ranks, bfloat16, ...".
        global_steps: returns the number of steps so far.
    """

    model: nn.Module
    units: Sequence[ParamUnit]
    collectives: Collectives
    report: StepReport
    tiers: TierSet
    in_backward: Callable[[], bool]
    title: Callable[[], str]
    global_steps: Callable[[], int]


class TimelineHooks:
    """Records when each unit computes; attached on construction, while steps are traced.

    It uses the same means as `Hooks`: module hooks, and prehooks of the nodes that made an output, so the graph stays
    unchanged. A compiled model gets none, since the compiler would trace hooks within it.

    Args:
        units: all units, persistent ones included.
        in_backward: returns True during a backward, when a forward is a recomputation.

    Attributes:
        is_attached: False for a compiled model.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[ParamUnit], timeline: Timeline, in_backward: Callable[[], bool]
    ) -> None:
        self._timeline, self._in_backward = timeline, in_backward
        self._running: list[tuple[nn.Module, Mark]] = []
        self._handles = ExitStack()
        self.is_attached = not is_compiled_within(root)
        seen: set[int] = set()  # several units may belong to one module, and compute together
        for unit in units if self.is_attached else ():
            for module in (module for module in unit.modules if id(module) not in seen):
                seen.add(id(module))
                before, after = self._around(unit.name)
                # Registered after those of `Hooks`, so that a unit's gather does not count as its forward.
                self._handles.callback(module.register_forward_pre_hook(LiveHook(before)).remove)
                self._handles.callback(module.register_forward_hook(LiveHook(after), always_call=True).remove)

    def detach(self) -> None:
        """Removes every hook."""
        self._handles.close()

    def _around(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        timeline = self._timeline

        def before(module: nn.Module, args: Any) -> None:
            self._running.append((module, timeline.mark()))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not self._running or self._running[-1][0] is not module:
                return  # a pre-hook raised before ours ran
            _, begin = self._running.pop()
            timeline.add("compute", name, begin, detail="recompute" if self._in_backward() else "forward")
            if torch.is_grad_enabled():
                for node in producers(output):
                    node.register_prehook(lambda _: timeline.begin_backward(name))

        return before, after


class StepTrace:
    """One recording: 1. `start`, 2. any number of steps, 3. `finish`, or `abandon` after an exception.

    Args:
        path: path of the file, which rank 0 writes.

    Attributes:
        result: the recording, on every rank, after `finish`; None before.
    """

    def __init__(self, path: Path, parts: TracedParts) -> None:
        self._path, self._parts = path, parts
        self._job = parts.collectives.job
        self._timeline: Timeline | None = None
        self._hooks: TimelineHooks | None = None
        self._first_step = 0
        self._clocks: list[tuple[int, int]] = []
        self._undo = ExitStack()
        self.result: StepTraceFile | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps recorded so far."""
        return 0 if self._timeline is None else self._timeline.num_steps

    @property
    def waits(self) -> list[Wait]:
        """The three largest waits of all ranks, after `finish`."""
        return [] if self.result is None else self.result.largest_waits()

    def start(self) -> None:
        """Aligns the clocks and begins to record. (all ranks)

        Raises:
            EngineStateError: a recording is already active.
            UsageError: the folder cannot be written; on every rank.
        """
        error: Exception | None = None
        if timeline.active is not None:
            error = EngineStateError(_CALL, expected="one recording at a time", fix="leave the other block first")
        elif self._job.rank == 0:
            error = unwritable(self._path)
        agree_or_raise(self._job, error, "trace: file")
        self._clocks = clock_offsets(self._job)
        parts, topology, undo = self._parts, self._parts.collectives.topology, self._undo
        recorded = Timeline(topology.device)
        self._hooks = TimelineHooks(parts.model, parts.units, recorded, parts.in_backward)
        undo.callback(self._hooks.detach)
        for name, recorder in {"": topology.flight_recorder, **topology.recorders}.items():
            recorder.listener = CollectiveSpans(recorded, name)
            undo.callback(setattr, recorder, "listener", None)
        for name, tier in parts.tiers.tiers.items():
            for way, traffic in tier.traffic.items():
                traffic.listener = partial(recorded.transfer, f"{name}: {way}")
                undo.callback(setattr, traffic, "listener", None)
        self._first_step = parts.global_steps() + 1
        parts.report.step_listener = self._end_step
        undo.callback(setattr, parts.report, "step_listener", None)
        timeline.active = self._timeline = recorded
        undo.callback(setattr, timeline, "active", None)
        recorded.begin_step()

    def abandon(self) -> None:
        """Detaches everything, without writing."""
        self._undo.close()

    def finish(self) -> None:
        """Detaches everything, collects the ranks' spans and writes the file. (all ranks)

        Raises:
            EngineStateError: no step was complete; on every rank.
            UsageError: the file cannot be written; on every rank.
        """
        assert self._timeline is not None, "finish without start"
        self._undo.close()
        spans = self._timeline.resolved()
        of_ranks: list[RankSpans] = self._job.gather_objects(_with_unit_names(spans), "trace: spans")
        steps = min(len(rank_spans.steps) for rank_spans in of_ranks)
        if not steps:
            raise EngineStateError(
                _CALL, expected="at least one engine.step() that updates", got="none", fix="train inside the block"
            )
        aligned = tuple(
            RankSpans(rank_spans.spans, rank_spans.steps[:steps]).shifted(offset)
            for rank_spans, (offset, _) in zip(of_ranks, self._clocks, strict=True)
        )
        self.result = StepTraceFile(self._facts(), aligned)
        error: Exception | None = None
        if self._job.rank == 0:
            try:
                write_trace(self._path, self.result)
            except OSError as raised:
                error = _refused(self._path, raised)
        agree_or_raise(self._job, error, "trace: file")

    def _end_step(self) -> None:
        assert self._timeline is not None, "a listener without a recording"
        self._timeline.end_step()

    def _facts(self) -> TraceFacts:
        ranks, hooks = self._parts.collectives, self._hooks
        assert hooks is not None, "facts without a recording"
        sizes = {ranks.world_size, ranks.shard_world_size, ranks.secondary_world_size, ranks.topology.world_size}
        return TraceFacts(
            engine=self._parts.title(),
            units=tuple(unit.name for unit in self._parts.units),
            first_step=self._first_step,
            clock_errors=tuple(error for _, error in self._clocks),
            # Otherwise reductions of different groups with the same number differ, and no rank is the last for both.
            one_group=len(sizes) == 1 and not (ranks.parts or ranks.part_holders or ranks.topology.recorders),
            separates_units=hooks.is_attached,
            on_device=ranks.topology.device.type != "cpu",
        )


def _with_unit_names(recorded: RankSpans) -> RankSpans:
    """Replaces buffer keys such as "layers.0/1", unit and number, with the unit's name, in updates and copies."""
    spans = (
        span._replace(name=span.name.rpartition("/")[0] or span.name) if span.kind in ("update", "copy") else span
        for span in recorded.spans
    )
    return RankSpans(tuple(spans), recorded.steps)


def unwritable(path: Path) -> UsageError | None:
    """Tries to write beside a file; returns the error for the file, or None."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        probe.touch()
        probe.unlink()
    except OSError as error:
        return _refused(path, error)
    return None


def _refused(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{_CALL}: {path}: {error.strerror}", fix="name a file in a writable folder")


# -- the order of `zeroaccel trace`


class TraceableEngine(Protocol):
    """The members of an engine that an order uses."""

    @property
    def optimizer(self) -> object:
        """The optimizer; None if the engine does not train."""

    def traced_parts(self) -> TracedParts:
        """Returns the parts of the engine that a recording observes."""


@dataclass(frozen=True)
class TraceOrder:
    """The request of `zeroaccel trace` to the first engine that a script makes for training.

    Attributes:
        path: path of the trace.
        warmup, steps: number of steps before the recording and in it.
        progress: file to which rank 0 writes the number of steps so far.
    """

    path: Path
    warmup: int
    steps: int
    progress: Path

    def follow(self, engine: TraceableEngine) -> None:
        """Records this engine's steps, then exits the program with success, at the end of `engine.step()`."""
        global _followed
        if _followed:
            logger.info("zeroaccel trace: a second engine trains in this program; only the first one is recorded")
            return
        _followed = True
        parts = engine.traced_parts()
        trace = StepTrace(self.path, parts)
        steps = -1

        def on_step() -> None:
            nonlocal steps
            steps += 1
            if steps > self.warmup:
                trace._end_step()
            if parts.collectives.job.rank == 0:
                self.progress.write_text(str(steps))
            if trace.num_steps == self.steps:
                trace.finish()
                raise SystemExit(0)
            if steps == self.warmup:
                trace.start()
            parts.report.step_listener = on_step  # in place of the recording's own

        on_step()  # the program is at its start


_followed = False


def record_if_asked(engine: TraceableEngine) -> None:
    """Starts the recording that `zeroaccel trace` requested, for the first engine that trains. (all ranks)

    Raises:
        ConfigError: the order in the environment does not have the format of `zeroaccel trace`.
    """
    if engine.optimizer is not None and (order := trace_order()) is not None:
        order.follow(engine)


def trace_order() -> TraceOrder | None:
    """Returns the order in the environment, or None.

    Raises:
        ConfigError: the order does not have the format of `zeroaccel trace`.
    """

    def read(order: Any) -> TraceOrder:
        return TraceOrder(Path(order["path"]), int(order["warmup"]), int(order["steps"]), Path(order["progress"]))

    return command_order(VARIABLE, "trace", read)
