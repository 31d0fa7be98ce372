"""The configurations that the model runs: an engine config, a number of ranks, and a training loop.

Data only: the tests read it without torch. `training_loops.py` has the loops by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cuda_model.network_size import Size

Config = Mapping[str, Any]

_CPU = {"device": "cpu"}
_IN_STEP = {**_CPU, "update_during": "step"}  # so that forward and backward can be timed without the update
_FILE = {"device": "nvme", "nvme_path": "."}  # the model writes nothing there
_HALF = {**_CPU, "ratio": 0.5}
_PARAMETER_FILE = {**_FILE, "max_in_cpu": 0}
# The engine gathers every unit before each use, prefetches some, and keeps none.
_TRAVELS = {
    "stage3_prefetch_bucket_size": 10_000_000,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


@dataclass(frozen=True)
class Case:
    """One run of the model.

    Attributes:
        config: config of `zeroaccel.initialize`.
        world_size: number of ranks of the job; the model runs the first.
        loop: a function of `training_loops.py`.
        size: size of the network.
        mesh: arguments of `ParallelConfig`: the number of ranks along each axis.
        sizes: changed constants of the package, by name, so that a small network fills several buffers or tiles.
        frozen: True to freeze the matrices of the blocks, except the last one of each block.
        open: part of a finding that the engine has until its defect is repaired; empty if there is none.
    """

    config: Config
    world_size: int = 1
    loop: str = "plain"
    size: Size = field(default_factory=Size)
    mesh: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    frozen: bool = False
    open: str = ""


def config(
    stage: int, precision: str = "bf16", *, optimizer: str = "AdamW", accumulation: int = 1, **zero: Any
) -> Config:
    """Returns a config with one optimizer; `zero` goes into `zero_optimization`."""
    params: dict[str, Any] = {"lr": 1e-4}
    if optimizer in ("SGD", "RMSprop"):
        params["momentum"] = 0.9
    if optimizer == "RMSprop":
        params["centered"] = True
    if "/" in optimizer:  # the format of its moments
        optimizer, _, params["moments_dtype"] = optimizer.partition("/")
    sections = {} if precision == "fp32" else {precision: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage, **zero},
        **sections,
    }


def _with_activations(tree: Config, **section: Any) -> Config:
    return {**tree, "activation_checkpointing": {"cpu_checkpointing": True, "wrap_blocks": True, **section}}


def _with_fp32_norms(tree: Config) -> Config:
    return {**tree, "data_types": {"keep_in_fp32_modules": ["norm"]}}


_MEDIUM = Size(layers=4, width=128, inner=256, tokens=128, vocabulary=1024)
# By default layers of this size stay on the device until backward; here about four of the eight have room.
_LARGE = Size(layers=8, width=2048, inner=5504, tokens=4096, vocabulary=32000)
_LAYERS_TRAVEL = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 250_000_000}
# Layers of a 70B network: two of them exceed the default of stage3_max_live_parameters.
_HUGE = Size(layers=4, width=8192, inner=28672, tokens=8192, vocabulary=32000)
_SHORT = Size(layers=2, tokens=32)
_BOTH_ON_HOST = {"offload_param": _CPU, "offload_optimizer": _CPU, **_TRAVELS}
_SMALL_CHUNKS = {f"zeroaccel.checkpoint.{name}.CHUNK_NBYTES": 1 << 16 for name in ("rank_file", "rank_file_writer")}
_TWO_CHUNKS = {"checkpoint": {"async_save": True, "staging_nbytes": 1 << 17}}
_ASYNC_SAVE = {"checkpoint": {"async_save": True}}
_QGZ = {"zero_quantized_gradients": True, "zeropp": {"node_size": 2, "quantize_gradients_on_one_node": True}}

CASES: Mapping[str, Case] = {
    # stages and precisions
    "stage 0": Case(config(0), 4),
    "stage 1, one rank": Case(config(1)),
    "stage 1": Case(config(1), 4),
    "stage 2": Case(config(2), 4),
    "stage 2, one rank": Case(config(2)),
    "stage 3": Case(config(3, **_TRAVELS), 4),
    "stage 3, two ranks": Case(config(3, **_TRAVELS), 2, size=_SHORT),
    "stage 3, one rank": Case(config(3, **_TRAVELS)),
    "stage 3, defaults": Case(config(3), 4),
    "stage 3, fp32": Case(config(3, "fp32", **_TRAVELS), 4),
    "stage 3, fp16": Case(config(3, "fp16", **_TRAVELS), 4),
    "stage 2, fp16": Case(config(2, "fp16"), 4),
    "stage 1, accumulation": Case(config(1, accumulation=2), 4),
    "stage 3, accumulation": Case(config(3, accumulation=2, **_TRAVELS), 4),
    # offload to host memory
    "stage 2, optimizer on the host": Case(config(2, offload_optimizer=_CPU)),
    "stage 2, optimizer on the host, several ranks": Case(config(2, offload_optimizer=_CPU), 4),
    "stage 2, optimizer on the host, small buckets": Case(
        config(2, reduce_bucket_size=30_000, offload_optimizer=_CPU), 4
    ),
    "stage 2, optimizer on the host, accumulation": Case(config(2, accumulation=2, offload_optimizer=_CPU), 4),
    "stage 3, parameters on the host": Case(config(3, offload_param=_CPU, **_TRAVELS), 4),
    "stage 3, both on the host": Case(config(3, **_BOTH_ON_HOST)),
    "stage 3, both on the host, several ranks": Case(config(3, **_BOTH_ON_HOST), 4),
    "stage 3, both on the host, fp16": Case(config(3, "fp16", **_BOTH_ON_HOST), 4),
    "stage 3, both on the host, unpinned": Case(
        config(
            3,
            offload_param={**_CPU, "pin_memory": False},
            offload_optimizer={**_CPU, "pin_memory": False},
            **_TRAVELS,
        ),
        4,
    ),
    "stage 2, update during the next step": Case(
        config(2, offload_optimizer={**_CPU, "update_during": "next_step"}), 4
    ),
    "stage 3, both on the host, update during the next step": Case(
        config(3, offload_param=_CPU, offload_optimizer={**_CPU, "update_during": "next_step"}, **_TRAVELS), 4
    ),
    # a share of the masters on the device
    "stage 2, half of the optimizer on the host": Case(config(2, offload_optimizer=_HALF)),
    "stage 2, half of the optimizer on the host, several ranks": Case(config(2, offload_optimizer=_HALF), 4),
    "stage 2, half of the optimizer on the host, accumulation": Case(
        config(2, accumulation=2, offload_optimizer=_HALF), 4
    ),
    "stage 3, half of the optimizer on the host": Case(
        config(3, "fp16", offload_optimizer=_HALF, offload_param=_CPU, **_TRAVELS), 4
    ),
    "stage 3, half of the optimizer on the host, fp32": Case(config(3, "fp32", offload_optimizer=_HALF, **_TRAVELS), 4),
    "stage 2, half of the optimizer on the host, update during the next step": Case(
        config(2, offload_optimizer={**_HALF, "update_during": "next_step"}), 4
    ),
    "stage 3, half of the states in files": Case(config(3, offload_optimizer={**_FILE, "ratio": 0.5}, **_TRAVELS), 4),
    "stage 2, update during the backward": Case(config(2, offload_optimizer={**_CPU, "update_during": "backward"}), 4),
    "stage 3, both on the host, update during the backward": Case(
        config(3, offload_param=_CPU, offload_optimizer={**_CPU, "update_during": "backward"}, **_TRAVELS), 4
    ),
    # offload to files
    "stage 2, states in files": Case(config(2, offload_optimizer=_FILE), 4),
    "stage 3, parameters in files": Case(config(3, offload_param=_PARAMETER_FILE, **_TRAVELS), 4),
    "stage 3, parameters in files, one buffer": Case(
        config(3, offload_param={**_PARAMETER_FILE, "buffer_count": 1, "buffer_size": 40_000}, **_TRAVELS), 4
    ),
    "stage 3, both in files": Case(config(3, offload_param=_PARAMETER_FILE, offload_optimizer=_FILE, **_TRAVELS), 4),
    "stage 2, states in files, update during the next step": Case(
        config(2, offload_optimizer={**_FILE, "update_during": "next_step"}), 4
    ),
    # two buffers for a unit: norms in fp32 beside matrices in 16 bits
    "stage 3, two buffers for a unit": Case(_with_fp32_norms(config(3, **_TRAVELS)), 4),
    "stage 3, both on the host, two buffers for a unit": Case(_with_fp32_norms(config(3, **_BOTH_ON_HOST)), 4),
    # ZeRO++ and replicas
    "stage 3, qwZ": Case(config(3, zero_quantized_weights=True, **_TRAVELS), 4),
    "stage 3, qwZ in e4m3": Case(
        config(3, zero_quantized_weights=True, zeropp={"weight_format": "fp8"}, **_TRAVELS), 4
    ),
    "stage 3, qwZ, parameters on the host": Case(
        config(3, zero_quantized_weights=True, offload_param=_CPU, **_TRAVELS), 4
    ),
    # a frozen base model
    "stage 3, frozen weights": Case(config(3, **_TRAVELS), 4, frozen=True),
    "stage 2, frozen weights as nf4": Case(config(2, frozen_weights="nf4"), 4, frozen=True),
    "stage 3, frozen weights as nf4": Case(config(3, frozen_weights="nf4", **_TRAVELS), 4, frozen=True),
    "stage 3, frozen weights as int8, parameters on the host": Case(
        config(3, frozen_weights="int8", offload_param=_CPU, **_TRAVELS), 4, frozen=True
    ),
    "stage 3, hpZ": Case(config(3, zero_hpz_partition_size=2, **_TRAVELS), 4),
    "stage 3, qgZ": Case(config(3, **_QGZ, **_TRAVELS), 4),
    "stage 3, qwZ, qgZ and hpZ": Case(
        config(3, zero_quantized_weights=True, zero_hpz_partition_size=2, **_QGZ, **_TRAVELS), 4
    ),
    "stage 3, MiCS": Case(config(3, mics_shard_size=2, **_TRAVELS), 4),
    # activations on the host
    "stage 2, activations on the host": Case(_with_activations(config(2))),
    "stage 3, activations on the host": Case(_with_activations(config(3, **_TRAVELS)), 4),
    "stage 2, activations in one buffer of the host": Case(
        _with_activations(config(2), contiguous_memory_optimization=True, number_checkpoints=4)
    ),
    "stage 3, residual masters and int8 moments, both on the host": Case(
        {**config(3, optimizer="AdamW/int8", **_BOTH_ON_HOST), "data_types": {"master_weights": "residual"}}, 4
    ),
    # optimizers
    "stage 2, Lion": Case(config(2, optimizer="Lion"), 4),
    "stage 2, SGD with momentum": Case(config(2, optimizer="SGD"), 4),
    "stage 2, Adagrad": Case(config(2, optimizer="Adagrad"), 4),
    "stage 3, RMSprop": Case(config(3, optimizer="RMSprop", **_TRAVELS), 4),
    "stage 3, Muon": Case(config(3, optimizer="Muon", **_TRAVELS), 1),
    "stage 3, Lamb": Case(config(3, optimizer="Lamb", **_TRAVELS), 1),
    "stage 2, bf16 moments": Case(config(2, optimizer="AdamW/bf16"), 4),
    "stage 2, int8 moments": Case(config(2, optimizer="AdamW/int8"), 4),
    # meshes
    "stage 1, tp": Case(config(1), 4, mesh={"tp": 2}),
    "stage 3, tp": Case(config(3, **_TRAVELS), 4, mesh={"tp": 2}),
    "stage 3, sp": Case(config(3, **_TRAVELS), 4, "sequence_parts", _SHORT, mesh={"sp": 2}),
    "stage 1, ep": Case(config(1), 4, "of_a_causal_model", _SHORT, mesh={"ep": 2}),
    "stage 3, ep": Case(config(3, **_TRAVELS), 4, "of_a_causal_model", _SHORT, mesh={"ep": 4}),
    "stage 1, pp": Case(config(1, accumulation=2), 2, "stages", mesh={"pp": 2}),
    "stage 3, pp": Case(config(3, accumulation=2, **_TRAVELS), 4, "stages", mesh={"pp": 2}),
    # overlap, on a network of realistic size; `ms` covers forward and backward
    "overlap, stage 3 on 8 ranks": Case(config(3, **_LAYERS_TRAVEL), 8, "forward_and_backward", _LARGE),
    "overlap, stage 3 on 8 ranks, layers of 70B": Case(config(3), 8, "forward_and_backward", _HUGE),
    "overlap, stage 1 on 8 ranks": Case(config(1), 8, "forward_and_backward", _LARGE),
    "overlap, stage 1 on 8 ranks, without": Case(config(1, overlap_comm=False), 8, "forward_and_backward", _LARGE),
    "overlap, stage 2, optimizer on the host": Case(
        config(2, offload_optimizer=_IN_STEP), 1, "forward_and_backward", _LARGE
    ),
    "overlap, stage 3, both on the host": Case(
        config(3, offload_param=_CPU, offload_optimizer=_IN_STEP, **_LAYERS_TRAVEL), 1, "forward_and_backward", _LARGE
    ),
    # programs that do more than step
    "evaluation before the step": Case(config(3, **_TRAVELS), 4, "evaluation_before_step"),
    "evaluation before the step, both on the host": Case(config(3, **_BOTH_ON_HOST), loop="evaluation_before_step"),
    "evaluation on another stream": Case(config(3, **_TRAVELS), 4, "evaluation_on_another_stream"),
    "evaluation on another stream, parameters on the host": Case(
        config(3, offload_param=_CPU, **_TRAVELS), 4, "evaluation_on_another_stream"
    ),
    "full parameters read and written": Case(config(3, **_TRAVELS), 4, "full_parameters"),
    "full parameters read and written, both on the host": Case(config(3, **_BOTH_ON_HOST), 1, "full_parameters"),
    "weights to a generator": Case(config(3, **_TRAVELS), 4, "weights_to_a_generator"),
    "weights to a generator, both on the host": Case(config(3, **_BOTH_ON_HOST), 1, "weights_to_a_generator"),
    "states to the host and back": Case(config(3, **_TRAVELS), 4, "states_to_the_host_and_back"),
    "weights in a generator on another stream": Case(config(3, **_TRAVELS), 1, "weights_in_a_generator"),
    "an input changed in place, activations on the host": Case(
        _with_activations(config(2)), loop="input_changed_in_place"
    ),
    "a graph dropped, activations on the host": Case(_with_activations(config(2)), loop="graph_dropped"),
    "two engines": Case(config(3, **_TRAVELS), 4, "two_engines"),
    "two engines, both on the host": Case(config(3, **_BOTH_ON_HOST), 1, "two_engines"),
    "a checkpoint saved in the background": Case({**config(3, **_TRAVELS), **_ASYNC_SAVE}, 1, "background_save"),
    "a checkpoint saved in the background, small chunks": Case(
        {**config(3, **_TRAVELS), **_TWO_CHUNKS}, 1, "background_save", sizes=_SMALL_CHUNKS
    ),
    "steps that nothing waits for": Case(config(3, "fp32", **_TRAVELS), 4, "outcomes_read_late"),
    "an aborted pass, parameters on the host": Case(config(3, offload_param=_CPU, **_TRAVELS), 4, "aborted_pass"),
    "an aborted pass, both on the host": Case(config(3, **_BOTH_ON_HOST), 1, "aborted_pass"),
    "a checkpoint saved in the background, both on the host": Case(
        {**config(3, **_BOTH_ON_HOST), **_ASYNC_SAVE}, 1, "background_save"
    ),
}


@dataclass(frozen=True)
class Peak:
    """A case whose peak device memory is compared with `zeroaccel.estimate`, which assumes default settings.

    Attributes:
        precision, accumulation, plan: arguments of the estimate; the plan is (stage, offload of the optimizer, of the
            parameters).
    """

    case: Case
    precision: str
    accumulation: int
    plan: tuple[int, str, str]


def _peak(
    ranks: int, stage: int, precision: str = "bf16", accumulation: int = 1, optimizer: str = "none", param: str = "none"
) -> tuple[str, Peak]:
    sections: dict[str, Any] = {}
    if optimizer == "cpu":
        sections["offload_optimizer"] = _CPU
    if param == "cpu":
        sections["offload_param"] = _CPU
    tree = config(stage, precision, accumulation=accumulation, **sections)
    name = f"peak, {ranks} ranks, stage {stage}, {precision}, x{accumulation}, optimizer {optimizer}, params {param}"
    return name, Peak(Case(tree, ranks, size=_MEDIUM), precision, accumulation, (stage, optimizer, param))


PEAKS: Mapping[str, Peak] = dict(
    (
        _peak(4, 0),
        _peak(4, 1),
        _peak(4, 2, accumulation=2),
        _peak(4, 3),
        _peak(4, 3, "fp32"),
        _peak(4, 3, "fp16", 2),
        _peak(4, 2, accumulation=2, optimizer="cpu"),
        _peak(4, 3, "fp32", param="cpu"),
        _peak(4, 3, optimizer="cpu", param="cpu"),
        _peak(4, 3, "fp32", 2, "cpu", "cpu"),
        _peak(1, 2),
        _peak(1, 2, optimizer="cpu"),
        _peak(1, 3, "fp32", param="cpu"),
        _peak(1, 3, optimizer="cpu", param="cpu"),
    )
)


SLOW = frozenset(
    {
        "a checkpoint saved in the background",
        "stage 3, accumulation",
        "stage 3, two buffers for a unit",
        "stage 2, frozen weights as nf4",
        "stage 3, both on the host, update during the backward",
        "stage 2, half of the optimizer on the host, update during the next step",
        "stage 3, half of the optimizer on the host",
        "an aborted pass, both on the host",
        "evaluation before the step, both on the host",
        "stage 1, tp",
        "stage 3, ep",
        "stage 3, both on the host, two buffers for a unit",
        "stage 3, both on the host, unpinned",
        "stage 3, pp",
        "stage 1, accumulation",
        "stage 2, fp16",
        "stage 2, half of the optimizer on the host, several ranks",
        "stage 2, half of the optimizer on the host, accumulation",
        "stage 3, half of the optimizer on the host, fp32",
        "stage 3, half of the states in files",
        "stage 2, one rank",
        "stage 2, optimizer on the host, accumulation",
        "stage 2, optimizer on the host, small buckets",
        "stage 2, states in files, update during the next step",
        "stage 3, both on the host, fp16",
        "stage 3, both on the host, update during the next step",
        "stage 3, hpZ",
        "stage 3, one rank",
        "stage 3, two ranks",
        "stage 3, qwZ",
        "stage 3, qwZ in e4m3",
        "stage 2, activations on the host",
        "stage 2, Adagrad",
        "stage 2, Lion",
        "evaluation before the step",
        "full parameters read and written",
        "two engines",
        "stage 3, defaults",
        "a checkpoint saved in the background, both on the host",
        "overlap, stage 2, optimizer on the host",
        "overlap, stage 3 on 8 ranks, layers of 70B",
        "weights to a generator",
        "evaluation on another stream, parameters on the host",
        "stage 2, states in files",
        "stage 3, both on the host",
        "stage 3, qwZ, parameters on the host",
        "stage 3, activations on the host",
    }
)
"""Cases that refine another one; only `make test-all` runs them."""


def case_of(name: str) -> Case:
    """Returns one of `CASES` or `PEAKS`."""
    return PEAKS[name].case if name in PEAKS else CASES[name]
