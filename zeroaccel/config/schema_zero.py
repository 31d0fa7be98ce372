"""The `zero_optimization` section with its subsections for offload and leaf modules, and the section for file I/O.

A part of `schema`; sizes are numbers of elements unless a unit is given. The schema declares the valid keys and values.
`support` lists which keys take effect, and only `shard_plan` interprets the stage.
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
    Nbytes,
    NbytesOrAuto,
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
UpdateDuring = Annotated[Literal["auto", "step", "forward", "backward", "next_step"], BeforeValidator(lowered)]
FrozenFormat = Annotated[Literal["int8", "nf4", "mxfp4", "codes"], BeforeValidator(lowered)]
Interval = Annotated[
    int | Literal["auto"],
    checked(
        lambda value: value == AUTO or (type(value) is int and value >= 1), '"auto" or a number of steps of at least 1'
    ),
]


class OffloadParam(ConfigSection):
    """Storage of the parameter shards between uses (stage 3)."""

    device: Device = "none"
    """"none" keeps them on the training device, "cpu" in host memory, "nvme" in files."""
    nvme_path: PathText | None = None
    """Folder for the files of "nvme", one per rank."""
    buffer_count: Count = 5
    """Number of host buffers for reading ahead from NVMe."""
    buffer_size: Count = 100_000_000
    """Elements per read-ahead buffer."""
    max_in_cpu: Count = 1_000_000_000
    """Number of elements that "nvme" keeps in host memory instead of files."""
    pin_memory: Flag = True
    """Use page-locked host memory, which speeds up copies to and from the device."""


class OffloadOptimizer(ConfigSection):
    """Storage and update of master weights and optimizer states (stages 1 to 3)."""

    device: Device = "none"
    """"none" keeps them on the training device, "cpu" in host memory, "nvme" in files."""
    nvme_path: PathText | None = None
    """Folder for the files of "nvme", one per rank."""
    buffer_count: Count = 4
    """Number of host buffers for tiles of states; at least one per state tensor of a parameter (Adam: 4)."""
    pin_memory: Flag = True
    """Use page-locked host memory, which speeds up copies to and from the device."""
    pipeline_read: Flag = False
    """Read the next tile during the update of the current one."""
    pipeline_write: Flag = False
    """Write the previous tile during the update of the current one."""
    fast_init: Flag = False
    """Create the files of "nvme" without writing them first."""
    update_during: UpdateDuring = "auto"
    """"step" updates in step(); "forward" in the next forward and "backward" before step(), with the same results;
    "next_step" one step late."""
    spare_budget: NbytesOrAuto = "auto"
    """Bytes of host memory per rank for updates in "backward"; "auto" is all that they can use, if it is free."""
    ratio: Fraction = 1.0
    """Share of the parameters that the host updates, 0 to 1; masters and states of the others stay on the device."""
    device_budget: Nbytes = 0
    """Bytes of masters and states per rank that stay on the device, such as "4GB"; the host updates the others."""
    super_offload: Flag = False
    """Use a schedule for machines with a fast link between host and device (stage 3)."""
    convert_grad_on_cpu: Flag = True
    """Convert gradients to fp32 on the host instead of the device."""
    cpuadam_cores_perc: Fraction = 0.8
    """Fraction of the cores that run updates on the host, 0 to 1 (with super_offload)."""


class ZenFlow(ConfigSection):
    """Optimizer steps on the host that overlap with the next forward pass, important gradients first."""

    topk_ratio: OpenFraction = 0.1
    """Fraction of gradient columns to update immediately, between 0 and 1."""
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """Unit of select_interval, at which the important columns are selected again."""
    select_interval: Interval = "auto"
    """Number of steps or epochs between two selections."""
    update_interval: Interval = "auto"
    """Number of steps between two updates of the other columns."""
    overlap_step: Flag = False
    """Overlap the host's step with forward and backward."""
    offload: Flag = False
    """Keep the states of the important columns on the host too."""
    auto_ratio: Fraction = 0.99
    """Threshold by which "auto" chooses update_interval."""
    full_warm_up_rounds: Count = 0
    """Number of initial rounds that update all columns."""
    pt_reserved_cores_perc: Fraction = 0.5
    """Fraction of the cores reserved for torch, 0 to 1."""


