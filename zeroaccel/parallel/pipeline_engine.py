"""`PipelineEngine`: one stage of a model, and the steps that it makes together with the other stages.

Each stage is an engine over its own data-parallel ranks. torch's schedules order the forwards and backwards of
micro-batches and send tensors between stages; each of these runs the same code per micro-batch as `Engine`, in the same
order of additions, so the number of stages changes no bit. Norm, overflow and clipping cover all stages.

[Note: shared parameters] A parameter that two stages read, such as tied embeddings in the first and the last, belongs
to the earlier one. The later stage computes with a copy, which it receives before each batch, and returns the copy's
gradient for each micro-batch. The earlier stage adds it to its own gradient before any other addition: this is the sum
that autograd forms if both uses are in one graph. A step of M micro-batches takes M + 1 messages of the parameter's
size; a sum at the end would take two, in another order. Gradients of several parameters are sent in the order of the
model, but backward reaches them in another order: the owner receives all of a micro-batch before it adds the first.

[Note: several stages on a rank] Each has its own backward of a micro-batch, which reaches its own parameters only. The
engine passes these parameters to `GradReducer.expect`. A buffer is then reduced with the backward that fills it, as
often as without stages, and its gradients are complete with its stage's last micro-batch.

[Note: layer-major order] On one rank, `schedule="layer_major"` makes each block a stage. All micro-batches of a step
pass through a stage before the next one: forward from the first stage to the last, backward from the last to the first.
Between two micro-batches of a stage its unit is needed again at once, so it stays gathered. A step then gathers each
unit twice, and reads it from files twice, whatever the number of micro-batches (the vertical schedule of GreedySnake,
2025). Each parameter's gradients are added in the order of the micro-batches, as in any other order; only those of a
parameter that two stages read, such as tied embeddings, are first summed over the later stage's micro-batches. The
inputs and outputs of all stages and micro-batches stay in memory. With the model's own recomputation nothing else does.

[Note: a backward in two halves] The zero-bubble schedule computes gradients of inputs first, and those of weights
later, with `torch.autograd.grad`, which calls no parameter hooks. So each half is a backward of the engine: the first
reaches no parameter, and after the second the stage reports every parameter whose gradient it has set.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.pipeline_group import PipelineGroup
from zeroaccel.config.parallel import LAYER_MAJOR, PipelineConfig
from zeroaccel.engine import EngineBase
from zeroaccel.errors import EngineStateError, UsageError, compose
from zeroaccel.nested import leaves_of, to_device
from zeroaccel.parallel.pipeline_cut import SharedParameter, Stage, StagePart, evaluating
from zeroaccel.parallel.sequence import SHIFTED_LABELS, SequenceGroup
from zeroaccel.zero.access.param_registry import ParamHandle, handle_of

_SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}

Batches = Sequence[Any]


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of the tensor that one stage sends to the next for each micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def example(self, *, requires_grad: bool) -> Tensor:
        """Returns a meta tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=requires_grad)


