"""Batches of scripts with accelerate's own loaders after a resume: those that would have come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import FACADE, JobResult, run_job
from tests.support.refusals import refused
from zeroaccel.compat.loader_positions import loading
from zeroaccel.errors import CheckpointError

pytest.importorskip("accelerate")
SCRIPT = "tests/multi/compat/resumed_loaders.py"


def _rows(result: JobResult) -> list[Any]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_script_reads_the_batches_that_would_have_come(processes: int, tmp_path: Path) -> None:
    rows = _rows(run_job(processes, SCRIPT, [tmp_path], timeout=120, imports=FACADE))
    assert len(rows) == {1: 42, 2: 96}[processes]
    assert [name for name, equal in rows if not equal] == []


def test_a_resumed_trainer_reads_the_batches_that_would_have_come(tmp_path: Path) -> None:
    kinds = ("shuffled", "workers", "stream")
    rows = _rows(run_job(2, "tests/multi/compat/resumed_trainer.py", [tmp_path, *kinds], timeout=120))
    assert sorted(kind for kind, *_ in rows) == sorted(2 * kinds)
    for kind, equal, rest, again, _ in rows:
        assert equal, (kind, rest, again)
        assert len(again) == (17 if kind == "stream" else 20)


@pytest.mark.parametrize(("before", "after", "skip"), [(2, 1, 8), (1, 2, 2)])
def test_another_number_of_ranks_continues_at_the_batch_that_the_warning_names(
    before: int, after: int, skip: int, tmp_path: Path
) -> None:
    saved = dict(_rows(run_job(before, SCRIPT, [tmp_path, "save"], imports=FACADE)))
    result = run_job(after, SCRIPT, [tmp_path, "load", skip], imports=FACADE)
    loaded = dict(_rows(result))
    assert f"of epoch 1 on each of {before} processes; on {after} it continues" in result.stderr
    assert f"skip_first_batches(loader, {skip})" in result.stderr
    rest = _of_all(saved, 1)[4 * before : 11]  # a twelfth batch repeats samples
    assert _of_all(loaded, 0)[: len(rest)] == rest


def _of_all(orders: dict[int, list[list[list[int]]]], epoch: int) -> list[list[int]]:
    """Returns the batches of an epoch in the order of one process."""
    rounds = zip(*(orders[rank][epoch] for rank in sorted(orders)), strict=True)
    return [batch for batches in rounds for batch in batches]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04half", b"text"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    def load(input_dir: Path, process_index: int, dataloaders: list[Any]) -> None: ...

    (tmp_path / "loader_positions_0.bin").write_bytes(content)
    with refused(CheckpointError, f"load_state: {tmp_path}/loader_positions_0.bin", "delete the file"):
        loading(load)(tmp_path, 0, [])
