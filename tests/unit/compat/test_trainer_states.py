"""The steps at which a Trainer's state is saved in memory, and the checkpoint from which a run resumes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.log_lines import log_lines
from zeroaccel.accelerate.memory_states import MemoryStates
from zeroaccel.accelerate.peer_copies import FoundState
from zeroaccel.compat import trainer_states
from zeroaccel.compat.trainer_states import TrainerStates
from zeroaccel.config.schema import PeerStates


class _Memory(MemoryStates):
    """Records the steps at which a state may be saved, and has one of step 5."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        super().__init__(folder, *arguments)
        self.steps: list[int] = []
        self._peers.newest = lambda _: FoundState("checkpoint_5", [], {})  # type: ignore[method-assign]

    def at_batch(self, num_steps: int, _: int) -> None:
        self.steps.append(num_steps)

    def open(self) -> Path:
        return self._memory / "checkpoint_5"


@pytest.fixture(name="states")
def _states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TrainerStates:
    monkeypatch.setattr(trainer_states, "MemoryStates", _Memory)
    monkeypatch.setattr(trainer_states, "_digest", lambda _: "digest")
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=0, epoch=0), args=SimpleNamespace(output_dir=tmp_path))
    return TrainerStates(trainer, tmp_path / "train", PeerStates(interval=1))


def test_the_last_step_of_an_epoch_is_saved_after_the_epochs_evaluation(states: TrainerStates) -> None:
    states._engine = object()  # type: ignore[assignment]
    calls = [(1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5), (3, 1.5)]  # the run ends within the second epoch
    seen = []
    for step, epoch in calls:
        states._trainer.state = SimpleNamespace(global_step=step, epoch=epoch)
        states.after_step()
        seen.append(list(states._memory.steps))  # type: ignore[attr-defined]
    assert seen == [[1], [1], [1, 2], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    ("asked", "there", "taken"),
    [
        (None, {}, "memory"),
        (True, {}, "memory"),  # Trainer alone would raise
        (True, {4: "checkpoint-4", 3: "checkpoint-3"}, "memory"),
        (True, {12: "checkpoint-12", 4: "checkpoint-4"}, "asked"),
        ("checkpoint-6", {6: "checkpoint-6"}, "asked"),
        ("checkpoint-4", {4: "checkpoint-4"}, "memory"),
        ("elsewhere", {}, "memory"),
    ],
)
def test_a_run_resumes_from_the_later_of_memory_and_the_requested_checkpoint(
    states: TrainerStates, tmp_path: Path, asked: Any, there: dict[int, str], taken: str
) -> None:
    for step, name in there.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    asked = str(tmp_path / asked) if isinstance(asked, str) else asked
    found = states.newest(asked)
    assert found == (asked if taken == "asked" else str(tmp_path / "train" / "checkpoint_5"))


@pytest.mark.parametrize(
    ("document", "interval"),
    [
        ({}, None),
        ({"checkpoint": {"keep_last": 2}}, None),
        ({"checkpoint": {"peer": {"enabled": False}}}, None),
        ({"checkpoint": {"peer": {}}}, "auto"),
        ({"checkpoint": {"peer": {"interval": 4}}}, 4),
    ],
)
def test_the_section_of_the_config_asks_for_states(document: dict[str, Any], interval: int | str | None) -> None:
    plugin = SimpleNamespace(deepspeed_config=document)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)))
    settings = trainer_states._settings(trainer)
    assert (settings and settings.interval) == interval


@pytest.mark.parametrize(
    ("saved", "ranks", "rank", "warns"), [(2, 1, 0, True), (1, 2, 0, True), (1, 2, 1, False), (2, 2, 0, False)]
)
def test_a_resume_on_another_number_of_processes_is_named(
    saved: int, ranks: int, rank: int, warns: bool, tmp_path: Path
) -> None:
    for name in [f"rng_state_{place}.pth" for place in range(saved)] if saved > 1 else ["rng_state.pth"]:
        (tmp_path / name).touch()
    engine = SimpleNamespace(collectives=SimpleNamespace(job=SimpleNamespace(world_size=ranks, rank=rank)))
    load = trainer_states.naming_ranks(lambda engine, path, load_module_strict=True: (path, load_module_strict))
    with log_lines() as lines:
        assert load(engine, tmp_path, load_module_strict=False) == (tmp_path, False)
    expected = f"expected {saved} processes, as it was saved on, got {ranks}: Trainer skips the same number of steps"
    assert [expected in line for line in lines] == [True] * warns
