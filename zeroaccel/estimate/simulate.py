"""Measures the peak memory of a rank by running the engine for two optimizer steps on tensors without data.

[Note: fake step] The model consists of tensors with shape and dtype but without values (`ShapesOnly`). Units,
coordinator, reducer and optimizer are the engine's own, with fake collectives (`FakeRanks`). On a mesh, the rank has
its part of the model (`mesh_parts`). The first step records the prefetch trace; the second one is like all later steps,
and is measured. Only two parts of the engine are replaced: the gradient norm, which needs values, and the optimizer's
arithmetic.

Counted: every tensor that an operation returns (`MemoryTracker`). Not counted: memory that a kernel allocates
internally, rounding and caches of allocators, and the backend's own memory.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroaccel.config import load_config, overlaps_communication
from zeroaccel.engine import Engine
from zeroaccel.errors import UsageError
from zeroaccel.estimate.adapters import adapt
from zeroaccel.estimate.extrapolate import MemoryTrace, Moment, changes_of, extrapolate_depth
from zeroaccel.estimate.fake_ranks import FakeRanks, SentBytes, sent_per_step
from zeroaccel.estimate.mesh_parts import PHASES, micro_steps, part_of, splits_of
from zeroaccel.estimate.shapes_only import META, SHAPES, WithoutValues, fused_attention
from zeroaccel.estimate.subject import Subject
from zeroaccel.estimate.workload import LIBRARY_CODES, MemoryByKind, Workload
from zeroaccel.parallel.sequence_layers import shapes_of_scans
from zeroaccel.setup.axis_estimate import Schedule
from zeroaccel.setup.build import build
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.plan import TrainPlan
from zeroaccel.zero.grad_norm import GradCheck, GradStats
from zeroaccel.zero.grad_reducer import ReduceRules
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.wrap_policy import group_parameters, has_expert_interface

_IN_PLACE = (torch.ops.aten._foreach_zero_.default, torch.ops.aten._foreach_copy_.default)


@dataclass(frozen=True)
class Simulated:
    """Memory of a simulated step.

    Attributes:
        numel: parameters of the model, without padding.
        peak: bytes at the peak.
        when: "forward", "backward" or "step".
        reduced: bytes of reduced gradients at the peak; part of `peak.gradients`.
        shards: elements and bytes of each parameter shard, in order; part of `peak.params`.
        trained: elements of each range of weights that this rank updates, with padding.
        sent: axis of the mesh -> bytes that this rank sends along it in a step.
    """

    numel: int
    peak: MemoryByKind
    when: str
    reduced: int
    shards: tuple[tuple[int, int], ...]
    trained: tuple[int, ...]
    sent: Mapping[str, int] = field(default_factory=dict)


def simulate(
    subject: Subject,
    workload: Workload,
    stage: int,
    *,
    on_cpu: bool = False,
    offloads_params: bool = False,
    pipeline_stage: int = 0,
) -> Simulated:
    """Runs two optimizer steps on tensors without data.

    A model with many equal blocks runs with a few of them, and the result is extrapolated; see `extrapolate_depth`.

    Args:
        on_cpu: True if ranks compute in host memory and communicate through gloo, which needs receive buffers.
        offloads_params: True if shards are stored apart from the full parameters, so that even a single rank has
            shards.
        pipeline_stage: pipeline stage of the rank, for a mesh with pp.

    Raises:
        UsageError: the model's forward needs values, or the mesh cannot divide the model.
    """
    kind = StepKind(stage, on_cpu, offloads_params, pipeline_stage)
    traces, more = short_traces(subject, workload, kind)
    trace = extrapolate_depth([changes_of(short) for short in traces], more) if more else traces[0]
    if trace is None:
        (trace,), _ = short_traces(subject, workload, kind, lengths=())
    return simulated(trace, workload, pipeline_stage)


class StepKind(NamedTuple):
    """Arguments of `simulate` other than subject and workload."""

    stage: int
    on_cpu: bool
    offloads_params: bool
    pipeline_stage: int


def short_traces(
    subject: Subject,
    workload: Workload,
    kind: StepKind,
    *,
    lengths: Sequence[int] = (0, 1, 2),
    every_operation: bool = False,
) -> tuple[list[MemoryTrace], int]:
    """Runs a model with a few of its equal blocks, in three lengths; the subject stores each trace for the next call.

    Args:
        lengths: which of the three lengths to run; () runs the whole model.
        every_operation: record a moment per operation for a whole model too, rather than per new peak.

    Returns:
        The traces, and the number of blocks that the last length lacks; or the trace of the whole model and 0 if its
        blocks are too few or unknown.
    """
    sent = SentBytes()
    rank_model = part_of(subject, workload, kind.pipeline_stage, sent)
    how = _How(kind.on_cpu, kind.offloads_params, sent, subject.name)
    # The extrapolation counts from both ends, so a short model has as many blocks behind those of another kind.
    shortest = _EDGES + 2 * subject.leading + _blocks_at_once(subject, workload, kind)

    def run(layers: int | None) -> MemoryTrace:
        key = workload, kind, layers, every_operation or layers is not None
        if key not in subject.traces:
            made = how._replace(every_operation=key[-1])
            subject.traces[key] = _trace(partial(rank_model.build, layers), workload, kind.stage, made)
        return subject.traces[key]

    if not lengths or shortest + 2 >= rank_model.layers:
        return [run(None)], 0
    return [run(shortest + more) for more in lengths], rank_model.layers - shortest - 2


def _blocks_at_once(subject: Subject, workload: Workload, kind: StepKind) -> int:
    """Returns the number of blocks that the engine prefetches, or reduces the gradients of, at a time."""
    numel = max(subject.layer_numel // workload.tp, 1)
    # Only stage 3, and shards stored apart from their parameters, prefetch.
    if kind.stage == 3 or kind.offloads_params:
        return -(-_PREFETCHED_NUMEL // numel)
    return -(-_REDUCED_NUMEL // numel) if numel * subject.layers > _REDUCED_NUMEL else 0


_EDGES = 4  # blocks at both ends, which the engine may treat differently from those between them
_PREFETCHED_NUMEL = 10**9  # default number of elements that the engine prefetches, or reuses without resharding
_REDUCED_NUMEL = ReduceRules.bucket_numel


class _How(NamedTuple):
    """Settings of a simulation: see `simulate`; `name` in `Subject`; the last in `_PeakRecorder`."""

    on_cpu: bool
    offloads_params: bool
    sent: SentBytes
    name: str
    every_operation: bool = False


def simulated(trace: MemoryTrace, workload: Workload, pipeline_stage: int) -> Simulated:
    """Computes the memory at the peak, and the bytes sent in a whole step, from a trace."""
    moment = max(trace.moments, key=lambda moment: moment.total)  # the first of several
    states = moment.params + moment.optimizer + moment.gradients
    peak = MemoryByKind(moment.params, moment.optimizer, moment.gradients, max(0, moment.total - states))
    when = PHASES[moment.phase % len(PHASES)]
    sent = sent_per_step(trace.sent, micro_steps(workload, pipeline_stage), workload.accumulation)
    return Simulated(trace.numel, peak, when, moment.reduced, trace.shards, trace.trained, sent)


def _trace(build: Callable[[], tuple[nn.Module, Schedule]], workload: Workload, stage: int, how: _How) -> MemoryTrace:
    """Records the memory over the second of two steps."""
    try:
        return _run_two_steps(build, workload, stage, how)
    except (RuntimeError, TypeError) as error:
        if not re.search("meta|unallocated storage", str(error), re.IGNORECASE):
            raise
        raise UsageError(
            f"{how.name}: its forward depends on values, which an estimate does not have: {error}",
            fix="estimate a number of parameters instead, such as 7b",
        ) from error


def _run_two_steps(
    build: Callable[[], tuple[nn.Module, Schedule]], workload: Workload, stage: int, how: _How
) -> MemoryTrace:
    recorder = _PeakRecorder(how.every_operation)
    with fused_attention(), MemoryTracker() as tracker:
        model, schedule = build()
        numel = sum(param.numel() for param in model.parameters())
        adapt(model, workload, how.name)
        collectives = FakeRanks(workload.shard_ranks, how.sent, receives_in_host_memory=how.on_cpu, experts=workload.ep)
        engine = _engine(model, workload, stage, collectives, META, how)
        tracker.follow(buffer.full for unit in engine.units for buffer in unit.buffers)
        with shapes_of_scans(model):
            # The first step records the prefetch trace, and leaves receive buffers in the pool.
            _run_step(engine, schedule, recorder, how.sent)
            engine.note_fixed()
            recorder.begin(engine)
            how.sent.begin()
            tracker.begin(recorder.record)
            _run_step(engine, schedule, recorder, how.sent)
        moments, operations = recorder.moments, recorder.operations
        recorder.engine = None
        buffers = [buffer for unit in engine.units for buffer in unit.buffers]
        shards = tuple((b.own.numel, _shard_nbytes(b)) for b in buffers if not b.persistent)
        trained = tuple(b.masters.range.numel for b in buffers if b.trainable)
        sent = how.sent.as_tuple()  # before destroy(), which communicates to join parts of experts
        engine.destroy()
    return MemoryTrace(numel, tuple(moments), shards, trained, sent, tuple(operations))


def _shard_nbytes(buffer: FlatBuffer) -> int:
    """Returns the bytes of this rank's shard; for codes, the bytes of their tensors."""
    if buffer.trainable:  # may share the memory of its masters
        return buffer.own.numel * buffer.dtype.itemsize
    return sum(tensor.nbytes for tensor in buffer.shard_tensors())


