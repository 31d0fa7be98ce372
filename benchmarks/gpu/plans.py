"""Configs and model sizes for one GPU; the stream model uses them, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.cuda_model.network_size import Size

SIZES: Mapping[str, Size] = {
    "small": Size(layers=6, width=512, inner=1376, tokens=1024, vocabulary=32000),
    "large": Size(layers=24, width=2048, inner=5504, tokens=8192, vocabulary=32000),
}
"""Sizes by name; the large network has 1.35e9 parameters."""

_HOST = {"device": "cpu"}
_CORES = {**_HOST, "ratio": 1.0}  # only the host's cores update
_TRAVELLING = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 250_000_000}


def plan(stage: int, **zero: Any) -> dict[str, Any]:
    """Returns a config with bf16, AdamW and clipping; `activation_checkpointing` is a separate section."""
    top = {name: zero.pop(name) for name in ("activation_checkpointing",) if name in zero}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **zero},
        **top,
    }


PLANS: Mapping[str, dict[str, Any]] = {
    "stage 2": plan(2),
    "stage 3": plan(3),
    "stage 2, optimizer on host": plan(2, offload_optimizer=_CORES),
    "stage 3, parameters on host": plan(3, offload_param=_HOST, **_TRAVELLING),
    "stage 3, both on host": plan(3, offload_param=_HOST, offload_optimizer=_CORES, **_TRAVELLING),
    "stage 2, inputs on host": plan(2, activation_checkpointing={"wrap_blocks": True, "cpu_checkpointing": True}),
}
"""By name."""
