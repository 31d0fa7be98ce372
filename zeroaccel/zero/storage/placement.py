"""Creates tiers, and the storages of every buffer, from a config's offload sections and the planned buffers.

Only this file chooses storage classes: two tables map the placement of a buffer's weights and masters to classes.
`TierSet` creates tiers and reserves NVMe space before the first weight moves; its caller, `setup/build.py`, makes the
ranks agree on errors.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import nn
from torch.optim import Optimizer

from zeroaccel.config.schema import Config
from zeroaccel.config.schema_zero import OffloadOptimizer, OffloadParam
from zeroaccel.config.shard_plan import Residence, TierPlan, UpdateTime
from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger
from zeroaccel.offload import free_nbytes
from zeroaccel.offload.file_io import IoSettings
from zeroaccel.offload.host_buffers import HostBuffers, aligned_nbytes, return_freed_memory, zeros_on_host
from zeroaccel.offload.nvme import NvmeTier
from zeroaccel.offload.offload_folder import OffloadFolder, examine_folder
from zeroaccel.offload.tier import HostTier, Tier
from zeroaccel.ops.shard_step import ShardOptimizer, ShardStep
from zeroaccel.optim.optimizer_copy import element_states
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.storage.code_shards import CodeShard, code_nbytes
from zeroaccel.zero.storage.copy_stream import CopyStream
from zeroaccel.zero.storage.masters import (
    AliasedMasters,
    MasterPiece,
    MasterPlace,
    MasterStorage,
    NoMasters,
    SeparateMasters,
    cut_pieces,
)
from zeroaccel.zero.storage.shards import MemoryShard, NvmeShard, ShardPlace, ShardStorage
from zeroaccel.zero.storage.swapped_masters import (
    RESIDUAL_SUB_GROUP_NUMEL,
    SUB_GROUP_NUMEL,
    ResidualMasters,
    StateFormat,
    StateSwapper,
    SubGroup,
    SwappedMasters,
    cut_sub_groups,
    fp32_nbytes,
    pack_sub_groups,
    residual_nbytes,
    state_formats,
)

SHARD_STORAGES: dict[str, Callable[[ShardPlace], ShardStorage]] = {
    "persistent": MemoryShard.persistent,  # always unsharded
    "device": MemoryShard.on_device,
    "host": MemoryShard.on_host,  # offload_param.device "cpu", and the first shards of "nvme" (max_in_cpu)
    "nvme": NvmeShard,  # offload_param.device "nvme"
}

MASTER_STORAGES: dict[str, Callable[[MasterPlace, StateSwapper], MasterStorage]] = {
    "none": lambda place, swapper: NoMasters(place),  # frozen
    "aliased": lambda place, swapper: AliasedMasters(place),  # fp32 parameters on the device of the optimizer step
    "separate": lambda place, swapper: SeparateMasters(place),
    "swapped": SwappedMasters,  # offload_optimizer.device "nvme"
    "residual": ResidualMasters,  # data_types.master_weights "residual"
}

_HOST = torch.device("cpu")
_MEMORY = -1  # `SpaceNeed.disk` of host memory
_NO_SWAPPER = StateSwapper(HostTier({}, pinned=False), {})  # for masters in memory


@dataclass(frozen=True, eq=False)
class BufferPlan:
    """The plan of one flat buffer: index arithmetic, before any weight moves.

    Attributes:
        key: its name in tiers, such as "layers.0/1".
        rank: this rank's index among the ranks that share the buffer.
        param_groups: param group of each slot; empty for a frozen buffer.
        persistent: every rank always has the unsharded buffer.
        replicated: every rank steps all of it.
        by_parameter: the optimizer steps it parameter by parameter, in their shapes.
        code_format: format of a frozen buffer stored as codes; "" for any other buffer.
        whole: every rank has the codes of all elements.
    """

    key: str
    rank: int
    layout: FlatLayout
    params: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    param_groups: tuple[int, ...]
    persistent: bool
    replicated: bool = False
    by_parameter: bool = False
    code_format: str = ""
    whole: bool = False

    @property
    def trainable(self) -> bool:
        """True if an optimizer updates the buffer."""
        return bool(self.param_groups)

    @property
    def shard_nbytes(self) -> int:
        """Number of bytes of this rank's shard."""
        numel = self.layout.shard_numel(self.rank)
        return code_nbytes(self.code_format, numel) if self.code_format else numel * self.dtype.itemsize

    def pieces(self) -> list[MasterPiece]:
        """Returns the pieces that this rank steps."""
        replicated, by_parameter = self.replicated, self.by_parameter
        return cut_pieces(self.layout, self.param_groups, self.rank, replicated=replicated, by_parameter=by_parameter)


