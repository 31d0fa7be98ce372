"""Sections of the config beside ZeRO: precision, metric writers, activation checkpointing.

One of the schema files that `schema` assembles. Dtypes are the words "fp32", "fp16" and "bf16", so that torch is not
imported. Contradictions between sections are found in `checks`; which keys take effect is the table in `support`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from zeroaccel.config.section import (
    AUTO,
    AlsoSpelled,
    ConfigSection,
    Count,
    Dtype,
    Flag,
    FreeSection,
    Integer,
    MaybeDtype,
    Name,
    NonNegativeNumber,
    Number,
    PositiveCount,
    Text,
    Texts,
    lowered,
    wrong,
)

__all__ = [
    "ActivationCheckpointing",
    "Autotuning",
    "Bf16",
    "Comet",
    "CommsLogger",
    "Compile",
    "CsvMonitorSection",
    "DataEfficiency",
    "DataTypes",
    "ExpertParallel",
    "FlopsProfiler",
    "Fp16",
    "HybridEngine",
    "LogLevel",
    "Pipeline",
    "TensorBoard",
    "TensorParallel",
    "ThroughputTimer",
    "Timers",
    "TorchAutocast",
    "Trackio",
    "Wandb",
    "WeightQuantization",
]


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
    """Run forward under autocast."""
    dtype: Dtype = "bf16"
    """Dtype of autocast."""
    lower_precision_safe_modules: Texts | None = None
    """Module classes whose gradients may be reduced in that dtype."""


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


class Comet(ConfigSection):
    """Metrics to Comet."""

    enabled: Flag = False
    """Send them."""
    samples_log_interval: PositiveCount = 100
    """Samples between two reports."""
    project: Text | None = None
    """Project the experiment belongs to."""
    workspace: Text | None = None
    """Workspace of the project."""
    api_key: Text | None = None
    """Key of the account."""
    experiment_name: Text | None = None
    """Name shown for the experiment."""
    experiment_key: Text | None = None
    """Key of the experiment, 32 to 50 letters and digits."""
    online: Flag | None = None
    """False keeps the data on this machine."""
    mode: Text | None = None
    """"get", "create" or "get_or_create"."""


class Trackio(ConfigSection):
    """Metrics to Trackio."""

    enabled: Flag = False
    """Send them."""
    project: Name = "zeroaccel"
    """Project the run belongs to."""


class CommsLogger(ConfigSection):
    """A log of the collectives: how many, how large, how long."""

    enabled: Flag = False
    """Keep the log."""
    verbose: Flag = False
    """Also log each call as it happens."""
    prof_all: Flag = True
    """All operations; false takes only those of prof_ops."""
    debug: Flag = False
    """Add the caller to each line."""
    prof_ops: Texts = ()
    """Names of the operations to log, as "all_gather"."""


class ThroughputTimer(ConfigSection):
    """Samples per second, measured over the step."""

    enabled: Flag = True
    """Measure it."""
    synchronized: Flag = True
    """Wait for the device before reading the clock."""


class Timers(ConfigSection):
    """Clocks of the engine."""

    throughput: ThroughputTimer = ThroughputTimer()
    """Samples per second."""


class FlopsProfiler(ConfigSection):
    """A profile of the operations of one step."""

    is_open = True
    is_read = False

    enabled: Flag = False
    """Take the profile."""
    recompute_fwd_factor: NonNegativeNumber = 0.0
    """Forward passes that recomputation adds to one step."""
    profile_step: PositiveCount = 1
    """Step that is profiled."""
    module_depth: Integer = -1
    """Depth of the modules shown; -1 is the innermost."""
    top_modules: PositiveCount = 1
    """Modules shown per depth."""
    detailed: Flag = True
    """Show each module."""
    output_file: Text | None = None
    """File to write to; absent, standard output."""


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


class Pipeline(ConfigSection):
    """Pipeline parallelism."""

    is_open = True
    is_read = False

    stages: Any = AUTO
    """Number of stages."""
    partition: Text = "best"
    """How layers are dealt out to the stages."""
    seed_layers: Flag = False
    """Seed the random numbers of each layer."""
    activation_checkpoint_interval: Count = 0
    """Layers between two checkpoints; 0 is none."""
    pipe_partitioned: Flag = True
    """Shard activations that are sent."""
    grad_partitioned: Flag = True
    """Shard gradients that are sent."""


class HybridEngine(ConfigSection):
    """One engine for training and generation."""

    enabled: Flag = False
    """Use it."""
    max_out_tokens: PositiveCount = 512
    """Tokens generated, at most."""
    inference_tp_size: PositiveCount = 1
    """Ranks that share the model while generating."""
    release_inference_cache: Flag = False
    """Free the cache after generating."""
    pin_parameters: Flag = True
    """Keep the parameters of generation in place."""
    tp_gather_partition_size: PositiveCount = 8
    """Layers gathered at once while generating."""
    enable_cuda_graph: Flag = False
    """Capture generation as a graph."""


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


class TensorParallel(ConfigSection):
    """Layers split among ranks."""

    dtype: Dtype = "fp16"
    """Dtype of the split model."""
    autotp_size: Count = 0
    """Ranks that share each layer; 0 is off."""
    tp_overlap_comm: Flag = False
    """Communicate beside computation."""
    vocab_parallel_lm_head: Flag | None = None
    """Split the output layer by vocabulary."""
    vocab_parallel_ce_backend: Text = "torch"
    """Implementation of the loss over a split vocabulary."""
    tensor_parallel: Annotated[TensorParallelGroup, AlsoSpelled("tp")] = TensorParallelGroup()
    """Older form of the size."""
    injection_policy_tuple: Any = None
    """Names of layers to split."""
    partition_config: FreeSection = None
    """Rules for splitting layers."""
    preset_model: Text | None = None
    """Name of a ready set of rules."""
    keep_module_on_host: Flag = False
    """Keep the whole model in host memory."""
    replace_with_kernel_inject: Annotated[Flag, AlsoSpelled("kernel_inject")] = False
    """Replace layers by special kernels."""


class ExpertParallel(ConfigSection):
    """Experts of a mixture-of-experts model divided among ranks."""

    enabled: Flag = False
    """Use it."""
    autoep_size: PositiveCount = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: PositiveCount = 1
    """Ranks that share one expert."""
    validate_folding_routing: Flag = False
    """Check the routing at run time."""
    async_split_plan: Flag = False
    """Exchange token counts asynchronously."""
    preset_model: Text | None = None
    """Name of a ready set of patterns."""
    moe_layer_pattern: Text | None = None
    """Pattern of the names of mixture layers."""
    expert_pattern: Text | None = None
    """Name of the experts within such a layer."""
    router_pattern: Text | None = None
    """Name of the router within it."""
    use_grouped_mm: Flag = True
    """Multiply all experts in one call."""
    disable_triton_grouped_mm: Flag = False
    """Not with Triton."""
    route_norm: Flag | None = None
    """Normalise the router's scores."""
    route_scale: Number = 1.0
    """Factor on the scores."""
    score_apply: Text = AUTO
    """Apply the scores before or after the experts."""
    combine_impl: Text = AUTO
    """How the experts' outputs are added."""
    row_weighting_impl: Text = AUTO
    """How rows are weighted."""
    gate_up_impl: Text = "separate"
    """How gate and up projections are run."""
    comm_backend: Text = "comm"
    """Library that exchanges tokens."""
    comm_num_sm: PositiveCount = 12
    """Multiprocessors given to the exchange."""
    comm_qp_margin: Count = 4
    """Spare queues of the exchange."""
    comm_max_tokens_per_rank: Count = 0
    """Tokens one rank may send."""
    num_expert_groups: PositiveCount | None = None
    """Groups the experts form."""
    num_limited_groups: PositiveCount | None = None
    """Groups a token may use."""
    score_func: Text = AUTO
    """Function of the router's scores."""
    top_k: Any = AUTO
    """Experts per token."""
    load_balance_coeff: Number | None = None
    """Weight of the balancing term."""
    routed_scaling_factor: Any = AUTO
    """Factor on the routed output."""
    expert_w1: Text | None = None
    """Name of the first weight of an expert."""
    expert_w2: Text | None = None
    """Name of the second."""
    expert_w3: Text | None = None
    """Name of the third."""
    num_experts_attr: Text | None = None
    """Attribute of the model's config that counts experts."""
    top_k_attr: Text | None = None
    """Attribute that counts experts per token."""
    has_shared_experts: Flag | None = None
    """Some experts see every token."""
    shared_experts_pattern: Text | None = None
    """Name of those."""
    shared_experts_gate_pattern: Text | None = None
    """Name of their gate."""
    expert_activation: Text | None = None
    """Activation function of the experts."""


