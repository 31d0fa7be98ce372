"""Runs the README's commands unchanged."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.environment import ROOT
from tests.support.job import run_job


def _block(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return str(block)


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