class _PeakRecorder:
    """Records memory by kind at every new peak of a step, or after every operation and at every other change.

    Some operations that do not change the memory occur once per unit, so traces of different lengths match only without
    them (`changes_of`). Traces of different workloads match only with them, because an operation may add and free the
    same bytes in one workload. Views and copies in place add no memory, so the peak is never at one; these are recorded
    without their name, and only if something else has changed the memory.

    Attributes:
        phase: number of completed phases of the step.
        moments: the recorded memory.
        operations: for a record of every operation, the one before each moment; None for a view or a copy in place.
    """

    def __init__(self, every_operation: bool) -> None:
        self._every_operation = every_operation
        self.engine: _EngineWithoutValues | None = None
        self.phase = 0
        self.moments: list[Moment] = []
        self.operations: list[object] = []
        self._highest = 0

    def begin(self, engine: _EngineWithoutValues) -> None:
        self.engine, self.phase, self.moments, self.operations, self._highest = engine, 0, [], [], 0

    def record(self, operation: object, total: int, resizable: int) -> None:
        if self.engine is None:
            return
        if self._every_operation:
            last = self.moments[-1] if self.moments else None
            if operation is None and last is not None and (total, self.phase) == (last.total, last.phase):
                return
            self.operations.append(operation)
        elif total <= self._highest:
            return
        self._highest = max(self._highest, total)
        self.moments.append(Moment(self.phase, total, *self.engine.memory_by_kind(resizable)))


