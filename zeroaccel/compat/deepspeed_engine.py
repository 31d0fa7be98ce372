"""`deepspeed.initialize` and `DeepSpeedEngine`: zeroaccel's engine with DeepSpeed's names and arguments.

The engine is `zeroaccel.initialize`'s; this file adds the members that accelerate, transformers, PEFT and TRL use
beyond those it has.
"""

from __future__ import annotations

import argparse
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeroaccel.checkpoint.weights import placeholder_state_dict
from zeroaccel.compat import transformers_calls
from zeroaccel.compat.deepspeed_comm import require_process_group
from zeroaccel.compat.deepspeed_init import from_library
from zeroaccel.compat.finder import VERSION
from zeroaccel.compat.parameters import ParameterOffload, attach, marked_names
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.initialization import initialize as assemble
from zeroaccel.logs import logger
from zeroaccel.nested import map_tensors, to_device
from zeroaccel.zero.engine import Engine


class DeepSpeedEngine(Engine):
    """`Engine` with the members that libraries written for DeepSpeed use."""

    _gathered_state: tuple[int, Callable[[], dict[str, Tensor] | None]] = (0, lambda: None)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """As `Engine.backward`, but with DeepSpeed's result.

        Returns:
            `loss` divided by the accumulation steps, with `scale_wrt_gas`; not by the loss scale. `loss` itself
            where there is nothing to divide by.
        """
        super().backward(loss, retain_graph, scale_wrt_gas)
        steps = self.settings.accumulation if scale_wrt_gas else 1
        return loss / steps if steps > 1 else loss

    def load_checkpoint(  # type: ignore[override]  # DeepSpeed's result without a checkpoint has no client state
        self, load_dir: str | os.PathLike[str], tag: object = None, *args: Any, **kwargs: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As `Engine.load_checkpoint`; a folder without any checkpoint is no error. (all ranks)

        Returns:
            (the checkpoint's folder, the client state); (None, None) where no tag is given and the folder is not there
            or is empty, as a script expects that resumes if there is something.
        """
        if tag is None and all(self.collectives.gather_objects(_is_empty(load_dir), "load_checkpoint: look")):
            logger.warning("%s: no checkpoint to load; nothing is changed", os.fspath(load_dir))
            return None, None
        vars(self).pop("_gathered_state", None)  # of other weights from now on
        return super().load_checkpoint(load_dir, tag, *args, **kwargs)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """As `Engine.step`; `engine.optimizer.overflow` then tells whether the update was skipped.

        Raises:
            UsageError: `lr_kwargs` are given; a scheduler's `step` takes none here.
        """
        if lr_kwargs:
            raise UsageError("engine.step(lr_kwargs)", expected="none", got=dict(lr_kwargs))
        skipped = self.skipped_steps
        super().step()
        self.optimizer.overflow = self.skipped_steps > skipped

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.units[0].buffers[0].full.device if self.units else torch.device("cpu")

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model's forward with `torch.compile`; `compile_kwargs` are more of its arguments.

        Raises:
            UsageError: a `schedule` or compiled autograd is asked for, which is of DeepSpeed's own compiler.
        """
        for name, value in (("schedule", schedule), ("compiled_autograd_enabled", compiled_autograd_enabled)):
            if value:
                raise UsageError(f"engine.compile({name})", expected="to be left out", got=value)
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    # -- the config

    def zero_optimization_stage(self) -> int:
        return int(self.config.get("zero_optimization", {}).get("stage", 0))

    def zero_optimization(self) -> bool:
        return self.settings.plan.optimizer

    def zero_optimization_partition_weights(self) -> bool:
        return self.settings.plan.params

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: weights are gathered when they are saved, without a setting before training."""
        return True

    def fp16_enabled(self) -> bool:
        return self.settings.loss_scaled

    def bfloat16_enabled(self) -> bool:
        return bool(self.config.get("bf16", {}).get("enabled", False))

    # -- full weights

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The model's state dict on the CPU, on rank 0; elsewhere one of meta tensors, without values. (all ranks)

        DeepSpeed returns None there, in whose place `save_pretrained` reads the sharded parameters.
        """
        full = self.consolidated_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if full is None:
            full = placeholder_state_dict(self.checkpointer.state(), exclude_frozen=exclude_frozen_parameters)
        state = OrderedDict(full)
        if not exclude_frozen_parameters:
            self._gathered_state = (self.weights_version, weakref.ref(state))
        return state

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    @property
    def gathered_state(self) -> dict[str, Tensor] | None:
        """The state dict that was gathered last, while the caller keeps it and until the next update; else None."""
        version, state = self._gathered_state
        return state() if version == self.weights_version else None


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """`zeroaccel.initialize` with DeepSpeed's arguments. (all ranks)

    Args:
        args: an object whose `deepspeed_config` is the config's path, where no config is given otherwise.
        config, config_params: two names for the same; one may be given.
        distributed_port: of no effect, as for `init_distributed`.
        mpu, mesh_param: must be None.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler); what there is none of is None.
    """
    if model is None:
        raise UsageError("deepspeed.initialize(model)", expected="a torch.nn.Module", got=None)
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise UsageError(
                f"deepspeed.initialize({name})",
                expected="None",
                got=type(value).__name__,
                fix="model and sequence parallelism are not part of zeroaccel",
            )
    require_process_group("deepspeed.initialize", dist_init_required)
    source = _config_of(config, config_params, getattr(args, "deepspeed_config", None))
    if isinstance(source, Mapping):
        source = from_library(source)
        _add_leaves(source, model)
    engine, *others = assemble(
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        source,
        collate_fn=collate_fn,
        engine_type=DeepSpeedEngine,
        unknown_keys="lenient",
    )
    if engine.settings.plan.params:
        attach(engine.registry)
    transformers_calls.attach(engine)
    logger.info("DeepSpeed info: version=%s, which zeroaccel answers for", VERSION)
    if engine.optimizer is not None:
        engine.optimizer.overflow = False
        engine.optimizer.parameter_offload = ParameterOffload(model)
    return engine, *others


def _config_of(config: Any, config_params: Any, from_args: Any) -> Any:
    """The config of the one argument that has it."""
    sources = {"config": config, "config_params": config_params, "args.deepspeed_config": from_args}
    names = [name for name, value in sources.items() if value is not None]
    if len(names) != 1:
        raise ConfigError(
            "deepspeed.initialize(config)",
            expected="a config" if not names else "one config",
            got=" and ".join(names) or None,
            fix="pass a dict or a path" if not names else f"keep {names[0]} only",
        )
    return sources[names[0]]


def _add_leaves(config: dict[str, Any], model: nn.Module) -> None:
    """Modules marked by `set_z3_leaf_modules`, as the config names them."""
    if names := marked_names(model):
        leaf = config.setdefault("zero_optimization", {}).setdefault("leaf_module", {})
        leaf["names"] = [*leaf.get("names", []), *names]


def _is_empty(folder: str | os.PathLike[str]) -> bool:
    """Whether there is no such folder, or nothing in it."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError:  # load_checkpoint names it
        return False


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "config of the engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted; the engine is used where it is initialized")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="DeepSpeed-format JSON")
    return parser


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested containers whose tensors have storage of their own size, on `device`.

    Names that share a tensor, as tied weights do, share one in the copy too, so that it is written once.
    """
    clones: dict[Any, Tensor] = {}

    def cloned(tensor: Tensor) -> Tensor:
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in clones:
            clones[key] = tensor.detach().clone().to(device)
        return clones[key]

    return map_tensors(cloned, item)


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """Nested containers with their tensors on `device`."""
    return to_device(item, device)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the given ranks; on all for None or [-1]."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    selected = list(ranks) if ranks is not None else [-1]
    if -1 in selected or rank in selected:
        logger.log(level, "%s", message)