class PipelineEngine(EngineBase):
    """Trains one stage of a model; created by `zeroaccel.initialize` with `ParallelConfig(pp=...)`.

    A step is one call, on all ranks: `loss = engine.train_batch(data_iter)`. It takes `gradient_accumulation_steps`
    micro-batches; all ranks of one pipeline must pass the same ones. The engine has no `backward` or `step`, and
    `forward` raises: a single stage computes no loss.

    Attributes:
        stage: this rank's part of the model.
        pipeline: the ranks that hold its stages.
        micro_losses: on the last stage, the losses of the last batch, (M,) float64 on the device; elsewhere empty.

    Example:
        >>> import torch, zeroaccel
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
        ...           "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        >>> pipeline = zeroaccel.PipelineConfig(loss=torch.nn.functional.mse_loss)
        >>> engine, *_ = zeroaccel.initialize(model, config=config, pipeline=pipeline)  # one stage on one rank
        >>> data = iter([(torch.ones(3, 4), torch.zeros(3, 2))] * 4)
        >>> losses = [engine.train_batch(data).item() for _ in range(2)]
        >>> losses[1] < losses[0], engine.global_steps
        (True, 2)
        >>> engine.destroy()
    """

    stage: Stage
    pipeline: PipelineGroup
    sequence_group: SequenceGroup

    def attach(self, stage: Stage, pipeline: PipelineGroup, config: PipelineConfig, loader: Any = None) -> None:
        """Completes an engine that `initialize` created. (all ranks)"""
        self.stage, self.pipeline = stage, pipeline
        self.micro_losses = self._no_losses()
        # With pp=1 there is one stage, and torch's interleaved schedules need several.
        self._is_layer_major = config.schedule == LAYER_MAJOR
        self._schedule_class = _SCHEDULES["1f1b" if stage.count == 1 else config.schedule]
        self._eval_class = ScheduleLoopedBFS if len(stage.parts) > 1 else ScheduleGPipe
        self._loader = loader
        self._own_batches: Iterator[Any] | None = None
        self._schedules: dict[tuple[Any, bool], tuple[Any, list[_ScheduledStage]]] = {}
        self._boundaries: dict[Any, list[TensorShape]] = {}
        self._batches: Batches = ()
        self._backwards: Counter[int] = Counter()
        self._failure: Exception | None = None
        self._owned: dict[int, SharedParameter] = {}
        self._arrived: dict[str, Tensor] = {}  # gradients of this micro-batch that other stages returned
        self._added: set[str] = set()  # names of the gradients already added
        self._share()

    # -- calls of programs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises EngineStateError: a single stage computes no loss; call `train_batch` or `eval_batch`."""
        raise EngineStateError(self._not_alone("engine(batch)"))

    def __getattr__(self, name: str) -> Any:
        if name in ("backward", "step"):
            raise AttributeError(self._not_alone(f"engine.{name}()"), name=name, obj=self)
        return super().__getattr__(name)

    def run_trial(self, batch: Mapping[str, Any]) -> Any:
        """Runs `EngineBase.run_trial` for each of this rank's stages separately."""
        return self.stage.run_trial(batch)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Trains one step over `gradient_accumulation_steps` micro-batches. (all ranks)

        Args:
            data_iter: micro-batches: for a causal model, mappings of its arguments with `labels`; for an
                nn.Sequential, pairs (inputs, targets). All micro-batches of a step have equal shapes. If None, the
                engine cycles through the loader of `training_data`.

        Returns:
            Mean loss over micro-batches and data-parallel ranks, float32, the same on every rank.

        Raises:
            UsageError: on every rank: data_iter ran out, shapes differ, or stages of a pipeline got different batches.
            CollectiveError: a rank of the pipeline is gone; the message names the waiting stages and their messages.
        """
        self._require_optimizer("train_batch")
        self._check_usable()
        with self._report.whole_call():
            boundaries = self._next_batches(data_iter, "train_batch")
            self._report.batches(self._batches)
            with torch.enable_grad():
                self._refresh_copies()
                self._run(boundaries, training=True)
            self.run_step()
            return self._mean_loss()

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Returns the mean loss like `train_batch`, without gradients, dropout or an update. (all ranks)"""
        self._check_usable()
        with self._report.whole_call():
            boundaries = self._next_batches(data_iter, "eval_batch")
            with evaluating(self.module):
                self._refresh_copies()
                self._run(boundaries, training=False)
            return self._mean_loss()

    def is_first_stage(self) -> bool:
        """True if this rank has the first stage, which computes from the batch."""
        return self.stage.is_first

    def is_last_stage(self) -> bool:
        """True if this rank has the last stage, which computes the loss."""
        return self.stage.is_last

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        """Loads a checkpoint like `Engine.load_checkpoint`, saved with any number of stages. (all ranks)"""
        self._own_batches = None
        return super().load_checkpoint(*args, **kwargs)

    def reset(self) -> None:
        """Resets like `Engine.reset`, after an exception on every rank; drops messages between stages. (all ranks)"""
        super().reset()
        self._activity("")
        if hasattr(self, "_schedules"):
            self._schedules.clear()  # their stages have states and buffers of the interrupted step
            self._arrived.clear()
            self._added.clear()
            for shared in self.stage.shared:
                if shared.copy is not None:
                    shared.copy.leaves.clear()

    # -- micro-batches

    def _next_batches(self, data_iter: Iterator[Any] | None, call: str) -> list[TensorShape]:
        """Takes the micro-batches of a step, and returns the shapes sent between stages. (all ranks)"""
        job, width = self.collectives.job, self._stage_width
        facts: _Signature | None = None
        with agreed(job, f"{call}: micro-batches"):
            self._batches = self._take(data_iter, self.settings.accumulation, call)
            facts = _Signature.of(self._batches, call) if self._batches else None
            if self.sequence_group.size > 1:
                _require_cut(self._batches, call)
        is_known = facts is not None and facts.shapes in self._boundaries
        of_ranks: list[tuple[_Signature | None, bool]] = job.gather_objects((facts, is_known), f"{call}: batches")
        place = job.rank % width
        place -= place % self._layer_ranks  # tensor-parallel ranks see the same samples
        first = of_ranks[place][0]
        with agreed(job, f"{call}: same batches"):
            assert first is not None, "the first stage has no batch"
            if facts is not None:
                facts.require(first, call, f"{self.stage.index}, {job.named([job.rank])}", f"0, {job.named([place])}")
        self._batches = [to_device(batch, self.collectives.topology.device) for batch in self._batches]
        if self._is_layer_major:
            return []  # no messages
        if not all(known for _, known in of_ranks[:width]):
            self._boundaries[first.shapes] = self._infer()
        return self._boundaries[first.shapes]

    def _infer(self) -> list[TensorShape]:
        """Returns the shapes sent between stages, from one forward through all of them. (all ranks)"""
        shapes: list[TensorShape] = []
        width = self._stage_width
        own_parts = {stage.index: stage for stage in self.stage.parts}
        for index in range(self.stage.num_parts - 1):
            shape: TensorShape | None = None
            if index in own_parts:
                device = self.collectives.topology.device
                received = torch.zeros(shapes[-1].shape, dtype=shapes[-1].dtype, device=device) if shapes else None
                with evaluating(self.module):
                    output = self._forward_of(own_parts[index], 0, received)
                shape = TensorShape(tuple(output.shape), output.dtype)
            of_ranks = self.collectives.job.gather_objects(shape, "shapes between stages")
            shapes.append(of_ranks[index % self.stage.count * width + self.collectives.job.rank % width])
        return shapes

    def _take(self, data_iter: Iterator[Any] | None, count: int, call: str) -> Batches:
        if data_iter is None and self._loader is not None:
            self._own_batches = self._own_batches or _round(self._loader)
            data_iter = self._own_batches
        if data_iter is None:
            if not self.stage.needs_batch():
                return ()
            raise UsageError(
                f"engine.{call}(data_iter)",
                expected=f"an iterator of micro-batches on stage {self.stage.index}",
                got=None,
                fix="pass one, or training_data to initialize()",
            )
        batches = list(itertools.islice(data_iter, count))
        if len(batches) < count:
            raise UsageError(
                f"engine.{call}(data_iter)",
                expected=f"{count} micro-batches (gradient_accumulation_steps)",
                got=f"{len(batches)} more",
                fix="make a new iterator for each epoch; drop_last=True drops batches that do not fill a step",
            )
        return batches

    def _forward_of(self, stage: StagePart, micro_batch: int, received: Tensor | None) -> Tensor:
        """Computes a stage's forward of one micro-batch."""
        for shared in self.stage.shared:
            if shared.copy is not None:
                shared.copy.micro_batch = micro_batch
        batch = self._batches[micro_batch] if self._batches else None
        output = self.stage.run(stage, self.run_forward, batch, received)
        if stage.is_last and self.sequence_group.size > 1:
            return self.sequence_group.mean_loss(output, batch[SHIFTED_LABELS])  # type: ignore[index]
        return output

    def _scaled(self, loss: Tensor, losses: list[Tensor]) -> Tensor:
        """Appends a micro-batch's loss; returns it scaled like `Engine.backward`: one multiplication of a scalar."""
        losses.append(loss.detach().reshape(()))
        self._report.loss(loss)
        factor = self.loss_scale.value / self.settings.accumulation
        return loss * factor if factor != 1.0 else loss

    def _backward_of(
        self, stage: StagePart, micro: int, run: Callable[[], Sequence[nn.Parameter]], *, inputs_only: bool = False
    ) -> None:
        """Does the work of `Engine.backward` and `step` for one micro-batch, except the update of the last one.

        See [Note: several stages on a rank] and [Note: a backward in two halves].

        Args:
            run: returns the parameters whose gradients autograd does not report through hooks.
            inputs_only: this is the first half of a split backward, which computes no gradients of weights.
        """
        micro_batches = self.settings.accumulation
        self._backwards[stage.index] += not inputs_only
        # A stage's gradients are complete with its own last micro-batch; other stages of the rank may follow.
        self.decide_boundary(not inputs_only and self._backwards[stage.index] == micro_batches)
        self._report.begin("backward")
        is_whole = len(self.stage.parts) == 1 and not inputs_only
        self.grad_reducer.expect(None if is_whole else frozenset() if inputs_only else stage.params)
        self._begin_backward(direct=False)
        for param in run():
            self.on_grad_ready(param)
        if not inputs_only:
            self._take_returned(stage)
            self._return_gradients(stage, micro)
        self._end_backward()
        self._report.end("backward")
        if inputs_only:
            return
        is_end = self._backwards.total() == micro_batches * len(self.stage.parts)
        self.decide_boundary(is_end)
        if is_end:
            self.grad_reducer.expect(None)
        elif self._backwards.total() < micro_batches:  # one step per micro-batch; the last one updates
            self.run_step()

    # -- the schedule

    def _run(self, boundaries: Sequence[TensorShape], *, training: bool) -> None:
        """Sends the micro-batches through the pipeline. (all ranks)"""
        losses: list[Tensor] = []
        self._failure = None
        self._backwards.clear()
        self._activity("")
        if self._is_layer_major:
            with self._coordinator.one_pass("train by layers" if training else "eval by layers"):
                self._run_by_layers(losses, training=training)
            self._activity("")
            self.micro_losses = torch.stack(losses).to(torch.float64)
            return
        schedule, scheduled = self._schedule(boundaries, training=training)
        for stage in scheduled:
            stage.losses = losses
        run = schedule.step if training else schedule.eval
        for stage in reversed(scheduled):
            stage.begin()
        try:
            run(target=torch.arange(self.settings.accumulation), return_outputs=False)
        except RuntimeError as error:
            if self._failure is not None:
                raise self._failure from None
            failure = self.pipeline.failure(error)
            if failure is None:
                raise
            raise failure from error
        finally:
            self.pipeline.end_wait()
        self.pipeline.finish_sends()
        for stage in scheduled:
            stage.clear_runtime_states()
        # The host reads no loss here: it would wait for the device.
        self.micro_losses = torch.stack(losses).to(torch.float64) if losses else self._no_losses()

    def _run_by_layers(self, losses: list[Tensor], *, training: bool) -> None:
        """Passes all micro-batches through each stage before the next one; see [Note: layer-major order]."""
        *earlier, last = self.stage.parts
        micro_batches = range(self.settings.accumulation)
        entered: list[list[Tensor | None]] = [[None for _ in micro_batches]]  # per stage, its inputs
        left: list[list[Tensor]] = []
        for stage in earlier:
            left.append([self._forward_at(stage, micro, entered[-1][micro]) for micro in micro_batches])
            entered.append([output.detach().requires_grad_(training) for output in left[-1]])
            if not training:
                left.clear()
                del entered[:-1]
        gradients: list[Tensor | None] = []
        for micro in micro_batches:  # the loss's backward follows at once, so that one micro-batch has logits
            loss = self._forward_at(last, micro, entered[-1][micro])
            loss = self._scaled(loss, losses)
            gradients += [self._backward_at(last, micro, loss, entered[-1][micro])] if training else []
        for stage in reversed(earlier) if training else ():
            entered.pop()
            outputs = left.pop()
            outputs.reverse()
            for micro in micro_batches:  # `pop` frees the graph of each micro-batch after its backward
                gradients[micro] = self._backward_at(stage, micro, outputs.pop(), entered[-1][micro], gradients[micro])

    def _forward_at(self, stage: StagePart, micro: int, received: Tensor | None) -> Tensor:
        self._activity(f"forward of micro-batch {micro} through layers {stage.begin} to {stage.end - 1}")
        return self._forward_of(stage, micro, received)

    def _backward_at(
        self, stage: StagePart, micro: int, output: Tensor, received: Tensor | None, gradient: Tensor | None = None
    ) -> Tensor | None:
        """Returns the gradient of the stage's input, or None on the first stage."""
        self._activity(f"backward of micro-batch {micro} through layers {stage.begin} to {stage.end - 1}")

        def run() -> tuple[()]:
            if output.requires_grad:  # not before the first trained parameter
                torch.autograd.backward(output, gradient)
            return ()

        self._backward_of(stage, micro, run)
        return None if received is None else received.grad

    def _schedule(self, boundaries: Sequence[TensorShape], *, training: bool) -> tuple[Any, list[_ScheduledStage]]:
        """Returns the schedule for such batches; keeps only the newest, since each schedule has its own buffers."""
        key = (tuple(boundaries), training)
        if key not in self._schedules:
            for other in [known for known in self._schedules if known[1] == training]:
                del self._schedules[other]
            scheduled = [_ScheduledStage(self, stage, boundaries) for stage in self.stage.parts]
            kind: Any = self._schedule_class if training else self._eval_class
            schedule = kind(
                scheduled[0] if issubclass(kind, PipelineScheduleSingle) else scheduled,
                self.settings.accumulation,
                loss_fn=scheduled[-1].scaled_loss,
                scale_grads=False,
            )
            self._schedules[key] = schedule, scheduled
        return self._schedules[key]

    def _mean_loss(self) -> Tensor:
        """Returns the mean over micro-batches and data-parallel ranks. (all ranks)"""
        total = torch.zeros(1, dtype=torch.float64, device=self.collectives.topology.device)
        if self.stage.is_last and self.collectives.is_first_data_group:
            total += self.micro_losses.mean() / self.collectives.world_size
        self.collectives.job.all_reduce_on_device(total, "sum", "loss")
        return total[0].to(torch.float32)

    def _no_losses(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64, device=self.collectives.topology.device)

    # -- parameters of two stages; see [Note: shared parameters]

    def on_grad_ready(self, param: nn.Parameter) -> None:
        """Calls `Engine.on_grad_ready`, after adding the other stage's gradient to a shared parameter's."""
        shared = self._owned.get(id(param))
        returned = self._returned(shared) if shared is not None and param.grad is not None else None
        if returned is not None:
            param.grad.add_(returned)  # type: ignore[union-attr]
        super().on_grad_ready(param)

    def _take_returned(self, stage: StagePart) -> None:
        """Gives parameters that a stage's backward did not reach the gradient of the other stage."""
        for shared in self._owned.values():
            if shared.owning_part == stage.index and shared.name not in self._added and shared.param is not None:
                returned = self._returned(shared)
                if returned is not None:
                    shared.param.grad = returned
                    super().on_grad_ready(shared.param)
        self._added.clear()

    def _returned(self, shared: SharedParameter) -> Tensor | None:
        """Returns the other stage's gradient of this micro-batch; a stage's gradients arrive together, in its order.

        In layer-major order the first micro-batch gets the sum over all of them, and the others None.
        """
        if shared.name not in self._arrived:
            if self._is_layer_major:
                return None
            self._receive_gradients(shared.reader)
        self._added.add(shared.name)
        return self._arrived.pop(shared.name)

    def _share(self) -> None:
        """Agrees on the dtypes of shared parameters, and on the trained ones. (all ranks)"""
        optimized = set() if self.sharded_optimizer is None else set(self.sharded_optimizer.group_of)
        here = {
            shared.name: (shared.param.dtype, shared.name in optimized)
            for shared in self.stage.shared
            if shared.param is not None
        }
        of_ranks: list[dict[str, tuple[torch.dtype, bool]]] = self.collectives.job.gather_objects(here, "shared names")
        facts = {name: fact for known in of_ranks for name, fact in known.items()}
        for shared in self.stage.shared:
            dtype, is_trained = facts[shared.name]
            if shared.param is not None and is_trained:
                self._owned[id(shared.param)] = shared
            if shared.copy is not None:
                shared.copy.value = shared.copy.value.to(self.collectives.topology.device, dtype, copy=True)
                shared.copy.is_trained = is_trained
        pairs = [(shared.owner, shared.reader) for shared in self.stage.shared if shared.owner != shared.reader]
        self.pipeline.connect_sharers({stage for pair in pairs if self.stage.index in pair for stage in pair})

    def _refresh_copies(self) -> None:
        """Sends shared parameters from the owning stage to the one that reads them."""
        for shared in self.stage.shared:
            label = f"values of {shared.name}"
            if shared.param is None:
                assert shared.copy is not None, f"{label}: neither the owner nor the reader"
                self.pipeline.receive(shared.copy.value, shared.owner, label)
                continue
            handle = self._handle_of(shared)
            self.registry.acquire([handle.unit])
            if shared.copy is not None:  # one rank has both stages
                shared.copy.value.copy_(shared.param.detach())
            else:
                self.pipeline.send(shared.param.detach().contiguous(), shared.reader, label)
                self.pipeline.finish_sends()
            self.registry.release([handle.unit])

    @staticmethod
    def _handle_of(shared: SharedParameter) -> ParamHandle:
        handle = None if shared.param is None else handle_of(shared.param)
        assert handle is not None, f"{shared.name} is in no engine"
        return handle

    def _receive_gradients(self, reader: int) -> None:
        """Receives the gradients of a micro-batch from a stage that reads parameters of this one."""
        for shared in self._owned.values():
            if shared.reader == reader:
                handle, device = self._handle_of(shared), self.collectives.topology.device
                gradient = torch.empty(handle.slot.shape, dtype=handle.param.dtype, device=device)
                self.pipeline.receive(gradient, reader, f"gradient of {shared.name}")
                self._arrived[shared.name] = gradient

    def _return_gradients(self, stage: StagePart, micro_batch: int) -> None:
        """Sends the gradients of copies to the owning stage."""
        for shared in self.stage.shared:
            if shared.copy is not None and shared.copy.is_trained and shared.reading_part == stage.index:
                leaf = shared.copy.leaves.pop(micro_batch)
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
                if self._is_layer_major:
                    total = self._arrived.setdefault(shared.name, gradient)
                    total.add_(gradient) if total is not gradient else None
                    continue
                self.pipeline.send(gradient, shared.owner, f"gradient of {shared.name}")

    # -- messages

    def _activity(self, what: str) -> None:
        """Sets this stage's computation for messages; after an exception it remains the rank's last activity."""
        self.collectives.topology.flight_recorder.activity = f"{what} on stage {self.stage.index}" if what else ""

    @property
    def _stage_width(self) -> int:
        """Number of ranks per stage."""
        return self.collectives.job.world_size // self.stage.count

    @property
    def _layer_ranks(self) -> int:
        """Number of tensor-parallel ranks."""
        return 1 if self.collectives.parts is None else self.collectives.parts.world_size

    @property
    def _where(self) -> str:
        return f"stage {self.stage.index} of {self.stage.count}"

    def _note_phase(self, phase: str) -> None:
        super()._note_phase(phase)
        recorder = self.collectives.topology.flight_recorder
        recorder.phase, recorder.step = phase, self.global_steps

    def _not_alone(self, call: str) -> str:
        return compose(
            f"{call} on {self._where} of a pipeline",
            expected="train_batch() or eval_batch(), which run all stages",
            fix="call engine.train_batch(data_iter), which takes the micro-batches of a step and updates",
        )


