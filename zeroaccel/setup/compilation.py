"""`Compilation`: applies `torch.compile` to a model before its engine is made."""

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
