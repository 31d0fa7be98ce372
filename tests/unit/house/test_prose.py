"""The prose linter finds each habit in a planted sentence, and accepts its rewrite."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    return load_script(".ci/prose.py")


@pytest.mark.parametrize(
    ("habit", "rule", "rewrite"),
    [
        ("What was not created is None.", "`what`", "Items that were not created are None."),
        ("The log says so, and what follows is lost.", "`what`", "The log says so and loses the rest."),
        ("It stays at the value of what was set.", "`what`", "It keeps its value. What do I set?"),
        (
            "Plans are compared and errors are raised.",
            "two passives",
            "Plans are compared by every rank; set-up raises the errors.",
        ),
        ("The size of the part of the shard of a rank.", "a chain of `of`", "The size of a rank's part of the shard."),
        ("Both are refused alike.", "'alike'", "Both raise an error."),
        ("It runs on any system\nbut for NVMe.", "'but for'", "It runs on any system\nexcept for NVMe."),
        ("| key | as ever |", "'as ever'", "| key | unchanged |"),
        ("## What differs", "`what`", "## Differences"),
    ],
)
def test_a_habit_is_found_and_its_rewrite_passes(prose: ModuleType, habit: str, rule: str, rewrite: str) -> None:
    (finding,) = prose.sentence_findings(habit, "page.md")
    assert rule in str(finding)
    assert "page.md" in str(finding)
    assert not list(prose.sentence_findings(rewrite, "page.md"))


def test_long_lines_are_found_outside_of_code_and_tables(prose: ModuleType) -> None:
    long = "word " * 27
    page = f"```text\n{long}\n```\n\n| {long} |\n\n{long}\n"
    (finding,) = prose.page_findings(page, "page.md")
    assert finding.place == "page.md:7"


def test_a_page_of_passives_is_found(prose: ModuleType) -> None:
    passive, active = "The tensor is gathered here.\n\n", "The engine gathers the tensor.\n\n"
    assert "3 of 6" in str(next(prose.page_findings(passive * 3 + active * 3, "page.md")))
    assert not list(prose.page_findings(passive * 3 + active * 20, "page.md"))


def test_code_markup_and_link_targets_are_not_prose(prose: ModuleType) -> None:
    text = (
        "Call `what is alike` and [read](but-for.md).\n\n```python\nx = 'as ever'\n```\n\nExample:\n    >>> 'as ever'\n"
    )
    assert not list(prose.sentence_findings(text, "page.md"))


MODULE = '''
"""What the module does."""
LIMIT = 1  # but for one
"""The limit is as ever."""


def check(name):
    """Raises an error likewise."""
    # The size of the part
    # of the shard of a rank.
    raise ValueError(f"{name}: both of them are refused alike")
'''


def test_docstrings_comments_and_messages_are_read(prose: ModuleType) -> None:
    found = {finding.place: finding.rule.split(":")[0] for finding in prose.source_findings(MODULE, "m.py")}
    assert found == {
        "m.py:2": "a clause with `what` in place of a noun",
        "m.py:3": "'but for'",
        "m.py:4": "'as ever'",
        "m.py:8": "'likewise'",
        "m.py:9": "a chain of `of`",
        "m.py:11": "'alike'",
    }
    quoting = prose.source_findings(MODULE, "m.py", messages=False)
    assert [finding.place for finding in quoting] == [place for place in found if place != "m.py:11"]


def test_names_and_keys_are_not_messages(prose: ModuleType) -> None:
    assert not list(prose.source_findings('KEYS = ["none of it", "what_is"]\n', "m.py"))


def test_every_page_and_module_is_read(prose: ModuleType) -> None:
    read = {path.relative_to(prose.ROOT).as_posix() for path in [*prose.pages(), *prose.sources()]}
    assert {"docs/design.md", "CHANGELOG.md", "tests/README.md"} <= read
    assert {"zeroaccel/engine.py", "cli/config/questions.py", "tests/unit/house/test_prose.py"} <= read


def test_a_path_without_pages_or_sources_is_refused(prose: ModuleType) -> None:
    with pytest.raises(SystemExit, match="zeroacel: no page or source of the project"):
        prose.main(["zeroacel"])
    assert prose.main([str(prose.ROOT / "cli" / "__main__.py")]) == 0


def test_rows_of_results_fit_a_page(prose: ModuleType) -> None:
    row = f"| {'a' * 130} |"
    assert [finding.rule for finding in prose.page_findings(row, "benchmarks/results/a.md")] == [
        f"row of a table above {prose.MAX_ROW_COLUMNS} columns"
    ]
    assert list(prose.page_findings(row, "docs/a.md")) == []
    pages = {path.parent.name for path in prose.pages() if "results" in path.parts}
    assert pages == {"results"}
