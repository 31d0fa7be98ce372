"""`Accelerator`: the interface of Hugging Face's accelerate, over the same engine as `zeroaccel.initialize`.

Its base classes hold the calls of one area each: `SettingsInForce` (settings and ranks), `TrainingLoop` (accumulation,
backward, clipping), `ModelSaving` (weights for other programs), `RunCalls` (states to resume from).
`AcceleratorArguments` combines the constructor's arguments with the launcher's settings. This module documents the
other public methods and delegates them: to `Preparation` (objects to engines), `Trackers` and `operations`.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from zeroaccel import operations
from zeroaccel.accelerate.accelerator_arguments import (
    AcceleratorArguments,
    GradientAccumulationPlugin,
    ResolvedArguments,
)
from zeroaccel.accelerate.accelerator_state import AcceleratorState, SettingsInForce
from zeroaccel.accelerate.beside_accelerate import join_accelerate, leave_accelerate
from zeroaccel.accelerate.kwargs_handlers import (
    ProfileKwargs,
    profile,
)
from zeroaccel.accelerate.model_saving import ModelSaving
from zeroaccel.accelerate.preparation import Preparation, PrepareRules, sort_objects
from zeroaccel.accelerate.prepared_optimizer import PreparedScheduler
from zeroaccel.accelerate.project import ProjectConfiguration
from zeroaccel.accelerate.run_state import RunCalls, RunSaving
from zeroaccel.accelerate.training_loop import TrainingLoop
from zeroaccel.accelerate.zero_plugin import ZeroPlugin, launched
from zeroaccel.comm.agree import agreed
from zeroaccel.config.diagnostics import names_meant
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig
from zeroaccel.data import DataLoaderConfiguration, PreparedLoader, prepare_data_loader
from zeroaccel.errors import UsageError
from zeroaccel.operations import collectives_of_process
from zeroaccel.parallel.sequence import SequenceGroup
from zeroaccel.telemetry.trackers import GeneralTracker, Trackers

_AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

F = TypeVar("F", bound=Callable[..., Any])


class Accelerator(SettingsInForce, TrainingLoop, ModelSaving, RunCalls):
    """Prepares models, optimizers, schedulers and loaders for ZeRO training, and runs backward, clipping and saving.

    Plugins and handlers may be instances of accelerate's own classes; a warning names each field that has no effect.

    Args:
        device_placement: move batches of prepared loaders to the device.
        split_batches: older spelling of `dataloader_config.split_batches`.
        mixed_precision: "no", "fp16" or "bf16". Defaults to the setting of the launcher or the config.
        gradient_accumulation_steps: micro-steps per optimizer step. Defaults to the setting of the launcher or the
            config, or 1 without either.
        cpu: compute on the CPU even if the machine has accelerators.
        dataloader_config: how loaders are sharded over the ranks.
        deepspeed_plugin: a `ZeroPlugin`, or a dict of several by name, of which the first is selected. Without it, the
            accelerator creates one if the launch requests ZeRO; otherwise it trains with plain data parallelism
            (stage 0).
        fsdp_plugin: accelerate's `FullyShardedDataParallelPlugin`; its sharding strategy and CPU offload are converted
            to a `ZeroPlugin`.
        torch_tp_plugin, megatron_lm_plugin: rejected unless all their parallel sizes are 1.
        parallelism_config: the mesh of the processes, a `ParallelConfig` or accelerate's `ParallelismConfig`. Defaults
            to the mesh of the launch.
        rng_types: random generators that are synchronized with rank 0 at the start of each epoch: "torch", "cuda",
            "numpy", "python". The sample order is always the same on all ranks.
        log_with: trackers: "tensorboard", "wandb", "all", instances of `GeneralTracker`, or a list of these.
        project_dir: folder for states and tracker files.
        project_config: project folder and further settings for saving states.
        gradient_accumulation_plugin: settings of gradient accumulation, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: False steps schedulers at every call of their `step`, also within an
            accumulation.
        kwargs_handlers: `AutocastKwargs`, `DistributedDataParallelKwargs`, `GradScalerKwargs`, `InitProcessGroupKwargs`
            and `ProfileKwargs`.
        dynamo_backend: `torch.compile` backend with which models are compiled. Defaults to the launcher's.
        dynamo_plugin: a `TorchDynamoPlugin` with the backend and further arguments of `torch.compile`.
        deepspeed_plugins: a dict of several plugins by name.
        zero_plugin: alias for `deepspeed_plugin`.
        pipeline: how models are divided into stages if `parallelism_config` has `pp`. `prepare` then returns a
            `PipelineEngine`; its `train_batch(iter(loader))` runs a whole step.
        scheduler_counts_processes: set it for scripts that count the batches of all processes. Schedulers made in code
            then step once per process at each update, and the steps of a `DummyScheduler` are divided by the number of
            processes.

    Attributes:
        state: the process, the plugins and the resolved configs; printing it shows every value with its source.
        rng_types: random generators that are synchronized with rank 0 at the start of each epoch.
        gradient_state: position within an accumulation.
        prepared: every prepared model, in order.
        dataloaders: every prepared loader, in order.

    Raises:
        ConfigError: arguments, launcher and config contradict each other, or one of them is invalid; on every rank.

    Example:
        >>> import torch
        >>> from zeroaccel import Accelerator, ZeroPlugin
        >>> accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=2), gradient_accumulation_steps=4)
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=2, shuffle=True)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for batch in loader:
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(model(batch).square().mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    @names_meant
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None,
        parallelism_config: Any = None,
        *,
        zero_plugin: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None,
        pipeline: PipelineConfig | None = None,
        scheduler_counts_processes: bool = False,
    ) -> None:
        # The arguments as data: `AcceleratorArguments` has a field of each name, and combines them with the launcher's.
        arguments = AcceleratorArguments(**{name: value for name, value in locals().items() if name != "self"})
        settings, sources = launched()
        process = arguments.join(settings)
        self.collectives = collectives_of_process()
        self._topology = self.collectives.topology
        # The launcher's variables may differ between nodes: an error on one rank raises on all ranks.
        with agreed(self.collectives, "Accelerator: settings"):
            resolved = arguments.resolve(settings, sources, self.collectives.world_size)
            logs_here, folder = self.collectives.rank == 0, resolved.project.logging_dir
            self._trackers = Trackers(resolved.log_with, folder, is_main_process=logs_here)
        self._handlers, self._mesh, self.dataloader_config = resolved.handlers, resolved.mesh, resolved.loaders
        self._sequences = SequenceGroup.of(self._topology, self._mesh.sp, stride=self._mesh.tp)
        self.device_placement, self.step_scheduler_with_optimizer = device_placement, step_scheduler_with_optimizer
        self.state = AcceleratorState(process, resolved.plugins, resolved.fallback, resolved.facts)
        if self._mesh != ParallelConfig().resolve(self.num_processes):
            self.state.parallelism_config = parallelism_config or self._mesh
        self.gradient_state = resolved.gradient_state(self.state.accumulation)
        self.rng_types = list(resolved.rng_types)
        self.dataloaders: list[PreparedLoader] = []
        self._preparation = Preparation(self.state, self.gradient_state, _rules_of(resolved), self.collectives)
        self._run = RunSaving(self.state, self.dataloaders, self.collectives, resolved.project)
        self.step = 0
        self._triggered = False
        join_accelerate(cpu=process.device.type == "cpu")

    # -- prepare

    def prepare(self, *objects: Any, device_placement: Any = None, optimizer_kind: str | None = None) -> Any:
        """Prepares models, optimizers, schedulers and loaders, in any number and order. (all ranks)

        A model with an optimizer is trained; a model without one is used for inference. Each model gets its own engine,
        configured by the currently selected plugin. Objects of other kinds are returned unchanged.

        Args:
            device_placement: a list raises an error, because the engine places parameters.
            optimizer_kind: "elementwise", "per_tensor" or "coupled". Set it if the engine should not determine the kind
                of the optimizer by trial steps.

        Returns:
            The prepared objects in the order of the arguments, as a tuple; a single object without a tuple.

        Raises:
            ConfigError: config, plugin, launcher and code contradict each other or are incomplete; on every rank.
            UsageError: the objects do not match, such as an optimizer without its model; on every rank.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(8, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
            >>> loader = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)
            >>> model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        """
        if device_placement is not None and not isinstance(device_placement, bool):
            raise UsageError(
                "prepare(device_placement)",
                expected="None or a bool, because the engine places models",
                got=device_placement,
                fix="remove it, or set Accelerator(device_placement=False) for the loaders",
            )
        kinds = sort_objects(objects)
        prepared = self._preparation.prepare(kinds, optimizer_kind)
        self._run.save_between_batches(self)
        for index, loader in kinds.loaders:
            prepared[index] = self.prepare_data_loader(loader, device_placement)
        result = [prepared.get(index, value) for index, value in enumerate(objects)]
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepares one model for inference; to train a model, pass it to `prepare` with its optimizer. (all ranks)

        Args:
            device_placement: no effect; the engine places parameters.
            evaluation_mode: no effect; a model without an optimizer is for inference.
        """
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Returns an optimizer that `prepare` has already prepared.

        Raises:
            UsageError: the optimizer was not prepared together with its model.
        """
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepares a scheduler whose optimizer is already prepared."""
        prepared: PreparedScheduler = self.prepare(scheduler)
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: None = None
    ) -> PreparedLoader:
        """Shards a loader over the ranks and moves its batches to this rank's device. (all ranks)

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
            >>> [batch.tolist() for batch in accelerator.prepare_data_loader(loader)]  # of one rank
            [[0, 1], [2, 3], [4, 5]]
        """
        if slice_fn_for_dispatch is not None:
            raise UsageError(
                "prepare_data_loader(slice_fn_for_dispatch)", expected="None, because rank 0 distributes single samples"
            )
        places = self.device_placement if device_placement is None else device_placement
        loader = prepare_data_loader(
            data_loader,
            self.dataloader_config,
            collectives=self.collectives,
            rank=self.data_parallel_rank,
            world_size=self._mesh.data_parallel_size,
            device=self.device if places else None,
            watch=self.gradient_state,
            cut=self._sequences.shard if self._mesh.sp > 1 else None,
        )
        if not any(loader is other for other in self.dataloaders):
            self.dataloaders.append(loader)
        return loader

    def verify_device_map(self, model: nn.Module) -> bool:
        """Returns True if a `device_map` placed the model on several devices, as in big-model inference."""
        places = getattr(model, "hf_device_map", None) or {}
        return len(set(places.values())) > 1

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Raises an error: LOMO updates weights inside backward, before the engine has reduced their gradients.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "accelerator.lomo_backward",
            expected="accelerator.backward(loss) and optimizer.step()",
            fix="use a stateless optimizer, such as SGD, at stage 3, which needs no more memory",
        )

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Returns the loader unchanged: prepared loaders already split sequences if the mesh has `sp`."""
        return dl

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Does nothing: the engine unscales gradients in its step and computes norms of unscaled gradients."""

    @property
    def scaler(self) -> None:
        """None: the engine holds the loss scale (`engine.loss_scale`)."""
        return None

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step of any optimizer was skipped because gradients were not finite."""
        return any(item.optimizer.step_was_skipped for item in self.prepared if item.optimizer is not None)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[None]:
        """Returns a context of mixed precision for code outside the model; the engine sets the model's precision.

        Args:
            autocast_handler: an `AutocastKwargs`. Defaults to that of `kwargs_handlers`.
        """
        handler = autocast_handler or self._handlers.autocast
        dtype = _AUTOCAST_DTYPES.get(self.mixed_precision)
        if dtype is None:
            return contextlib.nullcontext()
        # If it is not enabled, it still switches off an outer autocast.
        enabled, cached = bool(getattr(handler, "enabled", True)), getattr(handler, "cache_enabled", None)
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=cached)

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[None]:
        """Has no effect: prepared loaders split the sequences if the mesh has `sp`."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Has no effect: prepared loaders give all ranks the same number of steps, which the engine requires.

        Raises:
            UsageError: `even_batches` is False: processes with more batches would wait for the others.
        """
        if even_batches is False:
            raise UsageError(
                "join_uneven_inputs(even_batches)",
                expected="True, because all processes must take part in the collectives of every step",
                got=False,
                fix="remove it; loaders repeat samples in the last batches, and gather_for_metrics drops these",
            )
        yield

    # -- collectives: see `operations`

    def gather(self, tensor: Any) -> Any:
        """Gathers every tensor from all ranks, concatenated along dim 0. (all ranks)

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.gather({"loss": torch.tensor(0.5)})["loss"]  # (W,) of W ranks
            tensor([0.5000])
        """
        return operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers like `gather` and drops the samples that were repeated to fill the last batches. (all ranks)

        Call it in a loop over a prepared loader. Data with values other than tensors is gathered as objects: the
        result is one list of all samples if each process passes a list, else a list of the processes' data.

        Args:
            input_data: tensors or arrays with a row per sample, or lists with an item per sample, in nested dicts,
                tuples and dataclasses. A number, a 0-dim tensor or one row is a value of the process; the values of
                processes that have only repeated samples are dropped.
            use_gather_object: gather tensors as objects too; they may then differ in shape.

        Raises:
            UsageError: the loader repeated samples, and a value has neither a row per sample nor one row, or may
                mean both. Every rank raises it.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10), batch_size=4))
            >>> sum(len(accelerator.gather_for_metrics(batch % 2 == 0)) for batch in loader)
            10
        """
        if self._mesh.splits_samples:
            raise UsageError(
                "accelerator.gather_for_metrics",
                expected="a mesh in which every process has different samples",
                got=f"a mesh of {self._mesh}",
                fix="call gather(), and count samples that several processes share only once",
            )
        samples = self.gradient_state.real_samples
        return operations.gather_for_metrics(input_data, samples, use_gather_object=use_gather_object)

    def reduce(self, tensor: Any, reduction: Literal["mean", "sum", "none"] = "sum", scale: float = 1.0) -> Any:
        """Reduces every tensor to its sum or mean over the ranks. (all ranks)

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.reduce(torch.tensor([1.0, 3.0]), reduction="mean")
            tensor([1., 3.])
        """
        return operations.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pads every tensor along `dim` to the largest size of all ranks. (all ranks)"""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Makes the next `check_trigger` return True on every rank.

        Example:
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.set_trigger()  # on one rank, for example if its loss is NaN
            >>> accelerator.check_trigger()  # on every rank
            True
        """
        self._triggered = True

    def check_trigger(self) -> bool:
        """Returns True if any rank has called `set_trigger` since the last check. (all ranks)"""
        flag = torch.tensor([float(self._triggered)])
        self.collectives.all_reduce(flag, "max", "check_trigger")
        self._triggered = False
        return bool(flag.item())

    # -- trackers: see `Trackers`

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Trackers that run on this process."""
        return list(self._trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers of `log_with` on the main process, or on every process if they support it. (all ranks)

        Args:
            project_name: name of the run or project.
            config: hyperparameters that the trackers store.
            init_kwargs: tracker name -> further arguments of its constructor, e.g. `{"wandb": {"entity": "us"}}`.

        Raises:
            UsageError: `init_kwargs` names a tracker that is not in `log_with`.
        """
        with agreed(self.collectives, "init_trackers"):
            self._trackers.init(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns the tracker of that name; with `unwrap`, the object of its library.

        On a process that does not log, it returns a tracker that does nothing.
        """
        return self._trackers.get(name, unwrap)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Logs the values of one step to every tracker.

        Example:
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="runs/first")
            >>> accelerator.init_trackers("baseline", config={"lr": 1e-3})
            >>> accelerator.log({"train/loss": 0.25, "epoch": 1}, step=100)
            >>> accelerator.end_training()
        """
        self._trackers.log(values, step, log_kwargs)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Logs the images of one step to the trackers that support images."""
        self._trackers.log_images(values, step, log_kwargs)

    # -- profiling and the end

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Runs torch's profiler over a block; each rank writes `profile_<rank>.json` to `output_trace_dir`, if set."""
        return profile(profile_handler or self._handlers.profile, self.process_index, self.device)

    def free_memory(self, *objects: Any) -> list[None]:
        """Destroys every engine and drops all prepared objects; one process may call it alone.

        Returns:
            None for each argument; assign them to drop the caller's references too.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = accelerator.prepare(torch.nn.Linear(4, 1))
            >>> (model,) = accelerator.free_memory(model)
        """
        self._run.close()
        for item in self.prepared:
            item.engine.destroy()
        self.prepared.clear()
        self.dataloaders.clear()
        self.step = 0
        gc.collect()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """Same as `free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Ends the trackers, waits for all ranks, and leaves the job. (all ranks)

        Destroys the process group if zeroaccel created it.
        """
        self._end_tracking()
        self._run.close()
        self.wait_for_everyone()
        leave_accelerate()
        self.state.partial.destroy_process_group()

    def _end_tracking(self) -> None:
        with agreed(self.collectives, "end_training: trackers"):
            self._trackers.finish()

    def __repr__(self) -> str:
        return f"Accelerator({self.distributed_type.name}, {self.num_processes} processes, {self.mixed_precision})"


def _rules_of(resolved: ResolvedArguments) -> PrepareRules:
    arguments = resolved.arguments
    return PrepareRules(
        facts=resolved.facts,
        split_batches=resolved.loaders.split_batches,
        step_with_optimizer=arguments.step_scheduler_with_optimizer,
        steps_per_update=resolved.mesh.data_parallel_size if arguments.scheduler_counts_processes else 1,
        compilation=resolved.compilation,
        mesh=resolved.mesh,
        pipeline=arguments.pipeline,
    )
