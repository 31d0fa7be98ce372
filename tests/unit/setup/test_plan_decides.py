"""All decisions from the config are fields of the plan: `build` executes it and reads no rules of the config."""

from __future__ import annotations

import ast
from pathlib import Path

from zeroaccel.setup import build, plan


def _imported(module: object) -> set[str]:
    tree = ast.parse(Path(str(vars(module)["__file__"])).read_text())
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_building_imports_no_rules_of_the_config() -> None:
    rules = {"zeroaccel.config", "zeroaccel.zero.from_config", "zeroaccel.setup.job"}
    assert rules <= _imported(plan)
    assert not rules & _imported(build)
