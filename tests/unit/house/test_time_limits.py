"""Time limits that follow the machine's load: their values, and tests that they end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import time_limits
from tests.support.job import run_command
from tests.time_limits import CAP, VARIABLE, Limit


@pytest.fixture
def slowness(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The measured slowness: the last element of the list, to which tests append."""
    measured = [1.0]
    monkeypatch.setattr(time_limits, "measure", lambda: measured[-1])
    monkeypatch.setattr(time_limits, "_last", (-1e9, 1.0))
    monkeypatch.setattr(time_limits, "_FRESH_SECONDS", 0.0)
    monkeypatch.setenv(VARIABLE, "1")
    return measured


def test_the_measured_slowness_is_within_bounds() -> None:
    assert 1.0 <= time_limits.measure() <= CAP


def test_a_limit_is_longer_on_a_slow_machine(slowness: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_limits.seconds(3.0) == 3.0
    slowness.append(2.0)
    assert time_limits.seconds(3.0) == 6.0
    monkeypatch.setenv(VARIABLE, "4")  # as measured at the start of the session
    assert time_limits.seconds(3.0) == 12.0
    monkeypatch.setenv(VARIABLE, "40")
    assert time_limits.seconds(3.0) == 3.0 * CAP


def test_a_limit_asks_again_before_it_strikes(slowness: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time_limits, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    limit = Limit(5.0)
    now.append(106.0)
    slowness.append(10.0)  # the load rises
    assert not limit.is_over()
    assert (limit.left(), limit.total) == (44.0, 50.0)
    slowness.append(1.0)  # and falls; the limit keeps its length
    assert not limit.is_over()
    now.append(150.0)
    assert limit.is_over()
    assert limit.left() == 0


@pytest.mark.parametrize(("factor", "returncode"), [("8", 0), ("1", 1)])
def test_the_limit_of_a_test_follows(tmp_path: Path, factor: str, returncode: int) -> None:
    # Even on a machine measured ten times slower, the second limit ends the test long before its sleep does.
    seconds = {"8": 1.0, "1": 60.0}[factor]
    (tmp_path / "test_it.py").write_text(
        f"import time, pytest\n@pytest.mark.timeout(0.5)\ndef test_it():\n    time.sleep({seconds})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", os.devnull, "test_it.py"]
    done = run_command(command, env={VARIABLE: factor}, cwd=tmp_path)
    assert done.returncode == returncode, done.stdout
    assert ("Timeout (>" in done.stdout) == bool(returncode)