class _ScheduledStage(PipelineStage):
    """Stage for torch's schedules, which delegates the computations of a micro-batch to an engine.

    Attributes:
        losses: on the last stage, losses of the micro-batches so far.
        unit: a tensor that this stage sends or receives, for messages about waits.
    """

    def __init__(self, engine: PipelineEngine, stage: StagePart, boundaries: Sequence[TensorShape]) -> None:
        index, count = stage.index, engine.stage.num_parts
        self._engine, self._part = engine, stage
        self._micro_batch = 0
        self._last = "before its first micro-batch"  # last computation, for messages
        self.losses: list[Tensor] = []
        received = (boundaries[index - 1].example(requires_grad=True),) if index else ()
        sent = boundaries[index].example(requires_grad=True) if index < count - 1 else torch.empty((), device="meta")
        self.unit = received[0] if received else sent
        super().__init__(
            _ScheduledModule(self),
            index,
            count,
            engine.collectives.topology.device,
            input_args=received,
            output_args=sent,
            group=engine.pipeline.process_group,
        )

    def begin(self) -> None:
        """Begins a step: every stage except the first one starts by waiting."""
        self._last = "before its first micro-batch"
        self._engine.pipeline.begin_wait(f"{self._where}, {self._last}", self.unit)

    @property
    def _where(self) -> str:
        return f"stage {self._part.index} of {self._engine.stage.num_parts}"

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._micro_batch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._computing(f"forward of micro-batch {self._micro_batch}"):
            return self._engine._forward_of(self._part, self._micro_batch, args[0] if args else None)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        backward = super().backward_one_chunk

        def run() -> tuple[()]:
            backward(bwd_chunk_id, loss, full_backward, last_backward)
            return ()

        self._micro_batch = bwd_chunk_id
        with self._computing(f"backward of micro-batch {bwd_chunk_id}"):
            self._engine._backward_of(self._part, bwd_chunk_id, run, inputs_only=not full_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        backward = super().backward_weight_one_chunk

        def run() -> list[nn.Parameter]:
            backward(bwd_chunk_id, last_backward=last_backward)
            return [param for param in self._params() if param.grad is not None]

        self._micro_batch = bwd_chunk_id
        with self._computing(f"gradients of weights of micro-batch {bwd_chunk_id}"):
            self._engine._backward_of(self._part, bwd_chunk_id, run)

    def weights(self) -> Iterator[Tensor]:
        """Yields this stage's weights, and its copies of another stage's parameters for the current micro-batch."""
        yield from self._params()
        for shared in self._engine.stage.shared:
            copy = shared.copy if shared.reading_part == self._part.index else None
            if copy is not None and self._micro_batch in copy.leaves:
                yield copy.leaves[self._micro_batch]

    def _params(self) -> list[nn.Parameter]:
        params = self._engine.module.parameters()
        return [param for param in params if id(param) in self._part.params and param.requires_grad]

    # torch fetches these operations right before it sends or waits.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._awaited(super().get_fwd_recv_ops(fwd_chunk_id), "activations", fwd_chunk_id, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._awaited(super().get_bwd_recv_ops(bwd_chunk_id), "gradient", bwd_chunk_id, self.stage_index + 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._sent(super().get_fwd_send_ops(fwd_chunk_id), "activations", fwd_chunk_id, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id), "gradient", bwd_chunk_id, self.stage_index - 1)

    def _awaited(self, operations: list[Any], what: str, micro_batch: int, stage: int) -> list[Any]:
        for operation in operations:
            label = f"{what} of micro-batch {micro_batch} from stage {stage}"
            self._engine.pipeline.begin_wait(f"{label}, {self._last}", operation.tensor, "receive")
        return operations

    def _sent(self, operations: list[Any], what: str, micro_batch: int, stage: int) -> list[Any]:
        for operation in operations:
            rank = stage % self._engine.stage.count
            self._engine.pipeline.count(operation.tensor, rank, f"{what} of micro-batch {micro_batch}")
        return operations

    def scaled_loss(self, loss: Tensor, _: object) -> Tensor:
        """Returns the scaled loss of a micro-batch, as torch's schedules ask for it."""
        return self._engine._scaled(loss, self.losses)

    @contextlib.contextmanager
    def _computing(self, what: str) -> Iterator[None]:
        """Marks a computation between two waits; keeps its exception, since torch raises one of its own."""
        engine = self._engine
        engine.pipeline.end_wait()
        engine._activity(what)
        try:
            yield
        except Exception as error:
            engine._failure = error
            raise
        engine._activity("")
        self._last = f"after the {what}"
        engine.pipeline.begin_wait(f"{self._where}, {self._last}", self.unit)


class _ScheduledModule(nn.Module):
    """The rank's module for torch's schedules, with the parameters of one stage only."""

    def __init__(self, stage: _ScheduledStage) -> None:
        super().__init__()
        self.module = stage._engine.module  # a zero-bubble schedule refuses compiled modules
        self._stage = stage

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yields the weights for which torch splits a backward in two halves."""
        return self._stage.weights()


@dataclass(frozen=True)
class _Signature:
    """Shapes and contents of a step's micro-batches, to compare between the stages of a pipeline.

    Attributes:
        shapes: path, shape and dtype of each tensor of a micro-batch.
        checksums: checksum of each micro-batch; tensors on a device are compared only by shape.
    """

    shapes: tuple[tuple[str, tuple[int, ...], str], ...]
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, batches: Batches, call: str) -> _Signature:
        """Raises UsageError if micro-batches have different shapes."""
        shapes, checksums = [], []
        for batch in batches:
            tensors = [(path, leaf) for path, leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
            shapes.append(tuple((path, tuple(tensor.shape), str(tensor.dtype)) for path, tensor in tensors))
            checksums.append(_checksum([tensor for _, tensor in tensors if tensor.device.type == "cpu"]))
        for index, other in enumerate(shapes):
            if other != shapes[0]:
                raise UsageError(
                    f"engine.{call}(data_iter): micro-batch {index}",
                    expected=f"the shapes of micro-batch 0, {_shown(shapes[0])}",
                    got=_shown(other),
                    fix="pad the samples of a step to one length, and drop the last batch of an epoch (drop_last=True)",
                )
        return cls(shapes[0], tuple(checksums))

    def require(self, first: _Signature, call: str, own_place: str, first_place: str) -> None:
        """Raises UsageError unless this equals the first stage's signature."""
        if self != first:
            raise UsageError(
                f"engine.{call}(data_iter): batches of stage {own_place}",
                expected=f"the batches of stage {first_place}, {_shown(first.shapes)}",
                got=_shown(self.shapes) if self.shapes != first.shapes else "other values with these shapes",
                fix="load data by data-parallel rank (engine.collectives.rank), which all stages of a pipeline share",
            )


def _require_cut(batches: Batches, call: str) -> None:
    """Raises UsageError unless the batches are runs of sequences, whose labels were shifted before the cut."""
    for index, batch in enumerate(batches):
        if not isinstance(batch, Mapping) or SHIFTED_LABELS not in batch:
            raise UsageError(
                f"engine.{call}(data_iter): micro-batch {index}",
                expected=f"this rank's runs of sequences, with {SHIFTED_LABELS}",
                got=sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__,
                fix="cut batches with SequenceLoader, or engine.sequence_group.shard",
            )


def _shown(shapes: tuple[tuple[str, tuple[int, ...], str], ...]) -> str:
    return ", ".join(f"{path or 'a tensor'} {shape}" for path, shape, _ in shapes)


def _checksum(tensors: Sequence[Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data, checksum)
    return checksum


def _round(loader: Any) -> Iterator[Any]:
    """Yields the loader's batches, epoch after epoch."""
    while True:
        yield from loader