@dataclass(frozen=True)
class OffloadRules:
    """The offload settings of a config.

    Attributes:
        param, optimizer: residence of the parameters and of the optimizer's masters and states.
        splits_masters: store masters of bf16 weights as residuals (`data_types.master_weights`).
        host_share, device_budget: which masters and states stay on the device; see `TierPlan`.
        where: path of `zero_optimization` in the config, for error messages.
    """

    param: Residence
    optimizer: Residence
    param_section: OffloadParam
    optimizer_section: OffloadOptimizer
    io: IoSettings
    sub_group_numel: int
    splits_masters: bool = False
    host_share: float = 1.0
    device_budget: int = 0
    where: str = "zero_optimization"

    @classmethod
    def of(cls, config: Config, tiers: TierPlan) -> OffloadRules:
        """Returns the rules for a config and the residences that `tiers` plans."""
        zero, aio = config.zero_optimization, config.aio
        return cls(
            tiers.param,
            tiers.optimizer,
            zero.offload_param or OffloadParam(),
            zero.offload_optimizer or OffloadOptimizer(),
            IoSettings(aio.block_size, aio.intra_op_parallelism * aio.queue_depth, aio.overlap_events, aio.checksum),
            zero.sub_group_size,
            config.data_types.master_weights == "residual",
            tiers.host_share,
            tiers.device_budget,
        )


@dataclass(frozen=True)
class SpaceNeed:
    """The disk space that one file needs, or the host memory of one rank with spares, for all ranks to compare.

    Attributes:
        disk: machine, and identifier of the disk or `_MEMORY`; equal for files that share free space.
        where: config key of the folder, and the folder.
    """

    disk: tuple[str, int]
    where: str
    nbytes: int
    free_nbytes: int


@dataclass(frozen=True)
class _TierPlan:
    """The plan of a tier in host memory.

    Attributes:
        sizes: key -> bytes.
        pinned: page-lock its host memory.
        populated: see `HostTier`.
    """

    sizes: Mapping[str, int]
    pinned: bool
    populated: bool = field(default=False, kw_only=True)

    def make(self, io: IoSettings) -> Tier:
        return HostTier(self.sizes, pinned=self.pinned, populated=self.populated)


@dataclass(frozen=True)
class _FilePlan(_TierPlan):
    """The plan of a tier in a file; `budget_nbytes` of host memory buffer its reads and writes."""

    where: str
    folder: OffloadFolder
    budget_nbytes: int

    @property
    def need(self) -> SpaceNeed:
        nbytes = sum(aligned_nbytes(size) for size in self.sizes.values())
        disk = platform.node(), self.folder.path.stat().st_dev
        return SpaceNeed(disk, f"{self.where} {self.folder.path}", nbytes, self.folder.free_nbytes)

    def make(self, io: IoSettings) -> Tier:
        ahead = min(aligned_nbytes(self.budget_nbytes), self.need.nbytes) if self.pinned else 0
        buffers = HostBuffers(self.budget_nbytes, pinned=self.pinned, ahead_nbytes=ahead)
        tier = NvmeTier(self.sizes, self.folder, self.where, buffers, io)
        try:
            write, read = tier.file.measure()
        except BaseException:
            tier.close()
            raise
        how = "direct" if tier.file.direct else "cached"
        rates = f"{write / 1e9:.2f} GB/s write, {read / 1e9:.2f} GB/s read"
        logger.info("%s: %s, %s I/O, %s, %.3f GB reserved", self.where, tier.name, how, rates, tier.file.nbytes / 1e9)
        return tier


