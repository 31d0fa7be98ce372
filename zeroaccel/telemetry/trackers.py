"""Trackers write the metrics of a run to TensorBoard, Weights & Biases, files, accelerate's services, or the user's.

They have two users. `Trackers` serves `Accelerator.log`: scripts choose trackers by name or pass their own, and log on
every rank, whichever rank writes. `Monitors` serves the engine: the config's sections tensorboard, wandb, csv_monitor
and jsonl_monitor choose trackers, which receive the engine's events on rank 0. A tracker that fails is switched off
with an error in the log, because a disk or a server must not stop training.
"""

from __future__ import annotations

import atexit
import csv
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml

from zeroaccel.config import Config
from zeroaccel.errors import ConfigError, UsageError, ZeroAccelError
from zeroaccel.logs import logger

Event = tuple[str, float, int]
"""(name, such as "Train/loss"; value; step, which the engine counts in samples over all ranks)."""


_RUN_FACTS = "run.json"  # `zeroaccel report` reads it


class GeneralTracker:
    """Base class of trackers, without effect; subclass it for another service, and pass an instance as `log_with`.

    `register_tracker_class` lets `log_with` name a subclass instead.

    Attributes:
        name: name for `get_tracker`.
        requires_logging_directory: True if it needs a `logging_dir`.
        main_process_only: False for a tracker that logs on every rank.
        tracker: the tracking library's object.

    Example:
        >>> from zeroaccel import Accelerator, GeneralTracker
        >>> class Lines(GeneralTracker):
        ...     name = "lines"
        ...
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> accelerator = Accelerator(log_with=Lines())
        >>> accelerator.init_trackers("run")
        >>> accelerator.log({"loss": 0.5}, step=10)
        10 {'loss': 0.5}
    """

    name: str = "nothing"
    requires_logging_directory: bool = False
    main_process_only: bool = True
    tracker: Any = None

    def start(self) -> None:
        """Starts the run: `init_trackers` calls it before the other methods."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores the hyperparameters of a run."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes the values of one step."""

    def flush(self) -> None:
        """Makes logged values visible to readers."""

    def finish(self) -> None:
        """Ends the run; nothing is logged afterwards."""


