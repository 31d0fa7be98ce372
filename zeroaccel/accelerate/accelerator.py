"""`Accelerator`: the face in the manner of Hugging Face's accelerate, over the same engine as `zeroaccel.initialize`.

It knows the process, the plugins and what was prepared, and is put together from mixins, one for each of what scripts
call it for: `TrainingLoop`, `ModelSaving`, `RunSaving`, `RunTracking`, `ProcessControl`. Two accelerators share
nothing but the process group.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from zeroaccel import operations
from zeroaccel.accelerate.accelerator_state import (
    AcceleratorState,
    ConfigView,
    DistributedType,
    GradientState,
    PartialState,
)
from zeroaccel.accelerate.compilation import compilation_of
from zeroaccel.accelerate.dummies import DummyScheduler
from zeroaccel.accelerate.launched import launched
from zeroaccel.accelerate.matching import Sorted, pair, sort
from zeroaccel.accelerate.model_saving import ModelSaving
from zeroaccel.accelerate.preparation import Prepared, PrepareRules, check_same_objects, prepare_job, schedule_facts
from zeroaccel.accelerate.prepared_optimizer import PreparedOptimizer
from zeroaccel.accelerate.prepared_scheduler import PreparedScheduler
from zeroaccel.accelerate.process_control import ProcessControl
from zeroaccel.accelerate.profiler import ProfileKwargs, profile
from zeroaccel.accelerate.run_saving import RunSaving
from zeroaccel.accelerate.run_tracking import RunTracking
from zeroaccel.accelerate.training_loop import TrainingLoop
from zeroaccel.accelerate.zero_plugin import ZeroPlugin, gather_facts
from zeroaccel.comm.agree import agreed
from zeroaccel.config import Fact, Facts
from zeroaccel.config.launch.launch_sources import LaunchedSettings
from zeroaccel.data import DataLoaderConfiguration, PreparedLoader, prepare_data_loader
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.operations import collectives_of_process
from zeroaccel.project import ProjectConfiguration

__all__ = ["Accelerator", "GradientAccumulationPlugin"]

_PRECISIONS: Mapping[str, Literal["fp32", "fp16", "bf16"]] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
_NAMES = {precision: name for name, precision in _PRECISIONS.items()}

# kwargs handler of accelerate's -> what does its work here
_INSTEAD_OF = {
    "AutocastKwargs": "pass it to accelerator.autocast(...)",
    "DistributedDataParallelKwargs": "leave it out: parameters that a step does not use are noticed without it",
    "FP8RecipeKwargs": 'leave it out: there is no 8-bit training; use mixed_precision="bf16"',
    "GradScalerKwargs": "set loss_scale, initial_scale_power and the like in the config's fp16 section",
    "InitProcessGroupKwargs": "start with `zeroaccel launch --timeout SECONDS`, or make the process group before",
}


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Attributes:
        num_steps: micro-steps per update; None leaves it to the config or the launcher.
        adjust_scheduler: kept for scripts that read it; schedules count updates.
        sync_with_dataloader: the last batch of a loader updates, however many micro-steps came before.
        sync_each_batch: reduce gradients in every micro-step, where they are whole: less memory, more traffic.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


class Accelerator(TrainingLoop, ModelSaving, RunSaving, RunTracking, ProcessControl):
    """Prepares models, optimizers, schedules and loaders for ZeRO training, and stands beside the training loop.

    Args:
        device_placement: loaders put batches on the device.
        mixed_precision: "no", "fp16" or "bf16"; by default what the launcher or the config says.
        gradient_accumulation_steps: micro-steps per update; by default what the launcher or the config says, else 1.
        cpu: compute on the CPU although there are accelerators.
        dataloader_config: how loaders are dealt out.
        deepspeed_plugin: a `ZeroPlugin`, or several by name; the first is selected. Without one there is one if the
            launcher asks for ZeRO; else training is plain data parallelism, which is stage 0.
        zero_plugin: another name for it.
        log_with: trackers: "tensorboard", "wandb", "all", instances of `GeneralTracker`, or a list of these.
        project_dir: where states and what trackers write go.
        project_config: the same, with more to choose.
        deepspeed_plugins: several by name.
        gradient_accumulation_plugin: instead of the number.
        step_scheduler_with_optimizer: False makes every call of a schedule's `step` count.
        kwargs_handlers: a `ProfileKwargs`.
        dynamo_backend: compile models with this backend of `torch.compile`; by default what the launcher says.
        scheduler_counts_processes: schedules given in code move once per process at each update, and the steps of a
            `DummyScheduler` are divided by the processes: for scripts that count the batches of all processes.

    Attributes:
        state: the process, the plugins, the resolved configs; printing it shows every value with its source.
        gradient_state: where training stands between two updates.
        prepared: every model that went through `prepare`, in order.

    Raises:
        ConfigError: arguments, launcher and config say different things, or one of them is wrong; on every rank.
    """

    def __init__(
        self,
        device_placement: bool = True,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        deepspeed_plugins: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None,
        *,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        zero_plugin: ZeroPlugin | Mapping[str, ZeroPlugin] | None = None,
        dynamo_backend: str | None = None,
        scheduler_counts_processes: bool = False,
    ) -> None:
        settings, sources = launched()
        partial = PartialState(cpu or bool(settings.use_cpu), debug=bool(settings.debug))
        self.collectives = collectives_of_process()
        with agreed(self.collectives, "Accelerator: settings"):
            accumulation = _accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
            precision = _precision(mixed_precision, settings, sources)
            plugins = _plugins([deepspeed_plugin, deepspeed_plugins, zero_plugin], settings)
            compilation = compilation_of(dynamo_backend, settings, sources)
            self._profile_settings = _profile_settings(kwargs_handlers or ())
            self._start_saving(project_dir, project_config)
            self._start_tracking(log_with, self.logging_dir)
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        self.device_placement = device_placement
        self._facts = Facts(accumulation=accumulation, precision=precision)
        self._rules = PrepareRules(
            facts=self._facts,
            split_batches=self.dataloader_config.split_batches,
            scheduler_follows=step_scheduler_with_optimizer,
            compilation=compilation,
            per_update=partial.num_processes if scheduler_counts_processes else 1,
        )
        self.prepared: list[Prepared] = []
        self.dataloaders: list[PreparedLoader] = []
        self.step = 0
        # Made only where nobody asks for ZeRO: it would contradict a launch that does.
        plain = next(iter(plugins.values())) if plugins else ZeroPlugin(zero_stage=0)
        self.state = AcceleratorState(partial, plugins, plain, self._views, self._precision_now)
        handling = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self.gradient_state = GradientState(
            adjust_scheduler=handling.adjust_scheduler,
            sync_with_dataloader=handling.sync_with_dataloader,
            sync_each_batch=handling.sync_each_batch,
        )
        self.gradient_state.num_steps = self._accumulation_now()
        self._triggered = False

    # -- who and where

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.state.partial.device

    @property
    def num_processes(self) -> int:
        """Processes of the job, over all machines."""
        return self.state.partial.num_processes

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.state.partial.process_index

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self.state.partial.local_process_index

    @property
    def distributed_type(self) -> DistributedType:
        """DEEPSPEED with a plugin; else NO, MULTI_CPU or MULTI_GPU."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one process."""
        return self.use_distributed

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16": what models are trained in."""
        return self.state.mixed_precision

    @property
    def deepspeed_plugin(self) -> ZeroPlugin | None:
        """The selected plugin; None for plain data parallelism."""
        return self.state.deepspeed_plugin

    zero_plugin = deepspeed_plugin

    @property
    def zero_config(self) -> dict[str, Any]:
        """The resolved config of the first model that is trained, else of the first.

        Before `prepare` the selected plugin's, in which "auto" is what only a model or a loader can tell.
        """
        for item in (*(each for each in self.prepared if each.optimizer is not None), *self.prepared):
            return item.engine.zero_config
        return self.state.active_plugin.known(self._facts)[0]

    deepspeed_config = zero_config

    @property
    def split_batches(self) -> bool:
        """Whether a batch of a loader is divided among the processes."""
        return self.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get equally many batches."""
        return self.dataloader_config.even_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all; None: where a dataset is only iterable."""
        return self.dataloader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of an epoch is drawn from the seed and its number alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    # -- prepare

    def prepare(self, *objects: Any, device_placement: Any = None, optimizer_kind: str | None = None) -> Any:
        """Models, optimizers, schedules and loaders, in any number and order; anything else comes back as it is.

        A model with its optimizer is trained, one without is for inference. Each model has its own engine, under the
        plugin that is selected now. (all ranks)

        Args:
            device_placement: refused as a list: where parameters are is the engine's matter.
            optimizer_kind: "elementwise", "per_tensor" or "coupled", of the optimizers among the objects, where the
                engine is not to find out by trying what their rules look at.

        Returns:
            What was prepared of each object, in their order; a single one bare.

        Raises:
            ConfigError: config, plugin, launcher and code say different things, or too little; on every rank.
            UsageError: an optimizer without its model, and the like; on every rank.
        """
        if device_placement is not None and not isinstance(device_placement, bool):
            raise UsageError(
                "prepare(device_placement)",
                expected="nothing: the engine places what it prepares",
                got=device_placement,
                fix="remove it, or set Accelerator(device_placement=False) for the loaders",
            )
        result = list(objects)
        found = sort(objects)
        with agreed(self.collectives, "prepare: objects"):
            jobs, late = pair(found, [item.engine for item in self.prepared])
            schedules = schedule_facts(jobs, late)
        check_same_objects(jobs, [value for _, value in (*late, *found.loaders)], schedules, self.collectives)
        for job in jobs:
            plugin = self.state.active_plugin
            given = [loader for _, loader in found.loaders if not isinstance(loader, PreparedLoader)]
            item = prepare_job(job, given, plugin, self._rules, self.gradient_state, self.collectives, optimizer_kind)
            if item.optimizer is not None:
                self._accumulate_as(item)
                result[job.optimizer_at] = item.optimizer
            self.prepared.append(item)
            result[job.model_at] = item.engine
            for (index, _), scheduler in zip(job.schedulers, item.schedulers, strict=True):
                result[index] = scheduler
        for index, scheduler in late:
            result[index] = self._late_scheduler(scheduler)
        self._prepare_loaders(found, result, device_placement)
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """One model, for inference. A model that is trained is prepared together with its optimizer.

        Args:
            device_placement: has nothing to say: where parameters are is the engine's matter.
            evaluation_mode: likewise: a model without an optimizer is for inference.
        """
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Not to be called, but for an optimizer that is prepared already, which is returned.

        Raises:
            UsageError: an optimizer is prepared together with its model, which is laid out for it.
        """
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """A schedule of an optimizer that is prepared already."""
        prepared: PreparedScheduler = self.prepare(scheduler)
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: None = None
    ) -> PreparedLoader:
        """This process's part of a loader, on its device. (all ranks)"""
        if slice_fn_for_dispatch is not None:
            raise UsageError(
                "prepare_data_loader(slice_fn_for_dispatch)", expected="nothing: samples are dealt one by one"
            )
        places = self.device_placement if device_placement is None else device_placement
        loader = prepare_data_loader(
            data_loader,
            self.dataloader_config,
            collectives=self.collectives,
            device=self.device if places else None,
            watch=self.gradient_state,
        )
        if not any(loader is other for other in self.dataloaders):
            self.dataloaders.append(loader)
        return loader

    def _prepare_loaders(self, found: Sorted, result: list[Any], device_placement: bool | None) -> None:
        for index, loader in found.loaders:
            result[index] = self.prepare_data_loader(loader, device_placement)

    def _late_scheduler(self, scheduler: Any) -> PreparedScheduler:
        inner = (
            scheduler.optimizer.optimizer if isinstance(scheduler.optimizer, PreparedOptimizer) else scheduler.optimizer
        )
        assert not isinstance(scheduler, DummyScheduler), "pairing refuses it"
        item = next(item for item in self.prepared if item.optimizer is not None and item.optimizer.optimizer is inner)
        assert item.optimizer is not None, "it was found by its optimizer"
        wrapper = PreparedScheduler(
            scheduler,
            item.optimizer,
            self.gradient_state,
            with_optimizer=self._rules.scheduler_follows,
            per_update=self._rules.per_update,
        )
        item.schedulers.append(wrapper)
        return wrapper

    # -- collectives

    def gather(self, tensor: Any) -> Any:
        """Every tensor of all processes, strung together along dim 0. (all ranks)"""
        return operations.gather(tensor)

    def reduce(self, tensor: Any, reduction: Literal["mean", "sum", "none"] = "sum", scale: float = 1.0) -> Any:
        """Every tensor's sum or mean over the processes. (all ranks)"""
        return operations.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Every tensor padded along `dim` to the largest of all processes. (all ranks)"""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Asks all processes for something, which each learns by `check_trigger`."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last check. (all ranks)"""
        flag = torch.tensor([float(self._triggered)])
        self.collectives.all_reduce(flag, "max", "check_trigger")
        self._triggered = False
        return bool(flag.item())

    # -- the end, and looking on

    @contextlib.contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """torch's profiler around a block; with `output_trace_dir`, each process writes `profile_<rank>.json` there."""
        with profile(profile_handler or self._profile_settings, self.process_index, self.device) as running:
            yield running

    def free_memory(self, *objects: Any) -> list[None]:
        """Takes every engine off its model and forgets all that was prepared. (all ranks)

        Returns:
            None for each argument: `model = accelerator.free_memory(model)[0]` drops the caller's names too.
        """
        for item in self.prepared:
            item.engine.destroy()
        self.prepared.clear()
        self.dataloaders.clear()
        self.step = 0
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Ends the trackers, waits for everyone, and leaves the job. (all ranks)

        The process group is closed if zeroaccel made it.
        """
        self._end_tracking()
        self.wait_for_everyone()
        self.state.partial.destroy_process_group()

    def __repr__(self) -> str:
        return f"Accelerator({self.distributed_type.name}, {self.num_processes} processes, {self.mixed_precision})"

    # -- what is known now

    def _views(self) -> list[ConfigView]:
        if self.prepared:
            return [item.view() for item in self.prepared]
        plugins = self.state.plugins or {"plain data parallelism": self.state.active_plugin}
        return [
            ConfigView(name if name != "default" else plugin.title, *plugin.known(self._facts))
            for name, plugin in plugins.items()
        ]

    def _precision_now(self) -> str:
        for item in self.prepared:
            return _NAMES[item.config.precision]
        plugin = self.state.active_plugin
        for name in ("fp16", "bf16"):
            if plugin.get_value(f"{name}.enabled") is True:
                return name
        known = self._facts.precision
        return "no" if known is None else _NAMES[known.value]

    def _accumulation_now(self) -> int:
        plugin = self.state.active_plugin
        known = gather_facts(self._facts, plugin.facts()).accumulation
        configured = plugin.get_value("gradient_accumulation_steps")
        return configured if isinstance(configured, int) else 1 if known is None else known.value


def _accumulation(steps: int | None, plugin: GradientAccumulationPlugin | None) -> Fact[int] | None:
    if plugin is not None and plugin.num_steps is not None:
        if steps is not None:
            raise UsageError(
                "Accelerator(gradient_accumulation_steps, gradient_accumulation_plugin)",
                expected="one of the two",
                fix="leave the number out",
            )
        steps, who = plugin.num_steps, "GradientAccumulationPlugin(num_steps"
    else:
        who = "Accelerator(gradient_accumulation_steps"
    if steps is None:
        return None
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"{who})", expected="a whole number of at least 1", got=steps)
    return Fact(steps, f"{who}={steps})")


def _precision(
    given: str | None, settings: LaunchedSettings, sources: Mapping[str, str]
) -> Fact[Literal["fp32", "fp16", "bf16"]] | None:
    """What code and launcher say; a launcher's "no" that nobody wrote is nobody's word."""
    facts = []
    said = settings.mixed_precision
    for name, who, explicit in (
        (given, f"Accelerator(mixed_precision={given!r})", True),
        (
            said,
            sources.get("mixed_precision", ""),
            said != "no" or not sources["mixed_precision"].startswith(("env", "default")),
        ),
    ):
        if name is None:
            continue
        if str(name).lower() not in _PRECISIONS:
            fix = "there is no 8-bit training; use bf16" if str(name).lower() == "fp8" else ""
            raise ConfigError(f"{who}: mixed_precision", expected='"no", "fp16" or "bf16"', got=name, fix=fix)
        facts.append(Facts(precision=Fact(_PRECISIONS[str(name).lower()], who, explicit)))
    return gather_facts(*facts).precision


def _plugins(
    given: Sequence[ZeroPlugin | Mapping[str, ZeroPlugin] | None], settings: LaunchedSettings
) -> dict[str, ZeroPlugin]:
    said = [value for value in given if value is not None]
    if len(said) > 1:
        raise ConfigError(
            "Accelerator(deepspeed_plugin, deepspeed_plugins, zero_plugin)", expected="one of them", got=len(said)
        )
    if not said:
        asks = settings.use_zero or settings.deepspeed_config_file is not None or settings.zero_stage is not None
        return {"default": ZeroPlugin()} if asks else {}
    plugins = dict(said[0]) if isinstance(said[0], Mapping) else {"default": said[0]}
    for name, plugin in plugins.items():
        if not isinstance(plugin, ZeroPlugin):
            raise ConfigError(f"Accelerator: plugin {name!r}", expected="a ZeroPlugin", got=type(plugin).__name__)
    if not plugins:
        raise ConfigError("Accelerator(deepspeed_plugins)", expected="at least one plugin", got={})
    return plugins


def _profile_settings(handlers: Sequence[Any]) -> ProfileKwargs:
    chosen = ProfileKwargs()
    for handler in handlers:
        if not isinstance(handler, ProfileKwargs):
            name = type(handler).__name__
            fix = _INSTEAD_OF.get(name, "set what it says in the config")
            raise UsageError("Accelerator(kwargs_handlers)", expected="a ProfileKwargs", got=name, fix=fix)
        chosen = handler
    return chosen
