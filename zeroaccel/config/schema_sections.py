"""Sections of the config other than ZeRO: precision, metric writers, activation checkpointing, unread sections.

One of the schema files that `schema` assembles. Dtypes are the words "fp32", "fp16" and "bf16", so that torch is not
imported. Contradictions between sections are found in `checks`; which keys take effect is the table in `support`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zeroaccel.config.section import (
    AUTO,
    AlsoSpelled,
    Arguments,
    ConfigSection,
    Count,
    Dtype,
    Flag,
    MaybeDtype,
    Name,
    NonNegativeNumber,
    PositiveCount,
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
