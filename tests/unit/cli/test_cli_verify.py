"""The report of `verify` on the records of a script that runs without an engine, under a stand-in for the launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zeroaccel.cli import verify as verify_module
from zeroaccel.cli.launch.launch_job import ordered_settings
from zeroaccel.cli.main import main
from zeroaccel.config.launch.launch_sources import ExplicitSettings

# Writes records as an engine does: two steps, with numbers that the test chooses.
SCRIPT = """
import json, os, sys
from pathlib import Path
order = json.loads(os.environ["ZEROACCEL_VERIFY"])
runs = Path("runs")
number = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (number + 1))
if sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]))
losses = {"same": 1.0, "sharded": 1.0 if order["zero"] else 2.0, "random": float(number), "nan": float("nan")}
if sys.argv[1] in losses:
    Path(order["folder"]).mkdir()
    step = {"stage": order["zero"].get("stage", 3), "accumulation": 1, "norm": None}
    step["losses"] = [losses[sys.argv[1]].hex()]
    Path(order["folder"], "0-0.jsonl").write_text((json.dumps(step) + "\\n") * order["steps"])
"""


def _verify(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Result, int]:
    """Returns the command's result and the number of times that the script ran."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(verify_module, "launch_command", lambda words: [sys.executable, "-S", *words])
    (folder / "train.py").write_text(SCRIPT)
    result = CliRunner().invoke(main, ["verify", "--steps", "2", "train.py", *words])
    return result, len((folder / "runs").read_text())


@pytest.mark.parametrize("script", ["same", "nan"])
def test_equal_runs_are_the_same_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    result, runs = _verify(tmp_path, monkeypatch, script)
    assert (result.exit_code, runs) == (0, 2)
    assert result.stdout.splitlines()[-1] == "the same to the last bit"


def test_a_difference_is_due_to_sharding_if_two_plain_runs_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, runs = _verify(tmp_path, monkeypatch, "sharded")
    assert (result.exit_code, runs) == (1, 3)
    lines = result.stdout.splitlines()
    assert lines[-2:] == ["largest difference of a loss or a gradient norm on any rank: 1", "DIFFERENT"]
    assert len(lines) == 7  # with the baseline, and one line for each of the two steps


def test_a_script_without_seeds_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, runs = _verify(tmp_path, monkeypatch, "random")
    assert (result.exit_code, runs) == (1, 3)
    assert result.stdout.splitlines()[-1].endswith("the script does not set all its seeds")


def test_a_script_that_fails_or_takes_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, runs = _verify(tmp_path, monkeypatch, "exit", "7")
    assert (result.exit_code, runs) == (7, 1)
    result, _ = _verify(tmp_path, monkeypatch, "no step")
    assert result.exit_code == 2
    assert "the script took no step of a zeroaccel engine" in result.stderr


@pytest.mark.parametrize(
    ("cut", "apart", "says"),
    [
        ([(4.00001, 1.0), (3.0, 2.0)], False, "the same up to rounding"),
        ([(8.0, 2.0), (6.0, 4.0)], False, "PART at step 1: the loss is 2 times that of one rank"),
        ([(4.0, 2.0), (3.0, 4.0)], False, "PART at step 1: the gradient is 2 times that of one rank"),
        ([(4.0, 0.5), (3.0, 1.0)], False, "PART at step 1: the gradient is 1/2 of that of one rank"),
        ([(4.2, 1.1), (3.0, 2.0)], True, "PART at step 1: each rank's loss is the mean over its own tokens"),
        ([(4.2, 1.1), (3.0, 2.0)], False, "PART at step 1: the ranks train on other tokens or labels"),
        ([(4.0, 1.0), (3.1, 2.0)], False, "PART at step 2: the first step agrees"),
        ([(float("nan"), 1.0), (3.0, 2.0)], False, "PART at step 1"),
    ],
)
def test_the_report_says_where_runs_on_parts_of_sequences_part(
    cut: list[tuple[float, float | None]], apart: bool, says: str
) -> None:
    report, is_same = verify_module.compare_runs([(4.0, 1.0), (3.0, 2.0)], cut, 2, 1e-4, apart)
    assert report.splitlines()[-1].startswith(says)
    assert is_same == says.startswith("the same")


def test_a_run_on_whole_sequences_replaces_settings_of_the_launch(tmp_path: Path) -> None:
    settings = ExplicitSettings.of({"num_processes": 4, "sp_size": 2}, "test").settings()
    order = {"folder": str(tmp_path / "whole"), "launch": {"sp_size": 1, "num_processes": 2}}
    changed = ordered_settings(settings, json.dumps(order))
    assert (changed.num_processes, changed.parallel.sp) == (2, 1)
    ordered_settings(settings, json.dumps({"folder": str(tmp_path / "chosen")}))
    assert [verify_module.sequence_ranks(tmp_path / name) for name in ("whole", "chosen", "other")] == [1, 2, 1]
    assert ordered_settings(settings, None) is settings
