"""What is known beside the config, and who said it: the model's width, the loader's batch size, arguments in code.

Faces collect `Facts`; `resolve` fills every "auto" from them. Nothing is looked up here: this module knows no model, no
loader and no environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

__all__ = ["Fact", "Facts"]

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A value and its source.

    Attributes:
        value: the value.
        source: who says so, as it reads after "from": "model.config.hidden_size", "Accelerator(...)".
        binding: somebody wrote it, so a config that says otherwise contradicts it, and a config that is silent takes
            it. False: it only fills what is "auto".
    """

    value: T
    source: str
    binding: bool = True


@dataclass(frozen=True)
class Facts:
    """All that an "auto" can be filled from; None where nobody knows.

    Attributes:
        hidden_size: width of the model, from which sizes of buckets follow.
        world_size: ranks that see different samples.
        micro_batch_size: samples per rank and micro-step: an argument, the loader's, or that of a probed batch.
        accumulation: micro-steps per optimizer step.
        clipping: largest global L2 norm of the gradients; 0 is off.
        precision: dtype to train in.
        stage: 0 to 3.
        offload_param_device, offload_optimizer_device: "none", "cpu" or "nvme".
        offload_param_path, offload_optimizer_path: folder for "nvme".
        save_16bit_weights: write the whole model in 16 bits when a model is saved.
        lr, weight_decay, betas, eps: arguments of the optimizer.
        warmup_num_steps, total_num_steps: optimizer steps of the schedule.
        training: an optimizer comes from outside the config; batch sizes are needed to train only.
    """

    hidden_size: Fact[int] | None = None
    world_size: Fact[int] | None = None
    micro_batch_size: Fact[int] | None = None
    accumulation: Fact[int] | None = None
    clipping: Fact[float] | None = None
    precision: Fact[Literal["fp32", "fp16", "bf16"]] | None = None
    stage: Fact[int] | None = None
    offload_param_device: Fact[str] | None = None
    offload_param_path: Fact[str] | None = None
    offload_optimizer_device: Fact[str] | None = None
    offload_optimizer_path: Fact[str] | None = None
    save_16bit_weights: Fact[bool] | None = None
    lr: Fact[float] | None = None
    weight_decay: Fact[float] | None = None
    betas: Fact[tuple[float, float]] | None = None
    eps: Fact[float] | None = None
    warmup_num_steps: Fact[int] | None = None
    total_num_steps: Fact[int] | None = None
    training: bool = False
