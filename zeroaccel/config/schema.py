"""The config: all keys of the DeepSpeed JSON except those of ZeRO (`schema_zero`), and the model the engine reads.

Made by `load_config`, read by everything above. It declares what may be written. Dtypes are the words "fp32", "fp16"
and "bf16", so that torch is not imported. Which keys take effect is the table in `support`, contradictions are found in
`checks`, stages become booleans and batch sizes are solved in `shard_plan`. An attribute whose key is "auto" reads as
its default.
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
    """Parameters in fp16, fp32 master weights, and a scaled loss."""

    is_open = True

    enabled: Flag = False
    """Train in fp16."""
    auto_cast: Flag = False
    """Cast floating-point inputs of forward to fp16."""
    loss_scale: NonNegativeNumber = 0.0
    """Factor on the loss; 0 finds it while training."""
    initial_scale_power: Count = 16
    """The search starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """Steps without overflow after which the factor doubles; above 0 when it is searched for."""
    hysteresis: PositiveCount = 2
    """Overflows, this one included, until the factor halves."""
    consecutive_hysteresis: Flag = False
    """Count the overflows anew after each good step, not only when the factor grows."""
    min_loss_scale: NonNegativeNumber = 1.0
    """Lowest factor; an overflow at it is an error. Above 0 when the factor is searched for."""
    fp16_master_weights_and_grads: Flag = False
    """Master weights and gradients in fp16."""
    opt_level: Any = None
    """Level of Apex's mixed precision."""


class Bf16(ConfigSection):
    """Parameters in bf16 and fp32 master weights."""

    is_open = True

    enabled: Flag = False
    """Train in bf16."""
    immediate_grad_update: Flag = False
    """Add each gradient to its fp32 sum as soon as it is there."""
    check_grad_overflow: Flag = True
    """Skip a step whose gradients are not finite."""
    bf16_master_weights_and_grads: Flag = False
    """Master weights and gradients in bf16."""
    bf16_optimizer_states: Flag = False
    """Optimizer states in bf16."""
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
    """Level of Apex's mixed precision."""


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
    """Dtype in which gradients are summed over micro-steps; absent, fp32 whatever the model's dtype."""
    param_dtype: MaybeDtype = None
    """Dtype of the parameters; it must be the one of the enabled precision. Absent, that one."""
    buffer_dtype: MaybeDtype = None
    """Dtype all floating-point buffers are cast to; absent, they follow the parameters of their module."""
    master_weights: Literal["fp32", "residual"] = "fp32"
    """"residual" keeps of a bf16 weight's fp32 master what rounding took: exact, in nearly 2 bytes fewer."""
    keep_in_fp32_modules: Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_modules)] = "auto"
    """Names of modules whose parameters and buffers stay fp32; "auto" takes the model's own list, if it has one."""


class TorchAutocast(ConfigSection):
    """Mixed precision by torch.autocast instead of parameters in 16 bits."""

    is_open = True

    enabled: Flag = False
    """Run forward under torch.autocast."""
    dtype: Dtype = "bf16"
    """Dtype of autocast; fp16 scales the loss as torch.amp.GradScaler does."""
    lower_precision_safe_modules: Texts | None = None
    """Module classes, as "torch.nn.Linear", whose weights and gradients are stored, gathered and reduced in that dtype,
    with masters in fp32; all others stay fp32. By default torch.nn.Linear, Conv1d, Conv2d and Conv3d."""


LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lowered)]


class _MetricFiles(ConfigSection):
    enabled: Flag = False
    """Write them."""
    output_path: Text = ""
    """Folder to write to; empty is the working directory."""
    job_name: Name = "zeroaccel"
    """Folder within it, one per run."""


class TensorBoard(_MetricFiles):
    """Metrics as TensorBoard event files (needs the package tensorboard)."""


class CsvMonitorSection(_MetricFiles):
    """Metrics as CSV files, one per metric."""


class JsonlMonitor(_MetricFiles):
    """Metrics as one file of JSON lines, one per step."""


