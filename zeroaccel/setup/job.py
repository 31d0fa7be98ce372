"""`JobSpec`: the arguments of `initialize` or `Accelerator.prepare`, before anything is looked up or decided.

`Compilation`, one of them, applies `torch.compile` to the model before its engine is made.
"""

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
from zeroaccel.zero.from_config import LoopRules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

import logging

from zeroaccel.activations import repeated_blocks
from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_once
from zeroaccel.zero.compiled import Backend, backend_named

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


_MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Compilation:
    """Arguments of `torch.compile`.

    Attributes:
        regional: compile each repeated block separately, if there are any, instead of the model.
        options: options of the backend; cannot be combined with a mode.
        mode_setting: name of the setting of the mode, for a warning.
        setting: name of the setting that requests compilation, for an error.
    """

    backend: Backend
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    regional: bool = False
    options: Mapping[str, Any] | None = None
    mode_setting: str = "dynamo_mode"
    setting: str = "dynamo_backend"

    def apply(self, model: nn.Module, *, parameters_move: bool = False) -> None:
        """Marks the model, or its blocks, to be compiled at the first forward.

        Call it before making the engine: the engine's hooks stay out of graphs only if they find a module compiled.

        Args:
            parameters_move: True if each pass gathers parameters into other memory of a CUDA device.
        """
        if parameters_move and self.mode in _MODES_WITH_CUDA_GRAPHS:
            log_once(
                logging.WARNING,
                f'{self.mode_setting} "{self.mode}" records CUDA graphs, which need fixed addresses of parameters, but'
                " each pass gathers sharded parameters to other addresses: graphs are recorded again and again;"
                ' set it to "default", or do not shard parameters (stage 2)',
            )
        blocks = [block for _, block in repeated_blocks(model)] if self.regional else []
        for module in blocks or [model]:
            module.compile(
                backend=self.backend,
                mode=self.mode,
                fullgraph=self.fullgraph,
                dynamic=self.dynamic,
                options=None if self.options is None else dict(self.options),
            )


def compilation_of(config: Config) -> Compilation | None:
    """Returns the compilation that the `compile` section requests, or None.

    Raises:
        ConfigError: there is no such backend, or both a mode and options are set.
    """
    section = config.compile
    if not section.compiles:
        return None
    arguments = section.kwargs
    mode = None if arguments.mode == "default" else arguments.mode  # torch's "default" may be combined with options
    if mode is not None and arguments.options:
        raise ConfigError(f"{config.where('compile.kwargs.mode')}: set together with options", fix="keep one of them")
    return Compilation(
        backend_named(section.backend or "inductor", config.where("compile.backend")),
        mode,
        arguments.fullgraph,
        arguments.dynamic,
        options=arguments.options or None,
        mode_setting=config.where("compile.kwargs.mode"),
        setting=config.where("compile.enabled"),
    )
