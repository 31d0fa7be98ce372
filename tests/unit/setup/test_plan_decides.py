"""What depends on the config is a field of the plan: `build` carries it out, and has no rule of its own to read."""

from __future__ import annotations

import ast
from pathlib import Path

from zeroaccel.setup import build, plan


def _imported(module: object) -> set[str]:
    tree = ast.parse(Path(str(vars(module)["__file__"])).read_text())
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_building_imports_no_rules_of_the_config() -> None:
    rules = {"zeroaccel.config", "zeroaccel.zero.from_config", "zeroaccel.setup.compilation"}
    assert rules <= _imported(plan)
    assert not rules & _imported(build)
