"""Trackers: what `Accelerator.log` writes to. TensorBoard, Weights & Biases, or a class of the user's own.

A tracker is started by `init_trackers` on the main process, unless it says that it runs on all of them. Other processes
get trackers that do nothing, so that scripts need not ask where they are. The engine's own monitors, switched on by
sections of a config, are `telemetry/monitors.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from zeroaccel.errors import ConfigError, UsageError

__all__ = ["GeneralTracker", "TensorBoardTracker", "Trackers", "WandBTracker"]


class GeneralTracker:
    """What a tracker has; subclass it for a kind of one's own. This one does nothing.

    `__init__` takes what it needs to; an instance is passed as `log_with`. It is started at once, by whoever makes it.

    Attributes:
        name: what `get_tracker` finds it by.
        requires_logging_directory: whether it needs a `logging_dir`.
        main_process_only: False for one that logs on every process.
    """

    name: str = "nothing"
    requires_logging_directory: bool = False
    main_process_only: bool = True

    @property
    def tracker(self) -> Any:
        """The object underneath, of the tracking library."""
        return None

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keeps the hyperparameters of a run."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Takes numbers of one step."""

    def finish(self) -> None:
        """Ends the run; nothing is logged after it."""


class TensorBoardTracker(GeneralTracker):
    """Event files under `logging_dir/run_name`.

    Args:
        kwargs: for `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        self._folder = Path(logging_dir, run_name)
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = module.SummaryWriter(log_dir=str(self._folder), **kwargs)

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self._writer

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """As hyperparameters of the run, and in `hparams.yml` beside the events."""
        plain = {
            key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in values.items()
        }
        self._writer.add_hparams(plain, metric_dict={}, run_name=".")
        self._writer.flush()
        (self._folder / "hparams.yml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers become scalars, texts text, and a mapping of numbers several lines of one chart."""
        for key, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self._writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                self._writer.add_scalar(key, _number(key, value), global_step=step, **kwargs)
        self._writer.flush()

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images, (n, height, width, channels) unless `dataformats` says otherwise."""
        for key, images in values.items():
            self._writer.add_images(key, images, global_step=step, **({"dataformats": "NHWC"} | kwargs))

    def finish(self) -> None:
        """Closes the files."""
        self._writer.close()


class WandBTracker(GeneralTracker):
    """A run of the Weights & Biases project `run_name`.

    Args:
        kwargs: for `wandb.init`.
    """

    name = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = self._wandb.init(**({"project": run_name} | kwargs))

    @property
    def tracker(self) -> Any:
        """The run."""
        return self._run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """As the run's config."""
        self._run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """As `wandb.Run.log`."""
        self._run.log(dict(values), step=step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Lists of images, made into `wandb.Image`."""
        for key, images in values.items():
            self._run.log({key: [self._wandb.Image(image, **kwargs) for image in images]}, step=step)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """A table of rows or of a data frame."""
        table = self._wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self._run.log({table_name: table}, step=step, **kwargs)

    def finish(self) -> None:
        """Ends the run."""
        self._run.finish()


_KNOWN: Mapping[str, type[TensorBoardTracker] | type[WandBTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
}


class Trackers:
    """The trackers of one accelerator: chosen when it is made, started by `init`, ended by `finish`.

    Args:
        log_with: names, "all" for those that are installed, or instances of `GeneralTracker`; one or several.
        logging_dir: for those that need one.
        is_main_process: whether this process logs for all.

    Raises:
        ConfigError: a name is unknown, its package is not installed, or it needs a folder; on every rank alike.
    """

    def __init__(self, log_with: Any, logging_dir: str | os.PathLike[str] | None, *, is_main_process: bool) -> None:
        chosen = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
        chosen = [getattr(one, "value", one) if not isinstance(one, GeneralTracker) else one for one in chosen]
        if "all" in chosen:
            others = [one for one in chosen if one != "all"]
            chosen = [*others, *(name for name in _KNOWN if name not in others and _installed(name))]
        self._logging_dir = logging_dir
        self._is_main = is_main_process
        self._chosen: list[str | GeneralTracker] = [self._checked(one) for one in chosen]
        self._running: list[GeneralTracker] = []

    def __iter__(self) -> Iterator[GeneralTracker]:
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._running)

    def init(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers and gives them the run's hyperparameters.

        Args:
            init_kwargs: by tracker's name, what its `__init__` is given besides.

        Raises:
            UsageError: `init_kwargs` names a tracker that is not among them.
            ConfigError: a tracker's folder cannot be written.
        """
        kwargs = dict(init_kwargs or {})
        names = [one if isinstance(one, str) else one.name for one in self._chosen]
        if unknown := sorted(set(kwargs) - set(names)):
            raise UsageError("init_trackers(init_kwargs)", expected=f"trackers among {names}", got=unknown)
        self.finish()
        for one in self._chosen:
            if isinstance(one, GeneralTracker):
                if self._is_main or not one.main_process_only:
                    self._running.append(one)
            elif self._is_main:
                made = _KNOWN[one]
                folder: dict[str, Any] = {"logging_dir": self._logging_dir} if made.requires_logging_directory else {}
                try:
                    self._running.append(made(project_name, **folder, **kwargs.get(one, {})))
                except OSError as error:
                    got = f"{error.filename or self._logging_dir} ({error.strerror})"
                    raise ConfigError(f"init_trackers: {one}", expected="a folder to write to", got=got) from error
        if config is not None:
            for tracker in self._running:
                tracker.store_init_configuration(config)

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name, or the object underneath; on a process that does not log, one that does nothing.

        Raises:
            UsageError: there is none of that name.
        """
        for tracker in self._running:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = [one if isinstance(one, str) else one.name for one in self._chosen]
        if name in names and not self._is_main:
            return GeneralTracker()
        fix = "call init_trackers first" if name in names else "add it to Accelerator(log_with=...)"
        raise UsageError("get_tracker(name)", expected=f"one of the trackers {names}", got=name, fix=fix)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Gives values to every tracker that runs here.

        Args:
            log_kwargs: by tracker's name, what its `log` is given besides.
        """
        for tracker in self._running:
            tracker.log(values, step=step, **dict((log_kwargs or {}).get(tracker.name, {})))

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Gives images to every tracker that takes them."""
        for tracker in self._running:
            if callable(take := getattr(tracker, "log_images", None)):
                take(values, step=step, **dict((log_kwargs or {}).get(tracker.name, {})))

    def finish(self) -> None:
        """Ends every tracker, also when one of them fails."""
        running, self._running = self._running, []
        failure: Exception | None = None
        for tracker in running:
            try:
                tracker.finish()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _checked(self, one: str | GeneralTracker) -> str | GeneralTracker:
        where = "Accelerator(log_with)"
        if isinstance(one, str):
            if one not in _KNOWN:
                raise ConfigError(
                    where,
                    expected=f'"all", {", ".join(map(repr, _KNOWN))}, or an instance of a GeneralTracker subclass',
                    got=one,
                    fix="for other services write such a subclass; it needs name, log and finish",
                )
            if not _installed(one):
                raise ConfigError(
                    where,
                    expected=f"the package {one} to be installed",
                    fix=f"pip install 'zeroaccel[track]' (or {one}), or log with something else",
                )
        elif not isinstance(one, GeneralTracker):
            raise ConfigError(where, expected="names or instances of GeneralTracker", got=type(one).__name__)
        needs = _KNOWN[one].requires_logging_directory if isinstance(one, str) else one.requires_logging_directory
        if needs and self._logging_dir is None:
            raise ConfigError(
                f"{where}: {one if isinstance(one, str) else one.name}",
                expected="a folder to write to",
                got=None,
                fix='pass Accelerator(project_dir="...") or ProjectConfiguration(logging_dir="...")',
            )
        return one


def _installed(package: str) -> bool:
    if (spec := importlib.util.find_spec(package)) is None:
        return False
    return spec.origin is not None  # a folder of that name, as wandb leaves behind, has none


def _number(key: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        raise UsageError(f"log: value of {key!r}", expected="a number, a text or a mapping of numbers", got=value)
    return value
