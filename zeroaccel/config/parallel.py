"""Mesh of a job, `ParallelConfig`, and settings of a pipeline, `PipelineConfig`. Does not import torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeroaccel.config.section import out_of_quotes
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once

# Keys of `tensor_parallel` for splits or computations that are not available here.
_OWN_PLANS = (
    *("partition_config", "preset_model", "injection_policy_tuple", "vocab_parallel_lm_head"),
    *("vocab_parallel_ce_backend", "tp_overlap_comm", "replace_with_kernel_inject", "kernel_inject"),
)

EP_BUFFER_NBYTES = 1 << 28
"""Default of `ParallelConfig(ep_buffer_nbytes)`."""

# Keys of `expert_parallel` for the routing of tokens, which is up to the model's own router.
_OWN_ROUTING = (
    *("load_balance_coeff", "route_norm", "route_scale", "routed_scaling_factor", "score_apply", "score_func", "top_k"),
    *("num_expert_groups", "num_limited_groups", "expert_activation", "comm_max_tokens_per_rank"),
    "expert_tensor_parallel_size",
)

AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
"""Axes of the mesh, outermost first: adjacent ranks differ in the last axis."""

_DEFAULT_SIZES = {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "sp": 1, "tp": 1, "ep": 1}

RankGroups = tuple[tuple[int, ...], ...]
"""Groups of global ranks; every rank of the job belongs to exactly one."""


@dataclass(frozen=True)
class ShardSize:
    """Number of ranks per shard group, the setting that determines it, and the alternative for messages."""

    size: int
    source: str
    alternative: str


@dataclass(frozen=True, init=False)
class ParallelConfig:
    """Mesh of a job with pp x dp_replicate x dp_shard x sp x tp ranks; names and order follow torchtitan.

    accelerate's names of the sizes are valid too: `ParallelConfig(tp_size=2)` equals `ParallelConfig(tp=2)`.

    The two data axes have different samples. Ranks that differ only in `sp` have parts of the same sequences (Ulysses,
    Jacobs et al., 2023, arXiv:2309.14509). Ranks that differ only in `tp` have parts of the same layers (Megatron-LM,
    Shoeybi et al., 2019, arXiv:1909.08053) and compute on the same samples. ZeRO shards over dp_shard x sp ranks,
    which all have the same parameters: those of one stage, and of one part of its layers.

    Ranks that differ only in `pp` have the stages of one pipeline and the same samples.

    `ep` is not a factor of the product: within the ranks that ZeRO shards over, each group of `ep` adjacent ranks
    divides the experts of each layer and sends each token to the rank with its expert (GShard, Lepikhin et al., 2020,
    arXiv:2006.16668). Each rank of a group has its own samples.

    Attributes:
        pp: number of pipeline stages, each on its own ranks.
        dp_replicate: number of groups of ranks that each hold one sharded model.
        dp_shard: number of data-parallel ranks per group; -1 divides the number of ranks by the other sizes.
        sp: number of ranks that share a sequence.
        tp: number of ranks that share each layer.
        ep: number of ranks that divide the experts of each layer; a divisor of dp_shard x sp.
        ep_buffer_nbytes: maximum bytes of tokens that a rank sends or receives at a time; if a layer has more, each
            rank processes a few of its experts at a time, at least one.
        tp_plan: suffix of a module's name, where * matches one part between dots, -> "colwise", "rowwise" or another
            style (docs/tensor_parallel.md). By default the plan of a transformers model; "auto" uses that plan too, and
            derives one from layer names for other models. No effect with tp=1.
        verify_cut: compare the model as split by `sp`, `tp` and `ep` with the whole model at the start, on a short
            batch.

    Raises:
        UsageError: a size is not a positive integer or given by two names, or `tp_plan` is a text other than "auto".

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
                    expected=f"{axis}=1 if ranks divide the experts",
                    got=getattr(self, axis),
                    fix=f"set {axis} or ep to 1",
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
        """Returns the mesh of an argument: a `ParallelConfig`, or an object with accelerate's sizes (`tp_size`) or
        those of transformers' `DistributedConfig` (`fsdp_size`). accelerate's `cp_size` is the size of `sp`.

        Args:
            where: name of the argument in messages.

        Raises:
            UsageError: the argument has another type, or an axis that is not available here.
        """
        if isinstance(source, ParallelConfig):
            return source
        if hasattr(source, "fsdp_size"):
            return _of_distributed_config(source, f"{where}: DistributedConfig")
        sizes = {axis: getattr(source, f"{axis}_size", None) for axis in (*AXES, "ep", "cp")}
        if all(size is None for size in sizes.values()):
            got = type(source).__name__
            raise UsageError(where, expected="a ParallelConfig, or accelerate's ParallelismConfig", got=got)
        context = sizes.pop("cp")
        if context not in (None, 1):
            if sizes["sp"] not in (None, 1):
                both = f"cp_size={context} and sp_size={sizes['sp']}"
                raise UsageError(where, expected="cp_size or sp_size, which both split sequences", got=both)
            sizes["sp"] = context
            rotation = getattr(getattr(source, "cp_handler", None), "cp_comm_strategy", None) or "allgather"
            log_once(
                logging.INFO,
                f"{where}: cp_size={context} is sp={context}, which exchanges heads of attention; "
                f"cp_comm_strategy={rotation!r}, which would pass on keys and values, does nothing",
            )
        return cls.from_sizes(sizes)

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int | None]) -> ParallelConfig:
        """Builds the mesh from accelerate's sizes, axis -> ranks; None means 1.

        With one replica, a `dp_shard` of 1 means -1, because accelerate's files contain 1 if no size is chosen.
        """
        known: dict[str, Any] = {axis: size for axis, size in sizes.items() if size is not None}
        if known.get("dp_replicate", 1) == 1 and known.get("dp_shard") == 1:
            del known["dp_shard"]
        return cls(**known)

    @property
    def splits_samples(self) -> bool:
        """True if several ranks work on the same sample."""
        return self.sp > 1 or self.tp > 1 or self.pp > 1

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with different samples. The mesh must be resolved."""
        return self.dp_replicate * self.dp_shard

    def resolve(self, world_size: int) -> ParallelConfig:
        """Returns the mesh with `dp_shard` computed from the number of ranks.

        Raises:
            UsageError: the product of the axes is not the number of ranks.
        """
        others = self._num_others
        mesh = replace(self, dp_shard=world_size // others) if self.dp_shard == -1 and world_size >= others else self
        if math.prod(getattr(mesh, axis) for axis in AXES) != world_size:
            raise UsageError(
                "ParallelConfig",
                expected=self._expected(world_size),
                got=self._product,
                fix=f"start a multiple of {others} ranks, or change the sizes",
            )
        if (mesh.dp_shard * mesh.sp) % mesh.ep:
            raise UsageError(
                f"ParallelConfig(ep={mesh.ep})",
                expected=f"a divisor of dp_shard x sp, {mesh.dp_shard * mesh.sp} ranks",
                got=mesh.ep,
                fix="set ep to such a divisor, or start another number of ranks",
            )
        return mesh

    def misfit(self, world_size: int) -> str:
        """Returns why the sizes do not fit this number of ranks, for a message."""
        shared = world_size // self._num_others * self.sp if self.dp_shard == -1 else self.dp_shard * self.sp
        if world_size % self._num_others == 0 and shared % self.ep:
            return f"ep {self.ep} is not a divisor of dp_shard x sp, {shared} ranks"
        return f"{self._product}, but the mesh needs {self._expected(world_size)}"

    @property
    def _num_others(self) -> int:
        """Product of the sizes of all axes except `dp_shard`."""
        return math.prod(getattr(self, axis) for axis in AXES if axis != "dp_shard")

    @property
    def _product(self) -> str:
        known = [axis for axis in AXES if (size := getattr(self, axis)) > 1 or (axis, size) == ("dp_shard", 1)]
        product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in known)
        return f"{product} = {math.prod(getattr(self, axis) for axis in known)}"

    def _expected(self, world_size: int) -> str:
        return f"sizes that {'divide' if self.dp_shard == -1 else 'multiply to'} the job's {world_size} ranks"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of a rank along each axis of a resolved mesh."""
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return {axis: places[axis] for axis in AXES}

    def groups(self, *axes: str) -> RankGroups:
        """Returns the groups of ranks that differ only in these axes, in ascending order. The mesh must be resolved.

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
        """Description of how ranks divide the model, for checkpoints: "pp 1 x (dp x sp) 4 x tp 2"."""
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return f"pp {self.pp} x (dp x sp) {self.data_parallel_size * self.sp} x tp {self.tp}{experts}"

    @property
    def data_groups(self) -> RankGroups:
        """Groups of ranks that hold the same parameters before ZeRO shards them."""
        return self.groups("dp_replicate", "dp_shard", "sp")

    @property
    def expert_groups(self) -> RankGroups:
        """Groups of ranks that divide the experts of each layer: adjacent ranks of a data group.

        Example:
            >>> mesh = ParallelConfig(dp_shard=4, ep=2)
            >>> mesh.expert_groups, mesh.expert_holders
            (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        """
        size = self.ep
        return tuple(ranks[i : i + size] for ranks in self.data_groups for i in range(0, len(ranks), size))

    @property
    def expert_holders(self) -> RankGroups:
        """Groups of ranks that hold the same experts before ZeRO shards them."""
        return tuple(ranks[place :: self.ep] for ranks in self.data_groups for place in range(self.ep))

    @property
    def shard_size(self) -> ShardSize | None:
        """Number of ranks per shard group, or None without replicas. The mesh must be resolved."""
        if self.dp_replicate == 1:
            return None
        size = len(self.data_groups[0]) // self.dp_replicate
        return ShardSize(size, "dp_shard x sp of ParallelConfig", "leave dp_replicate at 1")

    @property
    def compared(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks, by name: they determine the groups."""
        plan = dict(self.tp_plan) if isinstance(self.tp_plan, Mapping) else self.tp_plan
        sizes = {axis: getattr(self, axis) for axis in _DEFAULT_SIZES}
        return {**sizes, "verify_cut": self.verify_cut, "tp_plan": plan}

    @property
    def peer_groups(self) -> RankGroups:
        """Groups of ranks that issue the same collectives: all ranks, or those of one pipeline stage."""
        return self.groups(*(axis for axis in AXES if axis != "pp"))

    def data_parallel_rank(self, rank: int) -> int:
        """Returns the index of a rank among those with different samples. The mesh must be resolved."""
        places = self.coordinates(rank)
        return places["dp_replicate"] * self.dp_shard + places["dp_shard"]


def _of_distributed_config(source: Any, where: str) -> ParallelConfig:
    """Returns the mesh of transformers' `DistributedConfig`, with ZeRO in place of FSDP.

    Raises:
        UsageError: it sets something that belongs in the config, or divides experts among ranks with the same samples.
    """
    sizes = {axis: getattr(source, f"{axis}_size", None) for axis in ("pp", "dp_replicate", "tp", "ep")}
    refused = {
        "fsdp_cpu_offload": (False, "set zero_optimization.offload_param and offload_optimizer in the config"),
        "fsdp_mixed_precision": (False, "set bf16.enabled or fp16.enabled in the config"),
        "ep_size": (1, f"ranks that divide experts have their own samples: fsdp_size={sizes['tp']}, tp_size=1"),
        "tp_plan": ("auto", "pass ParallelConfig(tp=N, tp_plan={...}) with the whole plan"),
        "ep_implementation": ("auto", "leave it out: an all-to-all sends tokens to their experts"),
    }
    if (sizes["tp"] or 1) == 1:
        refused = {key: rule for key, rule in refused.items() if key not in ("ep_size", "tp_plan")}
    for key, (plain, fix) in refused.items():
        value = getattr(source, key, plain)
        if value not in (plain, None, "auto", "all_to_all"):
            raise UsageError(f"{where}({key})", expected=repr(plain), got=value, fix=fix)
    unread = {
        "ep_plan": "the engine finds experts by transformers' interface",
        "fsdp_plan": "the engine chooses the units of gathers (zero_optimization.leaf_module)",
        "enable_sequence_parallel": "transformers does not read it either; sp splits sequences",
    }
    for key, reason in unread.items():
        if getattr(source, key, None):
            log_once(logging.INFO, f"{where}({key}): does nothing: {reason}")
    tp_plan = "auto" if (sizes["tp"] or 1) > 1 else None
    return replace(ParallelConfig.from_sizes({**sizes, "dp_shard": source.fsdp_size}), tp_plan=tp_plan)


def with_config_axes(tree: Mapping[str, Any], parallel: ParallelConfig | None) -> ParallelConfig | None:
    """Combines the mesh of an argument with the sizes in a config.

    Args:
        tree: tree of the config, as written: `sequence_parallel_size` and its other names,
            `expert_parallel.autoep_size`, and `tensor_parallel.autotp_size` with its older forms. `load_config` reports
            mistakes in it.

    Raises:
        UsageError: the sizes differ, or the config has its own keys for splitting or running layers, or for routing
            tokens.

    Example:
        >>> with_config_axes({"tensor_parallel": {"autotp_size": 2}}, None)
        ParallelConfig(pp=1, dp_replicate=1, dp_shard=-1, sp=1, tp=2, tp_plan='auto')
    """
    layers = _autotp_size(tree)
    for key in ("sequence_parallel_size", "sp_size", "cp_size"):
        if (sequence := _ranks(tree.get(key))) > 1:
            parallel = _with_axis(parallel, "sp", sequence, key)
    if (experts := _autoep_size(tree)) > 1:
        parallel = _with_axis(parallel, "ep", experts, "expert_parallel.autoep_size")
    if layers > 1:
        parallel = _with_axis(parallel, "tp", layers, "tensor_parallel.autotp_size")
        parallel = replace(parallel, tp_plan="auto" if parallel.tp_plan is None else parallel.tp_plan)
    return parallel


def _ranks(value: object) -> int:
    """Returns a number of ranks from the config; 1 if the value is not an integer."""
    size = out_of_quotes(int, value)
    return size if isinstance(size, int) and not isinstance(size, bool) else 1


def _with_axis(parallel: ParallelConfig | None, axis: str, size: int, key: str) -> ParallelConfig:
    mesh = ParallelConfig() if parallel is None else parallel
    if getattr(mesh, axis) not in (1, size):
        expected = f"{size}, the value of {key} in the config"
        raise UsageError(f"ParallelConfig({axis})", expected=expected, got=getattr(mesh, axis))
    changed: dict[str, Any] = {axis: size}
    return replace(mesh, **changed)


def _autoep_size(tree: Mapping[str, Any]) -> int:
    """Returns the number of ranks that divide experts; 1 if the config omits or disables it."""
    section = tree.get("expert_parallel")
    if not isinstance(section, Mapping) or out_of_quotes(bool, section.get("enabled")) is not True:
        return 1
    for key in _OWN_ROUTING:
        if section.get(key) not in (None, 1 if key == "expert_tensor_parallel_size" else None):
            raise UsageError(
                f"expert_parallel.{key}",
                expected="no such key: the model's own routers and experts determine it",
                got=section[key],
                fix="remove it, or set it in the model's config",
            )
    # DeepSpeed's patterns and presets for finding experts, and its kernels. Here the model determines both.
    for key in sorted(section.keys() - {"enabled", "autoep_size", *_OWN_ROUTING}):
        log_once(logging.INFO, f"expert_parallel.{key}: does nothing: transformers' interface finds experts")
    return _ranks(section.get("autoep_size"))


def _autotp_size(tree: Mapping[str, Any]) -> int:
    """Returns the number of ranks that share layers; 1 if the config omits it."""
    section = tree.get("tensor_parallel")
    if not isinstance(section, Mapping):
        return 1
    older = section.get("tensor_parallel", section.get("tp"))
    size = max(_ranks(section.get("autotp_size")), _ranks(older.get("tp_size") if isinstance(older, Mapping) else None))
    for key in _OWN_PLANS:
        if size > 1 and section.get(key):
            raise UsageError(
                f"tensor_parallel.{key}",
                expected="nothing: the model's own plan or the layers' names determine the split",
                got=section[key],
                fix="remove it, and call initialize(parallel=ParallelConfig(tp=N, tp_plan={...})) for another split",
            )
    return size


SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "layer_major")
INTERLEAVED = ("interleaved_1f1b", "zero_bubble")
"""Schedules with several stages per rank."""
ZERO_BUBBLE = "zero_bubble"
"""Schedule that computes gradients of weights separately from, and later than, those of inputs."""
LAYER_MAJOR = "layer_major"
"""Schedule of one rank that passes all micro-batches of a step through each stage in turn."""
SPLITS = ("compute", "parameters", "uniform")


