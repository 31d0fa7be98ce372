"""`benchmarks/gpu` on a machine without a GPU: every part is skipped by name, and the command ends well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import time_limits

ROOT = Path(__file__).resolve().parents[3]


def _run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu", *arguments, "--out", str(folder)]
    limit = time_limits.seconds(60)
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=limit, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )


def test_every_part_is_skipped_by_name(tmp_path: Path) -> None:
    done = _run("--no-predictions", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    why = "torch sees no CUDA device" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
    [report] = tmp_path.glob("gpu-*.md")
    sections = report.read_text().split("\n## ")[1:]
    names = [section.splitlines()[0] for section in sections]
    assert [names[0], names[-1]] == ["machine", "largest"]
    assert all(f"skipped: {why}" in section for section in sections)


@pytest.mark.parametrize("part", ["wait", "everything"])
def test_a_part_that_is_none_is_named(part: str, tmp_path: Path) -> None:
    done = _run(part, folder=tmp_path)
    assert done.returncode == 2
    assert f"no part '{part}'; there are machine, tests" in done.stderr


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _run("--no-predictions", folder=tmp_path / "file")
    assert done.returncode == 2
    assert "--out" in done.stderr
    assert "expected a folder that can be written (File exists)" in done.stderr
