"""Measures the peak memory of a rank by running the engine for two optimizer steps on tensors without data.

[Note: fake step] The model consists of tensors with shape and dtype but without values: of `ShapesOnly`, or, for models
of users and libraries, of torch's `FakeTensorMode`, which runs every model. Units, coordinator, reducer and optimizer
are the engine's own, with fake collectives (`FakeRanks`). On a mesh, the rank has its part of the model (`mesh_parts`).
The first step records the prefetch trace; the second one is like all later steps, and is measured. Only two parts of
the engine are replaced: the gradient norm, which needs values, and the optimizer's arithmetic.

Counted: every tensor that an operation returns (`MemoryTracker`). Not counted: memory that a kernel allocates
internally, rounding and caches of allocators, and the backend's own memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zeroaccel.config import load_config, overlaps_communication
from zeroaccel.errors import UsageError
from zeroaccel.estimate.adapters import adapt
from zeroaccel.estimate.extrapolate import MemoryTrace, Moment, extrapolate_depth
from zeroaccel.estimate.fake_ranks import FakeRanks, SentBytes, sent_per_step
from zeroaccel.estimate.mesh_parts import PHASES, micro_steps, part_of, splits_of
from zeroaccel.estimate.shapes_only import META, ShapesOnly, fused_attention
from zeroaccel.estimate.subject import Subject
from zeroaccel.estimate.workload import LIBRARY_CODES, MemoryByKind, Workload
from zeroaccel.setup.axis_estimate import Schedule
from zeroaccel.setup.build import build
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.plan import TrainPlan
from zeroaccel.zero.engine import Engine
from zeroaccel.zero.grad_norm import GradCheck, GradStats
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.wrap_policy import group_parameters, has_expert_interface

_DEVICE = torch.ops.prim.device.default
_IN_PLACE = (torch.ops.aten._foreach_zero_.default, torch.ops.aten._foreach_copy_.default)
_SHAPES = ShapesOnly()  # shared, because its cached results are valid for every model


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
    trace = extrapolate_depth(traces, more) if more else traces[0]
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
    """Runs a model with a few of its equal blocks, in three lengths.

    Args:
        lengths: which of the three lengths to run; () runs the whole model.
        every_operation: record a moment per operation, rather than per change of memory, or for the whole model per
            new peak.

    Returns:
        The traces, and the number of blocks that the last length lacks; or the trace of the whole model and 0 if its
        blocks are too few or unknown.
    """
    sent = SentBytes()
    part = part_of(subject, workload, kind.pipeline_stage, sent)
    how = _How(
        kind.on_cpu,
        kind.offloads_params,
        subject.shapes_only,
        sent,
        subject.name,
        "operations" if every_operation else "peaks",
    )
    # Only stage 3, and shards stored apart from their parameters, prefetch over a window of elements.
    looks_ahead = kind.stage == 3 or kind.offloads_params
    # The extrapolation counts from both ends, so a short model has as many blocks behind those of another kind.
    shortest = _EDGES + 2 * subject.leading + (-(-_WINDOW_NUMEL // max(subject.layer_numel, 1)) if looks_ahead else 0)
    if not lengths or shortest + 2 >= part.layers:
        return [_trace(partial(part.build, None), workload, kind.stage, how)], 0
    how = how if every_operation else how._replace(record="changes")
    traces = [_trace(partial(part.build, shortest + more), workload, kind.stage, how) for more in lengths]
    return traces, part.layers - shortest - 2


_EDGES = 4  # blocks at both ends, which the engine may treat differently from those between them
_WINDOW_NUMEL = 10**9  # default number of elements that the engine prefetches, or reuses without resharding


_Record = Literal["peaks", "changes", "operations"]


class _How(NamedTuple):
    """Settings of a simulation: see `simulate`; `shapes_only`, `name` in `Subject`; `record` in `_PeakRecorder`."""

    on_cpu: bool
    offloads_params: bool
    shapes_only: bool
    sent: SentBytes
    name: str
    record: _Record = "peaks"


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
    if how.shapes_only:
        try:
            return _run_two_steps(build, workload, stage, how)
        except RuntimeError as error:
            if "meta" not in str(error).lower():
                raise
            # The model asks for a value, or calls an operation without shapes: fake tensors know constants.
            how = how._replace(shapes_only=False)
    # The import takes a third of a second, so it happens only if needed.
    from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException

    with FakeTensorMode() as fake:
        try:
            return _run_two_steps(build, workload, stage, how)
        except (UnsupportedFakeTensorException, torch._subclasses.fake_tensor.DataDependentOutputException) as error:
            raise UsageError(
                f"{how.name}: its forward depends on values, which an estimate does not have: {error}",
                fix="estimate a number of parameters instead, such as 7b",
            ) from error
        finally:
            fake.fake_tensor_converter.meta_converter.describer.lookup_storage.clear()
            # torch 2.6 crashes when it frees these weak references, so a few bytes of each are leaked.
            for reference in fake.fake_tensor_converter.constant_storage_mapping:
                reference._free_weak_ref = _left


def _left(address: int) -> None:
    """Replaces the function that frees a weak reference to a storage."""


def _run_two_steps(
    build: Callable[[], tuple[nn.Module, Schedule]], workload: Workload, stage: int, how: _How
) -> MemoryTrace:
    recorder = _PeakRecorder(how.record)
    attention = fused_attention() if how.shapes_only else nullcontext()
    with attention, MemoryTracker(_SHAPES if how.shapes_only else None) as tracker:
        model, schedule = build()
        numel = sum(param.numel() for param in model.parameters())
        adapt(model, workload, how.name)
        collectives = FakeRanks(workload.shard_ranks, how.sent, receives_in_host_memory=how.on_cpu, experts=workload.ep)
        device = META if how.shapes_only else torch.device("cpu")
        engine = _engine(model, workload, stage, collectives, device, how)
        tracker.follow(buffer.full for unit in engine.units for buffer in unit.buffers)
        # The first step records the prefetch trace, and leaves receive buffers in the pool.
        _run_step(engine, schedule, recorder, how.sent)
        engine.note_fixed()
        recorder.begin(engine)
        how.sent.begin()
        tracker.begin(recorder.record, skips_views=recorder.skips_views)
        _run_step(engine, schedule, recorder, how.sent)
        moments = recorder.moments
        recorder.engine = None
        buffers = [buffer for unit in engine.units for buffer in unit.buffers]
        shards = tuple((b.own.numel, _shard_nbytes(b)) for b in buffers if not b.persistent)
        trained = tuple(b.masters.range.numel for b in buffers if b.trainable)
        sent = how.sent.as_tuple()  # before destroy(), which communicates to join parts of experts
        engine.destroy()
    return MemoryTrace(numel, tuple(moments), shards, trained, sent)


def _shard_nbytes(buffer: FlatBuffer) -> int:
    """Returns the bytes of this rank's shard; for codes, the bytes of their tensors."""
    if buffer.trainable:  # may share the memory of its masters
        return buffer.own.numel * buffer.dtype.itemsize
    return sum(tensor.nbytes for tensor in buffer.shard_tensors())


