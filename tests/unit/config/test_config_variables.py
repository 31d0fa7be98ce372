"""Unknown variables that begin with ZEROACCEL_ are reported, and every one that the code reads is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import zeroaccel
from tests.support.environment import ROOT
from zeroaccel.cli.main import main
from zeroaccel.config.launch.launch_sources import check_variables, known_variables
from zeroaccel.errors import ConfigError


def test_every_variable_that_is_read_is_known_and_the_other_way_round() -> None:
    sources = [path for folder in ("zeroaccel", "cli") for path in (ROOT / folder).rglob("*.py")]
    literal = {
        name
        for path in sources
        if path.name != "variables.py"
        for name in re.findall(r'"(ZEROACCEL_[A-Z_]+)"', path.read_text())
    }
    assert literal - {"ZEROACCEL_"} <= known_variables()
    settings = {
        f"ZEROACCEL_{name.upper()}" for name in zeroaccel.config.launch.launch_settings.LaunchSettings.model_fields
    }
    assert known_variables() - settings == literal - {"ZEROACCEL_"} - settings


def test_all_unknown_ones_are_reported_with_the_nearest_name() -> None:
    check_variables(
        {"ZEROACCEL_ZERO_STAGE": "3", "ACCELERATE_ZEOR": "1", "MY_ZEROACCEL_X": "1", "ZEROACCEL_TIMEOUT": "1"}
    )
    with pytest.raises(ConfigError) as error:
        check_variables(["ZEROACCEL_ZERO_STGE", "ZEROACCEL_HOME", "PATH"])
    assert str(error.value).splitlines() == [
        "environment: 2 variables are wrong",
        "  ZEROACCEL_HOME: no such setting; names that begin with ZEROACCEL_ are settings; unset it",
        "  ZEROACCEL_ZERO_STGE: no such setting; did you mean ZEROACCEL_ZERO_STAGE?",
    ]


@pytest.mark.parametrize("words", [("launch", "--dry_run", "train.py"), ("config", "show", "--resolve")])
def test_a_launch_and_its_settings_are_refused(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    result = CliRunner().invoke(main, words, env={"ZEROACCEL_NUM_PROCESES": "2"})
    assert result.exit_code == 2
    assert result.stderr == (
        "zeroaccel: environment ZEROACCEL_NUM_PROCESES: no such setting; did you mean ZEROACCEL_NUM_PROCESSES?\n"
    )


def test_a_script_that_was_started_without_the_launcher_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from zeroaccel.comm.topology import destroy

    monkeypatch.setenv("ZEROACCEL_COLECTIVE_TIMEOUT", "5")
    with pytest.raises(ConfigError, match=r"did you mean ZEROACCEL_COLLECTIVE_TIMEOUT\?"):
        zeroaccel.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})
    destroy()
