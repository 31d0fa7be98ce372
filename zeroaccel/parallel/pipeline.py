"""The `pp` axis: the ranks that hold the stages of one pipeline, in training and in estimates.

This module is separate from `pipeline_engine`, so that training without stages does not wait for the import of torch's
schedules. An estimate holds the blocks of one stage, in the order of 1F1B; it counts messages and allocates their
buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroaccel.checkpoint.save_plan import WholeModel
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.pipeline_group import PipelineGroup
from zeroaccel.comm.topology import Topology
from zeroaccel.config import Config
from zeroaccel.config.parallel import INTERLEAVED, LAYER_MAJOR, ZERO_BUBBLE, ParallelConfig, PipelineConfig
from zeroaccel.engine import Engine, EngineBase
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.parallel.pipeline_cut import Stage, cut, divide, own_params
from zeroaccel.setup.axis import Axis
from zeroaccel.setup.axis_estimate import AxisEstimate, EstimatedJob, Schedule, Shape
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.optimizer_plan import OptimizerPlan
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.layout import Split


class PipelineAxis(Axis):
    """The ranks that hold the stages of one pipeline and see the same samples.

    Attributes:
        stage: this rank's part of the model, set by `divide`.
    """

    name: ClassVar[str] = "pp"
    stage: Stage

    def __init__(self, group: PipelineGroup, config: PipelineConfig) -> None:
        self.group, self.config = group, config

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> PipelineAxis | None:
        if mesh.pp == 1 and job.pipeline is None:
            return None
        config = job.pipeline or PipelineConfig()
        if config.schedule == LAYER_MAJOR and mesh.pp > 1:
            raise UsageError(
                f'PipelineConfig(schedule="{LAYER_MAJOR}")',
                expected="pp=1: it is an order of one rank, without messages between stages",
                got=f"pp={mesh.pp}",
                fix="set pp=1, or choose another schedule",
            )
        return cls(PipelineGroup(topology, mesh.groups(cls.name)), config)

    @classmethod
    def estimate(cls, mesh: ParallelConfig) -> AxisEstimate | None:
        return PipelineEstimate(mesh.pp) if mesh.pp > 1 else None

    @property
    def engine_type(self) -> type[EngineBase]:
        from zeroaccel.parallel.pipeline_engine import PipelineEngine  # imported here: torch's schedules are slow

        return PipelineEngine

    @property
    def whole(self) -> WholeModel | None:
        return self.stage.whole if self.stage.count > 1 or self.stage.shared else None

    def divide(self, model: nn.Module, others: Sequence[Axis]) -> None:
        """Reduces the model to this rank's stages.

        Raises:
            UsageError: the model cannot be cut.
        """
        self.stage = cut(model, self.group.rank, self.group.size, self.config)
        for other in others:
            other.keep(self.stage.modules())

        def splits_of(module: nn.Module) -> Mapping[str, Split]:
            return {name: split for other in others for name, split in other.splits_of(module).items()}

        self.stage.split_copies(splits_of)

    def own_params(self, optimizer: Any, params: Any) -> tuple[Any, Any]:
        return own_params(self.stage, optimizer, params)

    def facts(self) -> Mapping[str, object]:
        return {
            "schedule": self.config.schedule,
            "stages_per_rank": self.config.stages_per_rank,
            "split": self.config.split,
            "weights": self.stage.whole.fingerprint,
        }

    def connect(self, collectives: Collectives) -> None:
        collectives.observe(self.name, self.group)

    def attach(self, engine: EngineBase, loader: Any) -> None:
        from zeroaccel.parallel.pipeline_engine import PipelineEngine

        assert isinstance(engine, PipelineEngine), "the engine is not a PipelineEngine"
        engine.attach(self.stage, self.group, self.config, loader)

    def check(
        self, config: Config, settings: EngineSettings, optimizer: OptimizerPlan, names: Mapping[int, str]
    ) -> None:
        """Refuses settings that the stages do not support together, and micro-batches that do not fill the schedule.

        Raises:
            ConfigError: too few micro-batches, a schedule that stage 3 does not support, or updates during backward.
            UsageError: the optimizer's rule sums over parameters of several stages, or a stage has nothing to train.
        """
        stage, pipeline = self.stage, self.config
        if optimizer.kinds is None or stage.count == 1:
            return
        micro_batches = settings.accumulation
        if pipeline.schedule == "1f1b" and micro_batches < stage.count:
            raise ConfigError(
                config.where("gradient_accumulation_steps"),
                expected=f'at least {stage.count} micro-batches per step for schedule "1f1b" over {stage.count} stages',
                got=micro_batches,
                fix='raise it, or use PipelineConfig(schedule="gpipe")',
            )
        rounds = max(1, micro_batches // stage.count)
        if pipeline.schedule in INTERLEAVED and micro_batches % rounds:
            raise ConfigError(
                config.where("gradient_accumulation_steps"),
                expected=f"a multiple of {rounds}, the rounds of the interleaved schedule over {stage.count} ranks",
                got=micro_batches,
                fix=f"use a multiple of {stage.count}, or at most {2 * stage.count - 1}",
            )
        if pipeline.schedule == ZERO_BUBBLE and settings.plan.params:
            raise ConfigError(
                config.where("zero_optimization.stage"),
                expected='0, 1 or 2 with schedule "zero_bubble", which computes gradients of weights after the weights '
                "have been sharded again",
                got=3,
                fix='use PipelineConfig(schedule="interleaved_1f1b") or "1f1b"',
            )
        if settings.update_during not in ("auto", "step"):
            raise ConfigError(
                config.where("zero_optimization.offload_optimizer.update_during"),
                expected='"step" with a pipeline, since the gradient norm needs all stages',
                got=settings.update_during,
            )
        if OptimizerKind.COUPLED in optimizer.group_kinds:
            raise UsageError(
                f"pipeline: the optimizer: {optimizer.kinds.reason}",
                expected="an optimizer that updates elements or tensors independently",
                fix="use one such as AdamW or SGD, or set pp=1",
            )
        for stage_part in stage.parts:
            if not any(param in optimizer.groups for param in stage_part.params):
                raise UsageError(
                    f"pipeline: stage {stage_part.index}",
                    expected="at least one parameter to train on every stage",
                    got="none",
                    fix="choose another PipelineConfig(split), or set pp=1",
                )


# -- estimates

_StageForward = Callable[[Engine, Tensor, Tensor | None], Tensor]
"""(engine, token ids, hidden states of the previous stage) -> hidden states for the next one, or the loss."""


class PipelineEstimate(AxisEstimate):
    """The ranks that hold the stages of one pipeline; each sends to the stages before and after it."""

    name: ClassVar[str] = "pp"
    receivers: ClassVar[Literal["all", "ring", "line"]] = "line"

    def places(self, shape: Shape | None) -> Sequence[int]:
        """The first stage, the last one, and the one between with the most blocks times micro-batches in flight."""
        between = range(1, self.size - 1)
        if shape is None or len(between) < 2 or self.size > shape.layers:
            return range(self.size)
        numbers = [len(self.blocks(shape, index)) for index in range(self.size)]
        return [0, max(between, key=lambda index: numbers[index] * (self.size - index)), self.size - 1]

    def micro_steps(self, place: int) -> int:
        return self.size - place + 2

    def idle(self, accumulation: int) -> float:
        return (self.size - 1) / (accumulation + self.size - 1)

    def check(self, name: str, shape: Shape) -> None:
        if self.size > shape.layers:
            raise UsageError(f"{name}: pp {self.size}", expected=f"at most its {shape.layers} blocks", got=self.size)

    def blocks(self, shape: Shape, place: int) -> range:
        """Divides blocks by matrix elements, the default of `PipelineConfig`.

        Example:
            >>> PipelineEstimate(4).blocks(Shape(layers=8, width=64, inner=256, vocabulary=1000), 1)
            range(2, 4)
        """
        queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
        block = shape.width * (2 * (queries + keys) + 3 * shape.inner)
        firsts = divide([*[block] * (shape.layers - 1), block + shape.vocabulary * shape.width], self.size)
        return range(*[*firsts, shape.layers][place : place + 2])

    def share(self, job: EstimatedJob, model: nn.Module) -> Schedule:
        stage = _Stage(job, self.size, min(job.accumulation, self.micro_steps(job.place)))
        if job.shape is not None:
            stage.width = job.shape.width
            stage.shared_numel = job.shape.vocabulary * job.shape.width if job.shape.tied else 0
        else:
            stage.cut(model)
        return stage.run


class _Stage:
    """One stage of a pipeline.

    Args:
        count: number of stages.
        micro_steps: number of micro-batches to run.

    Attributes:
        forward: computes a micro-batch.
        width: width of the hidden states, (batch, sequence, width), sent between stages.
        shared_numel: elements of the parameter that the first and the last stage share, if any.
        frees_early: torch's schedules, from 2.15 on, create a buffer for each message, and keep no output that they
            have sent.
        received: direction -> buffers of a schedule, created once, as earlier schedules do.
    """

    def __init__(self, job: EstimatedJob, count: int, micro_steps: int) -> None:
        self.job, self.count, self.micro_steps = job, count, micro_steps
        self.is_first, self.is_last = job.place == 0, job.place == count - 1
        self.forward: _StageForward = self._forward_decoder
        self.width = self.shared_numel = 0
        from torch.distributed.pipelining import PipelineStage

        self.frees_early = hasattr(PipelineStage, "release_fwd_send_outputs")
        self.received: dict[str, list[Tensor]] = {}

    def cut(self, model: nn.Module) -> None:
        """Cuts a causal model of transformers, like `initialize`."""
        stage: Stage = cut(model, self.job.place, self.count, PipelineConfig(), verify=False)
        config: Any = getattr(model, "config", None)
        if config is None:
            raise UsageError(
                f"{self.job.name}: pp {self.count}",
                expected="a causal model of transformers",
                got=type(model).__name__,
            )

        def forward(engine: Engine, ids: Tensor, received: Tensor | None) -> Tensor:
            return stage.run(stage.parts[0], engine, {"input_ids": ids, "labels": ids}, received)

        self.forward, self.width = forward, int(config.get_text_config().hidden_size)
        self.shared_numel = sum(item.param.numel() for item in stage.shared if item.param is not None)
        for item in stage.shared:
            if item.copy is not None:
                self.shared_numel += item.copy.value.numel()
                item.copy.is_trained = True

    def _forward_decoder(self, engine: Engine, ids: Tensor, received: Tensor | None) -> Tensor:
        output: Tensor = engine(ids if received is None else received)
        return F.cross_entropy(output.flatten(0, -2), ids.flatten()) if self.is_last else output

    def run(self, engine: Engine) -> Iterator[tuple[int, str]]:
        """Runs one step in the order of 1F1B. (PipeDream-flush, Narayanan et al., 2021, arXiv:2006.09503)

        Makes the same engine calls per micro-batch as `PipelineEngine`. It is a `Schedule`.
        """
        job, name = self.job, PipelineEstimate.name
        count = self.micro_steps
        warm = min(count, self.count - job.place)
        actions = [("forward", micro) for micro in range(warm)]
        for micro in range(count):
            actions.append(("backward", micro))
            if warm + micro < count:
                actions.append(("forward", warm + micro))
        nbytes = job.batch * job.sequence * self.width * job.dtype.itemsize
        shared_nbytes = self.shared_numel * job.dtype.itemsize
        device = next(engine.module.parameters()).device
        if not self.received and not self.frees_early:
            self._make_buffers(device)
        outputs: dict[int, Any] = {}
        for number, (kind, micro) in enumerate(actions):
            is_last = micro == count - 1
            moment = "last" if is_last else "earlier"
            if kind == "forward":
                yield 3 * number, moment
                received = None if self.is_first else self._receive("forward", micro, device).requires_grad_()
                output = self.forward(engine, torch.zeros(job.batch, job.sequence, dtype=torch.long), received)
                is_sent = self.frees_early and not self.is_last
                outputs[micro] = torch.autograd.graph.get_gradient_edge(output) if is_sent else output
                del output, received
                job.count(name, 0 if self.is_last else nbytes)
                continue
            yield 3 * number + 1, moment
            engine.set_gradient_accumulation_boundary(is_last)
            engine._begin_backward(direct=False)
            gradient = None if self.is_last else self._receive("backward", micro, device)
            torch.autograd.backward([outputs.pop(micro)], [gradient])
            del gradient
            engine._end_backward()
            job.count(name, 0 if self.is_first else nbytes)
            job.count(name, shared_nbytes if self.is_last else 0)  # the gradient of the copy
            if not is_last:
                engine.step()
        yield 3 * len(actions) + 2, "step"
        job.count(name, shared_nbytes if self.is_first else 0)  # the values of the copy
        engine.step()

    def _receive(self, direction: str, micro: int, device: torch.device) -> Tensor:
        return self._buffer(device) if self.frees_early else self.received[direction][micro].detach()

    def _make_buffers(self, device: torch.device) -> None:
        """Creates buffers for all micro-batches of a step."""
        for direction, has in (("forward", not self.is_first), ("backward", not self.is_last)):
            self.received[direction] = [self._buffer(device) for _ in range(self.job.accumulation if has else 0)]

    def _buffer(self, device: torch.device) -> Tensor:
        hidden = self.job.batch, self.job.sequence, self.width
        return torch.empty(hidden, dtype=self.job.dtype, device=device)
