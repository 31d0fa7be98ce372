"""Inputs and results of an estimate: plain data, without torch.

`simulate` computes the results, `plans` compares them with a `Capacity`, and the command line prints them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from zeroaccel.config.parallel import AXES, ParallelConfig
from zeroaccel.errors import UsageError

Precision = Literal["fp32", "fp16", "bf16"]
Offload = Literal["none", "cpu", "nvme"]
OptimizerName = Literal["adam", "lion", "adagrad", "momentum", "sgd"]
MomentsName = Literal["fp32", "bf16", "int8"]
FrozenWeights = Literal["", "int8", "nf4", "mxfp4", "bnb_nf4", "bnb_nf4_double"]

LIBRARY_CODES = ("bnb_nf4", "bnb_nf4_double")
"""Formats of frozen weights from bitsandbytes, the second with quantized scales; the other formats are the engine's."""

SAMPLE_AXES = ("pp", "sp", "tp")
"""Axes of a mesh whose ranks work on the same samples; `Workload` has a field for each."""
_STATES: dict[str, int] = {"adam": 2, "lion": 1, "adagrad": 1, "momentum": 1, "sgd": 0}
_MOMENTS: dict[str, tuple[str, ...]] = {"adam": get_args(MomentsName), "lion": ("fp32", "bf16")}
_MOMENTS["adagrad"] = _MOMENTS["lion"]


