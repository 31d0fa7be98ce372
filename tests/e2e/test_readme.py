"""Runs the README's commands unchanged."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.environment import ROOT
from tests.support.job import run_job


def _block(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return str(block)


def test_its_stages_agree_in_pairs(tmp_path: Path) -> None:
    # It accumulates over 2 micro-batches: stages 0 and 1 add them before the ranks, stages 2 and 3 after.
    script = _block("python").replace("loss {loss.item():.3f}", "loss {loss.item().hex()}")
    (tmp_path / "train.py").write_text(script)
    losses = []
    for stage in range(4):
        (tmp_path / "ds_config.json").write_text(_block("json").replace('"stage": 3', f'"stage": {stage}'))
        result = run_job(2, tmp_path / "train.py", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        losses.append(re.findall(r"epoch \d: loss (\S+) after", result.stdout))
    assert [len(of_stage) for of_stage in losses] == [3, 3, 3, 3]
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    numbers = [[float.fromhex(loss) for loss in of_stage] for of_stage in losses]
    assert all(abs(a - b) < 0.1 * a for a, b in zip(numbers[0], numbers[3], strict=True))  # these differ by rounding


def test_the_first_example_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(_block("json"))
    (tmp_path / "train.py").write_text(_block("python"))
    result = run_job(2, tmp_path / "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+) after \d+ steps", result.stdout)]
    assert len(losses) == 3  # the first rank prints
    assert losses[2] < losses[0]
    assert "reduce_bucket_size" in result.stdout
    assert "hidden^2 = 4096" in result.stdout
    assert (tmp_path / "trained" / "model.safetensors").exists()
