"""Sections of the JSON format for things beyond sharded data parallelism: pipelines, tensors, experts, tuning, data.

One of the schema files that `schema` assembles. They are declared in full so that a config which carries them
switched off loads, and a misspelt key in them is found; switched on, they are refused by the table in `support`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from zeroaccel.config.section import (
    AUTO,
    AlsoSpelled,
    ConfigSection,
    Count,
    Dtype,
    Flag,
    FreeSection,
    Number,
    PositiveCount,
    Text,
    Texts,
)

__all__ = [
    "ActivationCheckpointing",
    "Autotuning",
    "Compile",
    "DataEfficiency",
    "ExpertParallel",
    "HybridEngine",
    "Pipeline",
    "TensorParallel",
    "WeightQuantization",
]


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
