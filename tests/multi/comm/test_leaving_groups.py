"""Groups that cause NCCL's exit warning are destroyed after a successful run, and kept after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.job import run_job

SCRIPT = Path(__file__).with_name("leaving_groups.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_good_run_leaves_no_groups(ranks: int) -> None:
    result = run_job(ranks, SCRIPT, ["in order"])
    assert result.returncode == 0
    assert result.stdout.splitlines() == ["left without groups"] * ranks
    assert "Warning" not in result.stderr


def test_groups_of_a_failed_run_are_not_waited_for() -> None:
    result = run_job(2, SCRIPT, ["failing"])
    assert result.returncode != 0
    assert result.stdout.splitlines() == ["left with groups"] * 2
    assert "a failure of the program" in result.stderr
