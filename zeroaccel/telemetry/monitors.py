"""Monitors: where the numbers of a run are written, as the sections tensorboard, csv_monitor and wandb say.

`build_monitors` is called once, by whoever builds an engine, on every rank: a missing package is then an error on all
of them; files and connections are made on rank 0 only. The engine gives events to the `Monitors` it is given and knows
no kinds of them. A number that cannot be written must not stop a training run: that monitor is switched off, with an
error in the log.
"""

from __future__ import annotations

import atexit
import csv
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TextIO

from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import logger

__all__ = [
    "CsvMonitor",
    "Event",
    "FileSection",
    "Monitor",
    "MonitorConfig",
    "Monitors",
    "ProjectSection",
    "TensorBoardMonitor",
    "WandbMonitor",
    "build_monitors",
]

Event = tuple[str, float, int]
"""Name, as "Train/loss"; value; step, which the engine counts in samples over all ranks."""


class Monitor(Protocol):
    """Takes the numbers of a run."""

    def write(self, events: Sequence[Event]) -> None:
        """Takes events, in the order of their steps."""

    def flush(self) -> None:
        """Brings what was written to where a reader sees it."""

    def close(self) -> None:
        """Flushes and ends; a second call does nothing."""


class FileSection(Protocol):
    """`tensorboard` and `csv_monitor` of a config."""

    @property
    def enabled(self) -> bool:
        """Whether to write."""

    @property
    def output_path(self) -> str:
        """Folder; empty is the working directory."""

    @property
    def job_name(self) -> str:
        """Folder in it, one per run."""


class ProjectSection(Protocol):
    """`wandb` of a config."""

    @property
    def enabled(self) -> bool:
        """Whether to send."""

    @property
    def group(self) -> str | None:
        """Group of runs."""

    @property
    def team(self) -> str | None:
        """Team the project belongs to."""

    @property
    def project(self) -> str:
        """Project the run belongs to."""


class MonitorConfig(Protocol):
    """The sections of a config that are read here."""

    @property
    def tensorboard(self) -> FileSection:
        """TensorBoard event files."""

    @property
    def csv_monitor(self) -> FileSection:
        """CSV files."""

    @property
    def wandb(self) -> ProjectSection:
        """Weights & Biases."""


class CsvMonitor:
    """One file per metric, `output_path/job_name/Train_loss.csv` for "Train/loss", with the columns step and loss.

    Rows are on disk as soon as they are written. A file that is there already, as after a restart, is continued.
    """

    def __init__(self, section: FileSection) -> None:
        self._folder = Path(section.output_path, section.job_name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, tuple[str, TextIO]] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Appends a row per event.

        Raises:
            UsageError: two metrics have names that make the same file name.
        """
        for name, value, step in events:
            csv.writer(self._file(name), lineterminator="\n").writerow([step, value])

    def flush(self) -> None:
        """Files are line-buffered: nothing waits."""

    def close(self) -> None:
        """Closes the files."""
        for _, file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TextIO:
        stem = name.replace("/", "_").replace(" ", "_")
        if stem not in self._files:
            file: TextIO = (self._folder / f"{stem}.csv").open("a", buffering=1, encoding="utf-8", newline="")
            self._files[stem] = (name, file)
            if file.tell() == 0:
                csv.writer(file, lineterminator="\n").writerow(["step", name.rsplit("/", 1)[-1]])
        owner, file = self._files[stem]
        if owner != name:
            raise UsageError(f"metric {name!r}", expected=f"a name whose file is not that of {owner!r}", got=stem)
        return file


class TensorBoardMonitor:
    """Scalars in TensorBoard event files under `output_path/job_name`."""

    def __init__(self, section: FileSection) -> None:
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            log_dir=str(Path(section.output_path, section.job_name))
        )

    def write(self, events: Sequence[Event]) -> None:
        """Adds one scalar per event."""
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Writes pending scalars to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


class WandbMonitor:
    """Metrics of one Weights & Biases run."""

    def __init__(self, section: ProjectSection) -> None:
        self._run: Any = importlib.import_module("wandb").init(
            project=section.project, group=section.group, entity=section.team
        )

    def write(self, events: Sequence[Event]) -> None:
        """Logs the events of one step together."""
        for step, of_step in groupby(events, key=lambda event: event[2]):
            self._run.log({name: value for name, value, _ in of_step}, step=step)

    def flush(self) -> None:
        """wandb sends from a process of its own: nothing waits here."""

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class Monitors:
    """Several monitors as one; false when there are none, so that their numbers need not be computed.

    1. `write` gives events to each. One that fails is logged with its traceback and left out from then on.
    2. `close`, which also happens when the process ends normally, closes each once.
    """

    def __init__(self, members: Iterable[Monitor] = ()) -> None:
        self._members = list(members)
        if self._members:
            atexit.register(self.close)

    def __len__(self) -> int:
        return len(self._members)

    def write(self, events: Sequence[Event]) -> None:
        """Gives events to each monitor."""
        self._each("write", events)

    def flush(self) -> None:
        """Flushes each monitor."""
        self._each("flush")

    def close(self) -> None:
        """Closes each monitor and forgets it."""
        atexit.unregister(self.close)
        self._each("close")
        self._members.clear()

    def _each(self, verb: str, *args: object) -> None:
        for member in tuple(self._members):
            try:
                getattr(member, verb)(*args)
            except Exception:  # whatever a disk or a server does, training goes on, and the log says what is lost
                self._members.remove(member)
                logger.exception("%s failed to %s and is switched off for this run", type(member).__name__, verb)


def build_monitors(config: MonitorConfig, rank: int) -> Monitors:
    """The monitors that a config switches on; none on ranks other than 0.

    Raises:
        ConfigError: a section is on and its package is not installed (on every rank), or its folder cannot be made
            (on rank 0, so agree on it before going on).
    """
    if config.tensorboard.enabled:
        _require("tensorboard", "tensorboard")
    if config.wandb.enabled:
        _require("wandb", "wandb")
    if rank != 0:
        return Monitors()
    members: list[Monitor] = []
    if config.tensorboard.enabled:
        members.append(_on_disk("tensorboard", TensorBoardMonitor, config.tensorboard))
    if config.csv_monitor.enabled:
        members.append(_on_disk("csv_monitor", CsvMonitor, config.csv_monitor))
    if config.wandb.enabled:
        members.append(WandbMonitor(config.wandb))
    return Monitors(members)


def _require(section: str, package: str) -> None:
    spec = importlib.util.find_spec(package)
    if (
        spec is None or spec.origin is None
    ):  # without an origin it is a folder of that name, such as wandb leaves behind
        raise ConfigError(
            f"{section}.enabled",
            expected=f"the package {package} to be installed",
            fix=f"pip install 'zeroaccel[track]' (or {package}), or set {section}.enabled to false",
        )


def _on_disk(name: str, kind: type[CsvMonitor] | type[TensorBoardMonitor], section: FileSection) -> Monitor:
    try:
        return kind(section)
    except OSError as error:
        folder = str(Path(section.output_path, section.job_name))
        raise ConfigError(
            f"{name}.output_path", expected="a folder that can be written", got=folder, fix=f"choose another ({error})"
        ) from error
