"""States, metrics and trackers of an `Accelerator` that the scripts in `examples/` do not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.support.log_lines import log_lines
from tests.support.pool import Ranks
from tests.support.refusals import complaint
from zeroaccel import Accelerator, DataLoaderConfiguration, GeneralTracker, ProjectConfiguration, ZeroPlugin


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(7))


def _metrics(dispatch: bool | None, split: bool) -> dict[str, list[Any]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split))
    found: dict[str, list[Any]] = {"items": [], "objects": [], "scalars": [], "nested": []}
    for data in (Stream(), list(range(7))):
        for batch in accelerator.prepare(DataLoader(data, batch_size=2)):  # type: ignore[arg-type]
            found["items"] += accelerator.gather_for_metrics(batch).tolist()
            found["objects"] += accelerator.gather_for_metrics([f"item {item}" for item in batch.tolist()])
            found["nested"] += accelerator.gather_for_metrics({"x": (batch, batch[:, None])})["x"][1].flatten().tolist()
            found["scalars"].append(len(accelerator.gather_for_metrics(batch.sum())))
    return found


@pytest.mark.parametrize(("dispatch", "split"), [(None, False), (False, False), (True, True)])
def test_metrics_count_every_sample_once(ranks: Ranks, dispatch: bool | None, split: bool) -> None:
    for found in ranks(2).run(_metrics, dispatch, split):
        assert found["items"] == found["nested"] == [*range(7), *range(7)]
        assert found["objects"] == [f"item {item}" for item in (*range(7), *range(7))]
        # A value of each rank that has a real sample; with `split`, one rank's last batch is repeated as a whole.
        assert found["scalars"] == ([2, 2, 2, 1] if split else [2, 2]) * 2


class Workers(IterableDataset[Any]):
    """Every worker yields its own part of 0 to 8, and fills its own last round."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        return iter(range(worker.id if worker else 0, 9, worker.num_workers if worker else 1))


def _metric_containers() -> dict[str, Any]:
    accelerator = Accelerator()
    found: dict[str, Any] = {"whole": [], "workers": [], "loss": []}
    whole = [torch.arange(2), torch.arange(2, 6), torch.arange(6, 9)]
    for batch in accelerator.prepare(DataLoader(whole, batch_size=None)):  # type: ignore[arg-type]
        found["whole"] += accelerator.gather_for_metrics(batch.tolist())
        found["loss"] += accelerator.gather_for_metrics(batch.float().mean()).tolist()
    for batch in accelerator.prepare(DataLoader(Workers(), batch_size=2, num_workers=2)):
        found["workers"] += accelerator.gather_for_metrics(batch).tolist()
    for batch in accelerator.prepare(DataLoader(list(range(11)), batch_size=2)):  # type: ignore[arg-type]
        found["texts"] = accelerator.gather_for_metrics(tuple(map(str, batch.tolist())))
        found["arrays"] = [one["p"].tolist() for one in accelerator.gather_for_metrics({"p": batch.numpy()})]
        found["sequences"] = accelerator.gather_for_metrics([row.repeat(2) for row in batch], use_gather_object=True)
        # A list without items has no leaf that is not a tensor.
        found["one rank"] = accelerator.gather_for_metrics([] if accelerator.process_index else ["a", "b"])
        if accelerator.gradient_state.end_of_dataloader:  # one rank has a repeated sample, and both raise
            found["refused"] = complaint(lambda batch=batch: accelerator.gather_for_metrics(batch.repeat(2)))
    return found


def test_metrics_of_objects_and_whole_batches_count_every_sample_once(ranks: Ranks) -> None:
    for found in ranks(2).run(_metric_containers):
        assert found["whole"] == list(range(9))
        assert found["loss"] == [0.5, 3.5, 7.0]  # the repeated batch has none
        assert sorted(found["workers"]) == list(range(9))
        assert found["texts"] == [("8", "9"), ("10",)]
        assert found["arrays"] == [[8, 9], [10]]
        assert [row.tolist() for row in found["sequences"]] == [[8, 8], [9, 9], [10, 10]]
        assert found["one rank"] == ["a", "b"]
        assert "gather_for_metrics: the value at the top: expected a row or list item" in found["refused"]


