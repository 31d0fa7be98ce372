"""State of an `Accelerator`: the process's place in the job, and plugins and configs, each value with its source.

`PartialState` describes the process; `AcceleratorState` adds the plugins and every prepared model, and printing it
shows the resolved configs. Unlike in accelerate, these are ordinary objects: two accelerators share only the process
group, and `AcceleratorState()` returns the state of the newest accelerator.
"""

from __future__ import annotations

import builtins
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from zeroaccel.accelerate.kwargs_handlers import DistributedType, note
from zeroaccel.accelerate.prepared_optimizer import PreparedOptimizer, PreparedScheduler
from zeroaccel.accelerate.zero_plugin import ZeroPlugin, gather_facts
from zeroaccel.comm.environment import started_in_notebook
from zeroaccel.comm.rank_device import ACCELERATOR
from zeroaccel.comm.topology import Topology, destroy, init_process_group, meet
from zeroaccel.config import Config, Facts
from zeroaccel.config.auto_values import shown
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.data import DataLoaderConfiguration
from zeroaccel.engine import EngineBase
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.operations import collectives_of_process

PRECISION_NAMES = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}
"""Precision in a config -> value of accelerate's `mixed_precision`."""

F = TypeVar("F", bound=Callable[..., Any])


class ControlFlow:
    """The process's rank in the job, and control flow by rank."""

    _topology: Topology

    # -- ranks

    @property
    def num_processes(self) -> int:
        """Number of processes of the job (world size)."""
        return self._topology.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._topology.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self._topology.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on rank 0 of the job."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on the first rank of each node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank of the job."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """True if the job has more than one process."""
        return self.num_processes > 1

    # -- functions that run on some ranks only

    def on_main_process(self, function: F) -> F:
        """Decorates a function so that it runs on rank 0 only; on other ranks it returns None."""
        return _only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: F) -> F:
        """Decorates a function so that it runs on the first rank of each node only."""
        return _only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorates a function so that it runs on the last rank only."""
        return _only(function, lambda: self.is_last_process)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> F | Callable[[F], F]:
        """Decorates a function so that it runs on one rank only: `@on_process(process_index=1)`."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)  # type: ignore[return-value]
        return _only(function, lambda: self.process_index == self._checked(process_index))

    def on_local_process(
        self, function: F | None = None, local_process_index: int | None = None
    ) -> F | Callable[[F], F]:
        """Decorates a function so that it runs on one rank of each node only."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)  # type: ignore[return-value]
        return _only(function, lambda: self.local_process_index == local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first rank of each node only."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def _checked(self, process_index: int | None) -> int:
        if process_index is None or not 0 <= process_index < self.num_processes:
            raise UsageError("on_process: process_index", expected=f"0 to {self.num_processes - 1}", got=process_index)
        return process_index

    # -- barriers

    def wait_for_everyone(self) -> None:
        """Waits until all ranks have called it. (all ranks)"""
        collectives_of_process().barrier("wait_for_everyone")

    def main_process_first(self) -> AbstractContextManager[None]:
        """Runs the block on rank 0 before the other ranks. (all ranks)"""
        return _first(self.is_main_process, "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Runs the block on the first rank of each node before the other ranks. (all ranks)"""
        return _first(self.is_local_main_process, "local_main_process_first")

    # -- parts of a list

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Yields this rank's part of `inputs`: a list, tuple, tensor, dataset, or a mapping of these of equal lengths.

        If the length is not a multiple of the number of processes, the first ranks get one more item.

        Args:
            apply_padding: pad shorter parts to equal length by repeating their last item, or the last item of all
                inputs if the part is empty.

        Raises:
            UsageError: `inputs` has no length, or the values of a mapping have different lengths.
        """
        return nullcontext(self._part(inputs, apply_padding))

    def _part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise UsageError("split_between_processes", expected="values of equal lengths", got=lengths)
            return {key: self._part(value, apply_padding) for key, value in inputs.items()}
        if not (isinstance(inputs, Tensor) or (hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__"))):
            raise UsageError(
                "split_between_processes",
                expected="a list, tuple, tensor, dataset, or mapping",
                got=type(inputs).__name__,
            )
        size, remainder = divmod(len(inputs), self.num_processes)
        index = self.process_index
        start = index * size + min(index, remainder)
        end = start + size + (index < remainder)
        pads = apply_padding and 0 < remainder <= index
        if isinstance(inputs, Tensor):
            rows = inputs[start:end]
            return torch.cat([rows, rows[-1:] if len(rows) else inputs[-1:]]) if pads else rows
        if isinstance(inputs, (list, tuple)):
            items: Any = inputs[start:end]
            return items + (items[-1:] or inputs[-1:]) if pads else items
        positions = list(range(start, end))
        if pads:
            positions.append(end - 1 if end > start else len(inputs) - 1)
        # `datasets.Dataset.select` returns a dataset; a list comprehension would return rows as dicts.
        select = getattr(inputs, "select", None)
        return select(positions) if callable(select) else [inputs[position] for position in positions]


class PartialState(ControlFlow):
    """The process's rank and device, and control flow by rank; the constructor joins the job. (all ranks)

    Args:
        cpu: compute on the CPU with gloo, even if the machine has accelerators.
        backend, init_method, timeout: as in `InitProcessGroupKwargs`, for a process that has not joined its job yet;
            `timeout` also applies to a job that it has already joined.

    Attributes:
        device: device on which this rank computes.
        backend: torch's name of the process group backend for tensors on `device`.
        debug: the launcher's debug flag. Arguments of collectives are compared between ranks with or without it.
        fork_launched: True in a process that `notebook_launcher` or `debug_launcher` started.

    Example:
        >>> from zeroaccel import PartialState
        >>> state = PartialState(cpu=True)
        >>> with state.split_between_processes(["a", "b", "c"]) as texts:
        ...     state.print(texts)
        ['a', 'b', 'c']
    """

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        debug: bool = False,
    ) -> None:
        if init_method not in (None, "env://") and not torch.distributed.is_initialized():
            meet("gloo" if cpu else None, str(init_method), -1, -1, timeout)
        self._topology = init_process_group("gloo" if cpu else None, timeout)
        self.device: torch.device = torch.device("cpu") if cpu else self._topology.device
        self.backend: str = _backend(self._topology.backend, self.device)
        self.debug = debug
        self.fork_launched = started_in_notebook()
        if backend not in (None, "nccl", self.backend, self._topology.backend):
            note(f"backend={backend!r}", f"no effect: tensors on {self.device.type} devices use {self.backend}")

    @property
    def local_num_processes(self) -> int:
        """Number of processes on this node."""
        return self._topology.local_world_size

    @property
    def distributed_type(self) -> DistributedType:
        """Type of a job without a plugin: NO for one process, otherwise MULTI_CPU or MULTI_GPU."""
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    @property
    def initialized(self) -> bool:
        """Always True: the constructor has joined the job."""
        return True

    @property
    def default_device(self) -> torch.device:
        """Device type that jobs use by default: "cuda" if it is available, otherwise "cpu"."""
        return torch.device(ACCELERATOR.type if ACCELERATOR.module.is_available() else "cpu")

    def set_device(self) -> None:
        """Makes `device` the current device of this process."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)

    def destroy_process_group(self) -> None:
        """Leaves the job, and destroys the process group if zeroaccel created it. (all ranks)"""
        destroy()

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.name}  Backend: {self.backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


def _only(function: F, runs_here: Callable[[], bool]) -> F:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if runs_here() else None

    return cast(F, run)


@contextmanager
def _first(is_first: bool, label: str) -> Iterator[None]:
    if not is_first:
        collectives_of_process().barrier(label)
    try:
        yield
    finally:
        if is_first:  # also after an exception: the other ranks wait at their barrier
            collectives_of_process().barrier(label)


def _backend(config: str, device: torch.device) -> str:
    """Returns the backend for tensors on this device from a string such as "cpu:gloo,cuda:nccl"."""
    by_device = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return by_device.get(device.type, config)


def _shown_config(
    title: str, tree: Mapping[str, Any], sources: Mapping[str, str], like: Mapping[str, Any] | None = None
) -> str:
    """Formats a config for printing: one line per value, with its path and source.

    Args:
        title: name of the model or plugin, such as "GPT (trained)".
        sources: dotted path -> source of the value.
        like: dict whose order of keys the lines follow.
    """
    rows = [(path, shown(value), sources.get(path, "default")) for path, value in _leaves(tree, "", like)]
    key = max((len(path) for path, _, _ in rows), default=0)
    value = min(max((len(text) for _, text, _ in rows), default=0), 24)
    return "\n".join([f"Config of {title}:", *(f"  {p:<{key}}  {v:<{value}}  {source}" for p, v, source in rows)])


def _leaves(tree: Mapping[str, Any], above: str, like: Any) -> Iterator[tuple[str, Any]]:
    order = {name: place for place, name in enumerate(like)} if isinstance(like, Mapping) else {}
    for name, value in sorted(tree.items(), key=lambda item: order.get(item[0], len(order))):
        path = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path, order and like.get(name))
        else:
            yield path, value


