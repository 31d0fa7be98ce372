"""Runs cases on the model, and reports its findings and counts."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.cuda_model.modelled_ranks import modelled_rank  # first: it loads the library before torch

from tests.cuda_model.communicators import Call, deadlocks  # isort: skip
from tests.cuda_model.configurations import Case, case_of
from tests.cuda_model.gpu_parts import run_part
from tests.cuda_model.modelled_collectives import Said
from tests.cuda_model.planted_bugs import BUGS, ORDERS
from tests.cuda_model.replacements import Replacements
from tests.cuda_model.stream_model import StreamModel
from tests.cuda_model.training_loops import LOOPS, Program, new_engine

_STEPS = 3  # the last step is counted: the first ones allocate memory, and record the order of units
_BOUNDARY = "step"


@dataclass
class Outcome:
    """Outcome of one run. Counts are of its last step.

    Attributes:
        findings: see `StreamModel`; in all steps.
        early_frees: see `StreamModel`.
        error: the exception of the run, with its traceback; empty if there is none.
        kernels, boundary_kernels: number of device operations in the step, and within `engine.step()`.
        boundary_bytes: bytes that device operations within `engine.step()` access, per element of the rank's shard.
        waits, control: number of the host's waits and blocking collectives, by "phase: why at place".
        late: number of first uses of a communicator after construction, by description, in all steps.
        first_calls: number of host calls that wait for the device, "cudaMalloc" and "first launch", in the first
            step, without construction.
        mallocs, locks: number of cudaMalloc calls and of page-locked slabs in the counted step.
        reserved_nbytes, expandable_nbytes: peak bytes of the caching allocator's segments in all steps, with its
            default settings and with expandable segments.
        allocated_nbytes: peak bytes allocated from these segments.
        calls: number of collectives, in all steps and construction.
        peak_nbytes, host_nbytes: peak bytes of device memory, and of page-locked and populated host memory.
        live_nbytes: bytes of device memory that the loop noted.
        ms: time on the model's clock.
        busy_ms: time of each lane.
        seconds: duration of the run on this machine.
    """

    findings: dict[str, int] = field(default_factory=dict)
    early_frees: dict[str, int] = field(default_factory=dict)
    error: str = ""
    kernels: int = 0
    boundary_kernels: int = 0
    boundary_bytes: float = 0.0
    waits: dict[str, int] = field(default_factory=dict)
    control: dict[str, int] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    first_calls: dict[str, int] = field(default_factory=dict)
    mallocs: int = 0
    locks: int = 0
    reserved_nbytes: int = 0
    expandable_nbytes: int = 0
    allocated_nbytes: int = 0
    calls: int = 0
    peak_nbytes: int = 0
    host_nbytes: int = 0
    live_nbytes: list[int] = field(default_factory=list)
    ms: float = 0.0
    busy_ms: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def num_waits(self) -> int:
        """Number of times the host waits for the device."""
        return sum(self.waits.values())

    @property
    def num_control(self) -> int:
        """Number of blocking collectives in host memory."""
        return sum(self.control.values())


def run_case(
    case: Case,
    plant: Callable[[Replacements], None] | None = None,
    model: StreamModel | None = None,
    rank: int = 0,
    said: Said | None = None,
    until: str = "",
) -> Outcome:
    """Trains some steps on the model, as one rank of the job, with a planted bug if one is given.

    Args:
        until: part of a finding; the run stops after the step that has it.
    """
    begin, model, replacements = time.perf_counter(), model or StreamModel(), Replacements()
    outcome = Outcome()
    try:
        with modelled_rank(case.world_size, model, rank, said) as modelled:
            for name, value in case.sizes.items():
                module, _, constant = name.rpartition(".")
                replacements.set(sys.modules[module], constant, value)
            if plant is not None:
                plant(replacements)
            engine, tokens = new_engine(case)
            program = Program(case, model, engine, tokens)
            loop = LOOPS[case.loop]
            for step in range(_STEPS):
                if step == _STEPS - 1:
                    model.reset_counts()
                loop(program)
                if step == 0:
                    outcome.first_calls = _first_calls(model)
                if until and any(until in text for text in (*model.findings, *model.early_frees, *model.log.late)):
                    break
            modelled.turns.finish()
            shard_numel = sum(buffer.own.numel for unit in engine.units for buffer in unit.buffers if buffer.trainable)
            _count(outcome, model, shard_numel)
            outcome.live_nbytes = program.live_nbytes
            for each in (engine, *program.others):
                each.destroy()
            modelled.turns.finish()
            if modelled.turns.failures:
                raise modelled.turns.failures[0]
            shutil.rmtree(program.folder, ignore_errors=True)
    except Exception:
        outcome.error = traceback.format_exc()
    finally:
        replacements.undo()
    outcome.findings, outcome.early_frees = dict(model.findings), dict(model.early_frees)
    outcome.late, outcome.calls = dict(model.log.late), len(model.log.calls)
    outcome.allocated_nbytes = model.allocator.peak_allocated
    outcome.reserved_nbytes, outcome.expandable_nbytes = model.allocator.peak_reserved, model.expandable.peak_reserved
    outcome.seconds = round(time.perf_counter() - begin, 2)
    return outcome


def call_logs(case: Case, plant: Callable[[Replacements], None] | None = None) -> dict[int, list[Call]]:
    """Returns the calls of every rank of a job; see `communicators.deadlocks`.

    Raises:
        RuntimeError: a rank fails.
    """
    logs: dict[int, list[Call]] = {}
    said: Said = {}
    for rank in range(case.world_size):
        model = StreamModel()
        if error := run_case(case, plant, model, rank, said).error:
            raise RuntimeError(f"rank {rank}: {error}")
        logs[rank] = model.log.calls
    return logs


def _first_calls(model: StreamModel) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (phase, what), count in model.first_calls.items():
        found[what] += count if phase else 0
    return dict(found)


def _count(outcome: Outcome, model: StreamModel, shard_numel: int) -> None:
    outcome.kernels = sum(model.kernels.values())
    outcome.boundary_kernels = model.sum_of(model.kernels, [_BOUNDARY])
    outcome.boundary_bytes = round(model.sum_of(model.kernel_nbytes, [_BOUNDARY]) / shard_numel, 1)
    outcome.locks = model.num_locks
    outcome.mallocs = _first_calls(model).get("cudaMalloc", 0)
    outcome.waits, outcome.control = _in_words(model.waits), _in_words(model.control)
    outcome.peak_nbytes, outcome.host_nbytes = model.peak_nbytes, model.host_peak_nbytes
    outcome.ms = round(model.elapsed_seconds() * 1e3, 3)
    outcome.busy_ms = {model.names[lane]: round(seconds * 1e3, 3) for lane, seconds in model.busy.items()}


def _in_words(counts: Counter[tuple[str, str, str]]) -> dict[str, int]:
    return {f"{phase}: {why} at {place}": count for (phase, why, place), count in counts.items()}


def serve() -> None:
    """Answers requests, one per line: {"case": name, "bug": name or null}, {"part": name} or {"order": name}."""
    # Only answers go to the standard output; the package's output goes to stderr.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "order" in request:
            found = deadlocks(call_logs(case_of("stage 3, two ranks"), ORDERS[request["order"]]))
            print(json.dumps({"deadlocks": found}), file=answers, flush=True)
            continue
        if "part" in request:
            print(json.dumps(run_part(request["part"])), file=answers, flush=True)
            continue
        case, bug = case_of(request["case"]), BUGS[request["bug"]] if request["bug"] else None
        outcome = run_case(case) if bug is None else run_case(case, bug.plant, until=bug.finding)
        print(json.dumps(asdict(outcome)), file=answers, flush=True)