class Wandb(ConfigSection):
    """Metrics to Weights & Biases."""

    enabled: Flag = False
    """Send them (needs the package wandb)."""
    group: Text | None = None
    """Group of runs."""
    team: Text | None = None
    """Team the project belongs to."""
    project: Name = "zeroaccel"
    """Project the run belongs to."""


class Comet(UnreadSection):
    """Metrics to Comet."""

    unread = "samples_log_interval project workspace api_key experiment_name experiment_key online mode"

    enabled: Flag = False
    """Send them."""


class Trackio(UnreadSection):
    """Metrics to Trackio."""

    unread = "project"

    enabled: Flag = False
    """Send them."""


class CommsLogger(UnreadSection):
    """A log of the collectives: how many, how large, how long."""

    unread = "verbose prof_all debug prof_ops"

    enabled: Flag = False
    """Keep the log."""


class ThroughputTimer(UnreadSection):
    """Samples per second, measured over the step."""

    unread = "enabled synchronized"


class Timers(ConfigSection):
    """Clocks of the engine."""

    throughput: ThroughputTimer = ThroughputTimer()
    """Samples per second."""


class FlopsProfiler(UnreadSection):
    """A profile of the operations of one step."""

    is_open = True
    unread = "recompute_fwd_factor profile_step module_depth top_modules detailed output_file"

    enabled: Flag = False
    """Take the profile."""


class ActivationCheckpointing(ConfigSection):
    """Recomputation in backward: of functions that a model checkpoints itself, and of its repeated blocks."""

    is_open = True

    wrap_blocks: Flag = False
    """Recompute every repeated block of the model."""
    partition_activations: Flag = False
    """Keep a share of each input per rank of the tensor-parallel group."""
    cpu_checkpointing: Flag = False
    """Keep inputs in host memory."""
    contiguous_memory_optimization: Flag = False
    """Keep inputs in one buffer."""
    number_checkpoints: PositiveCount | None = None
    """Inputs that buffer is sized for; absent, the number of repeated blocks."""
    synchronize_checkpoint_boundary: Flag = False
    """Wait for the device at each checkpoint."""
    profile: Flag = False
    """Log the time of checkpointed functions in forward and again in backward, and the bytes kept."""


class Pipeline(UnreadSection):
    """Pipeline parallelism."""

    is_open = True
    unread = "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned"


class HybridEngine(UnreadSection):
    """One engine for training and generation."""

    unread = (
        "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph"
    )

    enabled: Flag = False
    """Use it."""


class TensorParallelGroup(ConfigSection):
    """Older form of the size of tensor parallelism."""

    tp_size: PositiveCount = 1
    """Ranks that share each layer."""
    tp_grain_size: PositiveCount = 1
    """Multiple that the split sizes keep to."""
    mpu: Any = None
    """Object that knows the process groups."""
    tp_group: Any = None
    """Process group of tensor parallelism."""


class TensorParallel(UnreadSection):
    """Layers split among ranks."""

    unread = (
        "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend injection_policy_tuple "
        "partition_config preset_model keep_module_on_host replace_with_kernel_inject kernel_inject"
    )

    autotp_size: Count = 0
    """Ranks that share each layer; 0 is off."""
    tensor_parallel: Annotated[TensorParallelGroup, AlsoSpelled("tp")] = TensorParallelGroup()
    """Older form of the size."""


class ExpertParallel(UnreadSection):
    """Experts of a mixture-of-experts model divided among ranks."""

    unread = (
        "expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model "
        "moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm "
        "route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm "
        "comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k "
        "load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr "
        "has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation"
    )

    enabled: Flag = False
    """Use it."""
    autoep_size: PositiveCount = 1
    """Ranks that divide the experts of each layer."""


