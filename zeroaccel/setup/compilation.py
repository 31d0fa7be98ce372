"""`Compilation`: how `torch.compile` is applied to a model before its engine is made."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroaccel.activations import repeated_blocks
from zeroaccel.config import Config
from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_once
from zeroaccel.zero.compiled import Backend, backend_named

_MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Compilation:
    """Arguments of `torch.compile`.

    Attributes:
        regional: compile each repeated block by itself, where there are any, rather than the model.
        options: of the backend; not together with a mode.
        mode_setting: what the mode was set by, for a warning.
        setting: what asks for the compilation, for an error.
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

        To be called before the engine is made: its hooks stay out of graphs only where they find a module compiled.

        Args:
            parameters_move: they are gathered into other memory of a CUDA device in each pass.
        """
        if parameters_move and self.mode in _MODES_WITH_CUDA_GRAPHS:
            log_once(
                logging.WARNING,
                f'{self.mode_setting} "{self.mode}" records CUDA graphs, which are bound to the addresses of'
                " parameters, and sharded parameters are gathered to other addresses in each pass: graphs are recorded"
                " over and over;"
                ' set it to "default", or shard no parameters (stage 2)',
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
    """What the `compile` section asks for; None for nothing.

    Raises:
        ConfigError: there is no such backend, or a mode stands beside options.
    """
    section = config.compile
    if not section.compiles:
        return None
    arguments = section.kwargs
    mode = None if arguments.mode == "default" else arguments.mode  # torch's word for none, beside which options may be
    if mode is not None and arguments.options:
        raise ConfigError(f"{config.where('compile.kwargs.mode')}: given beside options", fix="keep one of the two")
    return Compilation(
        backend_named(section.backend or "inductor", config.where("compile.backend")),
        mode,
        arguments.fullgraph,
        arguments.dynamic,
        options=arguments.options or None,
        mode_setting=config.where("compile.kwargs.mode"),
        setting=config.where("compile.enabled"),
    )
