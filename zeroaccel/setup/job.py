"""`JobSpec`: the arguments of `initialize` or `Accelerator.prepare`, before anything is looked up or decided."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from zeroaccel.comm.collectives import Collectives
from zeroaccel.config import Config, Facts
from zeroaccel.config.document import Document, read_document
from zeroaccel.config.normalize import UnknownKeys
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig
from zeroaccel.engine import EngineBase
from zeroaccel.optim.optimizer_kinds import OptimizerKind
from zeroaccel.setup.compilation import Compilation
from zeroaccel.zero.from_config import LoopRules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ConfigSource = Mapping[str, Any] | str | os.PathLike[str] | Document | Config
OptimizerSource = Optimizer | Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class JobSpec:
    """The arguments of one call, with the source of each value that a frontend collected.

    Attributes:
        model: the model; its parameters keep their objects, shapes and names.
        optimizer: an optimizer, or a function that makes one; None takes the config's `optimizer` section.
        params: parameters or param groups for the config's optimizer; None takes all trainable ones.
        lr_scheduler: a scheduler, or a function of the optimizer; None takes the config's `scheduler` section.
        training_data, collate_fn: a dataset to make a loader for.
        config: DeepSpeed-format JSON as a dict, path or text, or a document or config that was read from one; None
            is an empty config.
        sources: origin of each value, by its dotted path in `config`, for error messages.
        facts: values that fill "auto", with their sources. The plan adds the hidden size and the number of samplers.
        unknown_keys: see `load_config`.
        collectives: the communication backend; None makes one over all ranks.
        mesh: a torch DeviceMesh of the data-parallel axes, instead of `parallel`.
        parallel: sizes of the mesh's axes, as a `ParallelConfig` or accelerate's `ParallelismConfig`.
        pipeline: how pipeline stages are cut and scheduled.
        engine_type: class of the engine; None takes the one that the mesh needs.
        optimizer_kind: "elementwise", "per_tensor" or "coupled", overriding the kind of its class.
        loop: how the caller's loop drives the engine.
        compilation: how to apply `torch.compile` to the model, or None.
    """

    model: nn.Module
    optimizer: OptimizerSource | None = None
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None
    lr_scheduler: Any = None
    training_data: Any = None
    collate_fn: Callable[..., Any] | None = None
    config: ConfigSource | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    unknown_keys: UnknownKeys = "standard"
    collectives: Collectives | None = None
    mesh: DeviceMesh | None = None
    parallel: ParallelConfig | Any = None
    pipeline: PipelineConfig | None = None
    engine_type: type[EngineBase] | None = None
    optimizer_kind: OptimizerKind | str | None = None
    loop: LoopRules = field(default_factory=LoopRules)
    compilation: Compilation | None = None

    @cached_property
    def document(self) -> Document | Config:
        """The config as written; read once.

        Raises:
            ConfigError: no such file, not readable, not JSON, or not an object.
        """
        source = {} if self.config is None else self.config
        return source if isinstance(source, (Document, Config)) else read_document(source)

    @property
    def config_tree(self) -> Mapping[str, Any]:
        """The keys of the config as written."""
        return self.document.raw if isinstance(self.document, Config) else self.document.tree