@dataclass(frozen=True)
class Workload:
    """Settings of a training run.

    Attributes:
        ranks: number of processes in the job.
        ranks_per_machine: number of processes per machine; None for one machine.
        precision: dtype of weights and activations; sums and masters are fp32.
        batch: samples per rank and micro-step.
        sequence: tokens per sample, for models that read tokens.
        accumulation: micro-steps per optimizer step.
        checkpointing: recompute each block in backward instead of storing its activations.
        optimizer: name of the optimizer, which determines its states.
        peer_checkpoints: save states in the memory of the machines (`checkpoint.peer`).
        residual_masters: store masters of bf16 weights as residuals (`data_types.master_weights`).
        moments_dtype: format of the states (`optimizer.params.moments_dtype`).
        early_updates: spare memory for updates in the backward (`update_during` "backward").
        ratio: share of the parameters that the host updates with `offload_optimizer`; the rest stays on the device.
        device_budget: bytes of masters and states that stay on the device with `offload_optimizer`.
        pp, sp, tp: ranks along these axes of the mesh, see `ParallelConfig`; all other ranks have different samples.
        ep: number of ranks, among those with different samples and those along `sp`, that divide each layer's experts.
        lora_rank: rank of LoRA adapters on all linear layers except the head, with all else frozen; 0 for no adapters.
        frozen_weights: format of frozen weights: `zero_optimization.frozen_weights`, or one of `LIBRARY_CODES`.

    Raises:
        UsageError: a value is invalid, the axes do not divide the ranks, or there are fewer micro-steps than the stages
            of a 1F1B schedule.

    Example:
        >>> Workload(ranks=8, tp=2).mesh.dp_shard
        4
    """

    ranks: int = 1
    ranks_per_machine: int | None = None
    precision: Precision = "bf16"
    batch: int = 1
    sequence: int = 2048
    accumulation: int = 1
    checkpointing: bool = False
    optimizer: OptimizerName = "adam"
    residual_masters: bool = False
    moments_dtype: MomentsName = "fp32"
    peer_checkpoints: bool = False
    early_updates: bool = False
    ratio: float = 1.0
    device_budget: int = 0
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    lora_rank: int = 0
    frozen_weights: FrozenWeights = ""

    def __post_init__(self) -> None:
        for name in ("ranks", "batch", "sequence", "accumulation"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"Workload.{name}", expected="a whole number of at least 1", got=value)
        local = self.ranks_per_machine
        if local is not None and (local < 1 or self.ranks % local):
            raise UsageError("Workload.ranks_per_machine", expected=f"a divisor of the {self.ranks} ranks", got=local)
        choices_of = {"precision": get_args(Precision), "optimizer": tuple(_STATES)}
        choices_of["frozen_weights"] = get_args(FrozenWeights)
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"Workload.{name}", expected=f"one of {', '.join(choices)}", got=getattr(self, name))
        if type(self.lora_rank) is not int or self.lora_rank < 0:
            raise UsageError("Workload.lora_rank", expected="a whole number, 0 for no adapters", got=self.lora_rank)
        if (self.lora_rank or self.frozen_weights) and (self.tp > 1 or self.ep > 1):
            raise UsageError(
                f"Workload.{'lora_rank' if self.lora_rank else 'frozen_weights'}",
                expected="tp 1 and ep 1: estimates do not support adapters on divided layers",
                got=f"tp {self.tp}, ep {self.ep}",
                fix="divide sequences (sp) or layers (pp) instead, or estimate the whole model",
            )
        self._check_share()
        if self.residual_masters and self.precision != "bf16":
            raise UsageError("Workload.residual_masters", expected='precision "bf16"', got=self.precision)
        formats = _MOMENTS.get(self.optimizer, ("fp32",))
        if self.moments_dtype not in formats:
            expected = f"{' or '.join(formats)} with optimizer {self.optimizer}"
            raise UsageError("Workload.moments_dtype", expected=expected, got=self.moments_dtype)
        _ = self.mesh  # raises if the axes do not divide the ranks
        if self.accumulation < self.pp:
            raise UsageError(
                "Workload.accumulation",
                expected=f"at least {self.pp} micro-steps, one for each stage of pp {self.pp} (1F1B)",
                got=self.accumulation,
            )
        if self.sequence % self.sp:
            raise UsageError("Workload.sequence", expected=f"a multiple of sp {self.sp}", got=self.sequence)

    def _check_share(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise UsageError("Workload.ratio", expected="a number from 0 to 1", got=self.ratio)
        key = "device_budget" if self.device_budget else "ratio"
        if (self.ratio < 1.0 and self.device_budget) or (self.keeps_share and self.residual_masters):
            other = "residual_masters" if self.residual_masters else "ratio"
            raise UsageError(f"Workload.{key}", expected=f"only one of {key} and {other}", got=getattr(self, key))

    @property
    def keeps_share(self) -> bool:
        """True if some masters and states stay on the device although the optimizer is offloaded."""
        return self.ratio < 1.0 or self.device_budget > 0

    def staying(self, trained: Sequence[int]) -> int:
        """Returns how many elements stay on the device: those of the first ranges that fit, as in the engine."""
        room = round((1.0 - self.ratio) * sum(trained)) if self.ratio < 1.0 else self.device_budget
        stays = 0
        for numel in trained:
            nbytes = numel if self.ratio < 1.0 else 4 * numel + self.states_nbytes(numel)
            if nbytes <= room:
                room, stays = room - nbytes, stays + numel
        return stays

    @property
    def mesh(self) -> ParallelConfig:
        """Mesh of all ranks."""
        sizes = dict(zip(SAMPLE_AXES, self.sizes, strict=True))
        return ParallelConfig.from_sizes({**sizes, "ep": self.ep}).resolve(self.ranks)

    @property
    def mesh_name(self) -> str:
        """Name of the mesh, such as "dp 4 x tp 2" or "dp 8, ep 4"."""
        sizes = {axis.removesuffix("_shard"): getattr(self.mesh, axis) for axis in AXES}
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 rank"
        return f"{product}, ep {self.ep}" if self.ep > 1 else product

    @property
    def is_plain(self) -> bool:
        """True if every rank has the whole model and its own samples."""
        return self.ep == 1 and not self.mesh.splits_samples

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that ZeRO shards over: those along `dp_shard` and `sp`, which have the same parameters."""
        return self.mesh.dp_shard * self.sp

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks along each of `SAMPLE_AXES`."""
        return tuple(getattr(self, axis) for axis in SAMPLE_AXES)

    @property
    def sample_ranks(self) -> int:
        """Number of ranks that work on the same sample."""
        return math.prod(self.sizes)

    def on_mesh(self, *sizes: int, ep: int = 1) -> Workload:
        """Returns the workload on another mesh with the same samples per step, by changing the number of micro-steps.

        Args:
            sizes: see `sizes`.
            ep: see `Workload`.
        """
        changed: dict[str, Any] = {**dict(zip(SAMPLE_AXES, sizes, strict=True)), "ep": ep}
        micro_steps = self.accumulation * math.prod(sizes) // self.sample_ranks
        return replace(self, **changed, accumulation=max(micro_steps, 1))

    @property
    def tokens(self) -> int:
        """Number of tokens per micro-step and rank with its own samples."""
        return self.batch * self.sequence

    @property
    def local_ranks(self) -> int:
        """Number of ranks that share one machine's memory and disk."""
        return self.ranks_per_machine or self.ranks

    @property
    def states_per_element(self) -> int:
        """Number of optimizer states per weight, without the master."""
        return _STATES[self.optimizer]

    def states_nbytes(self, numel: int) -> int:
        """Returns the bytes of the optimizer states of `numel` weights; a block of 32 8-bit codes has an exponent."""
        each = {"fp32": 4 * numel, "bf16": 2 * numel, "int8": numel + -(-numel // 32)}
        return self.states_per_element * each[self.moments_dtype]


@dataclass(frozen=True)
class MemoryByKind:
    """Bytes at the peak, by use.

    Attributes:
        params: bytes of weights: shards and unsharded units.
        optimizer: bytes of masters and optimizer states.
        gradients: bytes of gradients in flight and accumulated.
        activations: all other bytes: tensors for backward, temporaries, the model's buffers.
        saved: bytes of states saved in memory: two per rank, also of another machine's rank if there are several.
    """

    params: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    saved: int = 0

    @property
    def total(self) -> int:
        return self.params + self.optimizer + self.gradients + self.activations + self.saved


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank under one plan.

    Attributes:
        stage: 0 to 3.
        offload_optimizer, offload_param: device of states and of shards between uses.
        numel: number of parameters of the model, without padding.
        device: memory of the computing device at the peak of a step.
        host: host memory for offload; if the device is the CPU, in addition to `device`.
        disk: bytes in files.
        peak: phase of the step with the device's peak: "forward", "backward" or "step".
        pipeline_stage: the pipeline stage with the largest peak, to which the other fields belong.
        sent: axis of the mesh -> bytes that one rank sends along it in a step: "dp" for ZeRO's own.
    """

    stage: int
    offload_optimizer: Offload
    offload_param: Offload
    numel: int
    device: MemoryByKind
    host: MemoryByKind
    disk: MemoryByKind
    peak: str
    pipeline_stage: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the plan, such as "stage 3" or "stage 2, optimizer on cpu"."""
        parts = [f"stage {self.stage}"]
        if self.offload_optimizer != "none" and self.offload_optimizer == self.offload_param:
            return f"{parts[0]}, all on {self.offload_param}"
        parts += [f"optimizer on {self.offload_optimizer}"] if self.offload_optimizer != "none" else []
        parts += [f"parameters on {self.offload_param}"] if self.offload_param != "none" else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Capacity:
    """Memory of a machine, in bytes; the estimate ignores unknown values, which are None.

    Attributes:
        device: memory of one accelerator. None for a CPU, whose tensors are in `host`.
        host: memory of one machine.
        disk: free space for offload on one machine.
        on_cpu: True if ranks compute in host memory.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    on_cpu: bool = False
