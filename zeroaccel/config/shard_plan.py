"""What the engine derives from a config: which model states are sharded, on which tier they live, the batch sizes.

The one place that knows what a stage number means: everything below the config asks `ShardPlan` and `TierPlan`, never
the stage. Batch sizes follow from train = micro * accumulation * ranks, of which a config has to give at least one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zeroaccel.config.schema import Config
from zeroaccel.errors import ConfigError

Residence = Literal["device", "host", "nvme"]
"""Where tensors live between uses: with the model, in host memory, in files."""

UpdateTime = Literal["step", "backward", "next_step"]
"""When masters on the host are updated: in `step()`, during backward, or during the next step."""

_RESIDENCES: dict[Literal["none", "cpu", "nvme"], Residence] = {"none": "device", "cpu": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class ShardPlan:
    """Which model states are divided among the ranks; what is not is replicated on each.

    Attributes:
        optimizer: master weights and optimizer states (stage 1 and up).
        grads: gradients between micro-steps (stage 2 and up): each micro-step is reduced.
        params: parameters between uses (stage 3).
    """

    optimizer: bool
    grads: bool
    params: bool


@dataclass(frozen=True)
class TierPlan:
    """Where this rank's shards live between uses.

    Attributes:
        param: shards of the parameters.
        optimizer: master weights and optimizer states.
    """

    param: Residence
    optimizer: Residence


def shard_plan(config: Config) -> ShardPlan:
    """The sharding that `zero_optimization.stage` asks for (Rajbhandari et al., ZeRO, 2020, section 5).

    Example:
        >>> from zeroaccel.config import load_config
        >>> shard_plan(load_config({"zero_optimization": {"stage": 2}}))
        ShardPlan(optimizer=True, grads=True, params=False)
    """
    stage = config.zero_optimization.stage
    return ShardPlan(optimizer=stage >= 1, grads=stage >= 2, params=stage >= 3)


def tier_plan(config: Config) -> TierPlan:
    """The residences that `offload_param` and `offload_optimizer` ask for, of what is sharded."""
    zero, plan = config.zero_optimization, shard_plan(config)
    return TierPlan(
        param=_RESIDENCES[zero.offload_param.device] if zero.offload_param and plan.params else "device",
        optimizer=_RESIDENCES[zero.offload_optimizer.device] if zero.offload_optimizer and plan.optimizer else "device",
    )


def overlaps_communication(config: Config, *, has_streams: bool) -> bool:
    """Whether reductions overlap with the backward pass; by default, where params are sharded or there are streams.

    Args:
        has_streams: reductions run on streams of a device; on a CPU they take its cores from the backward.
    """
    overlap = config.zero_optimization.overlap_comm
    return (has_streams or shard_plan(config).params) if overlap is None else overlap


_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes in samples, with train = micro * accumulation * ranks.

    Attributes:
        train: per optimizer step, over all ranks.
        micro: per rank and micro-step.
        accumulation: micro-steps per optimizer step.
    """

    train: int
    micro: int
    accumulation: int


def solve_batch(config: Config, world_size: int) -> BatchSizes:
    """Derives the batch sizes that were not given.

    Args:
        config: gives one, two or all three of them; accumulation alone is not enough.
        world_size: number of ranks that see different samples.

    Raises:
        ConfigError: neither train nor micro is given, or the sizes do not fit; the message has all four numbers.

    Example:
        >>> from zeroaccel.config import load_config
        >>> solve_batch(load_config({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}), world_size=8)
        BatchSizes(train=64, micro=4, accumulation=2)
    """
    ranks = config.data_parallel_size
    if ranks is not None and ranks != world_size:
        fix = "remove the key, or start that many processes"
        raise ConfigError(config.where("data_parallel_size"), expected=f"{world_size} ranks", got=ranks, fix=fix)
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        raise _misfit(config, world_size, f"neither {_TRAIN} nor {_MICRO} is given", f"set {_MICRO}")
    if train is None and micro is not None:
        steps = accumulation or 1
        return BatchSizes(micro * steps * world_size, micro, steps)
    assert train is not None, "one of the two was checked to be there"
    if micro is not None and accumulation is not None:
        return _closed(config, world_size, BatchSizes(train, micro, accumulation))
    per_step = world_size * (micro or accumulation or 1)
    quotient, rest = divmod(train, per_step)
    if rest:
        below, above = quotient * per_step, (quotient + 1) * per_step
        choice = f"{below} or {above}" if below else f"{above}"
        factors = f"{micro or accumulation or 1} * {world_size} = {per_step}"
        raise _misfit(config, world_size, f"{train} is not a multiple of {factors}", f"set {_TRAIN} to {choice}")
    return BatchSizes(train, micro, quotient) if micro else BatchSizes(train, quotient, accumulation or 1)


def _closed(config: Config, world_size: int, sizes: BatchSizes) -> BatchSizes:
    product = sizes.micro * sizes.accumulation * world_size
    if sizes.train != product:
        what = f"{sizes.train} is not {sizes.micro} * {sizes.accumulation} * {world_size} = {product}"
        raise _misfit(config, world_size, what, f"set {_TRAIN} to {product}, or remove one of the three")
    return sizes


def _misfit(config: Config, world_size: int, what: str, fix: str) -> ConfigError:
    sizes = ", ".join(
        f"{name} {'not given' if value is None else value}"
        for name, value in (
            (_TRAIN, config.train_batch_size),
            (_MICRO, config.train_micro_batch_size_per_gpu),
            (_ACCUMULATION, config.gradient_accumulation_steps),
        )
    )
    where = config.where(_TRAIN) if config.train_batch_size is not None else "batch sizes"
    return ConfigError(f"{where}: {what} ({sizes}, ranks {world_size})", fix=fix)
