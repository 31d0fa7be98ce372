"""Folders of saved states: the name of the next one, pruning, and the recognition of complete ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroaccel.accelerate.project import (
    STATE_NAME,
    ProjectConfiguration,
    next_state_folder,
    prune_states,
    saved_states,
)
from zeroaccel.errors import CheckpointError, ConfigError


def make(root: Path, *numbers: int, complete: bool = True) -> None:
    for number in numbers:
        folder = root / "checkpoints" / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        (folder / "part").write_text("x")
        if complete:
            (folder / STATE_NAME).write_text("{}")


def names(project: ProjectConfiguration) -> list[str]:
    return [path.name for path in saved_states(project)]


def test_states_are_ordered_by_number_and_only_complete_ones_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project = ProjectConfiguration(str(tmp_path))
    assert names(project) == []
    make(tmp_path, 9, 10, 2)
    make(tmp_path, 11, complete=False)
    (tmp_path / "checkpoints" / "best").mkdir()
    assert names(project) == ["checkpoint_2", "checkpoint_9", "checkpoint_10"]
    assert "checkpoint_11: skipped, because saving was not finished" in caplog.text


def test_the_oldest_go_first_and_other_folders_stay(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), total_limit=2)
    make(tmp_path, 0, 1, 2, 3)
    (tmp_path / "checkpoints" / "best").mkdir()
    prune_states(project, in_flight=1)
    assert names(project) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]
    prune_states(project)
    assert names(project) == ["checkpoint_2", "checkpoint_3"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "best",
        "checkpoint_2",
        "checkpoint_3",
    ]


def test_a_state_is_not_written_over_but_the_rest_of_one_is(tmp_path: Path) -> None:
    make(tmp_path, 3)
    make(tmp_path, 4, complete=False)
    with pytest.raises(CheckpointError, match=r"checkpoint_3: a state with this number exists.*load_state"):
        next_state_folder(ProjectConfiguration(str(tmp_path), iteration=3))
    assert next_state_folder(ProjectConfiguration(str(tmp_path), iteration=4)).name == "checkpoint_4"


def test_directories_and_refusals() -> None:
    assert ProjectConfiguration("p").logging_dir == "p"
    assert ProjectConfiguration("p", "l").logging_dir == "l"
    with pytest.raises(ConfigError, match="project_dir="):
        saved_states(ProjectConfiguration())
    for arguments, message in (
        ({"total_limit": 0}, "total_limit: expected at least 1"),
        ({"iteration": -1}, "iteration: expected 0 or more"),
        ({"save_on_each_node": True}, "into one shared folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            ProjectConfiguration("p", **arguments)  # type: ignore[arg-type]