class CompileArguments(ConfigSection):
    """Arguments of `torch.compile`."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """What the backend aims for."""
    fullgraph: Flag = False
    """Make a graph break an error."""
    dynamic: Flag | None = None
    """Compile for changing shapes; absent, where shapes change."""
    options: Arguments = Field(default_factory=dict)
    """Options of the backend; not beside a mode."""
    disable: Flag = False
    """Compile nothing."""


class Compile(UnreadSection):
    """The model compiled by `torch.compile`."""

    is_read = True
    unread = (
        "free_activation free_activation_threshold offload_activation offload_opt_states double_buffer "
        "symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
        "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
    )

    enabled: Flag | None = None
    """Compile the model at its first forward."""
    disable: Flag | None = None
    """Older form: false stands for enabled, where that is absent; true compiles nothing."""
    backend: Name | None = None
    """Backend of torch.compile, or module.function of one's own; absent, inductor."""
    kwargs: CompileArguments = CompileArguments()
    """More arguments of torch.compile."""
    deepcompile: Flag = False
    """Compiler passes that schedule communication within the model's graph."""

    @property
    def compiles(self) -> bool:
        """Whether the model is to be compiled."""
        wanted = self.disable is False if self.enabled is None else self.enabled
        return wanted and not self.disable and not self.kwargs.disable


class WeightQuantization(UnreadSection):
    """Weights quantised once after loading, for inference."""

    unread = "num_bits q_type q_groups quantized_initialization post_init_quant"

    enabled: Flag = True
    """Quantise them."""


class Autotuning(UnreadSection):
    """A search for fast settings by trial runs."""

    is_open = True
    unread = (
        "fast results_dir exps_dir overwrite start_profile_step end_profile_step metric_path metric tuner_type "
        "tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
        "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes "
        "mp_size model_info model_info_path"
    )

    enabled: Flag = False
    """Search."""


class DataEfficiency(UnreadSection):
    """Choice of samples and tokens by difficulty."""

    is_open = True
    unread = "seed data_routing data_sampling"

    enabled: Flag = False
    """Use it."""


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
    """An optimizer to build, or how one that is made in code may be sharded (`kind` alone)."""

    is_open = True
    inner: ClassVar[Mapping[str, tuple[str, ...]]] = {"params": _OPTIMIZER_PARAMS}

    type: Name | None = None
    """Name of the optimizer: Adam, AdamW, Adagrad, Lion, RMSprop, SGD, Lamb, Muon, or any class of torch.optim."""
    params: Arguments = Field(default_factory=dict)
    """Its arguments."""
    kind: OptimizerKindName | None = None
    """What an element's update depends on: "elementwise", "per_tensor" or "coupled"; absent, it is found out."""
    legacy_fusion: Flag = False
    """Older form of the fused update."""


class SchedulerSection(ConfigSection):
    """A learning-rate scheduler to build."""

    is_open = True
    inner: ClassVar[Mapping[str, tuple[str, ...]]] = {"params": _SCHEDULER_PARAMS}

    type: Name
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or any class of torch.optim.lr_scheduler."""
    params: Arguments = Field(default_factory=dict)
    """Its arguments."""


class ParallelWrite(ConfigSection):
    """Writing of a checkpoint by several ranks."""

    pipeline_stage: Flag = False
    """Let the ranks of a pipeline stage share the writing."""


class CheckpointWriter(UnreadSection):
    """How bytes of a checkpoint reach the disk."""

    unread = "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier"


class PeerStates(ConfigSection):
    """States in the memory of the machines, from which a run resumes that has lost a rank."""

    enabled: Flag = True
    """Save them."""
    interval: Interval = "auto"
    """Steps between two states; "auto" measures an interval at which their part of the time should be 2 %."""
    memory: PositiveCount | None = None
    """Bytes of a machine's memory that states may take; absent, what is free."""


TagValidation = Annotated[Literal["ignore", "warn", "fail"], BeforeValidator(lowered)]


class Checkpoint(ConfigSection):
    """Options for writing and reading checkpoints."""

    is_open = True

    tag_validation: TagValidation = "warn"
    """What to do when the ranks name different checkpoints."""
    load_universal: Flag = False
    """Load a checkpoint in the format that fits any number of ranks."""
    use_node_local_storage: Flag = False
    """The folder is a different one on each node."""
    parallel_write: ParallelWrite = ParallelWrite()
    """Writing by several ranks."""
    checkpoint_serialization: Flag = True
    """Serialise before writing."""
    writer: CheckpointWriter | None = None
    """How bytes reach the disk."""
    async_save: Flag = False
    """Write checkpoints in the background, while training goes on."""
    staging_nbytes: PositiveCount = 1_073_741_824
    """Bytes of host memory per rank that checkpoints written in the background are copied through."""
    keep_last: PositiveCount | None = None
    """Checkpoints that stay in a folder: saving removes the oldest."""
    save_random_state: Flag = False
    """Save the state of the random generators too; a run of as many ranks resumes with it."""
    exclude_frozen_parameters: Flag | None = None
    """Leave out the values of frozen parameters; absent, those of an adapters' base that has a name."""
    save_on_preemption: PathText | None = None
    """Folder for a checkpoint when a rank receives SIGTERM or SIGUSR1; the process then ends with exit code 85."""
    peer: PeerStates | None = None
    """States in the memory of the machines, which an `Accelerator` saves and resumes from."""


