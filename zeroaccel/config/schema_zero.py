"""The `zero_optimization` section and what belongs to it: offload, leaf modules, asynchronous I/O.

A part of `schema`; sizes are counts of elements unless a unit is given. It says what may be written; which keys take
effect is the table in `support`, and what a stage means is decided in `shard_plan` alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from zeroaccel.config.section import (
    AUTO,
    AlsoSpelled,
    ConfigSection,
    Count,
    Flag,
    Fraction,
    FreeSection,
    Integer,
    OpenFraction,
    PathText,
    PositiveCount,
    Retired,
    Texts,
    checked,
    lowered,
    wrong,
)


def _stage(value: object) -> int:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value in (0, 1, 2, 3):
        return int(value)
    raise wrong("0, 1, 2 or 3")


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)]
Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lowered)]
UpdateDuring = Annotated[Literal["step", "backward", "next_step"], BeforeValidator(lowered)]
FrozenFormat = Annotated[Literal["int8", "nf4", "mxfp4"], BeforeValidator(lowered)]
Interval = Annotated[
    int | Literal["auto"],
    checked(
        lambda value: value == AUTO or (type(value) is int and value >= 1), '"auto" or a number of steps of at least 1'
    ),
]


class OffloadParam(ConfigSection):
    """Where the shards of the parameters live between uses (stage 3)."""

    device: Device = "none"
    """"none" keeps them on the training device, "cpu" in host memory, "nvme" in files."""
    nvme_path: PathText | None = None
    """Folder for the files of "nvme"; one file per rank."""
    buffer_count: Count = 5
    """Host buffers for reading ahead from NVMe."""
    buffer_size: Count = 100_000_000
    """Elements of one such buffer."""
    max_in_cpu: Count = 1_000_000_000
    """Elements kept in host memory although "nvme" is set."""
    pin_memory: Flag = True
    """Page-locked host memory: faster copies to and from the device."""


class OffloadOptimizer(ConfigSection):
    """Where master weights and optimizer states live and are updated (stages 1 to 3)."""

    device: Device = "none"
    """"none" keeps them on the training device, "cpu" in host memory, "nvme" in files."""
    nvme_path: PathText | None = None
    """Folder for the files of "nvme"; one file per rank."""
    buffer_count: Count = 4
    """Host buffers for tiles of states; at least one per state tensor of a parameter (Adam: 4)."""
    pin_memory: Flag = True
    """Page-locked host memory: faster copies to and from the device."""
    pipeline_read: Flag = False
    """Read the next tile while this one is updated."""
    pipeline_write: Flag = False
    """Write the previous tile while this one is updated."""
    fast_init: Flag = False
    """Quick creation of the files of "nvme"."""
    update_during: UpdateDuring = "step"
    """"step" updates in step(), "backward" as soon as a gradient is complete, "next_step" during the next step."""
    ratio: Fraction | None = None
    """Part of each update that the host's cores do, 0 to 1; absent, measured where a CUDA device can do the rest."""
    super_offload: Flag = False
    """Scheduling for machines whose host and device share a fast link (stage 3)."""
    convert_grad_on_cpu: Flag = True
    """Convert gradients to fp32 on the host rather than on the device."""
    cpuadam_cores_perc: Fraction = 0.8
    """Part of the cores that updates on the host, 0 to 1 (with super_offload)."""


class ZenFlow(ConfigSection):
    """Optimizer steps on the host that overlap with the next forward pass, important gradients first."""

    topk_ratio: OpenFraction = 0.1
    """Part of the gradient columns updated at once, between 0 and 1."""
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """When the important columns are chosen anew."""
    select_interval: Interval = "auto"
    """Steps or epochs between two choices."""
    update_interval: Interval = "auto"
    """Steps between two updates of the other columns."""
    overlap_step: Flag = False
    """Overlap the host's step with forward and backward."""
    offload: Flag = False
    """Keep the states of the important columns on the host too."""
    auto_ratio: Fraction = 0.99
    """Threshold by which "auto" chooses update_interval."""
    full_warm_up_rounds: Count = 0
    """First rounds in which everything is updated."""
    pt_reserved_cores_perc: Fraction = 0.5
    """Part of the cores left to torch, 0 to 1."""