class _PeakRecorder:
    """Records memory by kind at every new peak of a step, at every change, or after every operation that may add some.

    Some operations that do not change the memory occur once per unit, so traces of different lengths match only without
    them. Traces of different workloads match only with them, because an operation may add and free the same bytes in
    one workload. Views and copies in place add no memory, so the peak is never at one; whether padding is set to zero
    depends on the number of ranks.

    Attributes:
        phase: number of completed phases of the step.
    """

    def __init__(self, record: _Record) -> None:
        self._record = record
        self.engine: _EngineWithoutValues | None = None
        self.phase = 0
        self.moments: list[Moment] = []
        self._highest = 0

    def begin(self, engine: _EngineWithoutValues) -> None:
        self.engine, self.phase, self.moments, self._highest = engine, 0, [], 0

    @property
    def skips_views(self) -> bool:
        return self._record == "operations"

    def record(self, total: int, resizable: int) -> None:
        if self.engine is None:
            return
        is_new = total > self._highest or self._record == "operations"
        if is_new or (
            self._record == "changes" and (total, self.phase) != (self.moments[-1].total, self.moments[-1].phase)
        ):
            self._highest = max(self._highest, total)
            self.moments.append(Moment(self.phase, total, *self.engine.memory_by_kind(resizable)))


def _run_step(engine: _EngineWithoutValues, schedule: Schedule, recorder: _PeakRecorder, sent: SentBytes) -> None:
    for recorder.phase, sent.moment in schedule(engine):
        pass  # the schedule runs the phase when the loop requests the next one


# -- replacements for parts of the engine


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages that are allocated inside it, for fake and real tensors.

    It adds a result when its operation returns, and subtracts it when the last reference to its storage is gone. It
    measures resizable storages after each operation. It does not see memory that a kernel allocates and frees within
    one operation.

    Args:
        shapes: computes the results; without it, the operations run.
    """

    def __init__(self, shapes: ShapesOnly | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_change: Callable[[int, int], None] | None = None
        self._skips_views = False
        self._shapes = shapes
        self._nbytes: dict[int, int] = {}
        self._alive: dict[int, _StorageReference] = {}
        self._fixed = 0
        self._resizable: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._shapes is not None:
            result = self._shapes.result(func, args, kwargs or {})
        elif func is _DEVICE and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # two of three calls, so this path is as short as possible
        else:
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._add(result.untyped_storage())
        elif isinstance(result, (tuple, list)):
            for leaf in result:
                if isinstance(leaf, Tensor):
                    self._add(leaf.untyped_storage())
        if self._on_change is not None and not (self._skips_views and (func.is_view or func in _IN_PLACE)):
            self._measure(self._on_change)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping dynamo would take longer than an operation

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Measures the storages of these tensors every time from now on, because they are resized."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._subtract(storage._cdata)
            self._nbytes[storage._cdata] = 0  # not to be added again
            self._resizable.append(storage)

    def begin(self, on_change: Callable[[int, int], None], *, skips_views: bool = False) -> None:
        """Calls `on_change` now and after each operation, with the live bytes and the resizable part of them."""
        self._on_change, self._skips_views = on_change, skips_views
        self._measure(on_change)

    def _measure(self, on_change: Callable[[int, int], None]) -> None:
        resizable = sum([storage.nbytes() for storage in self._resizable])
        on_change(self._fixed + resizable, resizable)

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
        own: Callable[..., Any] | None = getattr(model, name, None)
        if own is not None:
            vars(getattr(model, "config", None) or {})["use_cache"] = False  # transformers does so too, with a warning
            own(**{name.replace("enable", "kwargs"): settings})
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