class Count:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _project(folder: str) -> tuple[list[str], list[Any], dict[str, str]]:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        project_config=project,
        gradient_accumulation_steps=2,
        deepspeed_plugins={"one": ZeroPlugin(zero_stage=3), "two": ZeroPlugin(zero_stage=1)},
    )
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    loader = DataLoader(torch.ones(8, 3), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    accelerator.state.select_deepspeed_plugin("two")
    accelerator.prepare(other)
    count = Count(accelerator.process_index)
    accelerator.register_for_checkpointing(count)
    told: list[Any] = []
    hook = accelerator.register_save_state_pre_hook(lambda models, weights, path: told.append((len(models), weights)))
    accelerator.register_load_state_pre_hook(lambda models, path: told.append(Path(path).name))
    said = {}
    for number, x in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if number == 0:
                said["in between"] = complaint(accelerator.save_state)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number == 1:
            accelerator.save_state()
            hook.remove()
            accelerator.save_state()
            count.value += 10
            accelerator.save_state()
            rates = schedule.get_last_lr()
            weights = accelerator.get_state_dict(model)
    count.value = -1
    accelerator.load_state()
    assert count.value == accelerator.process_index + 10
    assert (loader.epoch, loader.batches_given, accelerator.step) == (0, 2, 2)
    assert schedule.get_last_lr() == rates
    again = accelerator.get_state_dict(model)
    if weights is not None:
        assert all(torch.equal(weights[name], again[name]) for name in weights)
    said["number"] = str(accelerator.save_iteration)
    said["twice"] = complaint(lambda: accelerator.register_for_checkpointing(count))
    said["engine"] = complaint(lambda: accelerator.register_for_checkpointing(model))
    said["stateless"] = complaint(lambda: accelerator.register_for_checkpointing(object()))
    said["pickled"] = complaint(lambda: accelerator.save_state(safe_serialization=False))
    accelerator.register_for_checkpointing(Count(0))
    said["another"] = complaint(accelerator.load_state)
    names = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    parts = sorted(path.name for path in Path(folder, "checkpoints", names[-1]).iterdir() if path.is_dir())
    accelerator.free_memory()
    return names + parts, told, said


def test_states_of_a_project(ranks: Ranks, tmp_path: Path) -> None:
    for names, told, said in ranks(2).run(_project, str(tmp_path)):
        assert names == ["checkpoint_1", "checkpoint_2", "pytorch_model", "pytorch_model_1"]
        assert told == [(2, []), (2, []), "checkpoint_2", "checkpoint_2"]  # also called for the refused save
        assert "no gradients of an unfinished accumulation" in said["in between"]
        assert said["number"] == "3"
        assert "each object once" in said["twice"]
        assert "an object that prepare() did not return" in said["engine"]
        assert "object without state_dict and load_state_dict" in said["stateless"]
        assert "never pickled" in said["pickled"]
        assert "number of objects registered for checkpointing: expected 2" in said["another"]


class Notes(GeneralTracker):
    name = "notes"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((dict(values), step))

    def finish(self) -> None:
        self.calls.append("finish")
        raise OSError("the disk is gone")


def _tracked(folder: str) -> tuple[list[Any], list[str], list[str]]:
    notes = Notes()
    accelerator = Accelerator(log_with=notes, project_dir=folder)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0}, step=1)
    assert accelerator.logging_dir == accelerator.project_dir == folder
    with log_lines() as lines:
        accelerator._end_tracking()
    refused = [
        complaint(lambda: Accelerator(log_with="neptune")),
        complaint(lambda: Accelerator(log_with="tensorboard")),
        complaint(lambda: Accelerator().save_state()),
        complaint(lambda: Accelerator().load_state()),
        complaint(lambda: Accelerator(project_dir="a", project_config=ProjectConfiguration("b"))),
    ]
    return notes.calls, [line for line in lines if "switched off" in line], refused


def test_trackers_log_on_one_rank_whose_failure_ends_no_run(ranks: Ranks, tmp_path: Path) -> None:
    zero, one = ranks(2).run(_tracked, str(tmp_path))
    assert zero[0] == [({"loss": 1.0}, 1), "finish"]
    assert one[0] == []
    assert len(zero[1]) == 1
    assert "Notes failed to finish" in zero[1][0]
    assert one[1] == []
    for _, _, (unknown, folderless, unnamed, nowhere, two) in (zero, one):
        assert "got 'neptune'" in unknown
        assert "a writable folder" in folderless
        assert "automatic_checkpoint_naming=True" in unnamed
        assert "project_dir=" in nowhere
        assert "one project folder" in two