class TierSet:
    """The tiers of one rank.

    1. The constructor checks the settings. 2. The ranks exchange `needs`. 3. `open` allocates memory and disk space.
    4. The engine calls `close` at its end.

    [Note: resident share] The units whose masters and states stay on the device are the first ones that fit, in the
    model's order. Their gradients arrive last in backward and their weights are needed first in the forward: copies of
    gradients to the host then end with backward, and the first forward after an update on the host waits for it latest.

    Args:
        plans: every buffer, in the order of the units.
        optimizer: None for inference.

    Attributes:
        device: compute device of the engine.
        tiers: open tiers, by contents and place: "params, host", "params, nvme", "optimizer, host", "optimizer, nvme".
        swapper: the swapper of masters and optimizer states; None if they stay in memory.
        spares: keys of the buffers that get spare memory for early updates (`EarlyUpdate`).
        copies: the copy stream between host memory and the device; None on a CPU, or without offload.
        resident: keys of the buffers whose masters and states stay on the device, in an engine with offload.

    Raises:
        ConfigError: a folder is unsuitable, or the optimizer cannot step in host memory.
    """

    def __init__(
        self,
        rules: OffloadRules,
        plans: Sequence[BufferPlan],
        optimizer: Optimizer | None,
        device: torch.device,
    ) -> None:
        self._rules = rules
        self.device = device
        self.copies: CopyStream | None = None
        self.tiers: dict[str, Tier] = {}
        self.swapper: StateSwapper | None = None
        self.resident: frozenset[str] = frozenset()
        self._plans: dict[str, _TierPlan] = {}
        self._sub_groups: dict[str, list[SubGroup]] = {}
        self.spares: Collection[str] = ()
        self._spare_plan = _SparePlan({}, 0)
        # On a CPU, host and device are one memory: offload to "cpu" then changes only the report.
        offloads = rules.param != "device" or rules.optimizer != "device"
        if offloads and device.type != "cpu":
            pinned = rules.param_section.pin_memory and rules.optimizer_section.pin_memory
            self.copies = CopyStream(device, pinned=pinned)
        if optimizer is not None and (rules.optimizer != "device" or rules.splits_masters):
            # A trial step runs before anything is offloaded: an optimizer that has only CUDA kernels fails here with a
            # clear message, and the trial shows the states for which the tier reserves space.
            states_of = cache(partial(_states_on_host, optimizer))
            for group, shape in _examples(plans).items():
                states_of(group, shape)
            if rules.splits_masters:
                _check_one_memory(rules, device)
            formats = partial(_formats, optimizer, states_of)
            trained = [plan for plan in plans if plan.trainable]
            self.resident = self._chosen(trained, formats)
            apart = [plan for plan in trained if plan.key not in self.resident]
            if rules.optimizer == "nvme" or rules.splits_masters:
                self._plan_states(apart, optimizer, formats)
            if rules.optimizer == "host" and rules.optimizer_section.update_during == "backward":
                self._spare_plan = _spare_plan(apart, formats, copies=2 if rules.param == "host" else 1)
        if rules.param != "device":
            self._plan_shards([plan for plan in plans if not plan.persistent])

    def needs(self) -> list[SpaceNeed]:
        """Returns the disk space that this rank's files need, and the host memory with spares."""
        needs = [plan.need for plan in self._plans.values() if isinstance(plan, _FilePlan)]
        if sizes := self._spare_plan.sizes:
            budget = self._rules.optimizer_section.spare_budget
            spare = 0 if budget == "auto" else min(budget, sum(sizes.values()))
            nbytes = self._spare_plan.own_nbytes + spare
            needs.append(SpaceNeed((platform.node(), _MEMORY), self._spare_key, nbytes, free_nbytes()))
        return needs

    @property
    def has_needs(self) -> bool:
        """True if `needs` may have entries, on any rank."""
        return self.can_fail or bool(self._spare_plan.sizes)

    @property
    def _spare_key(self) -> str:
        return f"{self._rules.where}.offload_optimizer.spare_budget"

    def open(self, needs: Sequence[SpaceNeed]) -> None:
        """Allocates memory and disk space.

        Args:
            needs: `needs` of all ranks.

        Raises:
            ConfigError: a disk has less free space than the ranks on it need together.
        """
        _check_space([need for need in needs if need.disk[1] != _MEMORY])
        if self._spare_plan.sizes:
            self._choose_spares([need for need in needs if need.disk[1] == _MEMORY])
        # The check is complete before memory is allocated, so that a small disk does not fail in the middle of a run.
        section = self._rules.optimizer_section
        for name, plan in self._plans.items():
            self.tiers[name] = tier = plan.make(self._rules.io)
            if name.startswith("optimizer"):
                in_file = isinstance(plan, _FilePlan)
                self.swapper = StateSwapper(
                    tier,
                    self._sub_groups,
                    pipeline_read=in_file and section.pipeline_read,
                    pipeline_write=in_file and section.pipeline_write,
                )

    def _choose_spares(self, needs: Sequence[SpaceNeed]) -> None:
        """Chooses the buffers with spare memory, equal on all ranks: first those whose gradients come first.

        Args:
            needs: of all ranks.
        """
        setting, sizes = self._rules.optimizer_section.spare_budget, self._spare_plan.sizes
        rooms: dict[str, int] = {}
        for host in {need.disk[0] for need in needs}:
            here = [need for need in needs if need.disk[0] == host]
            rooms[host] = (min(need.free_nbytes for need in here) - sum(need.nbytes for need in here)) // len(here)
        budget = min(rooms.values()) if setting == "auto" else setting
        if setting != "auto" and min(rooms.values()) < 0:
            short = min(rooms, key=rooms.__getitem__)
            raise ConfigError(
                self._spare_key,
                expected=f"free memory on {short} for the masters, states and spares of its ranks",
                got=f"{-rooms[short]} bytes too few for each rank",
                fix='set it to fewer bytes, or to "auto"; or set update_during to "forward"',
            )
        total, chosen = 0, []
        for key, nbytes in sizes.items():
            if total + nbytes <= budget:
                total += nbytes
                chosen.append(key)
        self.spares = frozenset(chosen)
        logger.info("%s: %.3f GB for %d of %d buffers", self._spare_key, total / 1e9, len(chosen), len(sizes))

    @property
    def is_used(self) -> bool:
        """True if parameters or the optimizer are offloaded."""
        return self._rules.param != "device" or self._rules.optimizer != "device"

    @property
    def steps_on_host(self) -> bool:
        """True if the optimizer steps in host memory and not on the device."""
        return self._rules.optimizer != "device"

    @property
    def keeps_states_on_host(self) -> bool:
        """True if states of masters in host memory stay there, beside a device. It never copies them: not locked."""
        in_tier = any(name.startswith("optimizer") for name in self._plans)
        return self.steps_on_host and self.device.type != "cpu" and not in_tier

    @property
    def pins_masters(self) -> bool:
        """True if masters in host memory that are the weights to copy to a device, as in fp32, are page-locked."""
        return self.steps_on_host and self._pins(self._rules.optimizer_section.pin_memory)

    @property
    def can_fail(self) -> bool:
        """True if any tier is in files, whose errors may affect a single rank."""
        return any(isinstance(plan, _FilePlan) for plan in self._plans.values())

    def storages(self, plan: BufferPlan, place: ShardPlace) -> tuple[ShardStorage, MasterStorage]:
        """Returns new storages, without values, for a buffer's shard and its masters.

        Args:
            place: place of the buffer's shard, without a tier.
        """
        # The shard first: fp32 masters may share its memory, and reading residual masters reads the shard.
        kind = self._shard_kind(plan)
        place, make = replace(place, tier=self.tiers.get(f"params, {kind}"), copies=self.copies), SHARD_STORAGES[kind]
        shard = CodeShard(place, plan.code_format, make, whole=plan.whole) if plan.code_format else make(place)
        resident = plan.key in self.resident
        on_device = resident or not self.steps_on_host
        masters = MasterPlace(
            plan.key,
            plan.layout,
            plan.rank,
            shard,
            plan.pieces() if plan.trainable else (),
            self.device if on_device else _HOST,
            plan.replicated,
            self.pins_masters and not on_device and plan.dtype is torch.float32,
            resident,
        )
        swapper = self.swapper if self.swapper is not None else _NO_SWAPPER
        return shard, MASTER_STORAGES[self._master_kind(plan, shard, masters.device)](masters, swapper)

    def _shard_kind(self, plan: BufferPlan) -> str:
        if plan.persistent or plan.whole:
            return "persistent"
        for place in ("host", "nvme"):
            if (planned := self._plans.get(f"params, {place}")) is not None and plan.key in planned.sizes:
                return place
        return "device"

    def _master_kind(self, plan: BufferPlan, shard: ShardStorage, device: torch.device) -> str:
        if not plan.trainable:
            return "none"
        if self.swapper is not None and plan.key not in self.resident:
            return "residual" if self._keeps_residuals(plan) else "swapped"
        in_place = isinstance(shard, MemoryShard) and shard.device == device and not self._updates_late
        return "aliased" if plan.dtype is torch.float32 and in_place else "separate"

    @property
    def _updates_late(self) -> bool:
        """True for updates during forward and backward, which must not change the weights that these use."""
        return self._rules.optimizer_section.update_during == "next_step"

    def _keeps_residuals(self, plan: BufferPlan) -> bool:
        return self._rules.splits_masters and plan.dtype is torch.bfloat16

    def settle(self) -> None:
        """Waits until every store is complete; raises OffloadError if one failed."""
        for tier in self.tiers.values():
            tier.settle()
        if self.can_fail:  # values move to files so that their memory can serve other purposes
            return_freed_memory()

    def close(self) -> None:
        """Frees memory and files. Idempotent."""
        for tier in self.tiers.values():
            tier.close()

    def _pins(self, pin_memory: bool) -> bool:
        return pin_memory and self.device.type != "cpu"

    def _chosen(self, plans: Sequence[BufferPlan], formats_of: _FormatsOf) -> frozenset[str]:
        """Returns the keys of the buffers whose masters and states stay on the device; see [Note: resident share]."""
        rules = self._rules
        if rules.host_share == 1.0 and not rules.device_budget:
            return frozenset()
        by_share = rules.host_share < 1.0
        units: dict[str, int] = {}
        for plan in plans:  # by the largest shard, so that every rank keeps the same units
            each = 1.0 if by_share else self._nbytes_of_element(plan, formats_of)
            unit = plan.key.rpartition("/")[0]
            units[unit] = units.get(unit, 0) + math.ceil(plan.layout.largest_shard_numel * each)
        room = int((1.0 - rules.host_share) * sum(units.values())) if by_share else rules.device_budget
        chosen = set()
        for unit, size in units.items():
            if size <= room:
                room -= size
                chosen.add(unit)
        where = f"{rules.where}.offload_optimizer.{'ratio' if by_share else 'device_budget'}"
        logger.info("%s: masters and states of %d of %d units stay on the device", where, len(chosen), len(units))
        return frozenset(plan.key for plan in plans if plan.key.rpartition("/")[0] in chosen)

    def _nbytes_of_element(self, plan: BufferPlan, formats_of: _FormatsOf) -> float:
        """Returns the bytes of a master and its states on the device."""
        states = [formats_of(group, shape).values() for group, shape in _examples([plan]).items()]
        most = max((sum(state.dtype.itemsize / state.per for state in each) for each in states), default=0.0)
        aliased = plan.dtype is torch.float32 and self._rules.param == "device" and not self._updates_late
        return most if aliased else 4 + most

    def _plan_states(self, plans: Sequence[BufferPlan], optimizer: Optimizer, formats_of: _FormatsOf) -> None:
        section, where = self._rules.optimizer_section, f"{self._rules.where}.offload_optimizer"
        name = type(optimizer).__name__
        # A native kernel joins a tile of residual masters at a time; other optimizers need all of a sub-group joined.
        cached = SUB_GROUP_NUMEL if isinstance(optimizer, ShardOptimizer) else RESIDUAL_SUB_GROUP_NUMEL
        for plan in plans:
            nbytes_of = residual_nbytes if self._keeps_residuals(plan) else fp32_nbytes
            limit = self._rules.sub_group_numel
            starts = () if limit else {slot.start for slot in plan.layout.slots}  # 0: one parameter at a time
            if self._rules.optimizer != "nvme":  # residual masters in memory: the caches, not a disk, set the size
                limit = min(limit or cached, cached)
            if plan.layout.has_owners:
                pieces = plan.pieces()
                per_piece = [formats_of(piece.group, piece.shape) for piece in pieces]
                most = 0 if starts else limit
                self._sub_groups[plan.key] = pack_sub_groups(plan.key, pieces, per_piece, most, master_nbytes=nbytes_of)
                continue
            # One trial per param group suffices: the states of a flat run do not depend on its length.
            runs = plan.layout.group_runs(plan.param_groups, plan.rank)
            elementwise = {group for _, group in runs}  # other groups' rules may not support a flat tensor
            flat = [
                formats_of(group, (_TRIED_NUMEL,)) if group in elementwise else {}
                for group in range(len(optimizer.param_groups))
            ]
            self._sub_groups[plan.key] = cut_sub_groups(
                plan.key, runs, flat, limit or SUB_GROUP_NUMEL, starts=starts, master_nbytes=nbytes_of
            )
        groups = [group for of_buffer in self._sub_groups.values() for group in of_buffer]
        sizes, pinned = {group.key: group.nbytes for group in groups}, self._pins(section.pin_memory)
        if self._rules.optimizer != "nvme":
            if sizes:
                # Only the host reads and writes them: residuals are joined with weights in host memory.
                self._plans["optimizer, host"] = _TierPlan(sizes, pinned=False, populated=self.device.type != "cpu")
            return
        tensors = 1 + max((sum(state.per == 1 for state in group.states.values()) for group in groups), default=0)
        if section.buffer_count < tensors:
            raise ConfigError(
                f"{where}.buffer_count",
                expected=f"at least {tensors}: one buffer for the masters and one for each state of {name}",
                got=section.buffer_count,
            )
        # The sub-group in the step, the next one (reading) and the last one (writing).
        at_a_time = 1 + section.pipeline_read + section.pipeline_write
        budget = section.buffer_count * 4 * max((group.range.numel for group in groups), default=0) * at_a_time
        self._plans["optimizer, nvme"] = _file_plan(f"{where}.nvme_path", section.nvme_path, sizes, pinned, budget)

    def _plan_shards(self, plans: Sequence[BufferPlan]) -> None:
        section, where = self._rules.param_section, f"{self._rules.where}.offload_param"
        in_files, pinned = {plan.key: plan.shard_nbytes for plan in plans}, self._pins(section.pin_memory)
        on_host: dict[str, int] = {}
        # The model's first units stay in memory: backward gathers them last, and the next forward gathers them first.
        room = math.inf if self._rules.param == "host" else section.max_in_cpu
        for plan in plans:  # by the largest shard, so that every rank keeps the same units in memory
            if plan.layout.largest_shard_numel > room:
                break
            room -= plan.layout.largest_shard_numel
            on_host[plan.key] = in_files.pop(plan.key)
        if on_host:
            self._plans["params, host"] = _TierPlan(on_host, pinned)
        if on_host and self._rules.param == "nvme":
            logger.info("%s.max_in_cpu keeps %d of %d shards in host memory", where, len(on_host), len(plans))
        if in_files:
            budget = section.buffer_count * section.buffer_size * max(plan.dtype.itemsize for plan in plans)
            path = section.nvme_path
            self._plans["params, nvme"] = _file_plan(f"{where}.nvme_path", path, in_files, pinned, budget)