@dataclass
class Prepared:
    """One prepared model.

    Attributes:
        engine: engine of the model.
        plugin: plugin with which the model was prepared.
        config: the resolved config, with the source of every value.
        optimizer: the prepared optimizer; None for inference.
        schedulers: the schedulers of the optimizer.
    """

    engine: EngineBase
    plugin: ZeroPlugin
    config: Config
    optimizer: PreparedOptimizer | None = None
    schedulers: list[PreparedScheduler] = field(default_factory=list)

    def __str__(self) -> str:
        """Returns the resolved config, one line per value."""
        role = "trained" if self.optimizer is not None else "inference"
        name = f"{type(self.engine.module).__name__} ({role})"
        return _shown_config(name, self.config.resolved, self.config.resolved_sources, self.config.raw)


class _Models(list[Prepared]):
    """A list that can be referred to weakly."""


class AcceleratorState:
    """Process, plugins, prepared models and their configs; printing it shows them all.

    Without arguments it is the state of the newest accelerator; without an accelerator it raises EngineStateError.

    Args:
        fallback: the plugin of plain data parallelism, used if there are no plugins.
        facts: the accelerator's own arguments.

    Attributes:
        partial: the process's state; its attributes can also be read from this object.
        fsdp_plugin, megatron_lm_plugin, torch_tp_plugin, device_mesh: always None. An FSDP plugin is converted to a
            `ZeroPlugin`.
        parallelism_config: the mesh; None if every process trains on different samples, without replicas.
        is_fsdp2, use_ipex: always False.
        plugins: name -> plugin; empty for plain data parallelism.
        prepared: every model that `prepare` has prepared, in order, as long as the accelerator exists: the newest state
            outlives it without its models.
    """

    __slots__ = ("__dict__", "_models")  # the objects that share the newest state do not hold the models
    _newest: ClassVar[dict[str, Any] | None] = None

    def __init__(
        self,
        partial: PartialState | None = None,
        plugins: Mapping[str, ZeroPlugin] | None = None,
        fallback: ZeroPlugin | None = None,
        facts: Facts | None = None,
    ) -> None:
        if partial is None or plugins is None or fallback is None or facts is None:
            if AcceleratorState._newest is None:
                raise EngineStateError(
                    "AcceleratorState()", expected="an existing Accelerator", fix="create Accelerator() first"
                )
            self.__dict__ = AcceleratorState._newest
            return
        AcceleratorState._newest = self.__dict__
        self.partial = partial
        self.plugins = dict(plugins)
        self._models = _Models()
        self._found = weakref.ref(self._models)
        self._fallback = fallback
        self._facts = facts
        self._selected = next(iter(self.plugins), None)
        self._mark_selected()

    @classmethod
    def is_there(cls) -> bool:
        """Returns True if an accelerator has created a state, which `AcceleratorState()` then returns."""
        return cls._newest is not None

    @property
    def prepared(self) -> list[Prepared]:
        models = self._found()
        return [] if models is None else models

    # -- plugins

    @property
    def deepspeed_plugin(self) -> ZeroPlugin | None:
        """Selected plugin; None for plain data parallelism."""
        return self.plugins[self._selected] if self._selected is not None else None

    zero_plugin = deepspeed_plugin

    @property
    def deepspeed_plugins(self) -> dict[str, ZeroPlugin]:
        """All plugins, by name."""
        return dict(self.plugins)

    @property
    def active_plugin(self) -> ZeroPlugin:
        """Plugin that the next `prepare` uses: the selected plugin, or that of plain data parallelism."""
        return self.deepspeed_plugin or self._fallback

    def get_deepspeed_plugin(self, name: str) -> ZeroPlugin:
        """Returns the plugin of that name."""
        if name not in self.plugins:
            names = ", ".join(map(repr, self.plugins)) or "(none: the accelerator has no plugins)"
            raise UsageError("zero plugin", expected=f"one of the names {names}", got=name)
        return self.plugins[name]

    get_zero_plugin = get_deepspeed_plugin

    def select_deepspeed_plugin(self, name: str) -> None:
        """Makes later calls of `prepare` use this plugin; prepared models keep theirs."""
        self.get_deepspeed_plugin(name)
        self._selected = name
        self._mark_selected()

    select_zero_plugin = select_deepspeed_plugin

    def _mark_selected(self) -> None:
        for name, plugin in self.plugins.items():
            plugin._select(name == self._selected)

    # -- attributes that scripts read, for features that are not available

    fsdp_plugin = None
    megatron_lm_plugin = None
    torch_tp_plugin = None
    parallelism_config: Any = None
    device_mesh = None
    is_fsdp2 = False
    use_ipex = False

    # -- configs

    @property
    def zero_config(self) -> dict[str, Any]:
        """Resolved config of the first trained model, or else of the first model, or else of the selected plugin."""
        for item in (*(each for each in self.prepared if each.optimizer is not None), *self.prepared):
            return item.engine.zero_config
        return self.active_plugin.known(self._facts)[0]

    @property
    def mixed_precision(self) -> str:
        """Precision of the first prepared model, or else of the selected plugin: "no", "fp16" or "bf16"."""
        for item in self.prepared:
            return PRECISION_NAMES[item.config.precision]
        for name in ("fp16", "bf16"):
            if self.active_plugin.get_value(f"{name}.enabled") is True:
                return name
        precision = self._facts.precision
        return "no" if precision is None else PRECISION_NAMES[precision.value]

    @property
    def accumulation(self) -> int:
        """Micro-steps per optimizer step from the selected plugin or the arguments; 1 if neither sets them."""
        fact = gather_facts(self._facts, self.active_plugin.facts()).accumulation
        configured = self.active_plugin.get_value("gradient_accumulation_steps")
        if isinstance(configured, int):
            return configured
        return 1 if fact is None else fact.value

    @property
    def distributed_type(self) -> DistributedType:
        """DEEPSPEED with a plugin, for any number of processes, because scripts test for it."""
        return DistributedType.DEEPSPEED if self.plugins else self.partial.distributed_type

    def __getattr__(self, name: str) -> Any:
        if name == "partial":
            raise AttributeError(name)
        return getattr(self.partial, name)

    def __repr__(self) -> str:
        # Scripts test for accelerate's DEEPSPEED; a person must not look for DeepSpeed.
        kind = "zeroaccel (distributed_type DEEPSPEED)" if self.plugins else self.distributed_type.name
        head = repr(self.partial).replace(
            f"Distributed environment: {self.partial.distributed_type.name} ", f"Distributed environment: {kind} ", 1
        )
        blocks = [str(item) for item in self.prepared]
        if not blocks:
            plugins = self.plugins or {"plain data parallelism": self.active_plugin}
            blocks = [
                _shown_config(name if name != "default" else plugin.title, *plugin.known(self._facts))
                for name, plugin in plugins.items()
            ]
        return "\n".join([f"{head}Mixed precision type: {self.mixed_precision}", *blocks]) + "\n"


class SettingsInForce(ControlFlow):
    """The process, the settings and the place in the mesh that scripts read from an `Accelerator`."""

    state: AcceleratorState
    dataloader_config: DataLoaderConfiguration
    _mesh: ParallelConfig

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
