"""Trackers: values read back from TensorBoard's files, the calls to wandb, and a user's own class."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.log_lines import log_lines
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.telemetry.trackers import GeneralTracker, JsonlTracker, Trackers, register_tracker_class


class Notes(GeneralTracker):
    """A user's own tracker."""

    name = "notes"

    def __init__(self, everywhere: bool = False) -> None:
        self.main_process_only = not everywhere
        self.calls: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.calls

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.calls.append(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((dict(values), step, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_logged_values(tmp_path: Path) -> None:
    trackers = Trackers("tensorboard", tmp_path, is_main_process=True)
    trackers.init("run", {"lr": 0.1, "layers": [1, 2]}, {"tensorboard": {"flush_secs": 30}})
    trackers.log({"loss": torch.tensor(2.5), "note": "first"}, step=3)
    trackers.log({"loss": 1.5, "both": {"a": 1.0, "b": 2.0}}, step=4)
    trackers.get("tensorboard").log_images({"image": torch.zeros(1, 4, 5, 3)}, step=4)
    writer = trackers.get("tensorboard", unwrap=True)
    assert type(writer).__name__ == "SummaryWriter"
    trackers.finish()
    assert len(trackers) == 0
    found = read(tmp_path / "run")
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(3, 2.5), (4, 1.5)]
    assert found.Tags()["images"] == ["image"]
    assert "note/text_summary" in found.Tags()["tensors"]
    assert yaml.safe_load((tmp_path / "run" / "hparams.yml").read_text()) == {"lr": 0.1, "layers": "[1, 2]"}
    assert read(tmp_path / "run" / "both_b").Scalars("both")[0].value == 2.0


def test_other_processes_write_nothing_and_need_not_ask(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard", Notes(), Notes(everywhere=True)], tmp_path, is_main_process=False)
    trackers.init("run", {"lr": 0.1})
    trackers.log({"loss": 1.0})
    assert list(tmp_path.iterdir()) == []
    blank = trackers.get("tensorboard")
    blank.log({"loss": 1.0}, step=1)
    blank.tracker.add_scalar("loss", 1.0, global_step=1)
    assert trackers.get("notes").calls == [{"lr": 0.1}, ({"loss": 1.0}, None, {})]


def test_a_tracker_of_ones_own_gets_its_keywords_and_its_end() -> None:
    notes = Notes()
    trackers = Trackers(notes, None, is_main_process=True)
    trackers.init("run")
    trackers.log({"loss": 1.0}, step=2, log_kwargs={"notes": {"commit": True}, "other": {"no": 1}})
    assert trackers.get("notes", unwrap=True) is notes.calls
    trackers.finish()
    trackers.finish()
    assert notes.calls == [({"loss": 1.0}, 2, {"commit": True}), "finish"]


class Failing(Notes):
    name = "failing"

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if step:
            raise self.error


@pytest.mark.parametrize(
    "error", [ConnectionError("the service is away"), TypeError("'NoneType' has no items")], ids=repr
)
def test_a_tracker_that_fails_in_a_run_is_switched_off_and_the_others_go_on(error: Exception) -> None:
    failing, notes = Failing(error), Notes()
    trackers = Trackers([failing, notes], None, is_main_process=True)
    trackers.init("run")
    trackers.log({"loss": 3.0}, step=0)
    notes.calls.clear()
    with log_lines() as lines:
        for step in (1, 2):
            trackers.log({"loss": 2.0}, step=step)
    assert lines == ["Failing failed to log and is switched off for this run"]
    assert [call[1] for call in notes.calls] == [1, 2]
    trackers.finish()


class Strict(Notes):
    name = "strict"

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        self.calls.append(step)


def test_a_mistake_in_the_first_call_is_an_error_of_the_script() -> None:
    trackers = Trackers(Strict(), None, is_main_process=True)
    trackers.init("run")
    with pytest.raises(TypeError, match="unexpected keyword argument 'commit'"):
        trackers.log({"loss": 3.0}, log_kwargs={"strict": {"commit": True}})
    assert len(trackers) == 1


class Registered(Notes):
    """A tracker that scripts choose by its name, with arguments as accelerate passes them."""

    name, requires_logging_directory, main_process_only = "registered", True, False

    def __init__(self, project: str, folder: Path, /, **kwargs: Any) -> None:
        self.calls = [(project, folder, kwargs)]

    def start(self) -> None:
        self.calls.append("start")


def test_a_registered_class_is_chosen_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zeroaccel.telemetry.trackers._BY_NAME", {"jsonl": JsonlTracker})
    monkeypatch.setattr("zeroaccel.telemetry.trackers._NEED_NO_PACKAGE", {"jsonl"})
    with pytest.raises(ConfigError, match="got 'registered'; pass register_tracker_class"):
        Trackers("registered", tmp_path, is_main_process=True)
    register_tracker_class(Registered)
    for is_main in (True, False):
        trackers = Trackers(["registered", "jsonl"], tmp_path, is_main_process=is_main)
        trackers.init("run", {"lr": 0.1}, {"registered": {"team": "us"}})
        assert trackers.get("registered").calls == [("run", tmp_path, {"team": "us"}), "start", {"lr": 0.1}]
        trackers.finish()
    with pytest.raises(ConfigError, match="Accelerator\\(log_with\\): registered: expected a writable folder"):
        Trackers("registered", None, is_main_process=True)
    assert not caplog.messages
    register_tracker_class(type("Again", (Registered,), {}))
    assert caplog.messages == ["register_tracker_class: Again replaces the tracker 'registered'"]
    for wrong in (Notes(), dict, type("Nameless", (GeneralTracker,), {}), type("All", (Notes,), {"name": "all"})):
        with pytest.raises(
            UsageError, match=r"a subclass of zeroaccel\.tracking\.GeneralTracker with a name of its own"
        ):
            register_tracker_class(wrong)  # type: ignore[arg-type]


def test_all_trackers_finish_if_one_fails() -> None:
    class Broken(Notes):
        name = "broken"

        def finish(self) -> None:
            raise OSError("no connection")

    notes = Notes()
    trackers = Trackers([Broken(), notes], None, is_main_process=True)
    trackers.init("run")
    with log_lines() as lines:
        trackers.finish()
    assert lines == ["Broken failed to finish and is switched off for this run"]
    assert notes.calls == ["finish"]
    assert len(trackers) == 0


def test_images_that_a_tracker_cannot_take_switch_it_off_and_later_calls_have_no_effect() -> None:
    class Images(Notes):
        name = "images"

        def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
            if step:
                raise OSError("disk is full")

    failing, notes = Images(), Notes()
    trackers = Trackers([failing, notes], None, is_main_process=True)
    trackers.init("run")
    trackers.log({"loss": 1.0}, step=0)
    trackers.log_images({"a": []}, step=0)
    assert trackers.get("images") is failing
    with log_lines() as lines:
        trackers.log_images({"a": []}, step=1)
        trackers.log_images({"a": []}, step=2)
    assert lines == ["Images failed to log images and is switched off for this run"]
    trackers.get("images").log_table("rows", columns=["a"], data=[[1]])
    trackers.get("images", unwrap=True).config.update({"lr": 0.1})
    trackers.get("images").tracker.log({"a": 1})
    assert [tracker.name for tracker in trackers] == [notes.name]
    trackers.finish()
    with pytest.raises(UsageError, match="call init_trackers first"):
        trackers.get("images")


def test_wandb_gets_configs_values_images_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None, origin="here")
    run = MagicMock()
    wandb.init = MagicMock(return_value=run)
    wandb.Image = lambda image, **kwargs: ("image", image, kwargs)
    wandb.Table = lambda **kwargs: ("table", kwargs["columns"])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trackers = Trackers("all", "logs", is_main_process=True)
    trackers = Trackers(["wandb"], None, is_main_process=True)
    trackers.init("project", {"lr": 0.1}, {"wandb": {"entity": "us"}})
    wandb.init.assert_called_once_with(project="project", entity="us")
    run.config.update.assert_called_once_with({"lr": 0.1}, allow_val_change=True)
    trackers.log({"loss": 1.0}, step=5, log_kwargs={"wandb": {"commit": False}})
    run.log.assert_called_once_with({"loss": 1.0}, step=5, commit=False)
    trackers.get("wandb").log_table("t", columns=["a"], data=[[1]], step=6)
    assert run.log.call_args.args == ({"t": ("table", ["a"])},)
    trackers.log_images({"x": [1, 2]}, step=7)
    assert run.log.call_args.args == ({"x": [("image", 1, {}), ("image", 2, {})]},)
    assert trackers.get("wandb", unwrap=True) is run
    trackers.finish()
    run.finish.assert_called_once_with()


def _installed(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    module = MagicMock()
    module.__spec__ = ModuleSpec(name, None, origin="here")
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_services_that_accelerate_has_trackers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("accelerate.state").PartialState
    state(cpu=True)  # as `Accelerator()` does
    monkeypatch.setattr(state, "_shared_state", dict(state._shared_state))
    trackio, mlflow = _installed(monkeypatch, "trackio"), _installed(monkeypatch, "mlflow")
    mlflow.search_experiments.return_value = []
    mlflow.utils.validation.MAX_PARAM_VAL_LENGTH = mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 100
    Trackers(["trackio", "mlflow"], None, is_main_process=False).init("project", {"lr": 0.1})
    trackio.init.assert_not_called()
    trackers = Trackers(["trackio", "mlflow"], None, is_main_process=True)
    trackers.init("project", {"lr": 0.1}, {"trackio": {"space_id": "us/board"}, "mlflow": {"run_name": "first"}})
    trackio.init.assert_called_once_with(project="project", space_id="us/board")
    assert mlflow.create_experiment.call_args.kwargs["name"] == "project"
    assert mlflow.start_run.call_args.kwargs["run_name"] == "first"
    mlflow.log_params.assert_called_once_with({"lr": 0.1})
    trackers.log({"loss": torch.tensor(2.5)}, step=3)
    trackio.init.return_value.log.assert_called_once_with({"loss": 2.5}, step=3)
    mlflow.log_metrics.assert_called_once_with({"loss": 2.5}, step=3)
    assert trackers.get("trackio", unwrap=True) is trackio.init.return_value
    trackers.get("mlflow").log_artifact("a.txt")
    mlflow.log_artifact.assert_called_once_with(local_path="a.txt", artifact_path=None)
    trackers.finish()
    mlflow.end_run.assert_called_once_with()


def test_a_service_that_this_accelerate_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "swanlab")
    tracking = pytest.importorskip("accelerate.tracking")
    monkeypatch.delitem(tracking.LOGGER_TYPE_TO_CLASS, "swanlab")
    with pytest.raises(ConfigError, match=r"Accelerator\(log_with\): swanlab: expected a version of accelerate with"):
        Trackers("swanlab", None, is_main_process=False)


@pytest.mark.parametrize(
    ("log_with", "logging_dir", "message"),
    [
        (
            "neptune",
            "logs",
            r"log_with\): expected \"all\", .*'wandb', 'jsonl', .*'aim', or an instance.*got 'neptune'",
        ),
        ("wandb", "logs", r"log_with\): expected the package wandb to be installed.*pip install"),
        ("comet_ml", "logs", r"log_with\): expected the package comet_ml to be installed.*pip install"),
        ("tensorboard", None, "log_with.: tensorboard: expected a writable folder.*project_dir"),
        (3, "logs", "names or instances of GeneralTracker, got 'int'"),
    ],
)
def test_wrong_trackers_are_refused_by_name(log_with: Any, logging_dir: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trackers(log_with, logging_dir, is_main_process=False)


def test_unknown_trackers_and_values_are_refused(tmp_path: Path) -> None:
    trackers = Trackers("tensorboard", tmp_path, is_main_process=True)
    with pytest.raises(UsageError, match="call init_trackers first"):
        trackers.get("tensorboard")
    with pytest.raises(UsageError, match=r"log_with=\.\.\."):
        trackers.get("wandb")
    with pytest.raises(UsageError, match="init_kwargs"):
        trackers.init("run", init_kwargs={"wandb": {}})
    trackers.init("run")
    with pytest.raises(UsageError, match="value of 'loss': expected a number"):
        trackers.log({"loss": None})
    trackers.finish()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trackers = Trackers("tensorboard", tmp_path / "file", is_main_process=True)
    with pytest.raises(ConfigError, match=r"init_trackers: tensorboard: expected a writable folder, got '.*file"):
        trackers.init("run")
