"""The `pp` axis: ranks with the stages of one pipeline.

Apart from `pipeline_engine`, so that a training without stages does not wait for torch's schedules to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from zeroaccel.checkpoint.save_plan import WholeModel
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.pipeline_group import PipelineGroup
from zeroaccel.comm.topology import Topology
from zeroaccel.config import Config
from zeroaccel.config.parallel import INTERLEAVED, ZERO_BUBBLE, ParallelConfig, PipelineConfig
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.parallel.pipeline_cut import Stage, cut, own_params
from zeroaccel.setup.axis import Axis
from zeroaccel.setup.job import JobSpec
from zeroaccel.setup.optimizer_plan import OptimizerPlan
from zeroaccel.zero.engine_base import EngineBase
from zeroaccel.zero.from_config import EngineSettings
from zeroaccel.zero.layout import Split


class PipelineAxis(Axis):
    """Ranks with the stages of one pipeline, which see the same samples.

    Attributes:
        stage: of the model, from `divide` on.
    """

    name: ClassVar[str] = "pp"
    stage: Stage

    def __init__(self, group: PipelineGroup, config: PipelineConfig) -> None:
        self.group, self.config = group, config

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> PipelineAxis | None:
        if mesh.pp == 1 and job.pipeline is None:
            return None
        return cls(PipelineGroup(topology, mesh.groups(cls.name)), job.pipeline or PipelineConfig())

    @property
    def engine_type(self) -> type[EngineBase]:
        from zeroaccel.parallel.pipeline_engine import PipelineEngine  # here, as torch's schedules are slow to import

        return PipelineEngine

    @property
    def whole(self) -> WholeModel | None:
        return self.stage.whole if self.stage.count > 1 else None

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

        assert isinstance(engine, PipelineEngine), "a stage of an engine that has none"
        engine.attach(self.stage, self.group, self.config, loader)

    def check(
        self, config: Config, settings: EngineSettings, optimizer: OptimizerPlan, names: Mapping[int, str]
    ) -> None:
        """Refuses what the stages of a training cannot do together, and schedules that micro-batches do not fill.

        Raises:
            ConfigError: too few micro-batches, weights that a schedule does not find, or updates before the norm is
                known.
            UsageError: the optimizer's rule sums over parameters that are on several stages, or a stage trains nothing.
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
                expected=f"a multiple of its {rounds} rounds over {stage.count} ranks, as the schedule is interleaved",
                got=micro_batches,
                fix=f"take a multiple of {stage.count}, or at most {2 * stage.count - 1}",
            )
        if pipeline.schedule == ZERO_BUBBLE and settings.plan.params:
            raise ConfigError(
                config.where("zero_optimization.stage"),
                expected='0, 1 or 2 with schedule "zero_bubble", which computes gradients of weights after the weights '
                "have been sharded again",
                got=3,
                fix='use PipelineConfig(schedule="interleaved_1f1b") or "1f1b"',
            )
        if settings.update_during != "step":
            raise ConfigError(
                config.where("zero_optimization.offload_optimizer.update_during"),
                expected='"step" with a pipeline, whose norm is known only when all stages are done',
                got=settings.update_during,
            )
        if OptimizerKind.COUPLED in optimizer.group_kinds:
            raise UsageError(
                f"pipeline: the optimizer: {optimizer.kinds.reason}",
                expected="one that updates elements or tensors by themselves",
                fix="use AdamW, SGD or the like, or leave pp at 1",
            )
        for part in stage.parts:
            if not any(param in optimizer.groups for param in part.params):
                raise UsageError(
                    f"pipeline: stage {part.index}",
                    expected="at least one parameter to train on every stage",
                    got="none",
                    fix="choose another PipelineConfig(split), or leave pp at 1",
                )
