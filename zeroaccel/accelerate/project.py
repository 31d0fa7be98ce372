"""`ProjectConfiguration`: the folders of states and logs, and the number of states to keep.

The functions name, find and remove folders of states; `run_state.py` writes and reads their contents.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zeroaccel.errors import CheckpointError, ConfigError, UsageError
from zeroaccel.logs import logger

STATE_NAME = "run_state.json"
"""File that `save_state` writes last; a folder without it is not a complete state."""

_FOLDER = re.compile(r"checkpoint_(\d+)")


@dataclass
class ProjectConfiguration:
    """Folders of a project, and when and where the accelerator saves states.

    Attributes:
        project_dir: folder for states.
        logging_dir: folder for tracker files. Defaults to `project_dir`.
        automatic_checkpoint_naming: name states `project_dir/checkpoints/checkpoint_0`, `checkpoint_1` and so on.
        total_limit: maximum number of these states to keep; None keeps all.
        iteration: number of the next state; `load_state` sets it to the number after the loaded state.
        save_on_preemption: when a rank receives SIGTERM or SIGUSR1, save a numbered state between two batches and exit
            with code 85. Requires `automatic_checkpoint_naming`.
        memory_interval: number of steps between two states in the memory of the machines, from which a run resumes that
            `zeroaccel launch --max_restarts N` has restarted. "auto" measures an interval at which these states take at
            most 2 % of the time. Same as `checkpoint.peer.interval` of a config.
        save_on_each_node: must be False: all ranks write into one folder, which they must share.

    Example:
        >>> from zeroaccel import Accelerator, ProjectConfiguration
        >>> project = ProjectConfiguration("runs/first", automatic_checkpoint_naming=True, total_limit=3)
        >>> accelerator = Accelerator(project_config=project)
        >>> accelerator.logging_dir
        'runs/first'
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    save_on_preemption: bool = False
    memory_interval: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        where = "ProjectConfiguration"
        if self.save_on_each_node:
            raise ConfigError(
                f"{where}.save_on_each_node",
                expected="False, because all ranks write their parts of a state into one shared folder",
                got=True,
                fix="remove it, and save to a file system that all machines share",
            )
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigError(f"{where}.total_limit", expected="at least 1, or None to keep all", got=self.total_limit)
        if self.iteration < 0:
            raise ConfigError(f"{where}.iteration", expected="0 or more", got=self.iteration)
        if self.save_on_preemption and not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"{where}.save_on_preemption",
                expected="automatic_checkpoint_naming=True, which names the saved states",
                got=False,
            )
        interval = self.memory_interval
        if interval not in (None, "auto") and (
            not isinstance(interval, int) or isinstance(interval, bool) or interval < 1
        ):
            raise ConfigError(f"{where}.memory_interval", expected='a number of steps, "auto" or None', got=interval)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Sets `project_dir`, and `logging_dir` if it is None."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


def project_of(
    project_dir: str | os.PathLike[str] | None, configuration: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Returns the project from the two arguments of `Accelerator`.

    Raises:
        UsageError: they name different folders.
    """
    project = configuration or ProjectConfiguration()
    if project_dir is not None:
        if project.project_dir not in (None, os.fspath(project_dir)):
            raise UsageError(
                "Accelerator(project_dir, project_config)",
                expected="one project folder",
                got=f"{os.fspath(project_dir)} and {project.project_dir}",
                fix="remove one of the two",
            )
        project.set_directories(project_dir)
    return project


def next_state_folder(project: ProjectConfiguration) -> Path:
    """Returns the folder of the next state, numbered by `iteration`.

    Raises:
        ConfigError: the project has no folder.
        CheckpointError: a state with this number already exists.
    """
    folder = _states_folder(project) / f"checkpoint_{project.iteration}"
    if (folder / STATE_NAME).exists():
        raise CheckpointError(
            f"{folder}: a state with this number exists",
            fix="resume with load_state(), which continues the numbering, or set "
            "ProjectConfiguration(iteration=...) or another project_dir",
        )
    return folder


def saved_states(project: ProjectConfiguration) -> list[Path]:
    """Returns the folders of the project's complete states by number, and logs incomplete ones.

    Raises:
        ConfigError: the project has no folder.
    """
    root = _states_folder(project)
    states: list[tuple[int, Path]] = []
    for path in root.iterdir() if root.is_dir() else ():
        number = _FOLDER.fullmatch(path.name)
        if number is None:
            continue
        if (path / STATE_NAME).exists():
            states.append((int(number[1]), path))
        else:
            logger.warning("%s: skipped, because saving was not finished", path)
    return [path for _, path in sorted(states)]


def prune_states(project: ProjectConfiguration, *, in_flight: int = 0) -> None:
    """Removes the oldest states above the limit. (one rank)

    Args:
        in_flight: number of newest states that are not counted, because their saving may still fail.
    """
    if project.total_limit is None:
        return
    states = saved_states(project)
    for folder in states[: max(0, len(states) - project.total_limit - in_flight)]:
        logger.info("total_limit = %d: removing %s", project.total_limit, folder)
        try:
            (folder / STATE_NAME).unlink()  # first, so that a partly removed folder is never a complete state
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("%s could not be removed: %s", folder, error)


def _states_folder(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ConfigError(
            "save_state / load_state without a folder",
            expected="a project folder",
            got=None,
            fix='pass a folder, or create Accelerator(project_dir="...")',
        )
    return Path(os.path.abspath(project.project_dir), "checkpoints")
