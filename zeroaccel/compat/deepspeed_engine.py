"""`deepspeed.initialize` and `DeepSpeedEngine`: zeroaccel's engine with DeepSpeed's names and arguments.

`zeroaccel.initialize` builds the engine; this module adds the members that accelerate, transformers, PEFT and TRL use
beyond the engine's own.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeroaccel.accelerate.pretrained_saving import adapter_names
from zeroaccel.checkpoint.find import has_checkpoints
from zeroaccel.checkpoint.weights import placeholder_state_dict
from zeroaccel.comm.agree import agreed
from zeroaccel.compat import loss_scale_members, trainer_states, transformers_calls
from zeroaccel.compat.assertions import asserting
from zeroaccel.compat.deepspeed_answers import DeepSpeedAnswers
from zeroaccel.compat.deepspeed_calls import MonitorMaster, StepThroughput, check_expert_marks, note_expert_groups
from zeroaccel.compat.deepspeed_checkpoints import plain_client_state
from zeroaccel.compat.deepspeed_comm import require_process_group
from zeroaccel.compat.deepspeed_config import from_library, with_clipping
from zeroaccel.compat.deepspeed_pipe import PipelineModule
from zeroaccel.compat.finder import VERSION
from zeroaccel.compat.leaf_modules import mark_configured, mark_parameters, marked_names
from zeroaccel.compat.parameters import ParameterOffload, attach, watch_gradients
from zeroaccel.config.document import Document
from zeroaccel.config.parallel import ParallelConfig, with_config_axes
from zeroaccel.data import build_dataloader
from zeroaccel.engine import Engine, EngineBase, require_loss
from zeroaccel.errors import ConfigError, EngineStateError, UsageError, listed
from zeroaccel.initialization import start
from zeroaccel.logs import log_always, logger
from zeroaccel.parallel.pipeline_engine import PipelineEngine
from zeroaccel.setup.job import JobSpec
from zeroaccel.zero.access.param_registry import handle_of
from zeroaccel.zero.from_config import LoopRules
from zeroaccel.zero.module_names import plain_names


class DeepSpeedMembers(DeepSpeedAnswers):
    """The members that scripts and libraries written for DeepSpeed use of any engine.

    Attributes:
        training_dataloader: loader of `training_data`; None without training data.
    """

    training_dataloader: DataLoader[Any] | None = None
    _postpones_updates = False
    _is_step_due = False
    _gathered_state: tuple[int, Callable[[], dict[str, Tensor] | None]] = (0, lambda: None)
    _loss_is_scaled = False

    # -- the training step

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `EngineBase.run_forward`, and starts the throughput timer in training."""
        if self.training and (timer := vars(self).get("tput_timer")) is not None:
            timer.start()
        return super().run_forward(*args, **kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        """Returns `loss` times the loss scale, for a plain `backward()` in place of `engine.backward(loss)`.

        Raises:
            UsageError: `loss` is not a scalar with a gradient.
            EngineStateError: the engine has no optimizer.
        """
        require_loss(loss, "engine.scale(loss)")
        self._require_optimizer("scale")
        self._loss_is_scaled = True
        return loss * self.loss_scale.value if self.loss_scale.value != 1.0 else loss

    def _begin_backward(self, *, direct: bool) -> None:
        # `Engine` assumes that a plain backward under fp16 misses the loss scale.
        is_scaled, self._loss_is_scaled = self._loss_is_scaled, False
        super()._begin_backward(direct=direct and not is_scaled)
        self._step.is_direct = direct

    @cached_property
    def _refuses_unused(self) -> bool:
        # DeepSpeed does not check at stages 0 and 3 either.
        plan = self.settings.plan
        return (
            plan.optimizer and not plan.params and not self._checked_config.zero_optimization.ignore_unused_parameters
        )

    def _check_all_used(self) -> None:
        """Raises UsageError on all ranks if a parameter had no gradient in this step on any rank. (all ranks)"""
        buffers = [(gradients.written, gradients.buffer) for gradients in self.grad_reducer.gradients]
        unused = [slot.fqn for seen, b in buffers for i, slot in enumerate(b.layout.slots) if i not in seen]
        with agreed(self.collectives, "zero_optimization.ignore_unused_parameters"):
            if unused:
                raise UsageError(
                    "zero_optimization.ignore_unused_parameters false",
                    expected="a gradient for every parameter",
                    got=f"none for {listed(sorted(unused))}",
                    fix="set it to true, or freeze parameters that the loss does not depend on",
                )

    def run_step(self) -> None:
        """Runs `EngineBase.run_step`, and sets `engine.optimizer.overflow` to True if the update was skipped.

        Raises:
            UsageError: a parameter had no gradient while `zero_optimization.ignore_unused_parameters` is false; no
                parameter was updated.
        """
        if self._refuses_unused and self._step.num_backwards and self.is_gradient_accumulation_boundary():
            self._check_all_used()
        skipped, steps = self.skipped_steps, self.global_steps
        self._is_step_due = False
        super().run_step()
        if (timer := vars(self).get("tput_timer")) is not None:
            timer.stop(global_step=self.global_steps > steps)
        self.optimizer.overflow = self.skipped_steps > skipped

    @contextmanager
    def postponing_updates(self) -> Iterator[None]:
        """Makes `step()` at a boundary only examine the gradients, and leave the update to `finish_step()`.

        accelerate updates inside its `backward`. Until the loop calls `optimizer.step()`, it may read gradients and
        norm, as with DDP.
        """
        self._postpones_updates = True
        try:
            yield
        finally:
            self._postpones_updates = False

    def _postpone_step(self) -> None:
        self._require_gradients("step")
        self._check_gradients(norm=self.settings.compute_norm or self.settings.clipping > 0)
        self._is_step_due = True

    def finish_step(self) -> None:
        """Runs the update that `step()` postponed, if there is one. (all ranks)"""
        if self._is_step_due:
            self.run_step()

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm like `EngineBase.get_global_grad_norm`; before a postponed update, of its gradients."""
        check = None if self._boundary is None else self._boundary.check
        if not self._is_step_due or check is None:
            return super().get_global_grad_norm()
        stats = self._require_boundary("step").read(check, self.global_steps)
        return stats.unscaled_norm(self.loss_scale.value)

    def count_micro_step(self) -> None:
        """Counts like `Engine.count_micro_step`, but increases `global_samples` by whole steps, like DeepSpeed."""
        if not self.settings.managed_accumulation and self._step.boundary is None:  # counts backwards, like DeepSpeed
            super().count_micro_step()
            return
        samples = self.train_batch_size() if self.is_gradient_accumulation_boundary() else 0
        before = self.global_samples
        super().count_micro_step()
        self.global_samples = before + samples

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduces the gradients of several backwards together if gradients are not sharded; equals `no_sync`."""
        return self.no_sync()

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Does nothing: backward reduces gradients, and `step` reduces the rest."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Sets the samples per step by changing the number of micro-batches. (all ranks, between steps)

        Raises:
            UsageError: the size is not a multiple of the micro-batch times the data-parallel ranks.
            EngineStateError: an accumulation is not finished.
        """
        per_micro_step = self.train_micro_batch_size_per_gpu() * self.collectives.world_size
        if train_batch_size < per_micro_step or train_batch_size % per_micro_step:
            raise UsageError(
                "engine.set_train_batch_size",
                expected=f"a multiple of {per_micro_step}, the samples of all ranks in a micro-batch",
                got=train_batch_size,
            )
        self._require_between_steps("set_train_batch_size")
        self.settings = replace(self.settings, accumulation=train_batch_size // per_micro_step)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Sets the samples per rank and forward; keeps the micro-batches per step. (all ranks, between steps)"""
        if micro_batch_size < 1:
            raise UsageError("engine.set_train_micro_batch_size", expected="at least 1", got=micro_batch_size)
        self._require_between_steps("set_train_micro_batch_size")
        self.settings = replace(self.settings, micro_batch_size=micro_batch_size)

    def _require_between_steps(self, call: str) -> None:
        if self.has_gradients:
            raise EngineStateError(f"engine.{call}()", expected="a call between steps")

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the model's forward with `torch.compile`; `compile_kwargs` are additional arguments.

        Raises:
            UsageError: a `schedule` or compiled autograd is requested, options of DeepSpeed's own compiler.
        """
        for name, value in (("schedule", schedule), ("compiled_autograd_enabled", compiled_autograd_enabled)):
            if value:
                raise UsageError(f"engine.compile({name})", expected="no such argument", got=value)
        super().compile(backend=backend, **(compile_kwargs or {}))

    # Lightning's Fabric steps the engine in place of its optimizer if the engine has these optimizer members.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups."""
        return self._optimizer_member("param_groups")  # type: ignore[no-any-return]

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's defaults."""
        return self._optimizer_member("defaults")  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self._optimizer_member("state")

    def _optimizer_member(self, name: str) -> Any:
        if self.optimizer is None:
            raise AttributeError(f"{name}: not available on an engine without an optimizer")
        return getattr(self.optimizer, name)

    @property
    def is_compiled(self) -> bool:
        """True if the model is compiled as a whole, by `compile` or by the config's section."""
        return self.module._compiled_call_impl is not None

    def is_deepcompile_enabled(self) -> bool:
        """Returns False: `compile` uses torch.compile."""
        return False

    # -- data and reports

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Creates a loader of this rank's part of a dataset.

        Args:
            batch_size: by default the engine's micro-batch size.
            route: "train" shuffles; "eval" and "predict" do not.
            pin_memory: no effect without CUDA.
            data_sampler: chooses the indices; it must divide them between the ranks.
            num_local_io_workers: number of loader processes; by default, this process loads.
        """
        size, workers = batch_size or self.train_micro_batch_size_per_gpu(), num_local_io_workers or 0
        pinned = pin_memory and torch.cuda.is_available()
        if data_sampler is not None:
            return DataLoader(
                dataset,
                size,
                sampler=data_sampler,
                collate_fn=collate_fn,
                num_workers=workers,
                pin_memory=pinned,
                drop_last=self._checked_config.dataloader_drop_last,
            )
        return build_dataloader(
            dataset,
            size,
            self.collectives.rank,
            self.collectives.world_size,
            collate_fn,
            self._checked_config.dataloader_drop_last,
            shuffle=route == "train",
            num_workers=workers,
            pin_memory=pinned,
        )

    @property
    def monitor(self) -> MonitorMaster:
        """Writes (name, value, samples) events to the config's monitors, in addition to the engine's own."""
        return MonitorMaster(self._report.monitors)

    @cached_property
    def tput_timer(self) -> StepThroughput:
        """Samples per second from a forward to its step; starts at the first access.

        Both ends wait for the device, so the engine measures nothing before that.
        """
        return StepThroughput(None, batch_size=self.train_batch_size())

    # -- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool | None = None,
    ) -> bool:
        """Saves like `Engine.save_checkpoint`, into rank 0's folder if the ranks name different ones. (all ranks)

        Scripts may derive the folder's name from each rank's clock. Inside an accumulation, the checkpoint omits the
        gradients so far. `plain_client_state` converts `client_state` to plain data.
        """
        # `Engine.save_checkpoint` refuses other types by name.
        folder = os.fspath(save_dir) if isinstance(save_dir, (str, os.PathLike)) else ""
        folders = self.collectives.job.gather_objects(folder, "save_checkpoint: folder")
        if len(set(folders)) > 1:
            logger.warning("save_checkpoint: the ranks name different folders; all use that of rank 0, %s", folders[0])
        plain = plain_client_state(client_state) if isinstance(client_state, Mapping) else client_state
        return super().save_checkpoint(folders[0], tag, plain, save_latest, exclude_frozen_parameters)

    def load_checkpoint(  # type: ignore[override]  # DeepSpeed's result without a checkpoint has no client state
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads like `Engine.load_checkpoint`; a folder without a checkpoint is not an error. (all ranks)

        Args:
            custom_load_fn: must be None: weights are read into shards, without a state dict to pass to it.

        Returns:
            (folder of the checkpoint, client state); (None, None) if no tag is given and the folder is missing or
            contains neither `latest` nor a checkpoint, for scripts that resume only if there is a checkpoint.
        """
        if custom_load_fn is not None:
            raise UsageError(
                "engine.load_checkpoint(custom_load_fn)",
                expected="None, since weights are read into shards",
                got=custom_load_fn,
                fix="read the weights with deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint, "
                "change them, and pass them to engine.load_module_state_dict",
            )
        found = tag is not None or has_checkpoints(Path(load_dir))
        if tag is None and not any(self.collectives.job.gather_objects(found, "load_checkpoint: look")):
            logger.warning("%s: no checkpoint to load; the engine is unchanged", os.fspath(load_dir))
            return None, None
        vars(self).pop("_gathered_state", None)  # no longer matches the weights
        return super().load_checkpoint(
            load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Returns the state dict; at stage 3, sharded parameters have shape (0,) outside `GatheredParameters`."""
        arguments = {} if destination is None else {"destination": destination}
        state: dict[str, Any] = self.state_dict(prefix=prefix, keep_vars=keep_vars, **arguments)
        if exclude_frozen_parameters:
            plain = plain_names(self.module)
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + plain(name), None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Loads `checkpoint["module"]`, a state dict of the model, into shards and master weights. (all ranks)

        Args:
            custom_load_fn: called with `src` and `dst` instead of the model's `load_state_dict`.
            fetch_z3_params: no effect: sharded parameters take their values without being gathered.
        """
        state = checkpoint["module"]
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.load_state_dict(state, strict=strict)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Calls `save_16bit_model`; an older name. (all ranks)"""
        return self.save_16bit_model(save_dir, save_filename)

    def empty_partition_cache(self) -> None:
        """Frees gathered parameters that await their use, and the device memory that torch caches. (all ranks)"""
        self._coordinator.end_step()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- full weights

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Returns the model's state dict on the CPU of rank 0; elsewhere meta tensors, without values. (all ranks)

        DeepSpeed returns None there, and `save_pretrained` would read the sharded parameters instead.
        """
        # transformers excludes frozen parameters for an adapter, but PEFT also saves resized embeddings, for example.
        engine_state = self.checkpointer.state()
        also = adapter_names(engine_state) if exclude_frozen_parameters else frozenset()
        full = self.checkpointer.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters, also=also)
        if full is None:
            full = placeholder_state_dict(engine_state, exclude_frozen=exclude_frozen_parameters, also=also)
        state = OrderedDict(full)
        if not exclude_frozen_parameters:
            self._gathered_state = (self.weights_version, weakref.ref(state))
        return state

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    @property
    def gathered_state(self) -> dict[str, Tensor] | None:
        """Last gathered state dict, while the caller keeps it and until the next update; otherwise None."""
        version, state = self._gathered_state
        return state() if version == self.weights_version else None


class _EngineKind(type(EngineBase)):  # type: ignore[misc]
    """Makes every engine an instance of `DeepSpeedEngine`, which libraries test to unwrap models."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, EngineBase)


class DeepSpeedEngine(DeepSpeedMembers, Engine, metaclass=_EngineKind):
    """`Engine` with DeepSpeed's members and results."""

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs `Engine.backward`, but returns DeepSpeed's result.

        Returns:
            With `scale_wrt_gas`, `loss` divided by the accumulation steps, without the loss scale; `loss` itself if
            there is nothing to divide by.
        """
        super().backward(loss, retain_graph, scale_wrt_gas)
        steps = self.settings.accumulation if scale_wrt_gas else 1
        return loss / steps if steps > 1 else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Runs `Engine.step`, and sets `engine.optimizer.overflow` to True if the update was skipped.

        Raises:
            UsageError: `lr_kwargs` are passed; a scheduler's `step` takes no arguments here.
        """
        if lr_kwargs:
            raise UsageError("engine.step(lr_kwargs)", expected="none", got=dict(lr_kwargs))
        if self._postpones_updates and self.is_gradient_accumulation_boundary():
            self._postpone_step()
        else:
            super().step()


class DeepSpeedPipelineEngine(PipelineEngine, DeepSpeedMembers):
    """`PipelineEngine` with DeepSpeed's members, for a `PipelineModule`."""

    def is_pipe_parallel(self) -> bool:
        """Returns True: `train_batch` runs the stages."""
        return True

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Sets the loader that `train_batch()` cycles through without an iterator."""
        self._loader, self._own_batches = loader, None

    def reset_activation_shape(self) -> None:
        """Does nothing: the engine detects a new shape of batches."""


def _after_due_step(call: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a postponed update before `call`, for loops that call `accelerator.backward` and no `optimizer.step`."""

    @functools.wraps(call)
    def finishing(engine: DeepSpeedMembers, *args: Any, **kwargs: Any) -> Any:
        if engine._is_step_due:
            transformers_calls.update_in_backward(engine)
            engine.finish_step()
        return call(engine, *args, **kwargs)

    return finishing


for _call in (
    *("run_forward", "_begin_backward", "zero_grad", "state_dict", "load_state_dict", "destroy", "load_checkpoint"),
    *("save_checkpoint", "save_model", "save_16bit_model", "consolidated_state_dict", "_consolidated_16bit_state_dict"),
    "_zero3_consolidated_16bit_state_dict",
):
    setattr(DeepSpeedMembers, _call, _after_due_step(getattr(DeepSpeedMembers, _call)))
for _engine in (DeepSpeedEngine, DeepSpeedPipelineEngine):
    for _call in ("forward", "backward", "step", "train_batch", "eval_batch", "save_checkpoint", "load_checkpoint"):
        if hasattr(_engine, _call):
            setattr(_engine, _call, asserting(getattr(_engine, _call)))


@asserting
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
) -> tuple[DeepSpeedMembers, Any, DataLoader[Any] | None, Any]:
    """Calls `zeroaccel.initialize` with DeepSpeed's arguments. (all ranks)

    Args:
        args: an object whose `deepspeed_config`, or `deepscale_config` (its oldest name), is the config's path, if no
            other argument has the config.
        optimizer: replaces the config's `optimizer` section.
        lr_scheduler: replaces the config's `scheduler` section.
        config, config_params: two names of the same argument; pass at most one.
        distributed_port: no effect, as for `init_distributed`.
        mpu: its `get_sequence_parallel_world_size` sets the number of ranks that share a sequence; other axes must not
            be split.
        mesh_param: must be None.

    Returns:
        (engine, optimizer, dataloader, lr_scheduler); items that were not created are None.
    """
    if model is None:
        raise UsageError("deepspeed.initialize(model)", expected="a torch.nn.Module", got=None)
    if mesh_param is not None:
        raise UsageError(
            "deepspeed.initialize(mesh_param)",
            expected="None",
            got=mesh_param,
            fix="call zeroaccel.initialize(mesh=) with a DeviceMesh",
        )
    require_process_group("deepspeed.initialize", dist_init_required)
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    source = _batch_of_samplers(_config_of(config, config_params, from_args))
    source = _with_arguments(source, model, optimizer, lr_scheduler)
    source = with_clipping(source, has_optimizer=optimizer is not None)
    check_expert_marks(model)
    _take_over(model)
    plan, engine = start(
        JobSpec(
            model,
            optimizer,
            model_parameters,
            lr_scheduler,
            training_data,
            collate_fn,
            source,
            engine_type=DeepSpeedPipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine,
            unknown_keys="lenient",
            parallel=_parallel_of(mpu, model),
            pipeline=model.pipeline_config() if isinstance(model, PipelineModule) else None,
            loop=LoopRules(empty_when_sharded=True, saves_within_accumulation=True, resumes=trainer_states.are_asked()),
        )
    )
    assert isinstance(engine, DeepSpeedMembers), "the requested engine_type"
    _ENGINES.add(engine)
    mark_configured(model, engine._checked_config)
    mark_parameters(model)
    if engine.settings.plan.params:
        attach(engine.registry)
    watch_gradients()
    transformers_calls.attach(engine)
    trainer_states.attach(engine)
    note_expert_groups(engine.optimizer)
    loss_scale_members.attach(engine)
    engine.training_dataloader = plan.loader
    log_always(f"DeepSpeed info: version={VERSION}, git-hash=unknown, git-branch=unknown")
    if engine.optimizer is not None:
        engine.optimizer.overflow = False
        engine.optimizer.parameter_offload = ParameterOffload(model)
    return engine, engine.optimizer, plan.loader, engine.lr_scheduler


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Returns the model unchanged: `initialize` splits it, by `tensor_parallel.autotp_size` of its config.

    Args:
        tp_size: compared with the config, if one is passed.
        dtype: no effect, since the config of `initialize` sets the precision.
        kwargs: must be None: `initialize` creates the groups, and `ParallelConfig` has the plans.

    Raises:
        UsageError: the config has another size, or a further argument is not None.
    """
    for name, value in kwargs.items():
        if value is not None:
            raise UsageError(f"deepspeed.tp_model_init({name})", expected="None", got=value, fix="remove this argument")
    parallel = None if config is None else with_config_axes(from_library(config).tree, None)
    if config is not None and tp_size != (1 if parallel is None else parallel.tp):
        raise UsageError(
            "deepspeed.tp_model_init(tp_size)",
            expected="tensor_parallel.autotp_size of its config",
            got=tp_size,
            fix="pass the same in both",
        )
    return model


_ENGINES: weakref.WeakSet[DeepSpeedMembers] = weakref.WeakSet()


def _take_over(model: object) -> None:
    """Destroys earlier engines that hold parameters of `model`, unless they have unapplied gradients. (all ranks)

    Lightning calls `initialize` for each of fit, validate, test and predict, and destroys no engine.
    """
    params = model.parameters() if isinstance(model, nn.Module) else []
    handles = [handle for param in params if (handle := handle_of(param)) is not None]
    registries = {id(handle.registry) for handle in handles}
    for engine in [engine for engine in _ENGINES if id(engine.registry) in registries and not engine.has_gradients]:
        logger.warning("deepspeed.initialize(model): destroys an earlier engine of this model, and its optimizer")
        engine.destroy()
        _ENGINES.discard(engine)


def _batch_of_samplers(config: Document) -> Document:
    """Corrects a total batch size that a library computed over all ranks to the ranks with different samples.

    accelerate and transformers fill "auto" in this way, even if ranks share layers. Other values remain unchanged.
    """
    tree = config.tree
    parallel = with_config_axes(tree, None)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (tree.get(name) for name in names)
    if parallel is None or not (isinstance(total, int) and isinstance(micro, int) and isinstance(steps, int)):
        return config
    if total != micro * steps * torch.distributed.get_world_size():
        return config
    return replace(config, tree={**tree, "train_batch_size": total // (parallel.tp * parallel.sp)})


def _parallel_of(mpu: Any, model: nn.Module) -> ParallelConfig | None:
    """Returns the mesh that an object like Megatron's `mpu` describes, or the stages of a `PipelineModule`.

    Returns None if the program passes neither; the launcher's sizes then apply.
    """
    if isinstance(model, PipelineModule):
        if mpu is not None:
            raise UsageError("deepspeed.initialize(mpu)", expected="None with a PipelineModule", got=type(mpu).__name__)
        return ParallelConfig(pp=model.num_stages)
    if mpu is None:
        return None
    split = ("model", "tensor_model", "pipeline", "pipeline_model", "pipe")
    sizes = {
        name: size()
        for name in (f"get_{axis}_parallel_world_size" for axis in (*split, "sequence"))
        if callable(size := getattr(mpu, name, None))
    }
    if not sizes:
        raise UsageError(
            "deepspeed.initialize(mpu)",
            expected="an object with get_sequence_parallel_world_size or get_model_parallel_world_size",
            got=type(mpu).__name__,
        )
    sequence = sizes.pop("get_sequence_parallel_world_size", 1)
    for name, size in sizes.items():
        if size > 1:
            raise UsageError(
                "deepspeed.initialize(mpu)",
                expected="ranks that hold the whole model, or share sequences",
                got=f"{size} ranks by {name}",
                fix="split the model over a DeviceMesh, and call zeroaccel.initialize(mesh=)",
            )
    return ParallelConfig(sp=sequence)


def _config_of(config: Any, config_params: Any, from_args: Any) -> Document:
    """Returns the config from the only argument that has it."""
    sources = {"config": config, "config_params": config_params, "args.deepspeed_config": from_args}
    names = [name for name, value in sources.items() if value is not None]
    if len(names) != 1:
        raise ConfigError(
            "deepspeed.initialize(config)",
            expected="a config" if not names else "one config",
            got=" and ".join(names) or None,
            fix="pass a dict or a path" if not names else f"keep {names[0]} only",
        )
    return from_library(sources[names[0]])


def _with_arguments(config: Document, model: nn.Module, optimizer: Any, lr_scheduler: Any) -> Document:
    """Applies the other arguments to the config.

    Adds marked leaf modules to the config's. Removes the sections of an optimizer and a scheduler that are passed in,
    since DeepSpeed ignores them.
    """
    leaves = marked_names(model)
    settings = config.tree
    for section, passed in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        if passed is not None and (settings.get(section) or {}).get("type") is not None:
            logger.warning("%s: ignores the config's section, since initialize got one as an argument", section)
            settings[section] = {key: value for key, value in settings[section].items() if key == "kind"} or None
    if leaves:
        leaf = settings.setdefault("zero_optimization", {}).setdefault("leaf_module", {})
        leaf["names"] = [*leaf.get("names", []), *leaves]
    return config
