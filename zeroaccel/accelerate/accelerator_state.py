"""What an `Accelerator` knows: of the process, of accumulation, and of its settings, each value with its source.

`PartialState` is the process's place in the job, `GradientState` where training stands between two updates, and
`AcceleratorState` both with the plugins and the resolved configs; printing that one shows everything. They are
ordinary objects: nothing is shared between two accelerators but the process group itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from zeroaccel.accelerate.process_control import ProcessControl
from zeroaccel.comm.topology import destroy, init_process_group
from zeroaccel.config.auto_values import shown
from zeroaccel.errors import UsageError

if TYPE_CHECKING:
    from zeroaccel.accelerate.zero_plugin import ZeroPlugin

__all__ = ["AcceleratorState", "ConfigView", "DistributedType", "GradientState", "PartialState"]


class DistributedType(str, enum.Enum):
    """How processes work together; compares equal to its name, as scripts write it."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    ZERO = "DEEPSPEED"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class PartialState(ProcessControl):
    """This process's place in the job; joins it when made. (all ranks)

    Args:
        cpu: compute on the CPU and talk through gloo although there are accelerators.

    Attributes:
        device: where this process computes.
        backend: of the process group, as torch names it.
        debug: whether the launcher asked for checks of collectives' arguments; they are always made here.
    """

    def __init__(self, cpu: bool = False, *, debug: bool = False) -> None:
        self._topology = init_process_group("gloo" if cpu else None)
        self.device: torch.device = torch.device("cpu") if cpu else self._topology.device
        self.backend: str = _backend(self._topology.backend, self.device)
        self.debug = debug

    @property
    def num_processes(self) -> int:
        """Processes of the job, over all machines."""
        return self._topology.world_size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self._topology.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self._topology.local_rank

    @property
    def local_num_processes(self) -> int:
        """Processes on this machine."""
        return self._topology.local_world_size

    @property
    def distributed_type(self) -> DistributedType:
        """Without a plugin: NO for one process, else by device."""
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    @property
    def initialized(self) -> bool:
        """True: a state that exists has joined."""
        return True

    def set_device(self) -> None:
        """Makes `device` the current one of this process."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

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


def _backend(config: str, device: torch.device) -> str:
    """The one of "cpu:gloo,cuda:nccl" that tensors of this device travel on."""
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)


class GradientState:
    """Where training stands between two updates. Loaders and the accelerator write it, wrappers read it.

    Attributes:
        sync_gradients: whether the micro-step under way ends with an update.
        num_steps: micro-steps per update.
        adjust_scheduler: passed on to scripts that ask; schedulers here count updates.
        sync_with_dataloader: the last batch of a loader ends with an update, however many micro-steps came before.
        sync_each_batch: reduce gradients in every micro-step.
    """

    def __init__(
        self,
        num_steps: int = 1,
        *,
        adjust_scheduler: bool = True,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
    ) -> None:
        self.sync_gradients = True
        self.num_steps = num_steps
        self.adjust_scheduler = adjust_scheduler
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self._loaders: list[Any] = []

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated, or None."""
        return self._loaders[-1] if self._loaders else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is the last of the loader being iterated."""
        return bool(getattr(self.active_dataloader, "end_of_dataloader", False))

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are not repetitions; -1 where unknown or without a loader."""
        return int(getattr(self.active_dataloader, "remainder", -1))

    def add_dataloader(self, loader: Any) -> None:
        """A loader begins to be iterated. It has `end_of_dataloader` and `remainder`."""
        self._loaders.append(loader)

    def remove_dataloader(self, loader: Any) -> None:
        """Its iteration is over, or was broken off."""
        self._loaders = [other for other in self._loaders if other is not loader]

    @contextmanager
    def iterating(self, loader: Any) -> Iterator[None]:
        """The two together, around an iteration."""
        self.add_dataloader(loader)
        try:
            yield
        finally:
            self.remove_dataloader(loader)

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation steps: {self.num_steps}\n"
        )


@dataclass(frozen=True)
class ConfigView:
    """A config as it is shown.

    Attributes:
        title: of whom: "GPT (trained)", or a plugin's name.
        tree: the plain dict.
        like: a dict whose order of keys is kept, as far as it has them.
        sources: dotted path -> where the value came from.
    """

    title: str
    tree: Mapping[str, Any]
    sources: Mapping[str, str]
    like: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One line per value: path, value, source; sections of defaults are not written out."""
        rows = [
            (path, shown(value), self.sources.get(path, "default")) for path, value in _leaves(self.tree, "", self.like)
        ]
        key = max((len(path) for path, _, _ in rows), default=0)
        value = min(max((len(text) for _, text, _ in rows), default=0), 24)
        return [f"Config of {self.title}:"] + [f"  {p:<{key}}  {v:<{value}}  {source}" for p, v, source in rows]


def _leaves(tree: Mapping[str, Any], above: str, like: Any) -> Iterator[tuple[str, Any]]:
    order = {name: place for place, name in enumerate(like)} if isinstance(like, Mapping) else {}
    for name, value in sorted(tree.items(), key=lambda item: order.get(item[0], len(order))):
        path = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path, order and like.get(name))
        else:
            yield path, value


class AcceleratorState:
    """Everything an accelerator was told, and what became of it; `print` shows it.

    Attributes:
        partial: the process's place in the job, whose attributes are this object's too.
        plugins: name -> plugin; empty for plain data parallelism.
    """

    def __init__(
        self,
        partial: PartialState,
        plugins: Mapping[str, ZeroPlugin],
        fallback: ZeroPlugin,
        views: Callable[[], list[ConfigView]],
        precision: Callable[[], str],
    ) -> None:
        self.partial = partial
        self.plugins = dict(plugins)
        self._fallback = fallback
        self._selected = next(iter(self.plugins), None)
        self._views = views
        self._precision = precision
        self._mark()

    # -- plugins

    @property
    def deepspeed_plugin(self) -> ZeroPlugin | None:
        """The selected plugin; None for plain data parallelism."""
        return self.plugins[self._selected] if self._selected is not None else None

    zero_plugin = deepspeed_plugin

    @property
    def deepspeed_plugins(self) -> dict[str, ZeroPlugin]:
        """All of them, by name."""
        return dict(self.plugins)

    @property
    def active_plugin(self) -> ZeroPlugin:
        """The plugin that the next `prepare` uses: the selected one, or that of plain data parallelism."""
        return self.deepspeed_plugin or self._fallback

    def get_deepspeed_plugin(self, name: str) -> ZeroPlugin:
        """The plugin of that name."""
        if name not in self.plugins:
            known = ", ".join(map(repr, self.plugins)) or "none, as the accelerator has no plugins"
            raise UsageError("zero plugin", expected=f"one of the names {known}", got=name)
        return self.plugins[name]

    get_zero_plugin = get_deepspeed_plugin

    def select_deepspeed_plugin(self, name: str) -> None:
        """From now on `prepare` uses this one; what was prepared before keeps its own."""
        self.get_deepspeed_plugin(name)
        self._selected = name
        self._mark()

    select_zero_plugin = select_deepspeed_plugin

    def _mark(self) -> None:
        for name, plugin in self.plugins.items():
            plugin._select(name == self._selected)

    # -- the rest

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16": what the selected config trains in."""
        return self._precision()

    @property
    def distributed_type(self) -> DistributedType:
        """DEEPSPEED with a plugin, whatever the number of processes, as scripts test for it."""
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
        blocks = ["\n".join(view.lines()) for view in self._views()]
        return "\n".join([f"{head}Mixed precision type: {self.mixed_precision}", *blocks]) + "\n"
