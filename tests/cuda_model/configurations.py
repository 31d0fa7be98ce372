"""The configurations that the model runs: a config of the engine, a number of ranks, and how a program trains.

Data only: the tests read it without torch. `training_loops.py` has the loops by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cuda_model.network_size import Size

Config = Mapping[str, Any]

_CPU = {"device": "cpu"}
_CORES = {**_CPU, "ratio": 1.0}  # the host's cores alone update
_FILE = {"device": "nvme", "nvme_path": "."}  # the model writes nothing there
_PARAMETER_FILE = {**_FILE, "max_in_cpu": 0}
# Every unit is gathered before each use, some ahead, and none stays.
_TRAVELS = {
    "stage3_prefetch_bucket_size": 10_000_000,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


@dataclass(frozen=True)
class Case:
    """One run of the model.

    Attributes:
        config: of `zeroaccel.initialize`.
        world_size: ranks of the job, of which the first is modelled.
        loop: a function of `training_loops.py`.
        size: of the network.
        mesh: of `ParallelConfig`: how many ranks each axis has.
        sizes: constants of the package that have another value, so that small networks have several of each: by name.
        open: part of a finding that the engine is known to have, until it is mended; empty for none.
    """

    config: Config
    world_size: int = 1
    loop: str = "plain"
    size: Size = field(default_factory=Size)
    mesh: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    open: str = ""


def config(
    stage: int, precision: str = "bf16", *, optimizer: str = "AdamW", accumulation: int = 1, **zero: Any
) -> Config:
    """A config with one optimizer; `zero` goes into `zero_optimization`."""
    params: dict[str, Any] = {"lr": 1e-4}
    if optimizer == "SGD":
        params["momentum"] = 0.9
    if "/" in optimizer:  # a format of its moments
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
_SHORT = Size(layers=2, tokens=32)