class LeafModule(ConfigSection):
    """Leaf modules: the engine gathers each as a whole, with all submodules (stage 3)."""

    classes: Texts = ()
    """Class names, short or with their module; the engine finds mixture-of-experts blocks without this key."""
    names: Texts = ()
    """Full names of modules, as in named_modules()."""
    name_suffixes: Texts = ()
    """Suffixes of module names."""


class ZeroPlusPlus(ConfigSection):
    """Additional settings of zeroaccel for the zero_quantized_*, zero_hpz_* and mics_* keys."""

    node_size: PositiveCount | None = None
    """Number of consecutive ranks to treat as one machine; by default from the launcher or the host names."""
    quantize_gradients_on_one_node: Flag = False
    """Apply zero_quantized_gradients even if it saves no traffic between nodes."""
    weight_format: Literal["int8", "fp8"] = "int8"
    """Format for zero_quantized_weights: int8, or fp8 (e4m3), which preserves small values next to large ones."""
    watch_interval: Count = 0
    """Number of steps between measurements of the quantization error in gathers and reductions; 0 for none."""


class Aio(ConfigSection):
    """File I/O for "nvme" offload."""

    is_open = True

    block_size: PositiveCount = 1_048_576
    """Bytes per request."""
    queue_depth: PositiveCount = 8
    """Number of requests in flight per thread."""
    intra_op_parallelism: Annotated[PositiveCount, AlsoSpelled("thread_count")] = 1
    """Number of threads that share one tensor."""
    single_submit: Flag = False
    """Submit requests one at a time."""
    overlap_events: Flag = True
    """Submit new requests before waiting for earlier ones."""
    use_gds: Flag = False
    """Transfer directly between NVMe and GPU memory."""
    checksum: Flag = False
    """Compute a checksum of each block on writing and verify it on reading."""


