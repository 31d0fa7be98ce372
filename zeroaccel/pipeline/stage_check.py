"""What the stages of a pipeline cannot do together, said before any of them is an engine.

Apart from `pipeline_engine`, so that a training without stages does not wait for torch's schedules to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from zeroaccel.config import Config
from zeroaccel.config.parallel import INTERLEAVED, ZERO_BUBBLE, PipelineConfig
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.optim.optimizer_kinds import OptimizerKind, OptimizerKinds
from zeroaccel.pipeline.model_cut import Stage
from zeroaccel.zero.from_config import EngineSettings


def facts_of(stage: Stage | None, pipeline: PipelineConfig) -> list[str]:
    """What the stages of a pipeline have to have in common."""
    if stage is None:
        return []
    facts = {
        "schedule": pipeline.schedule,
        "stages_per_rank": pipeline.stages_per_rank,
        "split": pipeline.split,
        "weights": stage.whole.fingerprint,
    }
    return [f"pipeline {name}={value}" for name, value in facts.items()]


def check_stage(
    stage: Stage | None,
    pipeline: PipelineConfig,
    settings: Config,
    engine: EngineSettings,
    kinds: OptimizerKinds | None,
    groups: Mapping[int, int],
) -> None:
    """Refuses what the stages of a training cannot do together, and schedules that micro-batches do not fill.

    Args:
        kinds: of the optimizer's groups; None for inference.
        groups: id(parameter) -> index of its group.

    Raises:
        ConfigError: too few micro-batches, weights that a schedule does not find, or updates before the norm is known.
        UsageError: the optimizer's rule sums over parameters that are on several stages, or a stage trains nothing.
    """
    if kinds is None or stage is None or stage.count == 1:
        return
    micro_batches = engine.accumulation
    if pipeline.schedule == "1f1b" and micro_batches < stage.count:
        raise ConfigError(
            settings.where("gradient_accumulation_steps"),
            expected=f'at least {stage.count} micro-batches per step for schedule "1f1b" over {stage.count} stages',
            got=micro_batches,
            fix='raise it, or use PipelineConfig(schedule="gpipe")',
        )
    rounds = max(1, micro_batches // stage.count)
    if pipeline.schedule in INTERLEAVED and micro_batches % rounds:
        raise ConfigError(
            settings.where("gradient_accumulation_steps"),
            expected=f"a multiple of its {rounds} rounds over {stage.count} ranks, as the schedule is interleaved",
            got=micro_batches,
            fix=f"take a multiple of {stage.count}, or at most {2 * stage.count - 1}",
        )
    if pipeline.schedule == ZERO_BUBBLE and engine.plan.params:
        raise ConfigError(
            settings.where("zero_optimization.stage"),
            expected='0, 1 or 2 with schedule "zero_bubble", whose gradients of weights are computed when the weights '
            "have been sharded again",
            got=3,
            fix='use PipelineConfig(schedule="interleaved_1f1b") or "1f1b"',
        )
    if engine.update_during != "step":
        raise ConfigError(
            settings.where("zero_optimization.offload_optimizer.update_during"),
            expected='"step" with a pipeline, whose norm is known only when all stages are done',
            got=engine.update_during,
        )
    if OptimizerKind.COUPLED in kinds.groups:
        raise UsageError(
            f"pipeline: the optimizer: {kinds.reason}",
            expected="one that updates elements or tensors by themselves",
            fix="use AdamW, SGD or the like, or leave pp at 1",
        )
    for part in stage.parts:
        if not any(param in groups for param in part.params):
            raise UsageError(
                f"pipeline: stage {part.index}",
                expected="at least one parameter to train on every stage",
                got="none",
                fix="choose another PipelineConfig(split), or leave pp at 1",
            )
