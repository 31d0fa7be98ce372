"""From the offload sections of a config and the planned buffers to tiers, and to the places of every buffer.

The one file that knows which tier holds what. Tiers are made, and NVMe space is reserved, before the first weight
moves; the ranks agree on errors (`assembly.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.optim import Optimizer

from zeroaccel.config.plan import Residence
from zeroaccel.config.schema import Config
from zeroaccel.config.schema_zero import OffloadOptimizer, OffloadParam
from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger
from zeroaccel.offload.buffers import HostBuffers
from zeroaccel.offload.file_io import IoSettings
from zeroaccel.offload.folder import examine_folder
from zeroaccel.offload.nvme import NvmeTier
from zeroaccel.offload.tier import HostTier, Tier
from zeroaccel.zero.build import BufferPlan
from zeroaccel.zero.host_copies import HostCopies
from zeroaccel.zero.optimizer_shard import group_runs
from zeroaccel.zero.shard_home import ShardHome
from zeroaccel.zero.state_tier import StateTier, SubGroup, cut_sub_groups, slab_nbytes
from zeroaccel.zero.trial import state_dtypes
from zeroaccel.zero.unit import Places

__all__ = ["OffloadRules", "TierSet"]

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class OffloadRules:
    """What a config says of offload.

    Attributes:
        param, optimizer: where they live.
        where: the path of `zero_optimization` in the config, for errors.
    """

    param: Residence
    optimizer: Residence
    param_section: OffloadParam
    optimizer_section: OffloadOptimizer
    io: IoSettings
    sub_group_numel: int
    where: str = "zero_optimization"

    @classmethod
    def of(cls, config: Config, param: Residence, optimizer: Residence) -> OffloadRules:
        """The rules of a config; the residences come from its `TierPlan`."""
        zero, aio = config.zero_optimization, config.aio
        return cls(
            param,
            optimizer,
            zero.offload_param or OffloadParam(),
            zero.offload_optimizer or OffloadOptimizer(),
            IoSettings(aio.block_size, aio.intra_op_parallelism * aio.queue_depth, aio.overlap_events, aio.checksum),
            zero.sub_group_size,
        )


class TierSet:
    """The tiers of one rank. Made before units are built; closed with the engine.

    Args:
        plans: every buffer, in the order of the units.
        optimizer: None for inference.

    Attributes:
        states: of masters and optimizer states, where they are in files.
        shards: of the parameters that come and go: "host" and "nvme", each None where it is not used.
        copies: see `build.Tiers`.

    Raises:
        ConfigError: a folder will not do, or the optimizer cannot step in host memory.
    """

    def __init__(
        self,
        rules: OffloadRules,
        plans: Sequence[BufferPlan],
        optimizer: Optimizer | None,
        rank: int,
        device: torch.device,
    ) -> None:
        self._rules = rules
        self._device = device
        self._away: dict[str, Tier] = {}
        self.copies: HostCopies | None = None
        self.states: StateTier | None = None
        self.shards: dict[Residence, Tier] = {}
        offloads = rules.param != "device" or rules.optimizer != "device"
        if offloads and device.type == "cuda":
            pinned = rules.param_section.pin_memory and rules.optimizer_section.pin_memory
            self.copies = HostCopies(device, pinned=pinned)
        dtypes = _states_on_the_host(optimizer) if optimizer is not None and rules.optimizer != "device" else []
        try:
            if optimizer is not None and rules.optimizer == "nvme":
                _check_one_number_per_element(optimizer, rules.where)
                self.states = self._state_tier(plans, dtypes, type(optimizer).__name__, rank)
            if rules.param != "device":
                self._place_shards([plan for plan in plans if not plan.resident])
        except BaseException:
            self.close()
            raise

    @property
    def tiers(self) -> dict[str, Tier]:
        """Every tier, by what is in it and where."""
        found = {f"params, {residence}": tier for residence, tier in self.shards.items()}
        return found | ({"optimizer, nvme": self.states.tier} if self.states is not None else {})

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer steps in host memory rather than on the device."""
        return self._rules.optimizer != "device"

    @property
    def can_fail(self) -> bool:
        """Whether anything is in files, which fail on one rank alone."""
        return self.states is not None or "nvme" in self.shards

    def places(self, plan: BufferPlan, rank: int, *, replicated: bool) -> Places:
        """See `build.Tiers.places`."""
        tier = self._away.get(plan.key)
        places = Places(replicated=replicated)
        if isinstance(tier, NvmeTier):
            places = replace(places, home=ShardHome(tier, plan.key, plan.dtype))
        elif tier is not None:
            places = replace(places, shard=tier.take(plan.key).view(plan.dtype))
        if not plan.trainable:
            return places
        if self.states is not None:
            origin = plan.layout.bounds(rank)[0]
            return replace(places, adopt_master=partial(self.states.adopt, plan.key, origin=origin))
        return replace(places, master=self._device if self._rules.optimizer == "device" else _HOST)

    def settle(self) -> None:
        """Returns when every store is done; raises OffloadError if one failed."""
        for tier in self.tiers.values():
            tier.settle()

    def close(self) -> None:
        """Gives memory and files back. Idempotent."""
        for tier in self.tiers.values():
            tier.close()

    def _state_tier(
        self, plans: Sequence[BufferPlan], dtypes: Sequence[Mapping[str, torch.dtype]], name: str, rank: int
    ) -> StateTier:
        section, where = self._rules.optimizer_section, f"{self._rules.where}.offload_optimizer"
        cut: dict[str, list[SubGroup]] = {}
        for plan in plans:
            if plan.trainable:
                runs = group_runs(plan.layout, plan.param_groups, rank)
                cut[plan.key] = cut_sub_groups(plan.key, runs, dtypes, self._rules.sub_group_numel)
        groups = [group for of_buffer in cut.values() for group in of_buffer]
        tensors = 1 + max((len(group.states) for group in groups), default=0)
        if section.buffer_count < tensors:
            raise ConfigError(
                f"{where}.buffer_count",
                expected=f"at least {tensors}: one for the masters and one for each state of {name}",
                got=section.buffer_count,
            )
        at_a_time = 1 + section.pipeline_read + section.pipeline_write
        budget = section.buffer_count * 4 * max((group.numel for group in groups), default=0) * at_a_time
        tier = self._nvme(
            f"{where}.nvme_path", section.nvme_path, {g.key: slab_nbytes(g) for g in groups}, budget, section.pin_memory
        )
        return StateTier(tier, cut, pipeline_read=section.pipeline_read, pipeline_write=section.pipeline_write)

    def _place_shards(self, plans: Sequence[BufferPlan]) -> None:
        section, where = self._rules.param_section, f"{self._rules.where}.offload_param"
        sizes = {plan.key: plan.layout.shard_numel * plan.dtype.itemsize for plan in plans}
        on_host = list(sizes)
        if self._rules.param == "nvme":
            room, on_host = section.max_in_cpu, []
            for plan in plans:
                if plan.layout.shard_numel > room:
                    break
                room -= plan.layout.shard_numel
                on_host.append(plan.key)
        if on_host:
            pinned = section.pin_memory and self._device.type == "cuda"
            self.shards["host"] = HostTier({key: sizes[key] for key in on_host}, pinned=pinned)
        away = {key: nbytes for key, nbytes in sizes.items() if key not in on_host}
        if away:
            widest = max(plan.dtype.itemsize for plan in plans)
            budget = section.buffer_count * section.buffer_size * widest
            self.shards["nvme"] = self._nvme(f"{where}.nvme_path", section.nvme_path, away, budget, section.pin_memory)
        if self._rules.param == "nvme" and on_host:
            logger.info("offload_param.max_in_cpu keeps %d of %d shards in host memory", len(on_host), len(sizes))
        self._away = {key: self.shards["host" if key in on_host else "nvme"] for key in sizes}

    def _nvme(
        self, where: str, path: str | None, sizes: Mapping[str, int], budget_nbytes: int, pin_memory: bool
    ) -> NvmeTier:
        assert path is not None, f"{where}: no path"
        buffers = HostBuffers(budget_nbytes, pinned=pin_memory and self._device.type == "cuda")
        tier = NvmeTier(sizes, examine_folder(path, where), where, buffers, self._rules.io)
        try:
            if sizes:
                write, read = tier.file.measure()
                logger.info(
                    "%s: %s, %s I/O, %.2f GB/s write, %.2f GB/s read, %.3f GB reserved",
                    where,
                    tier.name,
                    "direct" if tier.file.direct else "cached",
                    write / 1e9,
                    read / 1e9,
                    tier.file.nbytes / 1e9,
                )
        except BaseException:
            tier.close()
            raise
        return tier


def _check_one_number_per_element(optimizer: Optimizer, where: str) -> None:
    if getattr(optimizer, "moments_dtype", "fp32") == "int8":
        raise ConfigError(
            "optimizer.params.moments_dtype",
            expected=f'"fp32" or "bf16" with {where}.offload_optimizer.device "nvme"',
            got="int8",
            fix='8-bit blocks stay in memory: use "bf16", or set device to "cpu"',
        )


def _states_on_the_host(optimizer: Optimizer) -> list[dict[str, torch.dtype]]:
    try:
        return state_dtypes(optimizer)
    except Exception as error:
        raise ConfigError(
            f"zero_optimization.offload_optimizer: optimizer {type(optimizer).__name__} cannot step in host memory "
            f"({type(error).__name__}: {error})",
            fix='use one that can, such as AdamW, or set offload_optimizer.device to "none"',
        ) from error