@dataclass(frozen=True)
class _SparePlan:
    """Memory of early updates.

    Attributes:
        sizes: key of a buffer -> bytes of its spare masters, states and new weights, in the order of the gradients.
        own_nbytes: bytes of the masters, states, gradients and weights in host memory themselves.
    """

    sizes: Mapping[str, int]
    own_nbytes: int


def _spare_plan(plans: Sequence[BufferPlan], formats_of: _FormatsOf, *, copies: int) -> _SparePlan:
    """Plans spare memory; in host memory are 1 or 2 `copies` of a shard: its gradients, and its weights."""
    sizes, own_nbytes = {}, 0
    for plan in reversed(plans):
        numel = plan.layout.largest_shard_numel
        formats = [formats_of(group, (_TRIED_NUMEL,)) for group in set(plan.param_groups)]
        of_states = max(sum(state.nbytes(numel) for state in states.values()) for states in formats)
        own_nbytes += fp32_nbytes(numel) + of_states + copies * numel * plan.dtype.itemsize
        weights = numel * plan.dtype.itemsize if plan.dtype is not torch.float32 else 0
        sizes[plan.key] = fp32_nbytes(numel) + of_states + weights
    return _SparePlan(sizes, own_nbytes)


def _file_plan(where: str, path: str | None, sizes: Mapping[str, int], pinned: bool, budget_nbytes: int) -> _FilePlan:
    assert path is not None, f"{where}: no path"
    return _FilePlan(sizes, pinned, where, examine_folder(path, where), budget_nbytes)


