"""Unmodified programs of Hugging Face users on two processes, with zeroaccel in DeepSpeed's place.

`huggingface_runs.py` has the programs. One launch runs them all; these tests check their losses and weights.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import run_command

LIBRARIES = ("transformers", "peft", "trl")  # not imported here, because imports take seconds
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not all(map(find_spec, LIBRARIES)), reason=f"needs {', '.join(LIBRARIES)}"),
]

STAGES = ("1", "2", "3")
RUNS = {
    "trainer": STAGES,
    "resumed": ("3",),
    "own_optimizer": ("2", "3"),
    "offloaded": ("2", "3"),
    "lora": ("3",),
    "sft": ("3",),
    "dpo": ("3",),
    "again": ("3",),
    "gradients": ("2", "3"),
    "searched": ("3",),
    "vision": ("3",),
    "encoder_decoder": ("3",),
    "masked": ("3",),
    "experts": ("3",),
    "multimodal": ("3",),
    "generation": ("3",),
    "plugins": ("3",),
}
# The output of these has a form of its own; transformers evaluates without training at stage 3 only.
ALONE = {"saves": ("2", "3"), "evaluated": ("3",)}
BF16 = ("own_optimizer",)
# These warm up by DeepSpeed's schedule, which plain Trainer does not have.
WITHOUT_PEER = ("trainer", "resumed")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the line that rank 0 printed for each (scenario, stage)."""
    wanted = [
        f"{name}:{','.join((*stages, *(() if name in WITHOUT_PEER else ('ddp',))))}" for name, stages in RUNS.items()
    ]
    wanted += [f"{name}:{','.join(stages)}" for name, stages in ALONE.items()]
    folder = tmp_path_factory.mktemp("huggingface")
    program = Path(__file__).with_name("huggingface_runs.py")
    command = [
        sys.executable,
        "-m",
        "zeroaccel.cli",
        "launch",
        "--num_processes",
        2,
        "--engine",
        "zeroaccel",
        program,
        folder,
        *wanted,
    ]
    result = run_command(command, timeout=280)
    assert result.returncode == 0, result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"scenario"')]
    return {(line["scenario"], line["stage"]): line for line in lines}


@pytest.mark.parametrize("scenario", [name for name, stages in RUNS.items() if len(stages) > 1])
def test_stages_agree_to_the_last_bit(outcomes: Any, scenario: str) -> None:
    """Stages 2 and 3 only: at stage 1, accumulation sums in another order."""
    runs = {stage: outcomes[scenario, stage] for stage in RUNS[scenario]}
    assert {**runs["2"], "stage": ""} == {**runs["3"], "stage": ""}
    losses = [run["losses"] for run in runs.values()]
    assert all(loss == pytest.approx(losses[0], rel=2e-4 if scenario in BF16 else 1e-5) for loss in losses)
    assert len(losses[0]) >= 2


@pytest.mark.parametrize("scenario", [name for name in RUNS if name not in WITHOUT_PEER])
def test_they_train_like_plain_data_parallelism(outcomes: Any, scenario: str) -> None:
    expected = outcomes[scenario, "ddp"]["losses"]
    for stage in RUNS[scenario]:
        close = pytest.approx(expected, rel=2e-4 if scenario in BF16 else 1e-5)
        assert outcomes[scenario, stage]["losses"] == close


def test_a_search_keeps_nothing_of_earlier_trials(outcomes: Any) -> None:
    first, second, third = outcomes["searched", "3"]["left"]
    assert first[0] == 1
    assert first == second == third


@pytest.mark.parametrize("stage", RUNS["gradients"])
def test_a_callback_reads_the_gradients_of_data_parallelism(outcomes: Any, stage: str) -> None:
    run, expected = outcomes["gradients", stage], outcomes["gradients", "ddp"]
    assert run["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)
    assert [total for total, *_ in run["read"]] == pytest.approx(run["grad_norms"], rel=1e-5)  # before clipping
    for (_, *parts), (_, *expected_parts) in zip(run["read"], expected["read"], strict=True):
        assert parts == pytest.approx(expected_parts, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stage", RUNS["resumed"])
def test_a_resumed_trainer_ends_where_the_other_did(outcomes: Any, stage: str) -> None:
    assert outcomes["resumed", stage]["losses"][-2:] == outcomes["trainer", stage]["losses"][-2:]


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_checkpoint_is_loaded_at_the_end(outcomes: Any, stage: str) -> None:
    assert outcomes["trainer", stage]["predicted"] == min(outcomes["trainer", stage]["evaluated"])


def test_bert_is_saved_under_the_names_of_plain_training(outcomes: Any) -> None:
    names = outcomes["masked", "3"]["names"]
    assert names == outcomes["masked", "ddp"]["names"]
    assert "bert.embeddings.LayerNorm.weight" in names


def test_generation_is_that_of_the_whole_model(outcomes: Any) -> None:
    for stage in RUNS["generation"]:
        assert outcomes["generation", stage]["written"] == outcomes["generation", "ddp"]["written"]


@pytest.mark.parametrize("stage", ALONE["saves"])
def test_each_way_of_saving_writes_every_weight_once(outcomes: Any, stage: str) -> None:
    ways = ("documented", "no_state_dict", "in_parts", "main_process_only", *(["plainly"] if stage == "3" else []))
    assert outcomes["saves", stage]["found"] == dict.fromkeys(ways, True)


@pytest.mark.parametrize("stage", ALONE["evaluated"])
def test_a_trainer_that_evaluated_first_trains_as_one_that_did_not(outcomes: Any, stage: str) -> None:
    first, other = outcomes["evaluated", stage]["trained"]
    assert len(first) == 5  # losses of four steps, and of an evaluation
    assert first == other


LAUNCH_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
machine_rank: 0
main_process_port: 0
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""


@pytest.mark.slow
def test_the_launcher_chooses_for_scripts_that_say_nothing(tmp_path: Path) -> None:
    """`accelerate launch` and `zeroaccel launch` accept the same questionnaire's file, and run the same engine."""
    launch_file = tmp_path / "launch.yaml"
    launch_file.write_text(LAUNCH_FILE)
    program = Path(__file__).with_name("huggingface_launched.py")
    theirs = [sys.executable, "-m", "zeroaccel.compat", "-m", "accelerate.commands.launch"]
    ours = [sys.executable, "-m", "zeroaccel.cli", "launch", "--engine", "zeroaccel"]
    printed = []
    for launcher in (theirs, ours):
        result = run_command([*launcher, "--config_file", launch_file, program, tmp_path / "out"], timeout=100)
        assert result.returncode == 0, result.stderr[-6000:]
        printed.append(json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"by_hand"'))))
    assert printed[0] == printed[1]
    assert printed[0]["by_hand"]["engine"] == printed[0]["by_trainer"]["engine"] == "zeroaccel.compat.deepspeed_engine"
    assert (printed[0]["by_hand"]["stage"], printed[0]["by_hand"]["world"]) == (2, 2)
    assert printed[0]["by_hand"]["losses"][-1] < printed[0]["by_hand"]["losses"][0]