def _steps_per_print(value: object) -> object:
    return None if value == float("inf") else value  # a number of steps that never comes: HF libraries write it so


ReduceOp = Annotated[Literal["mean", "sum"], BeforeValidator(lowered)]


class Config(ConfigSection):
    """A config in the DeepSpeed JSON format, checked; made by `load_config`."""

    is_open = True

    train_batch_size: PositiveCount | None = None
    """Samples per optimizer step, over all ranks and micro-steps."""
    train_micro_batch_size_per_gpu: PositiveCount | None = None
    """Samples per rank and micro-step."""
    gradient_accumulation_steps: PositiveCount | None = None
    """Micro-steps per optimizer step."""
    managed_gradient_accumulation: Flag = True
    """The engine counts micro-steps; false makes every call of step() an update."""
    gradient_clipping: NonNegativeNumber = 0.0
    """Largest global L2 norm of the gradients. 0, the default, does not clip: other readers of the format take 1.0."""
    steps_per_print: Annotated[PositiveCount | None, BeforeValidator(_steps_per_print)] = None
    """Optimizer steps between two log lines; absent, none."""
    dump_state: Flag = False
    """Print the engine's settings at start."""
    disable_python_gc: Flag = False
    """Turn Python's cyclic garbage collection off while training."""
    disable_allgather: Flag = False
    """A key without effect."""
    communication_data_type: MaybeDtype = None
    """Dtype in which gradients are reduced; absent, the one of the enabled precision."""
    seq_parallel_communication_data_type: Annotated[Dtype, AlsoSpelled("seq_parallel_comm_data_type")] = "fp32"
    """The same under sequence parallelism."""
    prescale_gradients: Flag = False
    """Divide gradients before they are summed over ranks rather than after."""
    gradient_predivide_factor: PositiveNumber = 1.0
    """Part of that division that is made before the sum."""
    gradient_allreduce_op: ReduceOp = "mean"
    """Gradients over ranks: "mean" or "sum"."""
    zero_allow_untested_optimizer: Flag = False
    """Shard the states of an optimizer class that is not known to be elementwise."""
    zero_force_ds_cpu_optimizer: Flag = True
    """Take only a special optimizer for the host."""
    optimizer: OptimizerSection | None = None
    """Optimizer to build, unless one is passed in."""
    scheduler: SchedulerSection | None = None
    """Learning-rate scheduler to build, unless one is passed in."""
    opt_level: Any = None
    """Level of Apex's mixed precision."""
    vocabulary_size: PositiveCount | None = None
    """Size of the model's vocabulary."""
    wall_clock_breakdown: Flag = False
    """Log the time of forward, backward and step."""
    memory_breakdown: Flag = False
    """Log the memory in use after each of them."""
    dataloader_drop_last: Flag = False
    """Drop the last, smaller batch of a loader made by the engine."""
    use_data_before_expert_parallelism: Flag = False
    """Order of the ranks of expert parallelism."""
    log_level: LogLevel | None = None
    """Level of zeroaccel's logger; absent, as it is."""
    sequence_parallel_size: PositiveCount = 1
    """Ranks that share one sequence."""
    data_parallel_size: PositiveCount | None = None
    """Ranks that see different samples; it must be the number of ranks."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """What is sharded, where it lives, and how far ahead it is fetched."""
    fp16: Fp16 = Fp16()
    """Training in fp16."""
    bf16: Annotated[Bf16, AlsoSpelled("bfloat16", deprecated=True)] = Bf16()
    """Training in bf16."""
    data_types: DataTypes = DataTypes()
    """Dtypes of gradients, parameters and buffers."""
    torch_autocast: TorchAutocast = TorchAutocast()
    """Mixed precision by torch.autocast."""
    aio: Aio = Aio()
    """How "nvme" offload reads and writes."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    """Options of a checkpointing function that a model calls itself."""
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
    """A log of the collectives."""
    timers: Timers = Timers()
    """Clocks of the engine."""
    flops_profiler: FlopsProfiler = FlopsProfiler()
    """A profile of one step."""
    autotuning: Autotuning = Autotuning()
    """A search for fast settings."""
    compile: Compile = Compile()
    """The model compiled by torch.compile."""
    data_efficiency: DataEfficiency = DataEfficiency()
    """Choice of samples and tokens."""
    expert_parallel: ExpertParallel = ExpertParallel()
    """Experts divided among ranks."""
    hybrid_engine: HybridEngine = HybridEngine()
    """One engine for training and generation."""
    pipeline: Pipeline = Pipeline()
    """Pipeline parallelism."""
    tensor_parallel: TensorParallel = TensorParallel()
    """Layers split among ranks."""
    weight_quantization: WeightQuantization | None = None
    """Weights quantised for inference."""
    amp: FreeSection = None
    """Mixed precision by Apex."""
    compression_training: FreeSection = None
    """Training with compressed weights."""
    curriculum_learning: FreeSection = None
    """Sequence length that grows with training."""
    datastates_ckpt: FreeSection = None
    """Asynchronous checkpoints."""
    eigenvalue: FreeSection = None
    """Curvature for quantised training."""
    elasticity: FreeSection = None
    """Batch sizes that fit many numbers of ranks."""
    graph_harvesting: FreeSection = None
    """Capture of short kernels as graphs."""
    msamp: FreeSection = None
    """8-bit training by MS-AMP."""
    nebula: FreeSection = None
    """Asynchronous checkpoints to a service."""
    progressive_layer_drop: FreeSection = None
    """Layers left out while training."""
    quantize_training: FreeSection = None
    """Training with weights of falling precision."""
    sparse_attention: FreeSection = None
    """Attention kernels with a fixed pattern."""
    sparse_gradients: FreeSection = None
    """Sparse gradients of embeddings."""

    _origin: Provenance = PrivateAttr(default_factory=Provenance)

    def model_post_init(self, context: Any) -> None:
        """Keeps the provenance that the loader passes as validation context."""
        if isinstance(context, Provenance):
            self._origin = context

    @property
    def raw(self) -> Mapping[str, Any]:
        """A copy of the tree as it was given, with its spellings and its "auto" values."""
        return self._origin.raw

    @property
    def resolved(self) -> Mapping[str, Any]:
        """The plain tree in which every "auto" is filled, in the spelling it was written in.

        An "auto" that takes a default which cannot be written down is absent.
        """
        return self._origin.resolved

    @property
    def resolved_sources(self) -> Mapping[str, str]:
        """Dotted path in `resolved` -> where the value came from, or the formula that filled it."""
        return self._origin.resolved_sources

    @property
    def sources(self) -> Mapping[str, str]:
        """Dotted path -> where its value was given ("ds_config.json:3:5"); keys that were not given are absent."""
        return self._origin.sources()

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Dotted paths whose value is "auto"; their attributes read as defaults until they are filled in."""
        return self._origin.unresolved

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each key that is accepted without being followed to the letter, and what happens instead."""
        return self._origin.notes

    @property
    def precision(self) -> Literal["fp32", "fp16", "bf16"]:
        """Dtype of the parameters: "fp16" or "bf16" where enabled, else "fp32"."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are computed in fp16, where small ones vanish unless the loss is scaled."""
        return self.fp16.enabled or (self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16")

    def where(self, path: str) -> str:
        """The address of a key for an error message: "ds_config.json:3:5: optimizer.params.lr".

        Args:
            path: dotted path in the schema's names; it may go on into `optimizer.params` and `scheduler.params`.
        """
        return self._origin.where(tuple(path.split(".")))