def _check_one_memory(rules: OffloadRules, device: torch.device) -> None:
    """Raises ConfigError if weights or optimizer states are on the device: the host joins weight and residual."""
    if device.type != "cpu" and "device" in (rules.param, rules.optimizer):
        raise ConfigError(
            'data_types.master_weights "residual": weights and optimizer states must be in host memory or in files',
            fix=f'set offload_param and offload_optimizer in {rules.where}, or set master_weights to "fp32"',
        )


def _check_space(needs: Sequence[SpaceNeed]) -> None:
    """Raises ConfigError if the files on one disk need more than its free space, before any file is created."""
    by_disk: dict[tuple[str, int], list[SpaceNeed]] = {}
    for need in needs:
        by_disk.setdefault(need.disk, []).append(need)
    for (host, _), on_disk in by_disk.items():
        nbytes, free = sum(need.nbytes for need in on_disk), min(need.free_nbytes for need in on_disk)
        if nbytes > free:
            raise ConfigError(
                on_disk[0].where,
                expected=f"{nbytes} bytes of free space for {len(on_disk)} files of the ranks on {host}",
                got=f"{free} bytes free",
                fix="free some space, or set a folder on a larger disk; no file has been written",
            )


def _examples(plans: Sequence[BufferPlan]) -> dict[int, tuple[int, ...]]:
    """Returns param group -> shape of one of its smallest masters."""
    shapes: dict[int, tuple[int, ...]] = {}
    for plan in plans:
        for group, slot in zip(plan.param_groups, plan.layout.slots, strict=False):
            shape = slot.shape if plan.layout.has_owners else (_TRIED_NUMEL,)
            if slot.numel and (group not in shapes or slot.numel < math.prod(shapes[group])):
                shapes[group] = shape
    return shapes