class LeafModule(ConfigSection):
    """Leaf modules: gathered at once, with everything below them (stage 3)."""

    classes: Texts = ()
    """Class names, short or with their module; mixture-of-experts blocks are found without being named."""
    names: Texts = ()
    """Full names of modules, as in named_modules()."""
    name_suffixes: Texts = ()
    """Ends of such names."""


class ZeroPlusPlus(ConfigSection):
    """What zeroaccel adds to the format for the zero_quantized_*, zero_hpz_* and mics_* keys."""

    node_size: PositiveCount | None = None
    """Consecutive ranks to take for one machine; absent, as the launcher or the host names say."""
    quantize_gradients_on_one_node: Flag = False
    """Follow zero_quantized_gradients even where no traffic across nodes is saved."""
    weight_format: Literal["int8", "fp8"] = "int8"
    """Codes of zero_quantized_weights: int8, or fp8 (e4m3), which keeps small values beside large ones."""
    watch_interval: Count = 0
    """Steps between two looks at the error of a quantised gather and reduction; 0 is never."""


class Aio(ConfigSection):
    """How files are read and written by "nvme" offload."""

    is_open = True

    block_size: PositiveCount = 1_048_576
    """Bytes of one request."""
    queue_depth: PositiveCount = 8
    """Requests in flight per thread."""
    intra_op_parallelism: Annotated[PositiveCount, AlsoSpelled("thread_count")] = 1
    """Threads that share one tensor."""
    single_submit: Flag = False
    """Submit requests one by one."""
    overlap_events: Flag = True
    """Submit new requests before waiting for the old."""
    use_gds: Flag = False
    """Direct transfers between NVMe and GPU memory."""
    checksum: Flag = False
    """Sum up every block that is written and compare when it is read."""


