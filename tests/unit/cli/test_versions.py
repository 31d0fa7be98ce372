"""Versions of libraries that are too old, or newer than those of the tests, are named before the ranks start."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.support.environment import ROOT
from zeroaccel.cli import doctor, machine


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed versions by package, for `machine` and `doctor`; packages that it lacks are not installed."""
    versions: dict[str, str] = {}

    def version(package: str) -> str:
        return versions.get(package, "")

    for module in (machine, doctor):
        monkeypatch.setattr(module, "version", version)
    return versions


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.6.0", "transformers": "4.56.2", "trl": "1.0.0"},
        {"torch": "2.15.1+cu130", "peft": "0.21.2", "accelerate": "1.15.0"},
        {},
    ],
)
def test_tried_versions_say_nothing(installed: dict[str, str], versions: Mapping[str, str]) -> None:
    installed.update(versions)
    assert [*machine.untried_versions()] == []
    assert doctor._versions().verdict == "works"


def test_older_and_newer_versions_are_named(installed: dict[str, str]) -> None:
    installed.update(torch="2.16.0a0+git1", transformers="4.56.1", peft="1.0", trl="0.29.1")
    newer = "is newer than {}, the newest that ran zeroaccel's tests; if a call fails, try pip install '{}'"
    assert [line for line, _ in machine.untried_versions()] == [
        "torch 2.16.0a0+git1 " + newer.format("2.15", "torch==2.15.*"),
        "transformers 4.56.1: expected 4.56.2 or newer: pip install 'transformers>=4.56.2'",
        "peft 1.0 " + newer.format("0.21", "peft==0.21.*"),
        "trl 0.29.1: expected 1.0 or newer: pip install 'trl>=1.0'",
    ]
    assert doctor._versions().verdict == "BROKEN"
    del installed["transformers"], installed["trl"]
    assert doctor._versions().verdict == "works"  # newer versions may well work


def test_the_page_has_the_same_versions() -> None:
    page = (ROOT / "docs" / "releases.md").read_text()
    rows = {name.lower(): pair for name, *pair in re.findall(r"^\| (\w+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)}
    assert {name: tuple(rows[name]) for name in machine.TRIED} == machine.TRIED