_TRIED_NUMEL = 64  # elements of the trial vector, which represents any run of a flat shard


_FormatsOf = Callable[[int, tuple[int, ...]], Mapping[str, StateFormat]]
"""(param group, shape of a master) -> name and format of its states per element."""


def _formats(
    optimizer: Optimizer,
    states_of: Callable[[int, tuple[int, ...]], Mapping[str, torch.dtype]],
    group: int,
    shape: tuple[int, ...],
) -> Mapping[str, StateFormat]:
    return state_formats(optimizer, states_of(group, shape))


def _states_on_host(optimizer: Optimizer, group: int, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
    """Returns name -> dtype of the optimizer's states per element, from a trial step of a master of this shape.

    Raises:
        ConfigError: the optimizer cannot step in host memory.
    """
    try:
        return element_states(optimizer, group, shape)
    except Exception as error:
        raise ConfigError(
            f"zero_optimization.offload_optimizer: optimizer {type(optimizer).__name__} cannot step in host memory "
            f"({type(error).__name__}: {error})",
            fix='use another optimizer, such as AdamW, or set offload_optimizer.device to "none"',
        ) from error


def plan_tiers(
    rules: OffloadRules, plans: Sequence[BufferPlan], optimizer: Optimizer | None, device: torch.device
) -> TierSet:
    """Returns the tiers of an engine, not open yet, and prepares the optimizer for offloaded masters.

    Raises:
        ConfigError: see `TierSet`; or the optimizer does not support `update_during`.
    """
    tiers = TierSet(rules, plans, optimizer, device)
    if optimizer is not None and rules.optimizer != "device":
        section = f"{rules.where}.offload_optimizer"
        _check_update_time(optimizer, rules.optimizer_section.update_during, section)
    if tiers.keeps_states_on_host and isinstance(optimizer, ShardOptimizer):
        optimizer.host_memory = zeros_on_host
    return tiers


def _check_update_time(optimizer: Optimizer, during: UpdateTime, where: str) -> None:
    """Checks that the optimizer takes hyperparameters as arguments, as updates outside `step()` (`update_during`) need.

    Raises:
        ConfigError: this optimizer reads hyperparameters and state during the update.
    """
    kind = ShardOptimizer if during == "backward" else ShardStep
    if during not in ("auto", "step") and not isinstance(optimizer, kind):
        raise ConfigError(
            f'{where}.update_during "{during}": {type(optimizer).__name__} updates in step() only',
            fix='configure Adam, AdamW, Lion, Adagrad, RMSprop or SGD as "optimizer", or set the key to "step"',
        )