@dataclass(frozen=True)
class PipelineConfig:
    """Settings of a pipeline: the split of the model into stages, and the schedule of micro-batches.

    Attributes:
        schedule: "1f1b" (PipeDream-flush, Narayanan et al., 2021, arXiv:2006.09503) has at most as many micro-batches
            in flight as there are stages; "gpipe" (Huang et al., 2019, arXiv:1811.06965) has all of a step. Both sum
            gradients in the order of the micro-batches, and leave each rank idle for (pp - 1) / (m + pp - 1) of a step
            with m micro-batches. "interleaved_1f1b" (Narayanan et al., 2021, arXiv:2104.04473, section 2.2) has
            `stages_per_rank` = v stages on each rank; rank r has stages r, r + pp and so on, and is idle for
            (pp - 1) / (v m + pp - 1). "zero_bubble" (ZB-H1, Qi et al., 2024, arXiv:2401.10241) also fills the idle
            time with gradients of weights, which no rank waits for; not available at stage 3. "layer_major", for pp=1,
            passes all micro-batches of a step through each of the rank's stages before the next one, so that stage 3
            gathers weights, and reads them from files, twice per step instead of twice per micro-batch.
        stages_per_rank: number of stages per rank, by default 2 for the schedules "interleaved_1f1b" and "zero_bubble",
            and the number of blocks for "layer_major"; the others have 1.
        split: the quantity to balance: "compute", matrix elements used per token; "parameters"; or "uniform", the
            number of blocks. Or the number of blocks in each stage, in order.
        loss: function of (output, targets) for an nn.Sequential, whose batches are pairs (inputs, targets). A
            transformers model computes its own loss from `labels`.
        costs: one cost per child of an nn.Sequential, to balance instead of `split`.

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
                fix="other schedules sum gradients in an order other than that of micro-batches (looped BFS), or place "
                "the first and the last stage on one rank (ZBV, DualPipeV)",
            )
        stages = self.stages_per_rank
        several = (*INTERLEAVED, LAYER_MAJOR)
        most = None if self.schedule in several else 1
        if stages is not None and (type(stages) is not int or stages < 1 or stages > (most or stages)):
            raise UsageError(
                "PipelineConfig(stages_per_rank)",
                expected=f'{"a positive number" if most is None else most} with schedule "{self.schedule}"',
                got=stages,
                fix=f"schedules with several stages per rank are {', '.join(several)}",
            )
        by_hand = not isinstance(self.split, str) and all(type(number) is int and number > 0 for number in self.split)
        if not by_hand and self.split not in SPLITS:
            names = ", ".join(f'"{name}"' for name in SPLITS)
            raise UsageError(
                "PipelineConfig(split)", expected=f"one of {names}, or the number of blocks per stage", got=self.split
            )

    def stages_on(self, ranks: int, blocks: int) -> int:
        """Returns the number of stages per rank, for a number of ranks and of the model's blocks.

        A single rank has one stage, except with "layer_major".
        """
        if self.schedule == LAYER_MAJOR:
            return self.stages_per_rank or blocks
        if ranks == 1 or self.schedule not in INTERLEAVED:
            return 1
        return 2 if self.stages_per_rank is None else self.stages_per_rank
