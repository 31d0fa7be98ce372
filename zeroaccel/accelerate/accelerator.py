"""`Accelerator`: the interface of Hugging Face's accelerate, over the same engine as `zeroaccel.initialize`.

Three base classes hold the calls of one area each: `ControlFlow` (ranks), `TrainingLoop` (accumulation, backward,
clipping), `ModelSaving` (weights for other programs). This module documents the other public methods and delegates
them: to `AcceleratorState` (process, plugins, configs), `Preparation` (objects to engines), `RunSaving` (states to
resume from), `Trackers` and `operations`.
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
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from zeroaccel import operations
from zeroaccel.accelerate.accelerator_arguments import (
    GradientAccumulationPlugin,
    accumulation_of,
    apply_handlers,
    compilation_of,
    loader_settings_of,
    parallel_of,
    plugins_of,
    precision_of,
    refuse_other_parallelism,
    rng_types_of,
)
from zeroaccel.accelerate.accelerator_state import AcceleratorState, ControlFlow, PartialState, Prepared
from zeroaccel.accelerate.beside_accelerate import join_accelerate, leave_accelerate
from zeroaccel.accelerate.kwargs_handlers import (
    DistributedType,
    ProfileKwargs,
    handlers_of,
    note,
    own,
    process_group_of,
    profile,
    value_of,
)
from zeroaccel.accelerate.model_saving import ModelSaving
from zeroaccel.accelerate.preparation import Preparation, PrepareRules, sort_objects
from zeroaccel.accelerate.prepared_optimizer import GradientState, PreparedScheduler
from zeroaccel.accelerate.project import ProjectConfiguration, project_of
from zeroaccel.accelerate.run_state import LoadHook, PathLike, RunSaving, SaveHook
from zeroaccel.accelerate.training_loop import TrainingLoop
from zeroaccel.accelerate.zero_plugin import ZeroPlugin, launched
from zeroaccel.comm.agree import agreed
from zeroaccel.config import Facts
from zeroaccel.config.diagnostics import names_meant
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig, with_config_axes
from zeroaccel.data import DataLoaderConfiguration, PreparedLoader, prepare_data_loader, skip_first_batches
from zeroaccel.errors import UsageError
from zeroaccel.operations import collectives_of_process
from zeroaccel.parallel.sequence import SequenceGroup
from zeroaccel.telemetry.trackers import GeneralTracker, Trackers

_AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

F = TypeVar("F", bound=Callable[..., Any])


class Accelerator(ControlFlow, TrainingLoop, ModelSaving):
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
        settings, sources = launched()
        joining = process_group_of(kwargs_handlers or ())
        partial = PartialState(
            cpu or bool(settings.use_cpu),
            backend=joining.backend,
            init_method=joining.init_method,
            timeout=joining.timeout,
            debug=bool(settings.debug),
        )
        self.collectives = collectives_of_process()
        self._topology = self.collectives.topology
        # The launcher's variables may differ between nodes: an error on one rank raises on all ranks.
        with agreed(self.collectives, "Accelerator: settings"):
            handlers = handlers_of(kwargs_handlers or ())
            refuse_other_parallelism(torch_tp_plugin=torch_tp_plugin, megatron_lm_plugin=megatron_lm_plugin)
            accumulation = GradientAccumulationPlugin()
            if gradient_accumulation_plugin is not None:
                where = "Accelerator(gradient_accumulation_plugin)"
                accumulation = own(GradientAccumulationPlugin, gradient_accumulation_plugin, where)
            facts = Facts(
                accumulation=accumulation_of(gradient_accumulation_steps, accumulation),
                precision=precision_of(mixed_precision, settings, sources),
            )
            plugins = plugins_of([deepspeed_plugin, deepspeed_plugins, fsdp_plugin, zero_plugin], settings)
            mesh = parallel_of(parallelism_config, settings)
            # A stage 0 plugin is created only if nothing requests ZeRO: it would contradict a launch that does.
            fallback = next(iter(plugins.values())) if plugins else ZeroPlugin(zero_stage=0)
            mesh = with_config_axes(fallback.document(), mesh) or mesh
            mesh = mesh.resolve(self.collectives.world_size)
            apply_handlers(handlers, plugins, fallback)
            compilation = compilation_of(dynamo_backend, settings, sources, dynamo_plugin)
            self.dataloader_config = loader_settings_of(dataloader_config, split_batches)
            shared_generators = rng_types_of(rng_types)
            if project_config is not None:
                project_config = own(ProjectConfiguration, project_config, "Accelerator(project_config)")
            project = project_of(project_dir, project_config)
            trackers = (
                [value_of(one) for one in log_with] if isinstance(log_with, (list, tuple)) else value_of(log_with)
            )
            self._trackers = Trackers(trackers, project.logging_dir, is_main_process=self.collectives.rank == 0)
        self._handlers = handlers
        self._mesh = mesh
        self._sequences = SequenceGroup.of(self.collectives.topology, mesh.sp, stride=mesh.tp)
        self.device_placement = device_placement
        self.dataloaders: list[PreparedLoader] = []
        self.state = AcceleratorState(partial, plugins, fallback, facts)
        if mesh != ParallelConfig().resolve(self.num_processes):
            self.state.parallelism_config = parallelism_config or mesh
        self.gradient_state = GradientState(
            self.state.accumulation,
            adjust_scheduler=accumulation.adjust_scheduler,
            sync_with_dataloader=accumulation.sync_with_dataloader,
            sync_each_batch=accumulation.sync_each_batch,
            shared_generators=shared_generators,
        )
        self.rng_types = list(shared_generators)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        rules = PrepareRules(
            facts=facts,
            split_batches=self.dataloader_config.split_batches,
            step_with_optimizer=step_scheduler_with_optimizer,
            steps_per_update=mesh.data_parallel_size if scheduler_counts_processes else 1,
            compilation=compilation,
            mesh=mesh,
            pipeline=pipeline,
        )
        self._preparation = Preparation(self.state, self.gradient_state, rules, self.collectives)
        self.step = 0
        self._run = RunSaving(self.state, self.dataloaders, self.collectives, project)
        self._triggered = False
        join_accelerate(cpu=partial.device.type == "cpu")

    # -- the process: see `PartialState`

    @property
    def device(self) -> torch.device:
        """Device on which this process computes."""
        return self.state.partial.device

    @property
    def multi_device(self) -> bool:
        """True if the job has more than one process."""
        return self.use_distributed

    @property
    def distributed_type(self) -> DistributedType:
        """DEEPSPEED with a plugin; otherwise NO, MULTI_CPU or MULTI_GPU."""
        return self.state.distributed_type

    # -- attributes that scripts read, for features that are not available

    fp8_backend = None
    torch_device_mesh = None
    is_fsdp2 = False
    is_composable_parallelism_enabled = False

    # -- settings

    @property
    def prepared(self) -> list[Prepared]:
        """Every prepared model, in order."""
        return self.state.prepared

    @property
    def mixed_precision(self) -> str:
        """Training precision: "no", "fp16" or "bf16"."""
        return self.state.mixed_precision

    @property
    def deepspeed_plugin(self) -> ZeroPlugin | None:
        """The selected plugin; None for plain data parallelism."""
        return self.state.deepspeed_plugin

    zero_plugin = deepspeed_plugin

    @property
    def zero_config(self) -> dict[str, Any]:
        """Resolved config of the first trained model, or of the first model if no model is trained.

        Before `prepare`, it is the selected plugin's config; values that depend on a model or a loader are then still
        "auto".
        """
        return self.state.zero_config

    deepspeed_config = zero_config

    @property
    def split_batches(self) -> bool:
        """True if each batch of a loader is divided among the processes."""
        return self.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """True if all processes get the same number of batches."""
        return self.dataloader_config.even_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if rank 0 reads all batches and sends them; None does so for iterable datasets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """True if the sample order of an epoch depends only on the seed and the epoch's number."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Value from `dataloader_config`; every prepared loader has `state_dict` and `load_state_dict`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """True if loaders copy batches to the device asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def should_save_model(self) -> bool:
        """True on rank 0, which writes the model files."""
        return self.is_main_process

    @property
    def native_amp(self) -> bool:
        """True if models are trained in mixed precision."""
        return self.mixed_precision != "no"

    @property
    def parallelism_config(self) -> Any:
        """Mesh from the argument or the launch; None if every process trains on different samples."""
        return self.state.parallelism_config

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process among the processes that train on different samples."""
        return self._mesh.data_parallel_rank(self.process_index)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process along the `dp_shard` axis, within its replica."""
        return self._mesh.coordinates(self.process_index)["dp_shard"]

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this process along the `tp` axis: the part of each layer that it computes."""
        return self._mesh.coordinates(self.process_index)["tp"]

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this process along the `pp` axis: its pipeline stage."""
        return self._mesh.coordinates(self.process_index)["pp"]

    @property
    def context_parallel_rank(self) -> int:
        """Index of this process along the `sp` axis: the part of each sequence that it processes."""
        return self._mesh.coordinates(self.process_index)["sp"]

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

    # -- states to resume from: see `RunSaving`

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Settings of the project: its folders and the number of states to keep."""
        return self._run.project

    @property
    def project_dir(self) -> str | None:
        """Folder for states."""
        return self._run.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder for tracker files."""
        return self._run.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next state, with automatic naming."""
        return self._run.project.iteration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Adds objects to every state, in the order of the calls.

        Args:
            objects: objects with `load_state_dict()` and a `state_dict()` of plain data and tensors. Every rank saves
                the state of its own objects.

        Raises:
            UsageError: an object lacks one of the methods, or is already registered.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(4, 1))
            >>> accelerator.register_for_checkpointing(average)
        """
        for obj in objects:
            self._run.register(obj)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Registers `hook(models, weights, folder)`, which is called on every rank before a state is saved.

        `weights` is empty because the weights are sharded; call `accelerator.get_state_dict(model)` to gather them.
        """
        return self._run.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Registers `hook(models, folder)`, which is called on every rank before a state is loaded."""
        return self._run.add_load_hook(hook)

    def save_state(
        self, output_dir: PathLike | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Saves everything that a resumed run needs: models, optimizers, schedulers, loader positions, random
        generators and registered objects. (all ranks)

        Args:
            output_dir: a folder that all ranks share; an existing state in it is replaced. Defaults to the next
                numbered folder of the project; the oldest states above `total_limit` are then removed.
            safe_serialization: must be True; nothing is pickled.
            save_model_func_kwargs: arguments of DeepSpeed's `save_checkpoint`. `exclude_frozen_parameters=True` raises
                an error; the others have no effect, and a warning names them.

        Returns:
            The folder.

        Raises:
            CheckpointError: the state cannot be written; on every rank.
            UsageError: an object has a state that is not plain data and tensors, or no folder is configured.
            EngineStateError: an accumulation is unfinished; saving would lose its gradients.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> model = torch.nn.Linear(4, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            >>> folder = accelerator.save_state("runs/first/epoch_1")
        """
        if not safe_serialization:
            raise UsageError(
                "save_state(safe_serialization)", expected="True: states are never pickled", got=safe_serialization
            )
        if save_model_func_kwargs.pop("exclude_frozen_parameters", False):
            raise UsageError(
                "save_state(exclude_frozen_parameters)",
                expected="False, because resuming needs all weights",
                got=True,
                fix="remove it, or call engine.save_checkpoint(folder, exclude_frozen_parameters=True)",
            )
        for name in save_model_func_kwargs:
            note(f"save_state({name}=...)", "no effect: a state is always saved as one complete folder")
        return self._run.save(output_dir, self.step)

    def load_state(
        self,
        input_dir: PathLike | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Resumes from a state. Prepare and register the same objects first. (all ranks)

        Loaders continue after the last batch that they yielded. Start the loop over epochs at `dataloader.epoch`.

        Args:
            input_dir: folder of the state. Defaults to the newest complete state of the project or in memory.
            load_kwargs, load_model_func_kwargs: arguments of torch's and DeepSpeed's loading functions. They have no
                effect, and a warning names them.

        Returns:
            The folder.

        Raises:
            CheckpointError: the state is missing or damaged, or does not match this run; on every rank.

        Example:
            >>> import torch
            >>> from zeroaccel import Accelerator, ProjectConfiguration
            >>> project = ProjectConfiguration("runs/second", automatic_checkpoint_naming=True)
            >>> accelerator = Accelerator(project_config=project)
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=2))
            >>> folder = accelerator.save_state()
            >>> accelerator.load_state() == folder
            True
            >>> for epoch in range(loader.epoch, 3):
            ...     for batch in loader:
            ...         pass
        """
        for name in (*(load_kwargs or {}), *load_model_func_kwargs):
            note(f"load_state({name}=...)", "no effect: weights are read into their shards, other state by its name")
        folder, self.step = self._run.load(input_dir)
        return folder

    def resume(self) -> str | None:
        """Loads the newest state of the project or in memory, as `load_state()`. (all ranks)

        Returns:
            The folder; None without a state.
        """
        found = self._run.resume()
        if found is None:
            return None
        folder, self.step = found
        return folder

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Returns `dataloader` with each of its epochs starting at batch `num_batches`.

        Not needed after `load_state`, which restores loader positions; using both skips no batch twice.
        """
        return skip_first_batches(dataloader, num_batches)

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
