"""`Engine` and its base class: the core of a training step with checkpoints, streams of weights and reports.

`EngineBase` documents the calls of programs, once each. The core (`zero/engine_core.py`) has the parts of a step; the
`Checkpointer` saves and loads, the `WeightSender` streams weights, and the `StepReport` logs phases and steps. The core
imports no module of these three.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.checkpoint.checkpointer import Checkpointer, LoadOptions, SaveOptions, SavingRules
from zeroaccel.checkpoint.loader import LoadReport
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.stop_notice import stop_notice
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.rollout.receiver import Packet
from zeroaccel.rollout.weight_stream import WeightSender
from zeroaccel.telemetry.norm_spikes import SpikeWatch
from zeroaccel.telemetry.step_report import OffloadReport, StepReport, memory_now
from zeroaccel.telemetry.throughput import ModelWork, Throughput, known_peak, work_of
from zeroaccel.zero.access.full_params import gathered, iter_named_full_params
from zeroaccel.zero.compiled import backend_named, check_toolchain, is_compiled_within, refuse_compiled_engine
from zeroaccel.zero.engine_core import EngineCore, EngineParts
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.param_check import UntrainedWatch
from zeroaccel.zero.param_unit import ParamUnit
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.step_trace import StepTrace, TracedParts
from zeroaccel.zero.storage.placement import TierSet
from zeroaccel.zero.wrap_policy import has_expert_interface, scored_experts

__all__ = ["Engine", "EngineBase", "require_loss"]

PathLike = str | os.PathLike[str]


class EngineBase(EngineCore):
    """Base class of engines: the core of one model with its checkpoints, streams of weights and reports.

    `EngineCore` has the counters of steps and the parts of a step. The engine looks up attributes that it lacks in the
    model.

    Attributes:
        checkpointer: saves and loads the engine.
        weight_sender: streams the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        settings: EngineSettings,
        parts: EngineParts,
        config: Mapping[str, Any],
        report: StepReport,
        saving: SavingRules,
    ) -> None:
        if not is_compiled_within(model):
            _watch_routers(report, model, collectives)
        super().__init__(model, units, collectives, settings, parts, config)
        self._report = report
        tiers, optimizer = parts.tiers, parts.optimizer
        if tiers.is_used:
            report.offload = _offload_report(tiers, optimizer)
        if report.performance is not None:
            report.performance.watch(collectives, tiers.tiers if tiers.is_used else {}, _update_times(optimizer))
        if optimizer is not None:
            report.at_step = UntrainedWatch(self.units, collectives, self.grad_reducer.unreached).step
            if report.watches_inputs:
                self._watch_steps(report)
        self.at_destroy(report.close)
        # For programs that drop an engine without `destroy`; at exit, these objects close themselves.
        weakref.finalize(self, tiers.close).atexit = False
        if report.monitors is not None:
            weakref.finalize(self, report.monitors.close).atexit = False
        self.checkpointer = Checkpointer(self, saving)
        self.weight_sender = WeightSender(self, self.checkpointer.state)
        self._at_stop: list[Callable[[], object]] = []

    def _watch_steps(self, report: StepReport) -> None:
        """Lets a report that logs steps count tokens and look for spikes."""
        collectives, boundary = self.collectives, self._require_boundary("initialize")
        report.throughput = _throughput(self, report.peak_tflops)
        boundary.takes_norms = collectives.peers is collectives.job  # stages of a pipeline have no units in common
        gather = partial(collectives.job.gather_objects, label="losses of a spike")
        report.spikes = SpikeWatch(gather, warns=collectives.job.rank == 0, late=boundary.is_known_late)

    # -- one micro-batch, and one step

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward; the engine gathers sharded parameters as their modules run."""
        if torch.compiler.is_compiling():
            refuse_compiled_engine()
        self.checkpointer.require_intact("forward")
        self._report.begin("forward")
        self._report.forward(args, kwargs)
        # `finally`: the program may catch an exception of a forward and try the next batch.
        try:
            return super().run_forward(*args, **kwargs)
        finally:
            self._report.end("forward")

    def run_trial(self, batch: Mapping[str, Any]) -> Any:
        """Runs a forward at the start, to observe the model; it is not part of a training step."""
        return self.module(**batch)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model's forward with `torch.compile` and its arguments. The hooks stay out of the graphs.

        Example:
            >>> import torch
            >>> import zeroaccel
            >>> engine, *_ = zeroaccel.initialize(torch.nn.Linear(4, 2), config={"train_micro_batch_size_per_gpu": 8})
            >>> engine.compile(backend="eager")
            >>> engine(torch.ones(8, 4)).shape
            torch.Size([8, 2])

        Raises:
            UsageError: the engine refuses compiled models, because ranks share the layers of the model.
            ConfigError: there is no such backend, or the compiler that it calls is missing.
        """
        if self._refuses_compiled:
            raise UsageError(f"engine.compile(): {self._refuses_compiled}", fix="do not compile the model")
        backend, where = kwargs.get("backend", "inductor"), "engine.compile(backend)"
        with agreed(self.collectives.job, "engine.compile"):
            if isinstance(backend, str):
                kwargs["backend"] = backend = backend_named(backend, where)
            check_toolchain(backend, self.collectives.topology.device, where)
        self.module.compile(*args, **kwargs)
        self._hooks.attach_anew()

    def run_step(self) -> None:
        """Unscales, clips, updates, gathers and steps the scheduler at the boundary; elsewhere only counts.

        Raises:
            EngineStateError, CollectiveError, UsageError, CheckpointError: as `Engine.step`.
        """
        boundary = self.is_gradient_accumulation_boundary()
        self.require_states_loaded()
        self.checkpointer.require_intact("step")
        if boundary:
            self.checkpointer.before_update()
        weights = self._begin_step()
        if boundary:
            self._report.begin("step")
            with self._decided_step() as factor:
                weights.replace_weights(factor)
            self._report.end("step")
            self._report.step(self)
            outcome = self._require_boundary("step").outcome
            if self._report.spikes is not None and outcome is not None:
                self._report.spikes.step(self.global_steps, self.global_samples, outcome)
            self._stop_if_asked()

    def _end_reductions(self) -> None:
        self._report.begin("reduce")
        super()._end_reductions()
        self._report.end("reduce")

    def when_preempted(self, call: Callable[[], object]) -> None:
        """Registers a call that all ranks run once, after the same step, on preemption. (all ranks, before step 1)

        SIGTERM or SIGUSR1 to one process triggers it. The existing exchange of each step informs the other ranks; on a
        GPU they act one step later. `call` may save, and raise `zeroaccel.Preempted`.

        Example:
            >>> import torch, zeroaccel
            >>> from zeroaccel.errors import Preempted
            >>> model = torch.nn.Linear(4, 2)
            >>> config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            >>> engine, *_ = zeroaccel.initialize(model=model, config=config)
            >>> def leave():
            ...     raise Preempted(f"saved nothing at step {engine.global_steps}")
            >>> engine.when_preempted(leave)
            >>> engine.destroy()
        """
        boundary = self._require_boundary("when_preempted")
        if not boundary.sends_stop:
            boundary.sends_stop = True
            self.at_destroy(stop_notice.listen())
        self._at_stop.append(call)

    def _stop_if_asked(self) -> None:
        if not self._at_stop or not self._require_boundary("step").stops(self.global_steps - 1):
            return
        calls, self._at_stop = self._at_stop, []
        for call in calls:
            call()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether `step()` updates the weights, from now on; the engine stops counting micro-batches for that.

        Raises:
            EngineStateError: `managed_gradient_accumulation` is false, so every `step()` updates the weights.
        """
        if not self.settings.managed_accumulation:
            raise EngineStateError(
                "engine.set_gradient_accumulation_boundary()",
                expected="managed_gradient_accumulation true",
                got="false, so every engine.step() is a boundary",
                fix="call engine.step() only after the last micro-batch of each update",
            )
        self.decide_boundary(is_boundary)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated since the last step."""
        self._drop_gradients()
        self._step.num_backwards = 0

    # -- numbers of the run

    @property
    def optimizer(self) -> Any:
        """The optimizer; its `param_groups` hold this rank's shards."""
        return self.sharded_optimizer.optimizer if self.sharded_optimizer is not None else None

    def was_step_applied(self) -> bool:
        """Returns True if the last `step()` changed the weights; False between boundaries and after an overflow."""
        return self._step.applied

    def get_global_grad_norm(self) -> float | None:
        """Returns the last boundary's global L2 gradient norm, unscaled, before clipping; inf after an overflow.

        None before the first boundary, or if `compute_grad_norm` is off.
        """
        return None if self._boundary is None else self._boundary.grad_norm

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each param group; 0 if it has none, as in Adafactor with relative steps."""
        return [float(group.get("lr") or 0.0) for group in self._require_optimizer("get_lr").optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Returns the number of samples per step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.settings.accumulation * self.settings.data_parallel_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of samples per rank and forward."""
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-batches per step."""
        return self.settings.accumulation

    def model_state_nbytes(self) -> dict[str, int]:
        """Returns the bytes this rank holds now: "params", "gradients" and "optimizer" (masters and states).

        Counts allocated storage: a sharded unit counts its shard, an unsharded one its full buffer as well.
        """
        params = 0
        for buffer in (buffer for unit in self.units for buffer in unit.buffers):
            params += buffer.full.untyped_storage().nbytes()
            params += sum(tensor.nbytes for tensor in buffer.shard_tensors())
        return {
            "params": params,
            "gradients": self.grad_reducer.nbytes(),
            "optimizer": self.sharded_optimizer.nbytes() if self.sharded_optimizer is not None else 0,
        }

    def tier_nbytes(self) -> dict[str, int]:
        """Returns this rank's bytes in other tiers than its device: "params, host", "params, nvme", "optimizer, nvme".

        In a CPU run host memory is the device, so states in it count in `model_state_nbytes` only.
        """
        return {name: tier.nbytes for name, tier in self.tier_set.tiers.items()}

    def extra_repr(self) -> str:
        """Returns stage, ranks, dtypes, batch size and tiers for the first line of `repr(engine)`."""
        settings = self.settings
        dtypes = sorted({str(b.dtype).removeprefix("torch.") for unit in self.units for b in unit.buffers})
        batch = f"batch {settings.micro_batch_size} x {settings.accumulation} x {settings.data_parallel_size}"
        tiers = ", ".join(sorted(self.tier_nbytes())) or "none"
        kind = "" if self.sharded_optimizer is not None else ", inference"
        stage = sum((settings.plan.optimizer, settings.plan.grads, settings.plan.params))
        return (
            f"stage {stage}, {self.collectives.world_size} ranks, {' and '.join(dtypes)}, "
            f"{batch} = {self.train_batch_size()}, tiers: {tiers}{kind}"
        )

    # -- where time goes

    @contextlib.contextmanager
    def record_trace(self, path: PathLike) -> Iterator[StepTrace]:
        """Records the steps inside the block: units, collectives, updates and copies over time. (all ranks)

        Rank 0 writes one file for all ranks. Perfetto and Chrome open it, and `zeroaccel trace` turns it into a page.
        Recording changes neither computation nor traffic, except for a few small collectives before the first step and
        after the last. The first steps of a run are not typical: record later ones.

        Args:
            path: file on rank 0's machine; an existing file is replaced.

        Yields:
            The recording; after the block its `waits` are the three largest, on every rank.

        Raises:
            EngineStateError: another recording is active, or no step was complete.
            UsageError: the file cannot be written; on every rank.

        Example:
            >>> import torch, zeroaccel, tempfile
            >>> model, path = torch.nn.Linear(4, 2), tempfile.mkdtemp() + "/trace.json"
            >>> config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            >>> engine, *_ = zeroaccel.initialize(model, config=config)
            >>> with engine.record_trace(path) as recorded:
            ...     for _ in range(2):
            ...         _ = engine.backward(engine(torch.ones(8, 4)).square().mean())
            ...         engine.step()
            >>> recorded.result.num_steps, recorded.waits  # a single rank never waits
            (2, [])
            >>> engine.destroy()
        """
        trace = StepTrace(Path(path), self.traced_parts())
        trace.start()
        try:
            yield trace
        except BaseException:  # the other ranks may not be here
            trace.abandon()
            raise
        trace.finish()

    def traced_parts(self) -> TracedParts:
        """Returns the parts of the engine that a recording observes."""
        return TracedParts(
            model=self.module,
            units=self.units,
            collectives=self.collectives,
            report=self._report,
            tiers=self.tier_set,
            in_backward=lambda: self._step.in_backward,
            title=self.extra_repr,
            global_steps=lambda: self.global_steps,
        )

    # -- weights and states outside the step

    def change_masters(self, call: Callable[[], object]) -> None:
        """Runs an optimizer method other than `step` that changes weights, e.g. `eval` of a schedule-free optimizer.

        (all ranks, between a step and the next forward)

        Args:
            call: sees part of this rank's masters at a time in the param groups, as `step` does.
        """
        weights = self._require_weight_update("change_masters")
        self._check_usable()
        self.registry.require_free("a change of weights by the optimizer")
        self._note_phase("step")
        self._coordinator.end_step()
        for unit in self.units:
            unit.drop_copies()
        weights.change_masters(call)

    def gathered(self, budget: int | None = None) -> AbstractContextManager[None]:
        """Keeps parameters unsharded for generation or evaluation. (all ranks)

        Inside, ranks may run different numbers of forwards: a rank that leaves the block participates in the gathers of
        the others until all have left it. Training inside the block is an error.

        Args:
            budget: bytes of unsharded parameters to keep, in the order of the model; the engine gathers the rest for
                each forward. None keeps all.

        Raises:
            UsageError: `budget` is not a number of bytes, or differs between ranks; or the block is nested.
        """
        self.finish_update()
        return gathered(self.registry, self._coordinator, budget)

    def iter_named_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full values in the engine's dtype), one unsharded unit at a time. (all ranks, to the end)

        A tensor is valid only until the next one: copy it to keep it. Tied parameters come once.
        """
        self.finish_update()
        return iter_named_full_params(self.registry)

    def stream_weights(
        self,
        *,
        dtype: torch.dtype | None = None,
        names: Iterable[str] | Callable[[str], bool] | None = None,
        bucket_bytes: int = 1 << 28,
        merge_adapters: bool = False,
        only_rank: int | None = None,
        as_saved: bool = True,
    ) -> Iterator[Packet]:
        """Yields packets of all weights, gathered unit by unit, each byte once. (all ranks, to the end)

        A packet has a `manifest` of plain data and a `payload`, a tensor of bytes that is valid until the next packet.
        The stream holds one unit and one bucket of `bucket_bytes` at a time. Tied parameters come once; persistent
        buffers are included.

        Args:
            dtype: float32, bfloat16 or float16, for floating-point values; None keeps their own.
            names: names of parameters and buffers to send, or a predicate on names. The engine gathers only these.
            bucket_bytes: a multiple of 16; a larger tensor comes in pieces.
            merge_adapters: merge PEFT's adapters into the weights that they adapt, by the adapter's own rule, and send
                these under the names that they have without adapters. The engine's weights do not change.
            only_rank: rank in the job that gets payloads; packets of other ranks have none. None means all ranks.
            as_saved: use the names and layouts of `save_pretrained`; False uses those of the model's parameters, as
                deltas do.

        Raises:
            UsageError: an argument is wrong or differs between ranks; on every rank.
            EngineStateError: another stream is open.
        """
        wanted = names if names is None or callable(names) else tuple(names)
        return self.weight_sender.stream_weights(
            dtype=dtype,
            names=wanted,
            bucket_bytes=bucket_bytes,
            merge_adapters=merge_adapters,
            only_rank=only_rank,
            as_saved=as_saved,
        )

    def mark_changes(self, enabled: bool = True) -> None:
        """Makes each step mark the 16-bit weights that it changes, one bit per weight, for `stream_deltas`.

        It is off by default, and then uses no memory. Weights of other dtypes always count as changed.
        """
        self.weight_sender.mark_changes(enabled=enabled)

    def stream_deltas(self, since: int | None = None) -> Iterator[Packet]:
        """Yields packets of changed weights, each rank from its own shard, without a gather. (all ranks, to the end)

        All ranks send their packets; a receiver has the version once the packets of all ranks have arrived. If all
        values of a parameter take fewer bytes than the changed values with positions, the packet has all values.

        Args:
            since: the version that the receivers have (`engine.streamed_version` at that time). If it is not that of
                the last complete stream of weights or deltas, the packets contain all weights.

        Raises:
            EngineStateError: `mark_changes` was not called, or another stream is open.
        """
        return self.weight_sender.stream_deltas(since)

    @property
    def streamed_version(self) -> int:
        """Number of the last stream of weights that began; 0 before the first."""
        return self.weight_sender.version

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states from the device to host memory until `reload_states`; meanwhile the engine cannot be used.

        Args:
            include: a selection of "optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer", as
                strings or as members of an enum with these values; None means all.
            device: "cpu".
            non_blocking: accepted without effect: the call frees the memory, so it always waits for the copies.

        Raises:
            UsageError: a kind or the device is unknown.
            EngineStateError: the states are already offloaded.
        """
        self.finish_update()
        self.registry.before_write()  # a save may be copying them
        kinds = self._state_offload.kinds(include, device)
        self._coordinator.end_step()
        self._state_offload.offload(kinds, pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the states back to the device. Without an earlier `offload_states` it does nothing."""
        self._state_offload.reload()

    # -- checkpoints

    @property
    def loaded(self) -> LoadReport | None:
        """`LoadReport` with the bytes that the last `load_checkpoint` read; None before the first load."""
        return self.checkpointer.loaded

    def save_checkpoint(
        self,
        save_dir: PathLike,
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool | None = None,
    ) -> bool:
        """Saves everything a resumed run needs into `save_dir/<tag>`. (all ranks)

        With `checkpoint.async_save` it returns at once, and writing overlaps with training; if writing fails, the next
        `step()`, save or load raises the error.

        Args:
            save_dir: a folder that all ranks see.
            tag: name of the checkpoint, the same on all ranks; `global_step<N>` by default. Replaces an existing one.
            client_state: plain data and tensors of the caller, which `load_checkpoint` returns; rank 0's are saved.
            save_latest: write `latest`, so that a load without a tag finds this checkpoint.
            exclude_frozen_parameters: leave out the values of parameters that need no gradient, or save all. By default
                the config's `checkpoint.exclude_frozen_parameters`; without that, the save leaves out the base model
                under PEFT adapters if it has a name.

        Returns:
            True: the save is complete, or continues in the background.

        Raises:
            CheckpointError: writing failed (earlier checkpoints are unchanged), or an earlier save in the background
                failed.
            UsageError: the ranks' tags differ, or `client_state` contains something other than plain data and tensors.
            EngineStateError: gradients of an unfinished accumulation would be lost.
        """
        options = SaveOptions(client_state, save_latest, exclude_frozen_parameters)
        self.checkpointer.save_checkpoint(save_dir, tag, options)
        return True

    def load_checkpoint(
        self,
        load_dir: PathLike,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resumes from a checkpoint that any number of ranks saved, at any stage and precision. (all ranks)

        It also reads folders that DeepSpeed wrote, and FSDP2 state dicts that torch.distributed.checkpoint wrote.

        Args:
            tag: name of the checkpoint; by default the one that `latest` names. "auto" takes the newest valid one, of
                any writer, and logs the skipped ones with the reasons.
            load_module_strict: all names must match; False loads the names that match. Shapes must always match.
            load_optimizer_states: load optimizer states, such as moments, and the hyperparameters of the param groups.
            load_lr_scheduler_states: load the state of the scheduler.
            load_module_only: load only weights and buffers; training starts at step 0 with them.

        Returns:
            (the checkpoint's folder, the saved `client_state`); (None, {}) for "auto" if there is no checkpoint.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, incomplete, or does not fit; on every rank. If only
                reading it showed the damage, the engine refuses to run until a load succeeds.
        """
        options = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
        )
        return self.checkpointer.load_checkpoint(load_dir, tag, options)

    def save_16bit_model(
        self,
        save_dir: PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        *,
        requantize: bool | PathLike = False,
    ) -> bool:
        """Writes the parameters, in the dtypes they have in the engine, and the buffers to one file. (all ranks)

        Rank 0 writes, at every stage, with one unit unsharded at a time. It streams a file that ends in .safetensors;
        for .bin, .pt and .pth it calls `torch.save`, with all weights in its memory.

        Args:
            requantize: encode weights as FP8 or MXFP4 files of the model's source do; see `docs/fp8_mxfp4.md`. A
                folder, if the source is not that of the model's config.

        Returns:
            True: the file is written.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self.checkpointer.save_16bit_model(
            os.path.join(save_dir, save_filename), exclude_frozen=exclude_frozen_parameters, requantize=requantize
        )
        return True

    def save_model(
        self,
        save_dir: PathLike,
        *,
        max_nbytes: int,
        pickled: bool = False,
        exclude_frozen_parameters: bool = False,
        requantize: bool | PathLike = False,
    ) -> list[str]:
        """Writes the model as files of at most `max_nbytes` with an index, in the Hugging Face layout. (all ranks)

        For `requantize` see `save_16bit_model`.

        Returns:
            The names of the files.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        return self.checkpointer.save_model(
            save_dir, max_nbytes, pickled=pickled, exclude_frozen=exclude_frozen_parameters, requantize=requantize
        )

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Returns the model's full state dict in host memory on rank 0, and None on the others. (all ranks)

        Works at every stage, with one unit unsharded at a time; rank 0 holds a copy of all weights, in the engine's
        dtypes. Tied parameters are one tensor under each of their names.
        """
        return self.checkpointer.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters)

    def wait_for_checkpoint(self) -> None:
        """Waits until no save runs in the background. (all ranks)

        Raises:
            CheckpointError: the save failed; on every rank.
        """
        self.checkpointer.wait()

    # -- life cycle

    def destroy(self) -> None:
        """Detaches the engine: removes its hooks, and frees masters, gradients and optimizer states at once.

        `optimizer.state` is empty afterwards, and the model is an ordinary one. One rank may call it alone: weights
        that are sharded stay so until their values are used, by a forward, a read or a write, `state_dict()` or
        `initialize`; all ranks must do that together, because it unshards them. Only weights that an axis of the mesh
        splits, compiled models, and parameters of other classes are unsharded here. (then all ranks)

        Raises:
            CheckpointError: this rank's part of a save in the background failed.
        """
        try:
            self.checkpointer.close()
        finally:
            self._destroy()


class Engine(EngineBase):
    """Trains (or runs) one model; `zeroaccel.initialize` builds it.

    Call `loss = engine(batch)`, `engine.backward(loss)` and `engine.step()` once per micro-batch. `EngineBase` has the
    attributes and the calls outside the loop.

    Example:
        >>> import torch, zeroaccel
        >>> model = torch.nn.Linear(4, 2)
        >>> config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        >>> engine, optimizer, _, _ = zeroaccel.initialize(model=model, config=config)
        >>> loss = engine(torch.ones(8, 4)).square().mean()
        >>> _ = engine.backward(loss)
        >>> engine.step()
        >>> engine.global_steps, engine.was_step_applied()
        (1, True)
        >>> engine.destroy()
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward; the engine gathers sharded parameters as their modules run."""
        return self.run_forward(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Computes the gradients of this micro-batch; reduces them at the boundary, or always if they are sharded.

        Args:
            loss: a scalar that depends on this engine's forward; the mean over the rank's micro-batch.
            scale_wrt_gas: divide by the accumulation steps, so that a step averages over its micro-batches.

        Returns:
            `loss`, unchanged.

        Raises:
            UsageError: `loss` is not a scalar with a gradient.
            EngineStateError: the engine has no optimizer.
        """
        require_loss(loss)
        self._require_optimizer("backward")
        # Loss scale and mean over micro-batches in one factor: it multiplies one scalar instead of all gradients.
        factor = self.loss_scale.value / (self.settings.accumulation if scale_wrt_gas else 1)
        self._report.begin("backward")
        self._begin_backward(direct=False)
        scaled = loss * factor if factor != 1.0 else loss
        scaled.backward(retain_graph=retain_graph)
        self._end_backward()
        self._report.end("backward")
        self._report.loss(loss)
        return loss

    def step(self) -> None:
        """Unscales, clips, updates, gathers and steps the scheduler at the boundary; elsewhere only counts.

        Raises:
            EngineStateError: there was no backward before this call.
            CollectiveError: the ranks issued different collectives since the last step.
            UsageError: the ranks' param groups differ; no weight has changed, and the engine drops the gradients.
            CheckpointError: a save in the background failed; on every rank.
        """
        self.run_step()


def require_loss(loss: Any, where: str = "engine.backward(loss)") -> None:
    """Raises UsageError unless `loss` is a scalar with a gradient."""
    if not isinstance(loss, Tensor):
        raise UsageError(where, expected="a tensor", got=type(loss).__name__, fix="pass the loss itself")
    if loss.numel() != 1:
        raise UsageError(
            where, expected="a scalar", got=f"shape {tuple(loss.shape)}", fix="reduce it, e.g. loss.mean()"
        )
    if not loss.requires_grad:
        raise UsageError(
            where,
            expected="a loss that requires a gradient",
            got="a loss that does not",
            fix="compute it with gradients enabled",
        )


def _throughput(engine: EngineBase, peak: float | None) -> Throughput:
    """Returns the counter of this engine's tokens.

    Args:
        peak: TFLOPS of the device; None: look it up.
    """
    collectives = engine.collectives
    device = collectives.topology.device
    if peak is None and device.type != "cpu":
        peak = known_peak(torch.get_device_module(device).get_device_name(device))
    weights = {
        slot.fqn: (slot.whole_shape, buffer.trainable)
        for unit in engine.units
        for buffer in unit.buffers
        for slot in buffer.layout.slots
    }
    experts = [module for module in engine.module.modules() if has_expert_interface(module)]
    has_all = collectives.peers is collectives.job  # a stage of a pipeline knows its own weights only
    return Throughput(
        work_of(engine.module, weights, experts) if has_all else ModelWork(0.0),
        peak,
        lambda values: collectives.job.gather_objects(values, "tokens of the ranks"),
        lambda: (memory_now(device).peak, _states_nbytes(engine, device)),
        counts=collectives.is_first_data_group and 0 in collectives.peers.ranks,
    )


def _states_nbytes(engine: EngineBase, device: torch.device) -> int:
    """Returns the bytes of weights, gradients, masters and states on this rank's device, without gathered weights."""
    optimizer, buffers = engine.sharded_optimizer, [buffer for unit in engine.units for buffer in unit.buffers]
    tensors = [tensor for buffer in buffers for tensor in (*buffer.shard_tensors(), *buffer.masters.tensors())]
    tensors += [buffer.full for buffer in buffers if buffer.persistent]
    if optimizer is not None:
        states = (value for state in optimizer.optimizer.state.values() for value in state.values())
        tensors += [value for value in states if isinstance(value, Tensor) and any(value.stride())]
    trained = [buffer for buffer in buffers if buffer.trainable and optimizer is not None]
    numels = [buffer.own.numel if engine.settings.plan.grads else buffer.layout.numel for buffer in trained]
    grads = sum(numel * buffer.dtype.itemsize for numel, buffer in zip(numels, trained, strict=True))
    return grads + sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type)


def _watch_routers(report: StepReport, model: nn.Module, collectives: Collectives) -> None:
    """Registers the experts and routers of a mixture with the report, which counts tokens per expert."""
    experts: Iterable[Any] = filter(has_expert_interface, model.modules())
    routers: Iterable[Any] = filter(None, map(scored_experts, model.modules()))
    report.watch_routers(
        [(module, module.num_experts) for module in experts],
        [(router, nested[-1].num_experts) for router, nested in routers],
        partial(collectives.all_reduce, op="sum", label="tokens of experts"),
    )


def _update_times(optimizer: ShardedOptimizer | None) -> Callable[[], tuple[float, ...]]:
    return lambda: (0.0,) * 5 if optimizer is None else optimizer.times


def _offload_report(tiers: TierSet, optimizer: ShardedOptimizer | None) -> OffloadReport:
    swapper = tiers.swapper
    overlaps_io = swapper is not None and swapper.pipeline_read and swapper.pipeline_write
    resident = int if optimizer is None else partial(optimizer.nbytes, resident_only=True)
    return OffloadReport(tiers.tiers, _update_times(optimizer), overlaps_io=overlaps_io, resident=resident)