class ZeroOptimization(ConfigSection):
    """ZeRO: sharding of model states among ranks, offload and prefetching."""

    retired: ClassVar[Mapping[str, Retired]] = {
        "cpu_offload": Retired("offload_optimizer", {"device": "cpu"}),
        "cpu_offload_param": Retired("offload_param", {"device": "cpu"}),
    }
    from_flag: ClassVar[Mapping[bool, Mapping[str, object]]] = {True: {"stage": 1}, False: {"stage": 0}}

    stage: Stage = 0
    """ZeRO stage: 1 shards the optimizer states, 2 also the gradients, 3 also the parameters; 0 shards nothing."""
    contiguous_gradients: Flag = True
    """Copy gradients into one buffer as backward computes them."""
    reduce_scatter: Flag = True
    """Reduce each gradient only to the rank that owns it."""
    reduce_bucket_size: Count = 500_000_000
    """Maximum number of gradient elements in flight; a larger unit is reduced alone."""
    use_multi_rank_bucket_allreduce: Flag = True
    """Reduce the parts of several ranks in one collective."""
    allgather_partitions: Flag = True
    """Collect updated parameters by all-gather."""
    allgather_bucket_size: Count = 500_000_000
    """Maximum number of updated parameter elements in flight (stages 1 and 2)."""
    overlap_comm: Flag | None = None
    """Overlap communication with the backward pass; by default true at stage 3 and on devices with streams."""
    compute_grad_norm: Flag = True
    """Compute the global gradient norm; false requires gradient_clipping 0."""
    load_from_fp32_weights: Flag = True
    """Resume the master weights from their fp32 copies."""
    elastic_checkpoint: Flag = False
    """Write checkpoints that any number of ranks can load."""
    offload_param: OffloadParam | None = None
    """Storage of the parameter shards (stage 3)."""
    offload_optimizer: OffloadOptimizer | None = None
    """Storage of master weights and optimizer states (stages 1 to 3)."""
    zenflow: ZenFlow | None = None
    """Asynchronous optimizer steps on the host."""
    sub_group_size: Count = 1_000_000_000
    """Number of elements per rank that the optimizer updates at a time; 0 updates one parameter at a time."""
    prefetch_bucket_size: Annotated[Count, AlsoSpelled("stage3_prefetch_bucket_size")] = 50_000_000
    """Number of elements to gather ahead of their use; 0 disables prefetching (stage 3)."""
    param_persistence_threshold: Annotated[Count, AlsoSpelled("stage3_param_persistence_threshold")] = 100_000
    """Parameters with at most this many elements stay gathered between steps (stage 3)."""
    model_persistence_threshold: Annotated[Count, AlsoSpelled("stage3_model_persistence_threshold")] = sys.maxsize
    """Maximum total number of elements that stay gathered between steps (stage 3)."""
    max_live_parameters: Annotated[Count, AlsoSpelled("stage3_max_live_parameters")] = 1_000_000_000
    """Maximum number of gathered elements up to which the engine prefetches (stage 3)."""
    max_reuse_distance: Annotated[Count, AlsoSpelled("stage3_max_reuse_distance")] = 1_000_000_000
    """Parameters stay gathered if they are used again within this many elements (stage 3)."""
    gather_16bit_weights_on_model_save: Annotated[
        Flag,
        AlsoSpelled("stage3_gather_16bit_weights_on_model_save"),
        AlsoSpelled("stage3_gather_fp16_weights_on_model_save", deprecated=True),
    ] = False
    """Gather all weights on rank 0 when the model is saved (stage 3)."""
    module_granularity_threshold: Annotated[Count, AlsoSpelled("stage3_module_granularity_threshold")] = 0
    """Modules with fewer elements per descendant become leaf modules; 0 disables this (stage 3)."""
    use_all_reduce_for_fetch_params: Annotated[Flag, AlsoSpelled("stage3_use_all_reduce_for_fetch_params")] = False
    """Gather by an all-reduce over zero-filled buffers (stage 3)."""
    allgather_sequential: Annotated[Flag, AlsoSpelled("stage3_allgather_sequential")] = False
    """Gather one parameter at a time (stage 3)."""
    partition_stream_chunk_size: Annotated[Count, AlsoSpelled("stage3_partition_stream_chunk_size")] = 0
    """Elements per chunk for sharding a large parameter in pieces; 0 disables chunks (stage 3)."""
    cpu_offload_use_pin_memory: Flag | None = None
    """Older form of pin_memory in offload_param and offload_optimizer."""
    ignore_unused_parameters: Flag = True
    """With false, a trainable parameter without a gradient is an error."""
    legacy_stage1: Flag = False
    """Use the first implementation of stage 1."""
    round_robin_gradients: Flag = False
    """Assign the parameters to the ranks in turn (stages 1 and 2)."""
    parameter_alignment: Flag = False
    """Pad so that each parameter starts at an aligned address."""
    zero_hpz_partition_size: Count = 1
    """Number of ranks per group that holds a second copy of all shards; 1 disables this (stage 3)."""
    zero_quantized_weights: Flag = False
    """Gather the parameters in 8 bits (stage 3)."""
    zero_quantized_nontrainable_weights: Flag = False
    """Store frozen parameters as 8-bit integers (stage 3)."""
    frozen_weights: FrozenFormat | None = None
    """Quantize frozen weight matrices: "int8", "nf4" or "mxfp4"; "codes" keeps a checkpoint's (stages 0 to 3)."""
    zero_quantized_gradients: Flag = False
    """Reduce the gradients as 4-bit integers (stage 3)."""
    zeropp_loco_param: FreeSection = None
    """Error feedback for quantized gradients."""
    zeropp: ZeroPlusPlus = ZeroPlusPlus()
    """Additional settings of the quantized and hierarchical keys."""
    mics_shard_size: Integer = -1
    """Number of ranks that shard one replica of the model; -1 for all ranks."""
    mics_hierarchical_params_gather: Flag = False
    """Gather within the node first."""
    memory_efficient_linear: Flag = True
    """Use a linear layer that does not keep its gathered weight for backward (stage 3)."""
    pipeline_loading_checkpoint: Flag = False
    """Read a checkpoint on one rank of a node at a time (stage 3)."""
    override_module_apply: Flag = True
    """Gather parameters around Module.apply (stage 3)."""
    log_trace_cache_warnings: Flag = False
    """Log each change in the execution order of modules (stage 3)."""
    enable_sanity_checks: Flag = False
    """Compare the ranks' states at run time; slow, for debugging."""
    save_muon_momentum_buffer_in_memory: Flag = False
    """Keep Muon's momentum in memory instead of NVMe (stage 3)."""
    leaf_module: LeafModule = LeafModule()
    """Leaf modules, which the engine gathers as a whole (stage 3)."""
