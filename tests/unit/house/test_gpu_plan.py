"""`benchmarks/gpu` on a machine without a GPU: it skips every part by name and exits with 0."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.cuda_model.network_size import Size
from tests.support.environment import ROOT
from tests.support.scripts import load_script


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command with its own module path, on a machine without a device."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program: ModuleType = load_script("benchmarks/gpu/__main__.py")

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks/gpu", *map(str, arguments)])
        return int(program.main())

    return run


def test_every_part_is_skipped_by_name(gpu: Callable[..., int], tmp_path: Path) -> None:
    assert gpu("--no-predictions", "--out", tmp_path) == 0
    why = "torch sees no CUDA device" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
    [report] = tmp_path.glob("gpu-*.md")
    sections = report.read_text().split("\n## ")[1:]
    names = [section.splitlines()[0] for section in sections]
    assert [names[0], names[-1]] == ["machine", "largest"]
    assert all(f"skipped: {why}" in section for section in sections)


def test_figures_of_earlier_runs_are_kept(gpu: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "predictions.json").write_text('{"stage 2/waits": 1.0}')
    (tmp_path / "memory.md").write_text("## memory\n\nof another machine\n")
    assert gpu("waits", "--kept", "--out", tmp_path) == 0
    [report] = tmp_path.glob("gpu-*.md")
    text = report.read_text()
    assert "of another machine" in text
    assert "| stage 2/waits |  | 1 | " in text
    assert gpu("waits", "--no-predictions", "--out", tmp_path) == 0
    assert "of another machine" not in report.read_text()


def test_the_programs_for_comparison_step_without_a_gpu(gpu: Callable[..., int]) -> None:
    contenders = importlib.import_module("contenders_on_gpu")
    try:
        for make in (contenders.torch_step, contenders.fsdp2_step):
            step = make(Size(layers=1, tokens=16))
            for _ in range(2):
                step()
    finally:
        torch.distributed.destroy_process_group()


def test_mistakes_are_named(gpu: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("wait", "everything"):
        with pytest.raises(SystemExit, match="2"):
            gpu(part)
        assert f"no part '{part}'; there are machine, start, tests" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert gpu("--no-predictions", "--out", tmp_path / "file") == 2
    assert "file: expected a folder that can be written (File exists)" in capsys.readouterr().err
