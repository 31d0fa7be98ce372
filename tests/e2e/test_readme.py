"""Runs the README's commands unchanged; its first screen is short."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import torch

from tests.support.environment import ROOT
from tests.support.job import run_command, run_job

README = (ROOT / "README.md").read_text()
QUICKSTART = ROOT / "examples" / "quickstart"


def _block(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return str(block)


def test_the_first_command_comes_after_180_words_at_most() -> None:
    before = README[: README.index("```sh")]
    words = re.sub(r"```.*?```|<picture>.*?</picture>|\]\([^)]*\)|\|[-|]*\|", "", before, flags=re.DOTALL).split()
    assert 100 < len(words) <= 180


def test_the_trainer_quickstart_prints_the_losses_of_the_pages(tmp_path: Path) -> None:
    for file in QUICKSTART.iterdir():
        shutil.copy(file, tmp_path)
    command = re.findall(r"```sh\nzeroaccel (launch .* finetune\.py)\n```", README)
    result = run_command([sys.executable, "-m", "zeroaccel.cli", *command[0].split()], cwd=tmp_path, timeout=100.0)
    assert result.returncode == 0, result.stderr
    losses = re.compile(r"\{'loss': '([\d.]+)'.*'epoch': '([\d.]+)'\}")
    found = [tuple(map(float, match)) for match in losses.findall(result.stdout)]
    for page in (README, (ROOT / "docs" / "huggingface.md").read_text()):
        printed = [tuple(map(float, match)) for match in losses.findall(page)]
        assert len(printed) == len(found) == 3
        torch.testing.assert_close(torch.tensor(printed), torch.tensor(found), rtol=0.02, atol=0)
    assert (tmp_path / "trained" / "model.safetensors").exists()


def test_the_first_example_trains_and_its_stages_agree_in_pairs(tmp_path: Path) -> None:
    # It accumulates over 2 micro-batches: stages 0 and 1 add them before the ranks, stages 2 and 3 after.
    script = _block("python").replace("loss {loss.item():.3f}", "loss {loss.item().hex()}")
    (tmp_path / "train.py").write_text(script)
    losses = []
    for stage in range(4):
        (tmp_path / "ds_config.json").write_text(_block("json").replace('"stage": 3', f'"stage": {stage}'))
        result = run_job(2, tmp_path / "train.py", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        found = re.findall(r"epoch \d: loss (\S+) after \d+ steps", result.stdout)
        losses.append([float.fromhex(loss) for loss in found])
    assert [len(of_stage) for of_stage in losses] == [3, 3, 3, 3]  # the first rank prints
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert all(abs(a - b) < 0.1 * a for a, b in zip(losses[0], losses[3], strict=True))  # these differ by rounding
    assert losses[3][2] < losses[3][0]
    # The last run has the config of the page.
    assert "reduce_bucket_size" in result.stdout
    assert "hidden^2 = 4096" in result.stdout
    assert (tmp_path / "trained" / "model.safetensors").exists()
