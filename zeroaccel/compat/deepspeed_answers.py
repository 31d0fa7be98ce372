"""Members of a `DeepSpeedEngine` that only answer: ranks, devices and values of the config."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from zeroaccel.compat.deepspeed_comm import get_local_rank
from zeroaccel.compat.surface import ABSENT_MEMBERS, QUESTIONS
from zeroaccel.config import Config, load_config
from zeroaccel.config.diagnostics import at
from zeroaccel.engine import EngineBase
from zeroaccel.zero.from_config import DTYPES


class DeepSpeedAnswers(EngineBase):
    """The members of DeepSpeed's engine that return a rank, a device or a value of the config."""

    # -- devices and ranks

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.units[0].buffers[0].full.device if self.units else torch.device("cpu")

    @property
    def local_rank(self) -> int:
        """Rank among the ranks on this machine."""
        return get_local_rank()

    @property
    def global_rank(self) -> int:
        return self.collectives.job.rank

    @property
    def world_size(self) -> int:
        return self.collectives.job.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that see different samples."""
        return self.collectives.world_size

    @property
    def data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return self.collectives.rank

    @property
    def mp_world_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return 1 if self.collectives.parts is None else self.collectives.parts.world_size

    def get_model_parallel_rank(self) -> int:
        return 0 if self.collectives.parts is None else self.collectives.parts.rank

    # -- the config

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config, as a plain dict."""
        return self.zero_config

    def zero_optimization_stage(self) -> int:
        return int(self.config.get("zero_optimization", {}).get("stage", 0))

    def zero_optimization(self) -> bool:
        return self.settings.plan.optimizer

    def zero_optimization_partition_gradients(self) -> bool:
        return self.settings.plan.grads

    def zero_optimization_partition_weights(self) -> bool:
        return self.settings.plan.params

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns True: saves gather the weights, without a setting before training."""
        return True

    def zero_cpu_offload(self) -> bool:
        section = self._checked_config.zero_optimization.offload_optimizer
        return section is not None and section.device == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        section = self._checked_config.zero_optimization.offload_optimizer
        return section is not None and section.device in ("cpu", "nvme")

    def fp16_enabled(self) -> bool:
        return self.settings.loss_scaled

    def log_level(self) -> str | None:
        """Returns the config's `log_level` unchanged; None if the config has none."""
        level = self.config.get("log_level")
        return None if level is None else str(level)

    def dynamic_loss_scale(self) -> bool:
        """True if the config requests a dynamic scale; also without fp16, like DeepSpeed."""
        return float(self.config.get("fp16", {}).get("loss_scale", 0.0)) == 0.0

    def optimizer_name(self) -> str | None:
        """Returns the class name of a passed optimizer, or the config's type in lower case; None for inference."""
        section = self._checked_config.optimizer
        if self.optimizer is None:
            return None
        configured = None if section is None else section.type
        return type(self.optimizer).__name__ if configured is None else configured.lower()

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns (samples per step, samples per rank and forward, micro-batches per step)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def torch_autocast_dtype(self) -> torch.dtype:
        """Returns the dtype of the forward with `torch_autocast`."""
        return DTYPES[self._checked_config.torch_autocast.dtype]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns (dtype of the model, dtype of the gradients' sum over micro-steps)."""
        config = self._checked_config
        summed = config.data_types.grad_accum_dtype
        model = DTYPES[config.precision]
        return model, self.settings.rules.accumulation_dtype or (model if summed is None else DTYPES[summed])

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype in which gradients are reduced."""
        config = self._checked_config
        return DTYPES[config.communication_data_type or config.precision]

    def get_mom(self) -> list[Any]:
        """Returns momentum or betas of each param group; None for a group without either."""
        groups = self._require_optimizer("get_mom").optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_type(self) -> list[Any]:
        """Returns the "type" of each param group; None for a group without one."""
        return [group.get("type") for group in self._require_optimizer("get_type").optimizer.param_groups]

    @cached_property
    def _checked_config(self) -> Config:
        """Config with all defaults."""
        return load_config(self.config, unknown_keys="lenient")

    def __getattr__(self, name: str) -> Any:
        if name in QUESTIONS:
            return lambda: at(self._checked_config, QUESTIONS[name])
        if name in ABSENT_MEMBERS:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(
                    f"engine.{name}: zeroaccel provides deepspeed here, but not this name; {ABSENT_MEMBERS[name]}"
                )
        return super().__getattr__(name)