class _Silent(GeneralTracker):
    """Takes any call without effect: where no tracker runs, or one is switched off."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name.startswith("__") or name == "name" else self

    def __call__(self, *args: Any, **kwargs: Any) -> _Silent:
        return self


class TensorBoardTracker(GeneralTracker):
    """Event files under `logging_dir/run_name`.

    Args:
        flush_each_log: flush after every `log`; otherwise SummaryWriter's own interval and `flush` decide.
        kwargs: arguments for `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], *, flush_each_log: bool = True, **kwargs: Any
    ) -> None:
        self._folder = Path(logging_dir, run_name)
        self._flush_each_log = flush_each_log
        module = importlib.import_module("torch.utils.tensorboard")
        self.tracker = self._writer = module.SummaryWriter(log_dir=str(self._folder), **kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores them as hyperparameters of the run, and in `hparams.yml` beside the events."""
        plain = {
            key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in values.items()
        }
        self._writer.add_hparams(plain, metric_dict={}, run_name=".")
        self._writer.flush()
        (self._folder / "hparams.yml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers as scalars, strings as text, and a mapping of numbers as several lines of one chart."""
        for key, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self._writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                self._writer.add_scalar(key, _number(key, value), global_step=step, **kwargs)
        if self._flush_each_log:
            self._writer.flush()

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs batches of images, (n, height, width, channels) unless `dataformats` overrides it."""
        for key, images in values.items():
            self._writer.add_images(key, images, global_step=step, **({"dataformats": "NHWC"} | kwargs))

    def flush(self) -> None:
        """Writes pending values to the files."""
        self._writer.flush()

    def finish(self) -> None:
        """Flushes and closes the files."""
        self._writer.close()


class WandBTracker(GeneralTracker):
    """A run of the Weights & Biases project `run_name`.

    Args:
        kwargs: arguments for `wandb.init`.
    """

    name = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self.tracker = self._run = self._wandb.init(**({"project": run_name} | kwargs))

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores them as the run's config."""
        self._run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs with `wandb.Run.log`."""
        self._run.log(dict(values), step=step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs lists of images as `wandb.Image` objects."""
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
        """Logs a table of rows or of a data frame."""
        table = self._wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self._run.log({table_name: table}, step=step, **kwargs)

    def finish(self) -> None:
        """Ends the run."""
        self._run.finish()


class CsvTracker(GeneralTracker):
    """One file per metric, `logging_dir/run_name/Train_loss.csv` for "Train/loss", with the columns step and loss.

    Files are line-buffered, so that logged rows are on disk at once. An existing file is continued, for example after a
    restart.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        self._folder = Path(logging_dir, run_name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, tuple[str, TextIO]] = {}

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Appends a row per metric.

        Raises:
            UsageError: two metrics have the same file name.
        """
        for name, value in values.items():
            csv.writer(self._file(name), lineterminator="\n").writerow([step, value])

    def finish(self) -> None:
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
            raise UsageError(f"metric {name!r}", expected=f"a name whose file differs from that of {owner!r}", got=stem)
        return file


class JsonlTracker(GeneralTracker):
    """One file, `logging_dir/run_name/metrics.jsonl`, with a line per step: its number, the time, and every value.

    ``{"step": 16, "time": 1763889000.25, "Train/loss": 0.5}``; `time` is in seconds since 1970. NaN and infinities have
    the format of Python's json. A logged line is on disk at once. An existing file is continued, for example after a
    restart.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        folder = Path(logging_dir, run_name)
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores them as a separate line: ``{"config": {...}}``."""
        self._write({"config": dict(values)})

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Appends a line; numbers stay numbers, and strings and mappings of numbers are unchanged."""
        plain = {
            key: value if isinstance(value, (str, Mapping)) else _number(key, value) for key, value in values.items()
        }
        self._write({"step": step, "time": time.time(), **plain})

    def finish(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content, default=str) + "\n")


class AccelerateTracker(GeneralTracker):
    """A service for which accelerate has a tracker; that tracker's other methods can be called here.

    Args:
        run_name: first argument of accelerate's class: a project, or an experiment.
        folder: `logging_dir` if the class requires one.
        kwargs: its other arguments.
    """

    def __init__(self, run_name: str, /, *folder: Any, **kwargs: Any) -> None:
        self._inner: Any = self.load()(run_name, *folder, **kwargs)
        # Otherwise it asks accelerate's PartialState if this process logs; `Trackers` decides that here.
        self._inner.main_process_only = False

    @classmethod
    def load(cls) -> Any:
        """Returns accelerate's class.

        Raises:
            ConfigError: accelerate is not installed, or its version does not have that tracker.
        """
        try:
            return importlib.import_module("accelerate.tracking").LOGGER_TYPE_TO_CLASS[cls.name]
        except (ImportError, KeyError) as error:
            raise ConfigError(
                f"Accelerator(log_with): {cls.name}",
                expected="a version of accelerate with this tracker",
                got=f"{type(error).__name__}: {error}",
                fix="run `pip install -U accelerate`, or log with another tracker",
            ) from error

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def tracker(self) -> Any:
        """The service's object, such as the run."""
        return self._inner.tracker

    def start(self) -> None:
        """Starts accelerate's tracker."""
        if hasattr(self._inner, "start"):  # earlier versions start in the constructor
            self._inner.start()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores them with accelerate's tracker."""
        self._inner.store_init_configuration(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs with accelerate's tracker; converts tensors with one element to numbers."""
        plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        self._inner.log(plain, step=step, **kwargs)

    def finish(self) -> None:
        """Ends the run."""
        self._inner.finish()


def _of_accelerate(service: str, *, folder: bool = False) -> type[GeneralTracker]:
    return type(service, (AccelerateTracker,), {"name": service, "requires_logging_directory": folder})


# -- trackers of scripts

_BY_NAME: dict[str, Callable[..., GeneralTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "jsonl": JsonlTracker,
    **{name: _of_accelerate(name) for name in ("trackio", "mlflow", "swanlab", "comet_ml", "clearml", "dvclive")},
    "aim": _of_accelerate("aim", folder=True),
}
_NEED_NO_PACKAGE = {"jsonl"}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Makes `log_with` accept a subclass of `GeneralTracker` by its `name`; call it before making the accelerator.

    `init_trackers` calls the class with the project's name, then `logging_dir` if it requires one, then the keyword
    arguments of `init_kwargs`. A class replaces another one of its name, with a note in the log.

    Raises:
        UsageError: it is not a subclass with a name of its own.
    """
    is_tracker = isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)
    name = tracker_class.name if is_tracker else ""
    if not isinstance(name, str) or name in ("", "all", GeneralTracker.name):
        raise UsageError(
            "register_tracker_class(tracker_class)",
            expected="a subclass of zeroaccel.tracking.GeneralTracker with a name of its own",
            got=f"the name {name!r} of {tracker_class.__name__}" if is_tracker else tracker_class,
        )
    if name in _BY_NAME:
        logger.warning(f"register_tracker_class: {tracker_class.__name__} replaces the tracker {name!r}")
    _BY_NAME[name] = tracker_class
    _NEED_NO_PACKAGE.add(name)


class Trackers:
    """The trackers of one accelerator: chosen when it is made, started by `init`, ended by `finish`.

    Args:
        log_with: names, "all" for all installed ones, or instances of `GeneralTracker`; one or several.
        logging_dir: folder for trackers that need one.
        is_main_process: True if this process logs for all.

    Raises:
        ConfigError: on every rank, if a name is unknown, its package is not installed, or it needs a folder.
    """

    def __init__(self, log_with: Any, logging_dir: str | os.PathLike[str] | None, *, is_main_process: bool) -> None:
        requested = log_with if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
        chosen: list[Any] = [
            item if isinstance(item, GeneralTracker) else getattr(item, "value", item) for item in requested
        ]
        if "all" in chosen:
            others = [item for item in chosen if item != "all"]
            chosen = [*others, *(name for name in _BY_NAME if name not in others and _installed(name))]
        self._logging_dir = logging_dir
        self._is_main = is_main_process
        self._chosen: list[str | GeneralTracker] = [self._checked(item) for item in chosen]
        self._running: list[GeneralTracker] = []
        self._is_begun = False
        # A TypeError is a mistake in the call, until a call has gone well; later it comes from a service's answer.
        self._mistakes: list[type[Exception]] = [TypeError, ZeroAccelError]

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
        """Starts the trackers and passes them the run's hyperparameters.

        Args:
            init_kwargs: additional arguments of each tracker's constructor, by tracker name.

        Raises:
            UsageError: `init_kwargs` names a tracker that was not chosen.
            ConfigError: a tracker's folder cannot be written.
        """
        kwargs = dict(init_kwargs or {})
        if unknown := sorted(set(kwargs) - set(self._names)):
            raise UsageError("init_trackers(init_kwargs)", expected=f"trackers among {self._names}", got=unknown)
        self.finish()
        for item in self._chosen:
            if isinstance(item, GeneralTracker):
                if self._is_main or not item.main_process_only:
                    self._running.append(item)
            elif self._is_main or not getattr(_BY_NAME[item], "main_process_only", True):
                self._running.append(self._made(item, project_name, kwargs.get(item, {})))
        self._is_begun = True
        for tracker in self._running:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(config)

    def _made(self, name: str, project_name: str, kwargs: Mapping[str, Any]) -> GeneralTracker:
        kind: Any = _BY_NAME[name]
        folder = [self._logging_dir] if kind.requires_logging_directory else []
        try:
            tracker: GeneralTracker = kind(project_name, *folder, **kwargs)
            return tracker
        except OSError as error:
            got = f"{error.filename or self._logging_dir} ({error.strerror})"
            raise ConfigError(f"init_trackers: {name}", expected="a writable folder", got=got) from error

    @property
    def _names(self) -> list[str]:
        return [item if isinstance(item, str) else item.name for item in self._chosen]

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Returns the tracker of that name, or its library's object; one without effect where it does not run.

        Raises:
            UsageError: there is no tracker of that name.
        """
        for tracker in self._running:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = self._names
        if name in names and (self._is_begun or not self._is_main):
            return _Silent()
        fix = "call init_trackers first" if name in names else "add it to Accelerator(log_with=...)"
        raise UsageError("get_tracker(name)", expected=f"one of the trackers {names}", got=name, fix=fix)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Logs values to every tracker that runs on this rank; one that fails is switched off, and the log names it.

        Args:
            log_kwargs: additional arguments of each tracker's `log`, by tracker name.
        """
        more = log_kwargs or {}
        _each(self._running, "log", lambda t: t.log(values, step=step, **dict(more.get(t.name, {}))), *self._mistakes)
        self._mistakes = [ZeroAccelError]

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Logs images to every tracker that supports them; one that fails is switched off, as in `log`."""

        def call(tracker: GeneralTracker) -> None:
            if callable(log_images := getattr(tracker, "log_images", None)):
                log_images(values, step=step, **dict((log_kwargs or {}).get(tracker.name, {})))

        _each(self._running, "log images", call, *self._mistakes)

    def finish(self) -> None:
        """Ends every tracker; the log names one that fails, because the training is complete."""
        _each(self._running, "finish", lambda tracker: tracker.finish())
        self._running, self._is_begun = [], False

    def _checked(self, item: str | GeneralTracker) -> str | GeneralTracker:
        where = "Accelerator(log_with)"
        if isinstance(item, str):
            if item not in _BY_NAME:
                raise ConfigError(
                    where,
                    expected=f'"all", {", ".join(map(repr, _BY_NAME))}, or an instance of a GeneralTracker subclass',
                    got=item,
                    fix="pass register_tracker_class() a subclass of that name, or an instance as log_with",
                )
            if item not in _NEED_NO_PACKAGE and not _installed(item):
                raise ConfigError(
                    where,
                    expected=f"the package {item} to be installed",
                    fix=f"run `pip install {item}`, or log with another tracker",
                )
        elif not isinstance(item, GeneralTracker):
            raise ConfigError(where, expected="names or instances of GeneralTracker", got=type(item).__name__)
        kind: Any = _BY_NAME[item] if isinstance(item, str) else item
        if isinstance(kind, type) and issubclass(kind, AccelerateTracker):
            kind.load()
        if kind.requires_logging_directory and self._logging_dir is None:
            raise ConfigError(
                f"{where}: {kind.name}",
                expected="a writable folder",
                got=None,
                fix='pass Accelerator(project_dir="...") or ProjectConfiguration(logging_dir="...")',
            )
        return item


# -- trackers of the engine


class Monitors:
    """The engine's trackers; false if there are none, so that their metrics need not be computed.

    1. `write` logs events to each. If a tracker fails, `Monitors` logs its traceback and drops it.
    2. `close`, which also runs when the process ends normally, finishes each tracker once.
    """

    def __init__(self, trackers: Iterable[GeneralTracker] = ()) -> None:
        self._trackers = list(trackers)
        if self._trackers:
            atexit.register(self.close)

    def __len__(self) -> int:
        return len(self._trackers)

    def write(self, events: Sequence[Event]) -> None:
        """Logs events, those of one step together, to each tracker."""
        for step, group in groupby(events, key=lambda event: event[2]):
            values = {name: value for name, value, _ in group}
            _each(self._trackers, "write", lambda tracker, values=values, step=step: tracker.log(values, step=step))

    def flush(self) -> None:
        """Flushes each tracker."""
        _each(self._trackers, "flush", lambda tracker: tracker.flush())

    def close(self) -> None:
        """Finishes each tracker and drops it."""
        atexit.unregister(self.close)
        _each(self._trackers, "close", lambda tracker: tracker.finish())
        self._trackers.clear()


def _each(trackers: list[GeneralTracker], verb: str, call: Callable[..., None], *mistakes: type[Exception]) -> None:
    for tracker in tuple(trackers):
        try:
            call(tracker)
        except mistakes:
            raise
        except Exception:  # of any kind: training continues, and the log names the lost tracker
            trackers.remove(tracker)
            logger.exception("%s failed to %s and is switched off for this run", type(tracker).__name__, verb)


def build_monitors(config: Config, rank: int, facts: Mapping[str, object] | None = None) -> Monitors:
    """Makes the trackers that a config enables; none on ranks other than 0.

    Args:
        facts: model and settings of the run, for `run.json` beside the files of csv_monitor and jsonl_monitor.

    Raises:
        ConfigError: the package of an enabled section is not installed (on every rank), or its folder cannot be made
            (on rank 0, so ranks must agree on the outcome before they continue).
    """
    for name, section in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if section.enabled and not _installed(name):
            raise ConfigError(
                f"{name}.enabled",
                expected=f"the package {name} to be installed",
                fix=f"pip install 'zeroaccel[track]' (or {name}), or set {name}.enabled to false",
            )
    if rank != 0:
        return Monitors()
    trackers: list[GeneralTracker] = []
    for key, files, kind in (
        # The engine logs every training step: it flushes TensorBoard with its reports, not after each step.
        ("tensorboard", config.tensorboard, partial(TensorBoardTracker, flush_each_log=False)),
        ("csv_monitor", config.csv_monitor, CsvTracker),
        ("jsonl_monitor", config.jsonl_monitor, JsonlTracker),
    ):
        if files.enabled:
            try:
                trackers.append(kind(files.job_name, files.output_path))
                if facts is not None and key != "tensorboard":
                    about = {**facts, "begun": time.strftime("%Y-%m-%d %H:%M"), "numbered_by": "samples"}
                    Path(files.output_path, files.job_name, _RUN_FACTS).write_text(json.dumps(about) + "\n")
            except OSError as error:
                folder = str(Path(files.output_path, files.job_name))
                raise ConfigError(
                    f"{key}.output_path",
                    expected="a writable folder",
                    got=folder,
                    fix=f"choose another ({error})",
                ) from error
    if config.wandb.enabled:
        wandb = config.wandb
        trackers.append(WandBTracker(wandb.project, group=wandb.group, entity=wandb.team))
    return Monitors(trackers)


def _installed(package: str) -> bool:
    if (spec := importlib.util.find_spec(package)) is None:
        return False
    return spec.origin is not None  # a mere folder of that name, such as the one wandb leaves behind, has none


def _number(key: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        raise UsageError(f"log: value of {key!r}", expected="a number, a text or a mapping of numbers", got=value)
    return value