class Compile(ConfigSection):
    """Compiler passes that schedule communication within the model's graph."""

    deepcompile: Flag = False
    """Use them."""
    free_activation: Flag = False
    """Free large activations early."""
    free_activation_threshold: Count = 10_485_760
    """Bytes from which an activation is large."""
    offload_activation: Flag = False
    """Keep saved activations in host memory."""
    offload_opt_states: Flag = False
    """Keep optimizer states in host memory between steps."""
    double_buffer: Flag = True
    """Two communication buffers."""
    symmetric_memory: Flag = False
    """Buffers that peers can read."""
    debug_log: Flag = False
    """Write the graphs to files."""
    offload_parameters: Flag = False
    """Keep parameters in host memory."""
    sync_before_reduce: Flag = False
    """Wait for the device before a reduction."""
    sync_after_reduce: Flag = False
    """Wait for the device after a reduction."""
    sync_before_allgather: Flag = False
    """Wait for the device before an all-gather."""
    sync_after_allgather: Flag = False
    """Wait for the device after an all-gather."""
    keep_int_input_tensors: Flag = True
    """Profile with the real integer inputs."""
    keep_all_input_tensors: Flag = False
    """Profile with all real inputs."""
    passes: Texts | None = None
    """Names of the passes, in order."""


class WeightQuantization(ConfigSection):
    """Weights quantised once after loading, for inference."""

    enabled: Flag = True
    """Quantise them."""
    num_bits: PositiveCount = 8
    """Bits per weight."""
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    """With or without an offset."""
    q_groups: PositiveCount = 1
    """Groups with a scale of their own."""
    quantized_initialization: FreeSection = None
    """Options for quantising while loading."""
    post_init_quant: FreeSection = None
    """Options for quantising after loading."""


