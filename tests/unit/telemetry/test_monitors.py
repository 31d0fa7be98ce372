"""Monitors: the written files, the ranks that write, missing packages, and failures that must not stop a run."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.log_lines import log_lines
from zeroaccel.config import Config, load_config
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import logger
from zeroaccel.telemetry.trackers import (
    CsvTracker,
    GeneralTracker,
    Monitors,
    TensorBoardTracker,
    build_monitors,
)


def sections(**named: dict[str, Any]) -> Config:
    """Returns a config in which these sections are on."""
    return load_config({name: {"enabled": True, **keys} for name, keys in named.items()})


class Recorder(GeneralTracker):
    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((dict(values), step))

    def flush(self) -> None:
        self.calls.append("flush")

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Installs a stand-in for the package and returns the list of its calls."""
    told: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: told.append(("log", values, step)), finish=lambda: told.append(("finish",))
    )

    def init(**arguments: Any) -> Any:
        told.append(("init", arguments))
        return run

    module = SimpleNamespace(init=init, __spec__=SimpleNamespace(origin="here"))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return told


# -- csv


def test_csv_has_one_file_per_metric(tmp_path: Path) -> None:
    monitors = Monitors([CsvTracker("run", tmp_path)])
    monitors.write([("Train/loss", 2.5, 8), ("Train/lr", 1e-3, 8)])
    monitors.write([("Train/loss", 0.1, 16), ("my metric", float("inf"), 16)])
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "Train_loss.csv",
        "Train_lr.csv",
        "my_metric.csv",
    ]
    # read before close, because rows must not remain in a buffer
    assert (tmp_path / "run/Train_loss.csv").read_bytes() == b"step,loss\n8,2.5\n16,0.1\n"
    monitors.close()
    monitors.close()


def test_csv_continues_a_file_with_one_header_and_keeps_every_digit(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = CsvTracker("job", tmp_path)
        tracker.log({"Train/loss": 0.1 + 0.2}, step)
        tracker.finish()
    lines = (tmp_path / "job/Train_loss.csv").read_text().split()
    assert lines == ["step,loss", *(f"{step},{0.1 + 0.2!r}" for step in (1, 2))]


def test_csv_refuses_two_metrics_in_one_file(tmp_path: Path) -> None:
    tracker = CsvTracker("job", tmp_path)
    tracker.log({"a/b": 1.0}, 1)
    with pytest.raises(UsageError, match="metric 'a_b': expected a name whose file differs from that of 'a/b'"):
        tracker.log({"a_b": 1.0}, 1)
    tracker.finish()


def test_an_empty_output_path_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_monitors(sections(csv_monitor={"job_name": "job"}), rank=0).close()
    assert (tmp_path / "job").is_dir()


# -- tensorboard and wandb


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_scalars_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitors = Monitors([TensorBoardTracker("run", tmp_path, flush_each_log=False)])
    monitors.write([("Train/loss", 2.5, 8), ("Train/loss", 0.5, 16)])
    monitors.flush()
    read = EventAccumulator(str(tmp_path / "run"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("Train/loss")] == [(8, 2.5), (16, 0.5)]
    monitors.close()


def test_wandb_gets_the_project_and_one_log_per_step(wandb: list[Any]) -> None:
    monitors = build_monitors(sections(wandb={"group": "g", "team": "t", "project": "p"}), rank=0)
    monitors.write([("Train/loss", 1.0, 8), ("Train/lr", 0.1, 8), ("Train/loss", 0.5, 16)])
    monitors.close()
    assert wandb == [
        ("init", {"project": "p", "group": "g", "entity": "t"}),
        ("log", {"Train/loss": 1.0, "Train/lr": 0.1}, 8),
        ("log", {"Train/loss": 0.5}, 16),
        ("finish",),
    ]


# -- from a config


def test_monitors_are_built_on_rank_0_only(tmp_path: Path, wandb: list[Any]) -> None:
    config = sections(csv_monitor={"output_path": str(tmp_path), "job_name": "job"}, wandb={})
    assert not build_monitors(config, rank=1)
    assert not build_monitors(sections(), rank=0)
    assert (wandb, list(tmp_path.iterdir())) == ([], [])
    monitors = build_monitors(config, rank=0)
    assert len(monitors) == 2
    monitors.write([("Train/loss", 1.0, 8)])
    monitors.close()
    assert (tmp_path / "job/Train_loss.csv").exists()
    assert [call[0] for call in wandb] == ["init", "log", "finish"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_an_error_on_every_rank(
    package: str, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    config = sections(**{package: {"output_path": str(tmp_path)} if package == "tensorboard" else {}})
    with pytest.raises(ConfigError, match=rf"^{package}\.enabled: expected the package .*pip install.*to false"):
        build_monitors(config, rank)


def test_a_folder_of_a_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"wandb\.enabled"):
        build_monitors(sections(wandb={}), rank=0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"csv_monitor\.output_path: expected a writable folder"):
        build_monitors(sections(csv_monitor={"output_path": str(tmp_path / "file")}), rank=0)


# -- several monitors


def test_monitors_pass_everything_on_and_close_once() -> None:
    one, two = Recorder(), Recorder()
    monitors = Monitors([one, two])
    monitors.write([("a", 1.0, 1)])
    monitors.flush()
    monitors.close()
    monitors.close()
    assert one.calls == two.calls == [({"a": 1.0}, 1), "flush", "finish"]
    assert not monitors


@pytest.mark.parametrize("error", [OSError("disk is full"), TypeError("no answer")], ids=repr)
def test_a_failing_monitor_is_reported_and_left_out(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    said: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(f"{record.getMessage()}: {record.exc_info[1]}"))
    logger.addHandler(handler)
    bad, good = Recorder(error), Recorder()
    monitors = Monitors([bad, good])
    try:
        monitors.write([("a", 1.0, 1)])
        monitors.write([("a", 2.0, 2)])
    finally:
        logger.removeHandler(handler)
        monitors.close()
    assert good.calls[:2] == [({"a": 1.0}, 1), ({"a": 2.0}, 2)]
    assert said == [f"Recorder failed to write and is switched off for this run: {error}"]


@pytest.mark.parametrize("method", ["log", "flush", "finish"])
def test_each_call_of_a_monitor_may_fail_without_the_training(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the service is away")

    bad, good = Recorder(), Recorder()
    monkeypatch.setattr(bad, method, fail)
    monitors = Monitors([bad, good])
    with log_lines() as lines:
        monitors.write([("a", 1.0, 1)])
        monitors.flush()
        monitors.write([("a", 2.0, 2)])
        monitors.close()
    verb = {"log": "write", "finish": "close"}.get(method, method)
    assert lines == [f"Recorder failed to {verb} and is switched off for this run"]
    assert [call for call in good.calls if isinstance(call, tuple)] == [({"a": 1.0}, 1), ({"a": 2.0}, 2)]
