"""Every file of examples/ runs on two processes, and prints the results that it describes."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.environment import ROOT
from tests.support.job import run_command, run_job, running_command
from tests.support.pool import Ranks
from tests.support.scripts import load_script
from zeroaccel.accelerate.accelerator_state import PartialState
from zeroaccel.estimate import Capacity, Workload, plan_table

Runner = Callable[..., list[Any]]


def _call(path: str, argv: list[str], stage: int | None, config: str | None) -> tuple[Any, str]:
    """Runs `main` with the variables that the launcher would set; returns its result and its output."""
    said = {"ACCELERATE_USE_DEEPSPEED": "true"} if stage is not None or config is not None else {}
    said |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)} if stage is not None else {}
    said |= {"ACCELERATE_DEEPSPEED_CONFIG_FILE": config} if config is not None else {}
    os.environ.update(said)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    printed = io.StringIO()
    try:
        # The pool's process group, and the groups made from it, outlive an example.
        stays = patch.object(PartialState, "destroy_process_group", lambda state: None)
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed), stays:
            warnings.filterwarnings("ignore", category=DeprecationWarning)  # from packages that examples import
            result = load_script(f"examples/{path}").main(argv)
        gc.collect()  # engines of an example that has ended
        return result, printed.getvalue()
    finally:
        for name in said:
            del os.environ[name]


@pytest.fixture
def run(ranks: Ranks) -> Runner:
    def runner(path: str, *argv: object, stage: int | None = None, config: Path | None = None) -> list[Any]:
        config_file = None if config is None else str(config)
        return ranks(2).run(_call, path, [*map(str, argv)], stage, config_file, timeout=90.0)

    return runner


def test_the_text_classifier_learns_under_the_launcher() -> None:
    launch = (sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", 2, "--zero_stage", 2)
    script = ROOT / "examples" / "nlp_example.py"
    result = run_command([*launch, script, "--lines", 600, "--num_epochs", 2, "--batch_size", 8], timeout=100.0)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("epoch 0: accuracy 0.")
    assert first.endswith("over 120 lines")
    assert float(second.split()[3]) > 0.75


def test_the_image_classifier_learns(run: Runner) -> None:
    arguments = ("--images", 480, "--num_epochs", 3, "--batch_size", 12)
    (accuracies, printed), (others, silence) = run("cv_example.py", *arguments, stage=3)
    assert accuracies == others
    assert accuracies[-1] > 0.4 > 1 / 4
    assert "over 120 images" in printed
    assert silence == ""


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **SIZES)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["tensor_parallel", "sequence_parallel", "pipeline_parallel"])
def test_each_axis_of_the_mesh_trains(run: Runner, tiny: Path, name: str) -> None:
    (losses, _), (others, _) = run(f"parallel/{name}.py", tiny)
    assert losses == pytest.approx(others)  # both ranks work on the same samples
    assert losses[-1] < losses[0] - 0.1


def test_experts_are_divided(run: Runner, tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    MixtralForCausalLM(MixtralConfig(**SIZES, **heads, num_local_experts=4)).save_pretrained(tmp_path)
    (losses, _), (others, _) = run("parallel/experts.py", tmp_path)
    assert losses != others  # each rank has its own samples
    assert all(curve[-1] < curve[0] - 0.1 for curve in (losses, others))


def test_the_7b_script_trains_and_saves(run: Runner, tiny: Path, tmp_path: Path) -> None:
    (losses, printed), (others, silence) = run("finetune_7b.py", tiny, tmp_path)
    assert losses == others
    assert re.fullmatch(r"loss \d\.\d\d -> \d\.\d\d in 4 steps\n", printed), printed
    assert silence == ""
    assert (tmp_path / "finished" / "model.safetensors").exists()
    assert (tmp_path / "state").is_dir()


def test_qlora_saves_adapters(tiny: Path, tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", 2)
    result = run_command([*launch, ROOT / "examples" / "qlora.py", tiny], timeout=100.0, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", result.stdout)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert adapters
    assert all("lora" in name and value.numel() for name, value in adapters.items())


@pytest.mark.slow  # tests/multi/compat/test_save_codes.py covers it
def test_a_model_in_codes_is_tuned_merged_and_saved_as_codes(tmp_path: Path) -> None:
    name = "mxfp4/gpt_oss:GptOssForCausalLM"
    made = run_job(2, "tests/multi/compat/load_pretrained.py", [tmp_path, name], timeout=100)
    assert made.returncode == 0, made.stderr
    source, example = tmp_path / "mxfp4-gpt_oss-GptOssForCausalLM", ROOT / "examples" / "finetune_codes.py"
    launch = (sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", 2, example, source)
    trained = run_command(launch, timeout=100.0, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", trained.stdout)]
    assert losses == sorted(losses, reverse=True)
    merged = run_command([*launch, "--merge"], timeout=100.0, cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    assert "merged: model.safetensors, errors in requantized.json" in merged.stdout
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "merged"))
    assert {key: value.dtype for key, value in before.items()} == {key: value.dtype for key, value in after.items()}
    changed = {key.split(".")[-2] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"q_proj", "o_proj"}
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "mxfp4"}


def test_the_7b_page_has_the_figures_of_its_commands() -> None:
    page = (ROOT / "docs" / "finetune_7b.md").read_text()
    found = {}
    for ranks in (1, 2):
        for row in plan_table("llama-2-7b", Workload(ranks=ranks, checkpointing=True), Capacity(device=80 * 10**9)):
            one, places = row.estimate, (row.estimate.device, row.estimate.host, row.estimate.disk)
            found[f"{ranks} rank{'s' * (ranks > 1)}, {one.name}"] = [
                f"{place.total * (ranks if number else 1) / 1e9:.1f}".replace("0.0", "-") if place.total else "-"
                for number, place in enumerate(places)
            ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if " rank" in line]
    shown = {row[0]: row[1:] for row in rows if len(row) == 4}
    assert len(shown) == 6
    assert shown == {name: found[name] for name in shown}


def test_13_billion_parameters_train_when_scaled_down_and_say_what_memory_they_need(run: Runner) -> None:
    tiny = ("--hidden", 64, "--layers", 2, "--vocabulary", 256, "--sequence", 32, "--batch", 2, "--lr", 1e-3)
    (losses, printed), (others, silence) = run("train_13b_on_32gb.py", *tiny)
    assert losses == others
    assert losses[-1] < losses[0] - 0.1
    assert "step 9: loss " in printed
    assert silence == ""
    script = ROOT / "examples" / "train_13b_on_32gb.py"
    result = run_command([sys.executable, script, "--hidden", 524288, "--layers", 1], timeout=100.0)
    assert result.returncode == 1
    needs = r"[\d.]+ billion parameters need \d+ GB of host memory on each of 1 ranks, but \d+ GB are free: set fewer"
    assert re.search(needs, result.stderr)


def test_losses_are_the_same_at_every_stage(run: Runner) -> None:
    example = "by_feature/gradient_accumulation.py"
    curves = [run(example, "--num_epochs", 2, stage=stage)[0][0] for stage in range(4)]
    assert len(curves[0]) == 2 * 16
    assert curves[0] == curves[1] == curves[2] == curves[3]
    summed = [run(example, "--gradient_accumulation_steps", 3, stage=stage)[0][0] for stage in range(4)]
    assert len(summed[0]) == 3 * 6  # 16 micro-batches: the last one of an epoch is an update by itself
    assert summed[0] == summed[1]
    assert summed[2] == summed[3]
    torch.testing.assert_close(summed[0], summed[2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", range(4))
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(run: Runner, tmp_path: Path, stage: int) -> None:
    example = "by_feature/checkpointing.py"
    short = ("--num_epochs", 2, "--checkpointing_steps", 3, "--project_dir")
    whole = [losses for losses, _ in run(example, *short, tmp_path / "whole", stage=stage)]
    folder = tmp_path / "project"
    run(example, *short, folder, "--max_train_steps", 8, stage=stage)
    resumed = run(example, *short, folder, "--resume_from_checkpoint", "latest", stage=stage)
    assert [losses for losses, _ in resumed] == whole
    assert whole[0] != whole[1]  # each process has its own samples
    assert f"resumed from {folder}/checkpoints/checkpoint_1, after 6 updates" in resumed[0][1]
    states = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert states == ["checkpoint_2", "checkpoint_3", "checkpoint_4"]


def test_trackers_get_the_numbers(run: Runner, tmp_path: Path) -> None:
    example, arguments = "by_feature/tracking.py", ("--with_tracking", "--num_epochs", 2, "--project_dir", tmp_path)
    run(example, *arguments, "--report_to", "tensorboard", stage=1)
    run(example, *arguments, "--report_to", "jsonl", stage=1)
    found = EventAccumulator(str(tmp_path / "disc"))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train_loss")]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[0]["num_epochs"] == 2
    written = [(line["step"], line["train_loss"]) for line in lines[1:] if "train_loss" in line]
    assert [step for step, _ in losses] == [step for step, _ in written] == [16, 32]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in written])
    assert len(found.Scalars("lr")) == 32


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_says_how_it_goes(stage: int) -> None:
    launch = (sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", 2)
    script = ROOT / "examples" / "by_feature" / "step_lines.py"
    result = run_command([*launch, script, "--stage", stage], timeout=100.0)
    assert result.returncode == 0, result.stderr
    _, first, *lines = result.stderr.splitlines()
    steps = [line for line in lines if " step " in line and "W]" not in line]
    assert " step 1 | " in first
    assert [int(line.split(" step ")[1].split()[0]) for line in steps] == list(range(2, 13))
    for part in ("tokens/s", "TFLOPS (MFU ", "padding ", "peak ", "model states "):
        assert all(part in line for line in steps), part
    untrained, spike = (line for line in lines if "W]" in line)
    assert (
        "10 steps: 4 trainable parameters never had a gradient on any rank: vision.0, vision.2; 0.126 MiB" in untrained
    )
    assert "Call requires_grad_(False) on them" in untrained
    assert lines.index(untrained) == lines.index(steps[8]) + 1
    assert "step 12: gradient norm 24.9" in spike
    assert "by unit: root 19.6, text.0 10.9, text.1 10.9; " in spike
    assert "on rank 1, micro-batch 1, " in spike
    assert spike.endswith("samples 176 to 191 of this run")


def test_a_student_learns_from_a_frozen_teacher(run: Runner) -> None:
    (curve, _), (other, _) = run("by_feature/multiple_models.py")
    assert curve == other
    assert curve[-1] < curve[0]


def test_all_processes_stop_when_one_has_seen_enough(run: Runner) -> None:
    results = run("by_feature/early_stopping.py", "--target_loss", 0.5)
    ((steps, stopped, zero), _), ((others, also, one), _) = results
    assert steps == others < 320
    assert stopped
    assert also
    assert [zero, one].count(True) == 1


TEXT = "".join(f"{number} squared is {number**2}\n" for number in range(400))
SCHEDULE = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
AUTO = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(SCHEDULE, "auto")},
}


@pytest.mark.parametrize("sections", [(), ("optimizer",), ("optimizer", "scheduler")], ids=lambda names: len(names))
def test_what_the_config_file_has_is_used(run: Runner, tmp_path: Path, sections: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT[:-1600])
    (tmp_path / "held_out.txt").write_text(TEXT[-1600:])
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    } | {name: AUTO[name] for name in sections}
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    files = ("--train_file", tmp_path / "text.txt", "--validation_file", tmp_path / "held_out.txt")
    sizes = ("--block_size", 32, "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)
    rest = ("--config_name", tmp_path / "model", "--output_dir", tmp_path / "out", "--learning_rate", 0.01)
    track = ("--with_tracking", "--report_to", "tensorboard", "--checkpointing_steps", 6, "--num_train_epochs", 1)
    arguments = (*files, *sizes, *rest, *track, "--num_warmup_steps", 2)
    (best, printed), (other, _) = run("by_feature/config_support.py", *arguments, config=tmp_path / "zero3.json")
    assert best == other < 100 < 256
    assert re.search(r"reduce_bucket_size +1024 .*hidden_size", printed), printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor(list(TEXT[-1600:].encode())).view(-1, 32)
    with torch.no_grad():
        assert math.exp(model(input_ids=ids, labels=ids).loss.item()) == pytest.approx(best, rel=1e-4)
    found = EventAccumulator(str(tmp_path / "out" / "clm"))
    found.Reload()
    rates = [event.value for event in found.Scalars("lr")]
    assert max(rates) == pytest.approx(0.01, rel=0.6 if sections == ("optimizer", "scheduler") else 1e-3)
    assert rates[-1] == pytest.approx(0.0, abs=1e-3)
    assert (tmp_path / "out" / "step_6" / "run_state.json").exists()


def test_a_generator_follows_its_trainer_by_deltas(tmp_path: Path) -> None:
    folder, scripts = tmp_path / "policy", ROOT / "examples" / "reinforcement"
    launch = (sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", 2)
    with running_command([sys.executable, scripts / "generate.py", "--folder", folder]) as generator:
        trained = run_command([*launch, scripts / "train.py", "--folder", folder], timeout=100.0)
        assert trained.returncode == 0, trained.stderr
        sampled = generator.wait()
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout == "sampled with version 31\n"
    lines = re.findall(r"step (\d+): reward ([01]\.\d+), \d+ bytes from this rank\n", trained.stdout)
    assert [step for step, _ in lines] == ["10", "20", "30"], trained.stdout
    assert float(lines[0][1]) < float(lines[2][1]) > 0.5