class Autotuning(ConfigSection):
    """A search for fast settings by trial runs."""

    enabled: Flag = False
    """Search."""
    fast: Flag = True
    """Try micro-batch sizes only."""
    results_dir: Text = "autotuning_results"
    """Folder for the results."""
    exps_dir: Text = "autotuning_exps"
    """Folder for the trial runs."""
    overwrite: Flag = True
    """Replace results of an earlier search."""
    start_profile_step: Count = 3
    """First step of a trial that is measured."""
    end_profile_step: Count = 5
    """Last step that is measured."""
    metric_path: Text | None = None
    """File a trial writes its result to."""
    metric: Text = "throughput"
    """What is optimised."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    """Order of the trials."""
    tuner_early_stopping: Count = 5
    """Trials without progress until the search ends."""
    tuner_num_trials: Count = 50
    """Trials, at most."""
    arg_mappings: FreeSection = None
    """Command-line arguments that stand for keys."""
    max_train_batch_size: PositiveCount | None = None
    """Largest batch size tried."""
    min_train_batch_size: PositiveCount = 1
    """Smallest batch size tried."""
    max_train_micro_batch_size_per_gpu: PositiveCount = 1024
    """Largest micro-batch size tried."""
    min_train_micro_batch_size_per_gpu: PositiveCount = 1
    """Smallest micro-batch size tried."""
    num_tuning_micro_batch_sizes: PositiveCount = 3
    """Micro-batch sizes tried."""
    mp_size: PositiveCount = 1
    """Ranks that share the model."""
    model_info: FreeSection = None
    """Sizes of the model, if known."""
    model_info_path: Text | None = None
    """File with those."""


class DataEfficiency(ConfigSection):
    """Choice of samples and tokens by difficulty."""

    is_open = True
    is_read = False

    enabled: Flag = False
    """Use it."""
    seed: Count = 1234
    """Seed of the choice."""
    data_routing: FreeSection = None
    """Layers that skip tokens at random."""
    data_sampling: FreeSection = None
    """Order of the samples by difficulty."""