def _run_step(engine: _EngineWithoutValues, schedule: Schedule, recorder: _PeakRecorder, sent: SentBytes) -> None:
    for recorder.phase, sent.moment in schedule(engine):
        pass  # the schedule runs the phase when the loop requests the next one


# -- replacements for parts of the engine


class MemoryTracker(WithoutValues):
    """Counts the bytes of storages that are allocated inside it.

    It adds a result when its operation returns, and subtracts it when the last reference to its storage is gone. It
    measures resizable storages after each operation. It does not see memory that a kernel allocates and frees within
    one operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_change: Callable[[object, int, int], None] | None = None
        self._nbytes: dict[int, int] = {}
        self._alive: dict[int, _StorageReference] = {}
        self._fixed = 0
        self._resizable: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = SHAPES.result(func, args, kwargs or {})
        if isinstance(result, Tensor):
            self._add(result.untyped_storage())
        elif isinstance(result, (tuple, list)):
            for leaf in result:
                if isinstance(leaf, Tensor):
                    self._add(leaf.untyped_storage())
        if self._on_change is not None:
            self._measure(self._on_change, None if func.is_view or func in _IN_PLACE else func)
        return result

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Measures the storages of these tensors every time from now on, because they are resized."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._subtract(storage._cdata)
            self._nbytes[storage._cdata] = 0  # not to be added again
            self._resizable.append(storage)

    def begin(self, on_change: Callable[[object, int, int], None]) -> None:
        """Calls `on_change` now and after each operation.

        It receives the operation, or None for a view or a copy in place, the live bytes, and their resizable part.
        """
        self._on_change = on_change
        self._measure(on_change, "begin")

    def _measure(self, on_change: Callable[[object, int, int], None], operation: object) -> None:
        resizable = sum([storage.nbytes() for storage in self._resizable])
        on_change(operation, self._fixed + resizable, resizable)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._nbytes:
            self._nbytes[key] = nbytes = storage.nbytes()
            self._fixed += nbytes
            self._alive[key] = _StorageReference(storage, self._free)

    def _free(self, reference: _StorageReference) -> None:
        del self._alive[reference.key]
        self._subtract(reference.key)

    def _subtract(self, key: int) -> None:
        self._fixed -= self._nbytes.pop(key, 0)


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key",)

    def __init__(self, storage: torch.UntypedStorage, callback: Callable[[_StorageReference], None]) -> None:
        super().__init__(storage, callback)  # type: ignore[call-arg]
        self.key = storage._cdata


class _StatesOnly(torch.optim.Optimizer):
    """An optimizer that allocates its states without computing updates."""

    def __init__(self, params: Sequence[nn.Parameter], workload: Workload) -> None:
        super().__init__(params, {"lr": 0.0})
        self._workload = workload

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torch's implementation first imports its compiler, which takes a second.
        self.param_groups.append({**self.defaults, **param_group})

    def step_shard(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, *, grad_scale: float | Tensor, out: Tensor | None
    ) -> None:
        if not self.state[param]:
            nbytes = self._workload.states_nbytes(param.numel())
            self.state[param] = {"states": param.new_zeros(nbytes, dtype=torch.uint8)} if nbytes else {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


class _EngineWithoutValues(Engine):
    _shards_nbytes = 0
    _optimizer_nbytes = 0

    def note_fixed(self) -> None:
        """Stores the bytes that stay constant after the first step: those of shards and of the optimizer."""
        states = self.model_state_nbytes()
        full = sum(buffer.full.untyped_storage().nbytes() for unit in self.units for buffer in unit.buffers)
        self._shards_nbytes, self._optimizer_nbytes = states["params"] - full, states["optimizer"]

    def memory_by_kind(self, unsharded: int) -> tuple[int, int, int, int]:
        """Returns the bytes of parameters, optimizer, gradients (including those in flight) and reduced gradients.

        Args:
            unsharded: bytes of the units' full buffers.
        """
        return self._shards_nbytes + unsharded, self._optimizer_nbytes, *self.grad_reducer.nbytes_now()

    def _check_gradients(self, *, norm: bool) -> GradCheck:
        self._finish_reductions()
        return GradStats(finite=True, norm=1.0, same_history=True, same_settings=True)


def _engine(
    model: nn.Module,
    workload: Workload,
    stage: int,
    collectives: FakeRanks,
    device: torch.device,
    how: _How,
) -> _EngineWithoutValues:
    """Builds the engine like `initialize`, without the steps that need a process group or values."""
    accumulation = min(workload.accumulation, 2)  # a third micro-batch repeats the second
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
    }
    # Set explicitly, because the device of these tensors has no streams.
    overlaps = overlaps_communication(load_config(config), has_streams=not how.on_cpu)
    config["zero_optimization"]["overlap_comm"] = overlaps
    if workload.frozen_weights and workload.frozen_weights not in LIBRARY_CODES:
        config["zero_optimization"]["frozen_weights"] = workload.frozen_weights
    if workload.precision != "fp32":
        config[workload.precision] = {"enabled": True}
    if workload.checkpointing:
        _recompute(model)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = _StatesOnly(params, workload)
    job = JobSpec(model, optimizer, config=config, collectives=collectives, engine_type=_EngineWithoutValues)
    plan = TrainPlan.of(job, collectives.as_job(device))
    # No tier: the tracker counts tensors only.
    splits = splits_of(model, workload)
    plan = replace(plan, placement=replace(plan.placement, offloads_params=how.offloads_params, splits=splits))
    return cast(_EngineWithoutValues, build(plan))


def _recompute(model: nn.Module) -> None:
    """Checkpoints every block: by the model's own method if it has one, else around the units' modules."""
    settings = {"use_reentrant": False, "preserve_rng_state": False}  # a fake random state cannot be set
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # the newer one first
        enable: Callable[..., Any] | None = getattr(model, name, None)
        if enable is not None:
            vars(getattr(model, "config", None) or {})["use_cache"] = False  # transformers does so too, with a warning
            enable(**{name.replace("enable", "kwargs"): settings})
            model.train()
            return
    for spec in group_parameters(model):
        for module in spec.modules:
            is_block = module is not model and next(module.children(), None) is not None
            if is_block and not has_expert_interface(module):  # an experts module is inside a block
                module.forward = _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed
