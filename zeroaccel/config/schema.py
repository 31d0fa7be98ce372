"""The config model: all keys of the DeepSpeed JSON format except those of ZeRO, which are in `schema_zero`.

`load_config` builds it, and the rest of the package reads it. The schema declares the valid keys and values. Dtypes are
the words "fp32", "fp16" and "bf16", so that this module need not import torch. `support` lists which keys take effect,
`checks` finds contradictions, and `shard_plan` turns stages into booleans and solves the batch sizes. An attribute
whose key is "auto" has its default value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from zeroaccel.config.diagnostics import Provenance
from zeroaccel.config.schema_zero import Aio, Interval, ZeroOptimization
from zeroaccel.config.section import (
    AUTO,
    AlsoSpelled,
    Arguments,
    ConfigSection,
    Count,
    Dtype,
    Flag,
    FreeSection,
    MaybeDtype,
    Name,
    NonNegativeNumber,
    PathText,
    PositiveCount,
    PositiveNumber,
    Text,
    Texts,
    UnreadSection,
    lowered,
    wrong,
)


class Fp16(ConfigSection):
    """Training with fp16 parameters, fp32 master weights and a scaled loss."""

    is_open = True

    enabled: Flag = False
    """Train in fp16."""
    auto_cast: Flag = False
    """Cast the floating-point inputs of forward to fp16."""
    loss_scale: NonNegativeNumber = 0.0
    """Static factor on the loss; 0 selects dynamic loss scaling."""
    initial_scale_power: Count = 16
    """Base-2 logarithm of the initial dynamic loss scale."""
    loss_scale_window: Count = 1000
    """Number of steps without overflow after which a dynamic scale doubles; must be above 0 for a dynamic scale."""
    hysteresis: PositiveCount = 2
    """Number of overflows after which a dynamic scale halves."""
    consecutive_hysteresis: Flag = False
    """Reset the count of overflows after each step without overflow, not only when the scale grows."""
    min_loss_scale: NonNegativeNumber = 1.0
    """Lowest dynamic scale, above 0; an overflow at this scale raises an error."""
    fp16_master_weights_and_grads: Flag = False
    """Keep master weights and gradients in fp16."""
    opt_level: Any = None
    """Mixed-precision level of Apex."""


class Bf16(ConfigSection):
    """Training with bf16 parameters and fp32 master weights."""

    is_open = True

    enabled: Flag = False
    """Train in bf16."""
    immediate_grad_update: Flag = False
    """Add each gradient to its fp32 sum as soon as backward computes it."""
    check_grad_overflow: Flag = True
    """Skip a step if any gradient is infinite or NaN."""
    bf16_master_weights_and_grads: Flag = False
    """Keep master weights and gradients in bf16."""
    bf16_optimizer_states: Flag = False
    """Keep optimizer states in bf16."""
    auto_cast: Any = None
    """A key of fp16."""
    loss_scale: Any = None
    """A key of fp16."""
    initial_scale_power: Any = None
    """A key of fp16."""
    loss_scale_window: Any = None
    """A key of fp16."""
    hysteresis: Any = None
    """A key of fp16."""
    consecutive_hysteresis: Any = None
    """A key of fp16."""
    min_loss_scale: Any = None
    """A key of fp16."""
    opt_level: Any = None
    """Mixed-precision level of Apex."""


def _modules(value: object) -> object:
    if value == AUTO:
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise wrong('"auto" or a list of module names')


class DataTypes(ConfigSection):
    """Dtypes of gradients, parameters and buffers."""

    is_open = True

    grad_accum_dtype: MaybeDtype = None
    """Dtype of gradient sums over micro-batches; by default fp32, whatever the model's dtype."""
    param_dtype: MaybeDtype = None
    """Dtype of the parameters; must match the enabled precision, which is the default."""
    buffer_dtype: MaybeDtype = None
    """Dtype of all floating-point buffers; by default that of the parameters of their module."""
    master_weights: Literal["fp32", "residual"] = "fp32"
    """"residual" stores only the bf16 rounding error of each fp32 master: exact, and nearly 2 bytes smaller."""
    keep_in_fp32_modules: Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_modules)] = "auto"
    """Names of modules whose parameters and buffers stay fp32; "auto" uses the model's own list, if it has one."""


class TorchAutocast(ConfigSection):
    """Mixed precision through torch.autocast instead of 16-bit parameters."""

    is_open = True

    enabled: Flag = False
    """Run forward under torch.autocast."""
    dtype: Dtype = "bf16"
    """Dtype for autocast; fp16 scales the loss like torch.amp.GradScaler."""
    lower_precision_safe_modules: Texts | None = None
    """Module classes, such as "torch.nn.Linear", whose weights and gradients the engine stores, gathers and reduces in
    this dtype, with fp32 masters; all others stay fp32. By default torch.nn.Linear, Conv1d, Conv2d and Conv3d."""


LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lowered)]


class _MetricFiles(ConfigSection):
    enabled: Flag = False
    """Write the metrics."""
    output_path: Text = ""
    """Folder for the metrics; by default the working directory."""
    job_name: Name = "zeroaccel"
    """Name of the run's folder inside output_path."""


class TensorBoard(_MetricFiles):
    """Metrics as TensorBoard event files (requires the package tensorboard)."""


class CsvMonitorSection(_MetricFiles):
    """Metrics as CSV files, one per metric."""


class JsonlMonitor(_MetricFiles):
    """Metrics as one file of JSON lines, one per step."""


class Wandb(ConfigSection):
    """Metrics to Weights & Biases."""

    enabled: Flag = False
    """Send the metrics (requires the package wandb)."""
    group: Text | None = None
    """Group of the run."""
    team: Text | None = None
    """Team that owns the project."""
    project: Name = "zeroaccel"
    """Project of the run."""


class Comet(UnreadSection):
    """Metrics to Comet."""

    unread = "samples_log_interval project workspace api_key experiment_name experiment_key online mode"

    enabled: Flag = False
    """Send the metrics."""


class Trackio(UnreadSection):
    """Metrics to Trackio."""

    unread = "project"

    enabled: Flag = False
    """Send the metrics."""


class CommsLogger(UnreadSection):
    """Log of the collectives: number, size and duration."""

    unread = "verbose prof_all debug prof_ops"

    enabled: Flag = False
    """Log the collectives."""


class ThroughputTimer(UnreadSection):
    """Throughput in samples per second, measured over the step."""

    unread = "enabled synchronized"


class Timers(ConfigSection):
    """Timers of the engine."""

    throughput: ThroughputTimer = ThroughputTimer()
    """Throughput in samples per second."""


class FlopsProfiler(UnreadSection):
    """Profile of the operations in one step."""

    is_open = True
    unread = "recompute_fwd_factor profile_step module_depth top_modules detailed output_file"

    enabled: Flag = False
    """Record the profile."""


class ActivationCheckpointing(ConfigSection):
    """Recomputation in backward, for the functions that a model checkpoints itself and for its repeated blocks."""

    is_open = True

    wrap_blocks: Flag = False
    """Recompute every repeated block of the model."""
    partition_activations: Flag = False
    """Store an equal part of each input on every rank of the tensor-parallel group."""
    cpu_checkpointing: Flag = False
    """Store inputs in host memory."""
    contiguous_memory_optimization: Flag = False
    """Store inputs in one contiguous buffer."""
    number_checkpoints: PositiveCount | None = None
    """Number of inputs that the buffer holds; by default the number of repeated blocks."""
    synchronize_checkpoint_boundary: Flag = False
    """Synchronize with the device at each checkpoint."""
    profile: Flag = False
    """Log the time of checkpointed functions in forward and in their recomputation, and the bytes of stored inputs."""


class Pipeline(UnreadSection):
    """Pipeline parallelism."""

    is_open = True
    unread = "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned"


class HybridEngine(UnreadSection):
    """A combined engine for training and generation."""

    unread = (
        "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph"
    )

    enabled: Flag = False
    """Enable the hybrid engine."""


class TensorParallelGroup(ConfigSection):
    """Older form of the tensor-parallel size."""

    tp_size: PositiveCount = 1
    """Number of ranks that share each layer."""
    tp_grain_size: PositiveCount = 1
    """Number that divides the size of each part when a dimension is split."""
    mpu: Any = None
    """Object that provides the process groups."""
    tp_group: Any = None
    """Process group for tensor parallelism."""


class TensorParallel(UnreadSection):
    """Tensor parallelism: layers split among ranks."""

    unread = (
        "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend injection_policy_tuple "
        "partition_config preset_model keep_module_on_host replace_with_kernel_inject kernel_inject"
    )

    autotp_size: Count = 0
    """Number of ranks that share each layer; 0 disables tensor parallelism."""
    tensor_parallel: Annotated[TensorParallelGroup, AlsoSpelled("tp")] = TensorParallelGroup()
    """Older form of the tensor-parallel size."""


class ExpertParallel(UnreadSection):
    """Expert parallelism: experts of a mixture-of-experts model divided among ranks."""

    unread = (
        "expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model "
        "moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm "
        "route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm "
        "comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k "
        "load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr "
        "has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation"
    )

    enabled: Flag = False
    """Enable expert parallelism."""
    autoep_size: PositiveCount = 1
    """Number of ranks that divide the experts of each layer."""


class CompileArguments(ConfigSection):
    """Arguments of `torch.compile`."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Optimization mode of the backend."""
    fullgraph: Flag = False
    """Raise an error at a graph break."""
    dynamic: Flag | None = None
    """Compile for dynamic shapes; by default only where shapes change."""
    options: Arguments = Field(default_factory=dict)
    """Options of the backend; cannot be combined with mode."""
    disable: Flag = False
    """Disable compilation."""


class Compile(UnreadSection):
    """Compilation of the model by `torch.compile`."""

    is_read = True
    unread = (
        "free_activation free_activation_threshold offload_activation offload_opt_states double_buffer "
        "symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
        "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
    )

    enabled: Flag | None = None
    """Compile the model at its first forward."""
    disable: Flag | None = None
    """Older form: false enables compilation if enabled is absent; true disables it."""
    backend: Name | None = None
    """Backend of torch.compile, or the module.function of your own backend; by default inductor."""
    kwargs: CompileArguments = CompileArguments()
    """Further arguments of torch.compile."""
    deepcompile: Flag = False
    """Run compiler passes that schedule communication within the model's graph."""

    @property
    def compiles(self) -> bool:
        """True if the engine compiles the model."""
        wanted = self.disable is False if self.enabled is None else self.enabled
        return wanted and not self.disable and not self.kwargs.disable


class WeightQuantization(UnreadSection):
    """Quantization of the weights after loading, for inference."""

    unread = "num_bits q_type q_groups quantized_initialization post_init_quant"

    enabled: Flag = True
    """Quantize the weights."""


class Autotuning(UnreadSection):
    """Search for fast settings by trial runs."""

    is_open = True
    unread = (
        "fast results_dir exps_dir overwrite start_profile_step end_profile_step metric_path metric tuner_type "
        "tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
        "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes "
        "mp_size model_info model_info_path"
    )

    enabled: Flag = False
    """Enable the search."""


class DataEfficiency(UnreadSection):
    """Selection of samples and tokens by difficulty."""

    is_open = True
    unread = "seed data_routing data_sampling"

    enabled: Flag = False
    """Enable the selection."""


_OPTIMIZER_PARAMS = (
    *("lr", "betas", "eps", "weight_decay", "momentum", "amsgrad", "bias_correction"),
    *("adam_w_mode", "torch_adam", "fused", "foreach", "moments_dtype", "fp32_optimizer_states", "max_grad_norm"),
)
_SCHEDULER_PARAMS = (
    *("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "last_batch_iteration"),
    *("warmup_min_ratio", "cos_min_ratio", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr"),
)

OptimizerKindName = Annotated[Literal["elementwise", "per_tensor", "coupled"], BeforeValidator(lowered)]


class OptimizerSection(ConfigSection):
    """Optimizer that the engine builds; or, with `kind` alone, how it may shard an optimizer built in code."""

    is_open = True
    inner: ClassVar[Mapping[str, tuple[str, ...]]] = {"params": _OPTIMIZER_PARAMS}

    type: Name | None = None
    """Name of the optimizer: Adam, AdamW, Adagrad, Lion, RMSprop, SGD, Lamb, Muon, or any class of torch.optim."""
    params: Arguments = Field(default_factory=dict)
    """Arguments of the optimizer."""
    kind: OptimizerKindName | None = None
    """Scope of each element's update: "elementwise", "per_tensor" or "coupled"; by default detected."""
    legacy_fusion: Flag = False
    """Older form of the fused update."""


class SchedulerSection(ConfigSection):
    """Learning-rate scheduler that the engine builds."""

    is_open = True
    inner: ClassVar[Mapping[str, tuple[str, ...]]] = {"params": _SCHEDULER_PARAMS}

    type: Name
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or any class of torch.optim.lr_scheduler."""
    params: Arguments = Field(default_factory=dict)
    """Arguments of the scheduler."""


class ParallelWrite(ConfigSection):
    """Parallel writing of a checkpoint by several ranks."""

    pipeline_stage: Flag = False
    """Divide the writing among the ranks of a pipeline stage."""


class CheckpointWriter(UnreadSection):
    """Writer that stores the bytes of a checkpoint on disk."""

    unread = "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier"


class PeerStates(ConfigSection):
    """Copies of the training state in host memory, from which a run resumes after losing a rank."""

    enabled: Flag = True
    """Save the copies."""
    interval: Interval = "auto"
    """Number of steps between two copies; "auto" measures an interval at which they should take 2 % of the time."""
    memory: PositiveCount | None = None
    """Maximum bytes of a machine's memory for the copies; by default all free memory."""


TagValidation = Annotated[Literal["ignore", "warn", "fail"], BeforeValidator(lowered)]


class Checkpoint(ConfigSection):
    """Options for writing and reading checkpoints."""

    is_open = True

    tag_validation: TagValidation = "warn"
    """Reaction if the ranks name different checkpoints."""
    load_universal: Flag = False
    """Load a checkpoint in the format for any number of ranks."""
    use_node_local_storage: Flag = False
    """True if the checkpoint folder is local to each node."""
    parallel_write: ParallelWrite = ParallelWrite()
    """Parallel writing by several ranks."""
    checkpoint_serialization: Flag = True
    """Serialize tensors before writing."""
    writer: CheckpointWriter | None = None
    """Writer of the checkpoint files."""
    async_save: Flag = False
    """Write checkpoints in the background while training continues."""
    staging_nbytes: PositiveCount = 1_073_741_824
    """Bytes of host memory per rank for staging checkpoints that are written in the background."""
    keep_last: PositiveCount | None = None
    """Number of checkpoints to keep in a folder; each save removes older ones. By default all are kept."""
    save_random_state: Flag = False
    """Save the states of the random generators too; a run with the same number of ranks restores them."""
    exclude_frozen_parameters: Flag | None = None
    """Omit the values of frozen parameters; by default only those of a PEFT base model that has a name."""
    save_on_preemption: PathText | None = None
    """Folder for a checkpoint when a rank receives SIGTERM or SIGUSR1; the process then exits with code 85."""
    peer: PeerStates | None = None
    """Copies of the training state in host memory; an `Accelerator` saves them and resumes from them."""


def _steps_per_print(value: object) -> object:
    return None if value == float("inf") else value  # Hugging Face libraries write infinity to disable printing


ReduceOp = Annotated[Literal["mean", "sum"], BeforeValidator(lowered)]


class Config(ConfigSection):
    """A validated config in the DeepSpeed JSON format; `load_config` creates it."""

    is_open = True

    train_batch_size: PositiveCount | None = None
    """Number of samples per optimizer step, over all ranks and micro-batches."""
    train_micro_batch_size_per_gpu: PositiveCount | None = None
    """Number of samples per rank and micro-batch."""
    gradient_accumulation_steps: PositiveCount | None = None
    """Number of micro-batches per optimizer step."""
    managed_gradient_accumulation: Flag = True
    """Let the engine count micro-batches; with false, every call of step() updates the weights."""
    gradient_clipping: NonNegativeNumber = 0.0
    """Maximum global L2 norm of the gradients; 0 disables clipping. Default 0; `import deepspeed`: 1.0."""
    steps_per_print: Annotated[PositiveCount | None, BeforeValidator(_steps_per_print)] = None
    """Number of optimizer steps between two log lines; by default no lines are logged."""
    peak_tflops: PositiveNumber | None = None
    """TFLOPS that a device can do, for the MFU of log lines and trackers; by default known devices' 16-bit peak."""
    dump_state: Flag = False
    """Print the engine's settings at the start."""
    disable_python_gc: Flag = False
    """Disable Python's cyclic garbage collector during training."""
    disable_allgather: Flag = False
    """A key without effect."""
    communication_data_type: MaybeDtype = None
    """Dtype of gradient reductions; by default that of the enabled precision."""
    seq_parallel_communication_data_type: Annotated[Dtype, AlsoSpelled("seq_parallel_comm_data_type")] = "fp32"
    """Dtype of gradient reductions under sequence parallelism."""
    prescale_gradients: Flag = False
    """Divide gradients by the number of ranks before the sum over ranks instead of after it."""
    gradient_predivide_factor: PositiveNumber = 1.0
    """Factor by which gradients are divided before the sum over ranks; the rest of the division follows it."""
    gradient_allreduce_op: ReduceOp = "mean"
    """Reduction of gradients over ranks: "mean" or "sum"."""
    zero_allow_untested_optimizer: Flag = False
    """Shard the states of an optimizer class that is not known to be elementwise."""
    zero_force_ds_cpu_optimizer: Flag = True
    """Accept only DeepSpeed's CPU optimizer for updates on the host."""
    optimizer: OptimizerSection | None = None
    """Optimizer to build if the caller passes none."""
    scheduler: SchedulerSection | None = None
    """Learning-rate scheduler to build if the caller passes none."""
    opt_level: Any = None
    """Mixed-precision level of Apex."""
    vocabulary_size: PositiveCount | None = None
    """Size of the model's vocabulary."""
    wall_clock_breakdown: Flag = False
    """Log the time of forward, backward and step."""
    memory_breakdown: Flag = False
    """Log the memory in use after forward, backward and step."""
    dataloader_drop_last: Flag = False
    """Drop the last, smaller batch of a loader that the engine builds."""
    use_data_before_expert_parallelism: Flag = False
    """Order of the ranks in expert parallelism."""
    log_level: LogLevel | None = None
    """Level of zeroaccel's logger; by default unchanged."""
    sequence_parallel_size: Annotated[PositiveCount, AlsoSpelled("sp_size"), AlsoSpelled("cp_size")] = 1
    """Number of ranks that share one sequence."""
    data_parallel_size: PositiveCount | None = None
    """Number of ranks with different samples; must equal the actual number."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """ZeRO: sharding of model states, offload and prefetching."""
    fp16: Fp16 = Fp16()
    """Training in fp16."""
    bf16: Annotated[Bf16, AlsoSpelled("bfloat16", deprecated=True)] = Bf16()
    """Training in bf16."""
    data_types: DataTypes = DataTypes()
    """Dtypes of gradients, parameters and buffers."""
    torch_autocast: TorchAutocast = TorchAutocast()
    """Mixed precision through torch.autocast."""
    aio: Aio = Aio()
    """File I/O for "nvme" offload."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    """Recomputation of activations in backward."""
    checkpoint: Checkpoint = Checkpoint()
    """Options for checkpoints."""
    tensorboard: TensorBoard = TensorBoard()
    """Metrics as TensorBoard event files."""
    csv_monitor: CsvMonitorSection = CsvMonitorSection()
    """Metrics as CSV files."""
    jsonl_monitor: JsonlMonitor = JsonlMonitor()
    """Metrics as JSON lines."""
    wandb: Wandb = Wandb()
    """Metrics to Weights & Biases."""
    comet: Comet = Comet()
    """Metrics to Comet."""
    trackio: Trackio = Trackio()
    """Metrics to Trackio."""
    comms_logger: CommsLogger = CommsLogger()
    """Log of the collectives."""
    timers: Timers = Timers()
    """Timers of the engine."""
    flops_profiler: FlopsProfiler = FlopsProfiler()
    """Profile of one step."""
    autotuning: Autotuning = Autotuning()
    """Search for fast settings."""
    compile: Compile = Compile()
    """Compilation of the model by torch.compile."""
    data_efficiency: DataEfficiency = DataEfficiency()
    """Selection of samples and tokens."""
    expert_parallel: ExpertParallel = ExpertParallel()
    """Expert parallelism: experts divided among ranks."""
    hybrid_engine: HybridEngine = HybridEngine()
    """A combined engine for training and generation."""
    pipeline: Pipeline = Pipeline()
    """Pipeline parallelism."""
    tensor_parallel: TensorParallel = TensorParallel()
    """Tensor parallelism: layers split among ranks."""
    weight_quantization: WeightQuantization | None = None
    """Quantization of the weights for inference."""
    amp: FreeSection = None
    """Mixed precision by Apex."""
    compression_training: FreeSection = None
    """Training with compressed weights."""
    curriculum_learning: FreeSection = None
    """Sequence length that grows during training."""
    datastates_ckpt: FreeSection = None
    """Asynchronous checkpoints."""
    eigenvalue: FreeSection = None
    """Curvature estimates for quantized training."""
    elasticity: FreeSection = None
    """Batch sizes that suit many numbers of ranks."""
    graph_harvesting: FreeSection = None
    """Capture of short kernels as graphs."""
    msamp: FreeSection = None
    """8-bit training by MS-AMP."""
    nebula: FreeSection = None
    """Asynchronous checkpoints to a service."""
    progressive_layer_drop: FreeSection = None
    """Random omission of layers during training."""
    quantize_training: FreeSection = None
    """Training with weights of decreasing precision."""
    sparse_attention: FreeSection = None
    """Attention kernels with a fixed pattern."""
    sparse_gradients: FreeSection = None
    """Sparse gradients of embeddings."""

    _origin: Provenance = PrivateAttr(default_factory=Provenance)

    def model_post_init(self, context: Any) -> None:
        """Stores the provenance that the loader passes as validation context."""
        if isinstance(context, Provenance):
            self._origin = context

    @property
    def raw(self) -> Mapping[str, Any]:
        """Copy of the tree as given, with its spellings and "auto" values."""
        return self._origin.raw

    @property
    def resolved(self) -> Mapping[str, Any]:
        """Plain tree in the given spelling, with a value in place of every "auto".

        The tree omits a key whose "auto" takes a default that JSON cannot express.
        """
        return self._origin.resolved

    @property
    def resolved_sources(self) -> Mapping[str, str]:
        """Dotted path in `resolved` -> source of the value, or the formula that filled it."""
        return self._origin.resolved_sources

    @property
    def sources(self) -> Mapping[str, str]:
        """Dotted path -> place of its value ("ds_config.json:3:5"), without keys that were not given."""
        return self._origin.sources()

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Dotted paths whose value is "auto"; their attributes have default values until a rule fills them."""
        return self._origin.unresolved

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each key that the engine accepts but does not follow exactly, with its actual behaviour."""
        return self._origin.notes

    @property
    def precision(self) -> Literal["fp32", "fp16", "bf16"]:
        """Dtype of the parameters: "fp16" or "bf16" if enabled, else "fp32"."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def scales_loss(self) -> bool:
        """True if backward computes gradients in fp16, where small ones vanish unless the engine scales the loss."""
        return self.fp16.enabled or (self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16")

    def where(self, path: str) -> str:
        """Returns the address of a key for an error message: "ds_config.json:3:5: optimizer.params.lr".

        Args:
            path: dotted path in the schema's names; it may continue into `optimizer.params` and `scheduler.params`.
        """
        return self._origin.where(tuple(path.split(".")))
