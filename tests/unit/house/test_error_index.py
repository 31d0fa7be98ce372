"""The index of errors has each message of the code with its cause, from docstrings and handlers."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.environment import ROOT
from tests.support.scripts import load_script
from tests.unit.house.house_rules import sources


@pytest.fixture(scope="module")
def index() -> ModuleType:
    return load_script("docs/site/error_messages.py")


def test_a_message_has_the_cause_of_its_function_of_a_caller_or_of_its_handler(
    index: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "zeroaccel").mkdir()
    (tmp_path / "zeroaccel" / "made.py").write_text('''
def load(path):
    """Loads.

    Raises:
        ConfigError: if the file is
            of yesterday.
        UsageError: never.
    """
    _check(path)


def _check(path):
    raise ConfigError(f"{path}", expected="a file of today", fix="write it again")


def read(path):
    try:
        open(path)
    except (OSError, ConfigError):
        raise CheckpointError("gone") from None


def alone(count):
    raise UsageError("count", expected="a number")
''')
    made = {one.text: one.cause for one in index.messages(tmp_path)}
    assert made == {
        "{path}: expected a file of today": "the file is of yesterday",
        "gone": "the operation raised `OSError`",
        "count: expected a number": "",
    }


def test_every_error_of_the_code_is_in_the_index_and_most_have_a_cause(index: ModuleType) -> None:
    found = list(index.messages(ROOT))
    raised = 0
    for source in sources("zeroaccel", "cli", "templates").values():
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                raised += node.func.id.endswith("Error") and hasattr(index.errors, node.func.id)
    assert len(found) >= raised > 800
    assert sum(bool(one.cause or one.expected or one.fix) for one in found) > 0.95 * len(found)
    assert sum(bool(one.cause) for one in found) > 0.6 * len(found)


def test_messages_of_other_programs_lead_to_pages(index: ModuleType) -> None:
    assert len(index.FOREIGN) > 15
    assert [page for _, _, page, _ in index.FOREIGN if not (ROOT / "docs" / page).exists()] == []
    text = "\n".join(index.errors_page(ROOT))
    assert all(f"| `{message}` |" in text for message, *_ in index.FOREIGN)
