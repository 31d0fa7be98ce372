"""accelerate's and transformers' sequence parallelism on the facade: losses of whole sequences in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import run_command

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(240)


def _losses(folder: Path, ranks: int) -> Any:
    program = Path(__file__).with_name("sequence_parallel_runs.py")
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", ranks, "--engine", "zeroaccel"]
    if ranks > 1:
        launch += ["--distributed_type", "DEEPSPEED", "--zero_stage", 2, "--sp_size", ranks]
    result = run_command([*launch, program, folder], timeout=110)
    assert result.returncode == 0, result.stderr[-6000:]
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"trainer"')))


@pytest.mark.slow
def test_losses_are_those_of_whole_sequences(tmp_path: Path) -> None:
    whole, cut = _losses(tmp_path, 1), _losses(tmp_path, 2)
    assert len(cut["trainer"]) == 6
    assert len(cut["by hand"]) == 8
    for program, losses in whole.items():
        assert cut[program] == pytest.approx(losses, rel=2e-6), program


def test_a_hybrid_trains_by_the_name_of_context_parallelism(tmp_path: Path) -> None:
    program, launch = Path(__file__).with_name("hybrid_trainer.py"), tmp_path / "launch.yaml"
    launch.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\nuse_cpu: true\nparallelism_config: {cp_size: 2}\n"
    )
    steps = []
    for words in ([], ["-m", "zeroaccel.cli", "launch", "--config_file", launch]):
        result = run_command([sys.executable, *words, program, tmp_path], timeout=110)
        assert result.returncode == 0, result.stderr[-6000:]
        found = next(line for line in result.stdout.splitlines() if line.startswith('{"steps"'))
        steps.append([value for step in json.loads(found)["steps"] for value in step])
    assert len(steps[0]) == 6
    assert steps[1] == pytest.approx(steps[0], rel=1e-6)