class ZeroOptimization(ConfigSection):
    """What is sharded among the ranks, where it lives, and how far ahead it is fetched."""

    retired: ClassVar[Mapping[str, Retired]] = {
        "cpu_offload": Retired("offload_optimizer", {"device": "cpu"}),
        "cpu_offload_param": Retired("offload_param", {"device": "cpu"}),
    }
    from_flag: ClassVar[Mapping[bool, Mapping[str, object]]] = {True: {"stage": 1}, False: {"stage": 0}}

    stage: Stage = 0
    """0 shards nothing, 1 the optimizer states, 2 also the gradients, 3 also the parameters."""
    contiguous_gradients: Flag = True
    """Copy gradients into one buffer as they come."""
    reduce_scatter: Flag = True
    """Reduce each gradient only to the rank that owns it."""
    reduce_bucket_size: Count = 500_000_000
    """Elements of gradients on their way at a time, at most; a larger unit goes alone."""
    use_multi_rank_bucket_allreduce: Flag = True
    """Reduce the parts of several ranks in one collective."""
    allgather_partitions: Flag = True
    """Collect updated parameters by all-gather."""
    allgather_bucket_size: Count = 500_000_000
    """Elements of updated parameters on their way at a time, at most (stages 1 and 2)."""
    overlap_comm: Flag | None = None
    """Overlap communication with the backward pass; absent, true at stage 3 and false below."""
    compute_grad_norm: Flag = True
    """Compute the global gradient norm; false needs gradient_clipping 0."""
    load_from_fp32_weights: Flag = True
    """Resume the master weights from their fp32 copies."""
    elastic_checkpoint: Flag = False
    """Checkpoints that can be loaded by another number of ranks."""
    offload_param: OffloadParam | None = None
    """Where the shards of the parameters live (stage 3)."""
    offload_optimizer: OffloadOptimizer | None = None
    """Where the optimizer states live (stages 1 to 3)."""
    zenflow: ZenFlow | None = None
    """Asynchronous optimizer steps on the host."""
    sub_group_size: Count = 1_000_000_000
    """Elements, per rank, that the optimizer updates in one tile; 0 is one parameter at a time."""
    prefetch_bucket_size: Annotated[Count, AlsoSpelled("stage3_prefetch_bucket_size")] = 50_000_000
    """Layers are gathered ahead of their use until this many elements are; 0 turns it off (stage 3)."""
    param_persistence_threshold: Annotated[Count, AlsoSpelled("stage3_param_persistence_threshold")] = 100_000
    """Parameters of at most this many elements stay gathered between steps (stage 3)."""
    model_persistence_threshold: Annotated[Count, AlsoSpelled("stage3_model_persistence_threshold")] = sys.maxsize
    """Elements that may stay gathered in all (stage 3)."""
    max_live_parameters: Annotated[Count, AlsoSpelled("stage3_max_live_parameters")] = 1_000_000_000
    """Gathered elements beyond which nothing is gathered ahead (stage 3)."""
    max_reuse_distance: Annotated[Count, AlsoSpelled("stage3_max_reuse_distance")] = 1_000_000_000
    """A parameter used again within this many elements is not released in between (stage 3)."""
    gather_16bit_weights_on_model_save: Annotated[
        Flag,
        AlsoSpelled("stage3_gather_16bit_weights_on_model_save"),
        AlsoSpelled("stage3_gather_fp16_weights_on_model_save", deprecated=True),
    ] = False
    """Let all weights be gathered on rank 0 when the model is saved (stage 3)."""
    module_granularity_threshold: Annotated[Count, AlsoSpelled("stage3_module_granularity_threshold")] = 0
    """Modules with fewer elements per descendant than this become leaf modules; 0 is off (stage 3)."""
    use_all_reduce_for_fetch_params: Annotated[Flag, AlsoSpelled("stage3_use_all_reduce_for_fetch_params")] = False
    """Gather by the all-reduce of a buffer of zeros (stage 3)."""
    allgather_sequential: Annotated[Flag, AlsoSpelled("stage3_allgather_sequential")] = False
    """Gather one parameter after the other (stage 3)."""
    partition_stream_chunk_size: Annotated[Count, AlsoSpelled("stage3_partition_stream_chunk_size")] = 0
    """Elements of a chunk when a large parameter is sharded piece by piece; 0 is off (stage 3)."""
    cpu_offload_use_pin_memory: Flag | None = None
    """Older form of pin_memory in offload_param and offload_optimizer."""
    ignore_unused_parameters: Flag = True
    """False makes a trainable parameter without a gradient an error."""
    legacy_stage1: Flag = False
    """The first implementation of stage 1."""
    round_robin_gradients: Flag = False
    """Deal the parameters out to the ranks in turn (stages 1 and 2)."""
    parameter_alignment: Flag = False
    """Pad so that each parameter starts at an aligned address."""
    zero_hpz_partition_size: Count = 1
    """Ranks that hold a second copy of the shards among them; 1 is off (stage 3)."""
    zero_quantized_weights: Flag = False
    """Gather the parameters as 8-bit integers (stage 3)."""
    zero_quantized_nontrainable_weights: Flag = False
    """Store frozen parameters as 8-bit integers (stage 3)."""
    frozen_weights: FrozenFormat | None = None
    """Store frozen matrices as codes: "int8", "nf4" or "mxfp4" (stages 0 to 3)."""
    zero_quantized_gradients: Flag = False
    """Reduce the gradients as 4-bit integers (stage 3)."""
    zeropp_loco_param: FreeSection = None
    """Error feedback for quantised gradients."""
    zeropp: ZeroPlusPlus = ZeroPlusPlus()
    """Further settings of the quantised and hierarchical keys."""
    mics_shard_size: Integer = -1
    """Ranks among which the model is sharded, with replicas beyond; -1 is all."""
    mics_hierarchical_params_gather: Flag = False
    """Gather within the node first."""
    memory_efficient_linear: Flag = True
    """A linear layer that does not keep its gathered weight for backward (stage 3)."""
    pipeline_loading_checkpoint: Flag = False
    """Let the ranks of a node read a checkpoint one after the other (stage 3)."""
    override_module_apply: Flag = True
    """Gather parameters around Module.apply (stage 3)."""
    log_trace_cache_warnings: Flag = False
    """Log each change of the order in which modules run (stage 3)."""
    enable_sanity_checks: Flag = False
    """Compare the ranks' states at run time; slow, for debugging."""
    save_muon_momentum_buffer_in_memory: Flag = False
    """Keep Muon's momentum off NVMe (stage 3)."""
    leaf_module: LeafModule = LeafModule()
    """Leaf modules: gathered at once (stage 3)."""
