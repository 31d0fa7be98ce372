"""How the ranks of a job share out the work: `ParallelConfig`. No torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeroaccel.config.section import out_of_quotes
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once

# Keys of `tensor_parallel` that ask for another cut, or another way to compute, than there is.
_OWN_PLANS = (
    *("partition_config", "preset_model", "injection_policy_tuple", "vocab_parallel_lm_head"),
    *("vocab_parallel_ce_backend", "tp_overlap_comm", "replace_with_kernel_inject", "kernel_inject"),
)

EP_BUFFER_NBYTES = 1 << 28
"""Default of `ParallelConfig(ep_buffer_nbytes)`."""

# Keys of `expert_parallel` that say how tokens are routed, which the model's own router does.
_OWN_ROUTING = (
    *("load_balance_coeff", "route_norm", "route_scale", "routed_scaling_factor", "score_apply", "score_func", "top_k"),
    *("num_expert_groups", "num_limited_groups", "expert_activation", "comm_max_tokens_per_rank"),
    "expert_tensor_parallel_size",
)

AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
"""Outermost first: neighbouring ranks differ in the last axis."""

_DEFAULT_SIZES = {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "sp": 1, "tp": 1, "ep": 1}

RankGroups = tuple[tuple[int, ...], ...]
"""Groups of global ranks; every rank of the job is in exactly one."""


@dataclass(frozen=True)
class ShardSize:
    """Ranks of a shard group, who says so, and what to do instead."""

    size: int
    source: str
    alternative: str


@dataclass(frozen=True, init=False)
class ParallelConfig:
    """The mesh of a job, pp x dp_replicate x dp_shard x sp x tp ranks; names and order as torchtitan's.

    Sizes may be passed by accelerate's names, too: `ParallelConfig(tp_size=2)` is `ParallelConfig(tp=2)`.

    The two data axes see different samples. Ranks that differ in `sp` only have parts of the same sequences (Ulysses,
    Jacobs et al., 2023, arXiv:2309.14509). Ranks that differ in `tp` only have parts of the same layers (Megatron-LM,
    Shoeybi et al., 2019, arXiv:1909.08053) and compute on the same samples. ZeRO shards over dp_shard x sp ranks,
    which all have the same parameters: those of one stage, and of one part of its layers.

    Ranks that differ in `pp` only have the stages of one pipeline and see the same samples.

    `ep` is no factor of the product: among the ranks that ZeRO shards over, every `ep` neighbours divide the experts
    of each layer and send each token to the rank with its expert (GShard, Lepikhin et al., 2020, arXiv:2006.16668).
    Each of them sees its own samples.

    Attributes:
        pp: stages of a pipeline, each on ranks of its own.
        dp_replicate: groups of ranks that each hold one sharded model.
        dp_shard: -1 takes the ranks that the other axes leave.
        sp: ranks that share a sequence.
        tp: ranks that share each layer.
        ep: ranks that divide the experts of each layer; a divisor of dp_shard x sp.
        ep_buffer_nbytes: most bytes of tokens that a rank sends or receives at a time; where a layer has more, each
            rank takes a few of its experts at a time, at least one.
        tp_plan: the end of a module's name, where * is one part of it between dots, -> "colwise", "rowwise" or another
            style (docs/tensor_parallel.md). By default the plan of a transformers model; "auto" is the same, and for
            other models uses the names of their layers. With tp of 1 nothing is split.
        verify_cut: compare the model that `sp`, `tp` and `ep` cut with the whole one at the start, on a short batch.

    Raises:
        UsageError: a size is not a positive integer, or passed by both names, or `tp_plan` is a text other than "auto".

    Example:
        >>> mesh = ParallelConfig(sp=2).resolve(world_size=8)
        >>> mesh.dp_shard, mesh.data_parallel_size
        (4, 4)
        >>> mesh.coordinates(rank=5)
        {'pp': 0, 'dp_replicate': 0, 'dp_shard': 2, 'sp': 1, 'tp': 0}
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    sp: int = 1
    tp: int = 1
    tp_plan: Mapping[str, str] | str | None = field(default=None, hash=False)
    ep: int = field(default=1, repr=False)
    ep_buffer_nbytes: int = field(default=EP_BUFFER_NBYTES, repr=False)
    verify_cut: bool = field(default=True, compare=False, repr=False)

    def __init__(
        self,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        sp: int = 1,
        tp: int = 1,
        tp_plan: Mapping[str, str] | str | None = None,
        verify_cut: bool = True,
        ep: int = 1,
        ep_buffer_nbytes: int = EP_BUFFER_NBYTES,
        **sizes: int,
    ) -> None:
        values = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "sp": sp, "tp": tp, "ep": ep}
        for name, size in sizes.items():
            axis = name.removesuffix("_size")
            if axis not in values or axis == name:
                raise TypeError(f"ParallelConfig() has no argument {name!r}; axes are {', '.join((*AXES, 'ep'))}")
            if values[axis] not in (_DEFAULT_SIZES[axis], size):
                raise UsageError(f"ParallelConfig({axis}, {name})", expected="one of the two", got=(values[axis], size))
            values[axis] = size
        for axis, size in values.items():
            object.__setattr__(self, axis, size)
        object.__setattr__(self, "tp_plan", tp_plan)
        object.__setattr__(self, "verify_cut", verify_cut)
        object.__setattr__(self, "ep_buffer_nbytes", ep_buffer_nbytes)
        self._check()

    def _check(self) -> None:
        for axis in _DEFAULT_SIZES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and (axis, size) != ("dp_shard", -1)):
                rest = " or -1" if axis == "dp_shard" else ""
                raise UsageError(f"ParallelConfig({axis})", expected=f"a positive number of ranks{rest}", got=size)
        for axis in ("tp", "dp_replicate"):
            if self.ep > 1 and getattr(self, axis) > 1:
                raise UsageError(
                    f"ParallelConfig(ep={self.ep}, {axis}={getattr(self, axis)})",
                    expected=f"{axis} of 1 where ranks divide the experts",
                    got=getattr(self, axis),
                    fix=f"leave {axis} at 1, or ep",
                )
        buffer = self.ep_buffer_nbytes
        if not isinstance(buffer, int) or isinstance(buffer, bool) or buffer < 1:
            raise UsageError("ParallelConfig(ep_buffer_nbytes)", expected="a positive number of bytes", got=buffer)
        if not isinstance(self.verify_cut, bool):
            raise UsageError("ParallelConfig(verify_cut)", expected="True or False", got=self.verify_cut)
        if isinstance(self.tp_plan, str) and self.tp_plan != "auto":
            raise UsageError("ParallelConfig(tp_plan)", expected='"auto", or patterns with styles', got=self.tp_plan)

    @classmethod
    def of(cls, source: Any, where: str) -> ParallelConfig:
        """The mesh of an argument: a `ParallelConfig`, or an object with accelerate's sizes (`tp_size`) or those of
        transformers' `DistributedConfig` (`fsdp_size`).

        Args:
            where: the argument, for messages.

        Raises:
            UsageError: it is neither, or has an axis that is not available here.
        """
        if isinstance(source, ParallelConfig):
            return source
        if hasattr(source, "fsdp_size"):
            return _of_distributed_config(source, f"{where}: DistributedConfig")
        sizes = {axis: getattr(source, f"{axis}_size", None) for axis in (*AXES, "ep", "cp")}
        if all(size is None for size in sizes.values()):
            got = type(source).__name__
            raise UsageError(where, expected="a ParallelConfig, or accelerate's ParallelismConfig", got=got)
        if sizes.pop("cp") not in (None, 1):
            about = "1, as context parallelism is not available; sp_size cuts sequences"
            raise UsageError(f"{where}: cp_size", expected=about, got=source.cp_size)
        return cls.from_sizes(sizes)

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int | None]) -> ParallelConfig:
        """The mesh of accelerate's sizes, axis -> ranks.

        None is 1. A `dp_shard` of 1 beside one replica is -1, since accelerate's files say 1 where nothing is chosen.
        """
        known: dict[str, Any] = {axis: size for axis, size in sizes.items() if size is not None}
        if known.get("dp_replicate", 1) == 1 and known.get("dp_shard") == 1:
            del known["dp_shard"]
        return cls(**known)

    @property
    def splits_samples(self) -> bool:
        """Whether several ranks work on one sample: not all of them see different ones."""
        return self.sp > 1 or self.tp > 1 or self.pp > 1

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples; of a resolved mesh."""
        return self.dp_replicate * self.dp_shard

    def resolve(self, world_size: int) -> ParallelConfig:
        """The same with `dp_shard` known.

        Raises:
            UsageError: the axes do not multiply to the ranks of the job.
        """
        others = self._num_others
        mesh = replace(self, dp_shard=world_size // others) if self.dp_shard == -1 and world_size >= others else self
        if math.prod(getattr(mesh, axis) for axis in AXES) != world_size:
            raise UsageError(
                "ParallelConfig",
                expected=self._expected(world_size),
                got=self._product,
                fix=f"start a multiple of {others} ranks, or choose other sizes",
            )
        if (mesh.dp_shard * mesh.sp) % mesh.ep:
            raise UsageError(
                f"ParallelConfig(ep={mesh.ep})",
                expected=f"a divisor of dp_shard x sp, {mesh.dp_shard * mesh.sp} ranks",
                got=mesh.ep,
                fix="choose an ep that divides them, or start other ranks",
            )
        return mesh

    def misfit(self, world_size: int) -> str:
        """Why the sizes do not fit this number of ranks, for a message; "" where they fit."""
        shared = world_size // self._num_others * self.sp if self.dp_shard == -1 else self.dp_shard * self.sp
        if world_size % self._num_others == 0 and shared % self.ep:
            return f"ep {self.ep}, where a divisor of dp_shard x sp, {shared} ranks, is needed"
        return f"{self._product}, where {self._expected(world_size)} are needed"

    @property
    def _num_others(self) -> int:
        """Ranks along the axes other than `dp_shard`."""
        return math.prod(getattr(self, axis) for axis in AXES if axis != "dp_shard")

    @property
    def _product(self) -> str:
        known = [axis for axis in AXES if (size := getattr(self, axis)) > 1 or (axis, size) == ("dp_shard", 1)]
        product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in known)
        return f"{product} = {math.prod(getattr(self, axis) for axis in known)}"

    def _expected(self, world_size: int) -> str:
        return f"sizes that {'divide' if self.dp_shard == -1 else 'multiply to'} the job's {world_size} ranks"

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis of a resolved mesh."""
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return {axis: places[axis] for axis in AXES}

    def groups(self, *axes: str) -> RankGroups:
        """The groups of ranks that differ in these axes only, each in ascending order. The mesh must be resolved.

        Example:
            >>> mesh = ParallelConfig(dp_shard=2, tp=2)
            >>> mesh.groups("tp"), mesh.groups("dp_shard")
            (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(math.prod(getattr(self, axis) for axis in AXES)):
            places = self.coordinates(rank)
            groups.setdefault(tuple(places[axis] for axis in AXES if axis not in axes), []).append(rank)
        return tuple(map(tuple, groups.values()))

    @property
    def described(self) -> str:
        """The parts of a model that differ between ranks, for records in checkpoints: "pp 1 x (dp x sp) 4 x tp 2"."""
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return f"pp {self.pp} x (dp x sp) {self.data_parallel_size * self.sp} x tp {self.tp}{experts}"

    @property
    def data_groups(self) -> RankGroups:
        """The groups of ranks that hold the same parameters before ZeRO shards them."""
        return self.groups("dp_replicate", "dp_shard", "sp")

    @property
    def expert_groups(self) -> RankGroups:
        """The groups of ranks that divide the experts of each layer: neighbours in a data group.

        Example:
            >>> mesh = ParallelConfig(dp_shard=4, ep=2)
            >>> mesh.expert_groups, mesh.expert_holders
            (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        """
        size = self.ep
        return tuple(ranks[i : i + size] for ranks in self.data_groups for i in range(0, len(ranks), size))

    @property
    def expert_holders(self) -> RankGroups:
        """The groups of ranks that hold the same experts, before ZeRO shards them."""
        return tuple(ranks[place :: self.ep] for ranks in self.data_groups for place in range(self.ep))

    @property
    def shard_size(self) -> ShardSize | None:
        """Ranks of a shard group, where there are replicas; of a resolved mesh."""
        if self.dp_replicate == 1:
            return None
        size = len(self.data_groups[0]) // self.dp_replicate
        return ShardSize(size, "dp_shard x sp of ParallelConfig", "leave dp_replicate at 1")

    @property
    def compared(self) -> dict[str, Any]:
        """The settings that all ranks share, by name: their groups follow from these."""
        plan = dict(self.tp_plan) if isinstance(self.tp_plan, Mapping) else self.tp_plan
        sizes = {axis: getattr(self, axis) for axis in _DEFAULT_SIZES}
        return {**sizes, "verify_cut": self.verify_cut, "tp_plan": plan}

    @property
    def peer_groups(self) -> RankGroups:
        """The groups of ranks that issue the same collectives: all ranks, or those of one pipeline stage."""
        return self.groups(*(axis for axis in AXES if axis != "pp"))

    def data_parallel_rank(self, rank: int) -> int:
        """The place of a rank among those that see different samples; of a resolved mesh."""
        places = self.coordinates(rank)
        return places["dp_replicate"] * self.dp_shard + places["dp_shard"]


def _of_distributed_config(source: Any, where: str) -> ParallelConfig:
    """The mesh of transformers' `DistributedConfig`, whose FSDP is ZeRO here.

    Raises:
        UsageError: it asks for what the config decides here, or for experts of ranks that see the same samples.
    """
    sizes = {axis: getattr(source, f"{axis}_size", None) for axis in ("pp", "dp_replicate", "tp", "ep")}
    refused = {
        "fsdp_cpu_offload": (False, "set zero_optimization.offload_param and offload_optimizer in the config"),
        "fsdp_mixed_precision": (False, "set bf16.enabled or fp16.enabled in the config"),
        "ep_size": (1, f"ranks that divide experts see samples of their own: fsdp_size={sizes['tp']}, tp_size=1"),
        "tp_plan": ("auto", "pass ParallelConfig(tp=N, tp_plan={...}) with the whole plan"),
        "ep_implementation": ("auto", "leave it out: tokens go to their experts by all-to-all"),
    }
    if (sizes["tp"] or 1) == 1:
        refused = {key: rule for key, rule in refused.items() if key not in ("ep_size", "tp_plan")}
    for key, (plain, fix) in refused.items():
        value = getattr(source, key, plain)
        if value not in (plain, None, "auto", "all_to_all"):
            raise UsageError(f"{where}({key})", expected=repr(plain), got=value, fix=fix)
    unread = {
        "ep_plan": "experts are found by transformers' interface",
        "fsdp_plan": "the engine chooses the units of gathers (zero_optimization.leaf_module)",
        "enable_sequence_parallel": "transformers does not read it either; sp cuts sequences",
    }
    for key, reason in unread.items():
        if getattr(source, key, None):
            log_once(logging.INFO, f"{where}({key}): does nothing: {reason}")
    tp_plan = "auto" if (sizes["tp"] or 1) > 1 else None
    return replace(ParallelConfig.from_sizes({**sizes, "dp_shard": source.fsdp_size}), tp_plan=tp_plan)


def with_config_axes(tree: Mapping[str, Any], parallel: ParallelConfig | None) -> ParallelConfig | None:
    """The mesh of an argument and of a config, which says how many ranks share sequences and layers.

    Args:
        tree: of the config, as it was written: `sequence_parallel_size`, `expert_parallel.autoep_size`, and
            `tensor_parallel.autotp_size` with its older forms. What is wrong in it is for `load_config` to say.

    Raises:
        UsageError: they say different sizes; or the config says by keys of its own how layers are cut or run, or
            tokens routed.

    Example:
        >>> with_config_axes({"tensor_parallel": {"autotp_size": 2}}, None)
        ParallelConfig(pp=1, dp_replicate=1, dp_shard=-1, sp=1, tp=2, tp_plan='auto')
    """
    layers = _autotp_size(tree)
    if (sequence := _ranks(tree.get("sequence_parallel_size"))) > 1:
        parallel = _with_axis(parallel, "sp", sequence, "sequence_parallel_size")
    if (experts := _autoep_size(tree)) > 1:
        parallel = _with_axis(parallel, "ep", experts, "expert_parallel.autoep_size")
    if layers > 1:
        parallel = _with_axis(parallel, "tp", layers, "tensor_parallel.autotp_size")
        parallel = replace(parallel, tp_plan="auto" if parallel.tp_plan is None else parallel.tp_plan)
    return parallel


def _ranks(value: object) -> int:
    """A number of ranks as it is written; 1 for what is none."""
    size = out_of_quotes(int, value)
    return size if isinstance(size, int) and not isinstance(size, bool) else 1


def _with_axis(parallel: ParallelConfig | None, axis: str, size: int, key: str) -> ParallelConfig:
    mesh = ParallelConfig() if parallel is None else parallel
    if getattr(mesh, axis) not in (1, size):
        expected = f"{size}, as {key} of the config says"
        raise UsageError(f"ParallelConfig({axis})", expected=expected, got=getattr(mesh, axis))
    changed: dict[str, Any] = {axis: size}
    return replace(mesh, **changed)


def _autoep_size(tree: Mapping[str, Any]) -> int:
    """How many ranks divide experts; 1 where a config says nothing of it, or does not enable it."""
    section = tree.get("expert_parallel")
    if not isinstance(section, Mapping) or out_of_quotes(bool, section.get("enabled")) is not True:
        return 1
    for key in _OWN_ROUTING:
        if section.get(key) not in (None, 1 if key == "expert_tensor_parallel_size" else None):
            raise UsageError(
                f"expert_parallel.{key}",
                expected="no such key: the model's own routers and experts decide it",
                got=section[key],
                fix="remove it, or set it in the model's config",
            )
    # Patterns and presets by which DeepSpeed finds experts, and its kernels: found and computed as the model has them.
    for key in sorted(section.keys() - {"enabled", "autoep_size", *_OWN_ROUTING}):
        log_once(logging.INFO, f"expert_parallel.{key}: does nothing: experts are found by transformers' interface")
    return _ranks(section.get("autoep_size"))


def _autotp_size(tree: Mapping[str, Any]) -> int:
    """How many ranks share layers; 1 where a config says nothing of it."""
    section = tree.get("tensor_parallel")
    if not isinstance(section, Mapping):
        return 1
    older = section.get("tensor_parallel", section.get("tp"))
    size = max(_ranks(section.get("autotp_size")), _ranks(older.get("tp_size") if isinstance(older, Mapping) else None))
    for key in _OWN_PLANS:
        if size > 1 and section.get(key):
            raise UsageError(
                f"tensor_parallel.{key}",
                expected="nothing: layers are cut as the model's own plan says, or by their names",
                got=section[key],
                fix="remove it, and call initialize(parallel=ParallelConfig(tp=N, tp_plan={...})) for another cut",
            )
    return size


SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
INTERLEAVED = ("interleaved_1f1b", "zero_bubble")
"""Those with several stages per rank."""
ZERO_BUBBLE = "zero_bubble"
"""The one that computes gradients of weights by themselves, later than those of inputs."""
SPLITS = ("compute", "parameters", "uniform")


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is cut into the stages of a pipeline, and in which order they work on micro-batches.

    Attributes:
        schedule: "1f1b" (PipeDream-flush, Narayanan et al., 2021, arXiv:2006.09503) has at most as many micro-batches
            in flight as there are stages; "gpipe" (Huang et al., 2019, arXiv:1811.06965) all of a step. Both add up
            gradients in the order of the micro-batches, and leave each rank idle for (pp - 1) / (m + pp - 1) of a step
            of m micro-batches. "interleaved_1f1b" (Narayanan et al., 2021, arXiv:2104.04473, section 2.2) has
            `stages_per_rank` v stages on each rank, rank r those with the numbers r, r + pp and so on: idle for
            (pp - 1) / (v m + pp - 1). "zero_bubble" (ZB-H1, Qi et al., 2024, arXiv:2401.10241) is that, and fills the
            idle part with gradients of weights, which no rank waits for; not at stage 3.
        stages_per_rank: of the last two schedules; None is 2 there, and 1 for the others.
        split: the quantity to balance: "compute", matrix elements that each token meets; "parameters"; or "uniform",
            the number of blocks. Or the number of blocks of each stage, in order.
        loss: of (output, targets), for an nn.Sequential, whose batches are pairs (inputs, targets). A model of
            transformers computes its own from `labels`.
        costs: one per child of an nn.Sequential, to balance instead of `split`.

    Raises:
        UsageError: an unknown schedule or split.

    Example:
        >>> PipelineConfig(split=(3, 5)).split
        (3, 5)
    """

    schedule: str = "1f1b"
    split: str | Sequence[int] = "compute"
    loss: Callable[[Any, Any], Any] | None = None
    costs: Sequence[float] | None = None
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UsageError(
                "PipelineConfig(schedule)",
                expected=" or ".join(f'"{name}"' for name in SCHEDULES),
                got=self.schedule,
                fix="others add up gradients in another order than that of the micro-batches (looped BFS), or have the "
                "first and the last stage on one rank (ZBV, DualPipeV)",
            )
        stages = self.stages_per_rank
        most = None if self.schedule in INTERLEAVED else 1
        if stages is not None and (type(stages) is not int or stages < 1 or stages > (most or stages)):
            raise UsageError(
                "PipelineConfig(stages_per_rank)",
                expected=f'{"a positive number" if most is None else most} with schedule "{self.schedule}"',
                got=stages,
                fix=f"schedules with several stages per rank are {', '.join(INTERLEAVED)}",
            )
        by_hand = not isinstance(self.split, str) and all(type(number) is int and number > 0 for number in self.split)
        if not by_hand and self.split not in SPLITS:
            names = ", ".join(f'"{name}"' for name in SPLITS)
            raise UsageError(
                "PipelineConfig(split)", expected=f"one of {names}, or numbers of blocks per stage", got=self.split
            )

    def stages_on(self, ranks: int) -> int:
        """Stages per rank in a pipeline with this number of ranks; one rank interleaves nothing."""
        if ranks == 1 or self.schedule not in INTERLEAVED:
            return 1
        return 2 if self.stages_per_rank is None else self.stages_per_rank
