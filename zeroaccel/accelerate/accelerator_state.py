"""State of an `Accelerator`: the process's place in the job, and plugins and configs, each value with its source.

`PartialState` knows the process, `AcceleratorState` adds the plugins and every prepared model; printing the latter
shows the resolved configs. Unlike accelerate's these are ordinary objects: two accelerators share the process group
only, and `AcceleratorState()` is that of the newest.
"""

from __future__ import annotations

import builtins
import functools
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
from zeroaccel.comm.rank_device import ACCELERATOR
from zeroaccel.comm.topology import Topology, destroy, init_process_group, meet
from zeroaccel.config import Config, Facts
from zeroaccel.config.auto_values import shown
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.operations import collectives_of_process
from zeroaccel.zero.engine_base import EngineBase

PRECISION_NAMES = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}
"""Precision of a config -> `mixed_precision` as accelerate spells it."""

F = TypeVar("F", bound=Callable[..., Any])


class ControlFlow:
    """A process's place in the job, and control flow by rank."""

    _topology: Topology

    # -- ranks

    @property
    def num_processes(self) -> int:
        """World size of the job."""
        return self._topology.world_size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self._topology.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its node."""
        return self._topology.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the job."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    # -- functions that run on some ranks only

    def on_main_process(self, function: F) -> F:
        """Decorator: the function runs on rank 0 and returns None elsewhere."""
        return _only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: F) -> F:
        """Decorator: the function runs on the first rank of each node."""
        return _only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorator: the function runs on the last rank."""
        return _only(function, lambda: self.is_last_process)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> F | Callable[[F], F]:
        """Decorator: the function runs on one rank; `@on_process(process_index=1)`."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)  # type: ignore[return-value]
        return _only(function, lambda: self.process_index == self._checked(process_index))

    def on_local_process(
        self, function: F | None = None, local_process_index: int | None = None
    ) -> F | Callable[[F], F]:
        """Decorator: the function runs on one rank of each node."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)  # type: ignore[return-value]
        return _only(function, lambda: self.local_process_index == local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the first rank of each node."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def _checked(self, process_index: int | None) -> int:
        if process_index is None or not 0 <= process_index < self.num_processes:
            raise UsageError("on_process: process_index", expected=f"0 to {self.num_processes - 1}", got=process_index)
        return process_index

    # -- barriers

    def wait_for_everyone(self) -> None:
        """A barrier. (all ranks)"""
        collectives_of_process().barrier("wait_for_everyone")

    def main_process_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block before the other ranks. (all ranks)"""
        return _first(self.is_main_process, "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The first rank of each node runs the block before the others. (all ranks)"""
        return _first(self.is_local_main_process, "local_main_process_first")

    # -- parts of a list

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """This rank's part of `inputs`: a list, tuple, tensor, dataset, or a mapping of these of equal lengths.

        The first ranks get one item more where the length is not a multiple of the number of processes.

        Args:
            apply_padding: shorter parts repeat their last item (of all inputs, if they have none), so that all parts
                are equally long.

        Raises:
            UsageError: it has no length, or a mapping's values have different ones.
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
        # `datasets.Dataset.select` gives a dataset, where a list comprehension would give rows as dicts.
        select = getattr(inputs, "select", None)
        return select(positions) if callable(select) else [inputs[position] for position in positions]


class PartialState(ControlFlow):
    """This process's place in the job, which it joins when this is made, and control flow by rank. (all ranks)

    Args:
        cpu: compute on the CPU, with gloo, also where there are accelerators.
        backend, init_method, timeout: as of `InitProcessGroupKwargs`, where the process has not joined its job yet; a
            timeout changes the limit of a job that it has joined, too.

    Attributes:
        device: on which this rank computes.
        backend: of the process group for tensors of that device, as torch names it.
        debug: the launcher's debug flag; arguments of collectives are always compared between the ranks.

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
        if backend not in (None, "nccl", self.backend, self._topology.backend):
            note(f"backend={backend!r}", f"tensors of {self.device.type} devices travel on {self.backend}")

    @property
    def local_num_processes(self) -> int:
        """Processes on this node."""
        return self._topology.local_world_size

    @property
    def distributed_type(self) -> DistributedType:
        """Without a plugin: NO for one process, else by device."""
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    @property
    def initialized(self) -> bool:
        """True: a state that exists has joined the job."""
        return True

    @property
    def default_device(self) -> torch.device:
        """The kind of device that jobs compute on by default: "cuda" where there is one, else "cpu"."""
        return torch.device(ACCELERATOR.type if ACCELERATOR.module.is_available() else "cpu")

    def set_device(self) -> None:
        """Makes `device` the current one of this process."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)

    def destroy_process_group(self) -> None:
        """Leaves the job; the process group is closed if zeroaccel made it. (all ranks)"""
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
        if is_first:  # also after an exception, or the other ranks would wait for this one
            collectives_of_process().barrier(label)


def _backend(config: str, device: torch.device) -> str:
    """The one of "cpu:gloo,cuda:nccl" that tensors of this device travel on."""
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)


def _shown_config(
    title: str, tree: Mapping[str, Any], sources: Mapping[str, str], like: Mapping[str, Any] | None = None
) -> str:
    """A config for printing: a line per value, with its path and source.

    Args:
        title: whose config: "GPT (trained)", or a plugin's name.
        sources: dotted path -> where the value came from.
        like: a dict whose order of keys is followed.
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
        engine: of the model.
        plugin: with which it was prepared.
        config: resolved, with the source of every value.
        optimizer: None for inference.
        schedulers: of its optimizer.
    """

    engine: EngineBase
    plugin: ZeroPlugin
    config: Config
    optimizer: PreparedOptimizer | None = None
    schedulers: list[PreparedScheduler] = field(default_factory=list)

    def __str__(self) -> str:
        """The resolved config."""
        role = "trained" if self.optimizer is not None else "inference"
        name = f"{type(self.engine.module).__name__} ({role})"
        return _shown_config(name, self.config.resolved, self.config.resolved_sources, self.config.raw)


class AcceleratorState:
    """Process, plugins, prepared models and their configs; `print` shows all of it.

    Without arguments it is the state of the newest accelerator: EngineStateError where there is none.

    Args:
        fallback: the plugin of plain data parallelism, in use where there are no plugins.
        facts: the accelerator's own arguments.

    Attributes:
        partial: the process's place in the job, whose attributes are this object's too.
        fsdp_plugin, megatron_lm_plugin, torch_tp_plugin, device_mesh: None: an engine has a plugin of ZeRO, which those
            of FSDP become.
        parallelism_config: the mesh; None where all processes see different samples of one group.
        is_fsdp2, use_ipex: False.
        plugins: name -> plugin; empty for plain data parallelism.
        prepared: every model that went through `prepare`, in order.
    """

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
                    "AcceleratorState()", expected="an Accelerator, whose state this is", fix="make Accelerator() first"
                )
            self.__dict__ = AcceleratorState._newest
            return
        AcceleratorState._newest = self.__dict__
        self.partial = partial
        self.plugins = dict(plugins)
        self.prepared: list[Prepared] = []
        self._fallback = fallback
        self._facts = facts
        self._selected = next(iter(self.plugins), None)
        self._mark_selected()

    @classmethod
    def is_there(cls) -> bool:
        """Whether an accelerator has made a state, which `AcceleratorState()` is."""
        return cls._newest is not None

    # -- plugins

    @property
    def deepspeed_plugin(self) -> ZeroPlugin | None:
        """The selected plugin; None for plain data parallelism."""
        return self.plugins[self._selected] if self._selected is not None else None

    zero_plugin = deepspeed_plugin

    @property
    def deepspeed_plugins(self) -> dict[str, ZeroPlugin]:
        """All plugins by name."""
        return dict(self.plugins)

    @property
    def active_plugin(self) -> ZeroPlugin:
        """The plugin that the next `prepare` uses: the selected one, or that of plain data parallelism."""
        return self.deepspeed_plugin or self._fallback

    def get_deepspeed_plugin(self, name: str) -> ZeroPlugin:
        """The plugin of that name."""
        if name not in self.plugins:
            names = ", ".join(map(repr, self.plugins)) or "none, as the accelerator has no plugins"
            raise UsageError("zero plugin", expected=f"one of the names {names}", got=name)
        return self.plugins[name]

    get_zero_plugin = get_deepspeed_plugin

    def select_deepspeed_plugin(self, name: str) -> None:
        """Makes `prepare` use this plugin from now on; models that are prepared keep theirs."""
        self.get_deepspeed_plugin(name)
        self._selected = name
        self._mark_selected()

    select_zero_plugin = select_deepspeed_plugin

    def _mark_selected(self) -> None:
        for name, plugin in self.plugins.items():
            plugin._select(name == self._selected)

    # -- what scripts ask for that there is none of

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
        """The resolved config of the first trained model, else of the first model, else of the selected plugin."""
        for item in (*(each for each in self.prepared if each.optimizer is not None), *self.prepared):
            return item.engine.zero_config
        return self.active_plugin.known(self._facts)[0]

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16": of the first prepared model, else as the selected plugin says."""
        for item in self.prepared:
            return PRECISION_NAMES[item.config.precision]
        for name in ("fp16", "bf16"):
            if self.active_plugin.get_value(f"{name}.enabled") is True:
                return name
        precision = self._facts.precision
        return "no" if precision is None else PRECISION_NAMES[precision.value]

    @property
    def accumulation(self) -> int:
        """Micro-steps per optimizer step as far as the selected plugin and the arguments say."""
        fact = gather_facts(self._facts, self.active_plugin.facts()).accumulation
        configured = self.active_plugin.get_value("gradient_accumulation_steps")
        if isinstance(configured, int):
            return configured
        return 1 if fact is None else fact.value

    @property
    def distributed_type(self) -> DistributedType:
        """DEEPSPEED with a plugin, for any number of processes, as scripts test for it."""
        return DistributedType.DEEPSPEED if self.plugins else self.partial.distributed_type

    def __getattr__(self, name: str) -> Any:
        if name == "partial":
            raise AttributeError(name)
        return getattr(self.partial, name)

    def __repr__(self) -> str:
        kind = self.distributed_type.name
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
