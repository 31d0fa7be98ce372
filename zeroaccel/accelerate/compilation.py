"""`torch.compile` on a model that is prepared, where an `Accelerator` or its launcher asks for it.

Runs before the engine is made: hooks keep themselves out of graphs only where they find a module compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zeroaccel.activations import repeated_blocks
from zeroaccel.config.launch.launch_sources import LaunchedSettings
from zeroaccel.errors import ConfigError

__all__ = ["Compilation", "compilation_of"]

_HOW = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")


@dataclass(frozen=True)
class Compilation:
    """Arguments of `torch.compile`.

    Attributes:
        regional: compile each repeated block by itself, where there are any, rather than the whole model.
    """

    backend: str
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    regional: bool = False

    def apply(self, model: nn.Module) -> None:
        """Marks the model, or its blocks, to be compiled at the first forward."""
        blocks = [block for _, block in repeated_blocks(model)] if self.regional else []
        for module in blocks or [model]:
            module.compile(backend=self.backend, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic)


def compilation_of(backend: str | None, settings: LaunchedSettings, sources: dict[str, str]) -> Compilation | None:
    """What to compile with; None for nothing.

    Args:
        backend: the `Accelerator`'s own argument, which counts more than the launcher's.

    Raises:
        ConfigError: there is no such backend, or how to compile is said and not with what.
    """
    name = backend if backend is not None else settings.dynamo_backend
    if name is None:
        if given := [one for one in _HOW if getattr(settings, one)]:
            said = ", ".join(sources.get(one, one) for one in given)
            raise ConfigError(f"{said}: says how to compile", expected="a backend", fix="add --dynamo_backend inductor")
        return None
    if name.lower() == "no":
        return None
    if name.lower() not in torch.compiler.list_backends(exclude_tags=()):
        source = "Accelerator(dynamo_backend)" if backend is not None else sources.get("dynamo_backend", "the launcher")
        usual = ", ".join(["no", "eager", "aot_eager", *torch.compiler.list_backends()])
        raise ConfigError(source, expected=f"a backend of torch.compile ({usual})", got=name)
    return Compilation(
        name.lower(),
        settings.dynamo_mode,
        bool(settings.dynamo_use_fullgraph),
        settings.dynamo_use_dynamic,
        bool(settings.dynamo_use_regional_compilation),
    )
