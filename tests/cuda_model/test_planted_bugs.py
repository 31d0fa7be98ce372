"""The model finds planted bugs, each in a case that has no findings without it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.cuda_model.configurations import CASES
from tests.cuda_model.conftest import ModelProcess
from tests.cuda_model.planted_bugs import BUGS, ORDERS


@pytest.mark.parametrize("name", BUGS)
def test_the_model_finds_the_bug(name: str, outcome_of: Callable[..., SimpleNamespace]) -> None:
    bug = BUGS[name]
    known = CASES[bug.case].open
    assert not known or known not in bug.finding
    outcome = outcome_of(bug.case, name)
    assert not outcome.error
    assert any(bug.finding in text for text in (*outcome.findings, *outcome.early_frees, *outcome.late))


def test_there_are_at_least_46_bugs() -> None:
    assert len(BUGS) >= 46


@pytest.mark.parametrize("name", ORDERS)
def test_a_wait_for_the_device_deadlocks_if_the_ranks_orders_differ(name: str, model_process: ModelProcess) -> None:
    found = model_process.deadlocks(name)
    if name == "waits in another order":
        assert any("a circle" in text for text in found), found
    else:
        assert found == []
