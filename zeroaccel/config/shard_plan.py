"""Values derived from a config: the sharded model states, their storage tiers and the batch sizes.

Only this module interprets the stage number: the modules below the config read `ShardPlan` and `TierPlan`, never the
stage. Batch sizes follow from train = micro * accumulation * ranks; a config must give train or micro.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zeroaccel.config.schema import Config
from zeroaccel.errors import ConfigError

Residence = Literal["device", "host", "nvme"]
"""Storage of tensors between uses: on the model's device, in host memory, or in files."""

UpdateTime = Literal["auto", "step", "forward", "backward", "next_step"]
"""Time of the update of masters on the host: in `step()`, in the forward after it, in the backward before it, or during
the next step."""

_RESIDENCES: dict[Literal["none", "cpu", "nvme"], Residence] = {"none": "device", "cpu": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class ShardPlan:
    """Model states that are sharded among the ranks; each rank holds a full copy of the others.

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
    """Storage of this rank's shards between uses.

    Attributes:
        param: shards of the parameters.
        optimizer: master weights and optimizer states; "device" if all of them stay there.
        host_share: with the optimizer elsewhere, the share of the parameters that the host updates.
        device_budget: bytes of masters and states that stay on the device.
    """

    param: Residence
    optimizer: Residence
    host_share: float = 1.0
    device_budget: int = 0

    @property
    def keeps_share(self) -> bool:
        """True if some masters and states may stay on the device while the others are elsewhere."""
        return self.optimizer != "device" and (self.host_share < 1.0 or self.device_budget != 0)


def shard_plan(config: Config) -> ShardPlan:
    """Returns the sharding for `zero_optimization.stage` (Rajbhandari et al., ZeRO, 2020, section 5).

    Example:
        >>> from zeroaccel.config import load_config
        >>> shard_plan(load_config({"zero_optimization": {"stage": 2}}))
        ShardPlan(optimizer=True, grads=True, params=False)
    """
    stage = config.zero_optimization.stage
    return ShardPlan(optimizer=stage >= 1, grads=stage >= 2, params=stage >= 3)


def tier_plan(config: Config) -> TierPlan:
    """Returns the residences of sharded states according to `offload_param` and `offload_optimizer`."""
    zero, plan = config.zero_optimization, shard_plan(config)
    param = _RESIDENCES[zero.offload_param.device] if zero.offload_param and plan.params else "device"
    offload = zero.offload_optimizer
    if offload is None or offload.device == "none" or not plan.optimizer or offload.ratio == 0:
        return TierPlan(param, "device")
    return TierPlan(param, _RESIDENCES[offload.device], offload.ratio, offload.device_budget)


def overlaps_communication(config: Config, *, has_streams: bool) -> bool:
    """Returns True if reductions overlap with backward: by default if params are sharded or the device has streams.

    Args:
        has_streams: True if reductions run on streams of a device; on a CPU they compete with backward for its cores.
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
        train: samples per optimizer step, over all ranks.
        micro: samples per rank and micro-batch.
        accumulation: micro-batches per optimizer step.
    """

    train: int
    micro: int
    accumulation: int


def solve_batch(config: Config, world_size: int) -> BatchSizes:
    """Computes the batch sizes that the config omits.

    Args:
        config: gives one, two or all three of them; accumulation alone is not enough.
        world_size: number of ranks with different samples.

    Raises:
        ConfigError: neither train nor micro is given, or the sizes are inconsistent; the message has all four numbers.

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
    assert train is not None, "train or micro is given, as checked above"
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
