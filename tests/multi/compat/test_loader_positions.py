"""Batches of scripts with accelerate's own loaders after a resume: those that would have come."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import JobResult, run_job
from tests.support.libraries import TRANSFORMERS_4
from tests.support.refusals import refused
from zeroaccel.compat.loader_positions import loading
from zeroaccel.errors import CheckpointError

pytest.importorskip("accelerate")
trainer_parts = pytest.importorskip("transformers.trainer_pt_utils")
SCRIPT = "tests/multi/compat/resumed_loaders.py"


def _rows(result: JobResult) -> list[Any]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_script_reads_the_batches_that_would_have_come(processes: int, tmp_path: Path) -> None:
    # On Python 3.10, a forked rank hung in its fork of a loader's worker; a new interpreter does not.
    rows = _rows(run_job(processes, SCRIPT, [tmp_path], timeout=120, fresh=sys.version_info < (3, 11)))
    assert len(rows) == {1: 42, 2: 96}[processes]
    assert [name for name, equal in rows if not equal] == []


def test_a_resumed_trainer_reads_the_batches_that_would_have_come(tmp_path: Path) -> None:
    kinds = ("shuffled", "workers", "stream")
    rows = _rows(run_job(2, "tests/multi/compat/resumed_trainer.py", [tmp_path, *kinds], timeout=120))
    assert sorted(kind for kind, *_ in rows) == sorted(2 * kinds)
    for kind, equal, rest, again, _ in rows:
        batches, batches_again = ([batch for _, batch in run] for run in (rest, again))
        assert batches == batches_again, kind
        # transformers 4 makes no step of a resumed epoch's last batches if they are too few for one: the next has them.
        assert equal or (TRANSFORMERS_4 and kind != "stream"), (kind, rest, again)
        assert len(again) == (17 if kind == "stream" else 20)


@pytest.mark.skipif(
    not hasattr(trainer_parts, "BatchRebalanceSampler"),
    reason="this transformers has no batch_rebalance",
)
def test_rebalanced_batches_of_transformers_divide_the_samples_and_resume(tmp_path: Path) -> None:
    rows = _rows(run_job(2, "tests/multi/compat/resumed_trainer.py", [tmp_path, "rebalanced"], timeout=120))
    wholes = [whole for _, _, _, _, whole in rows]
    for _, equal, rest, again, _ in rows:
        assert equal, (rest, again)
        assert again
    steps = [[[row for row in whole if row[0] == step] for whole in wholes] for step in range(5)]
    for ranks in steps:
        samples = [[number for _, batch in rank for number in batch] for rank in ranks]
        assert len(set(samples[0] + samples[1])) == 8  # two batches of two on each of two ranks
        for one, other in zip(*ranks, strict=True):
            costs = [len(batch) * max(4 + (number % 11) ** 2 // 2 for number in batch) for _, batch in (one, other)]
            assert max(costs) <= 2.0 * min(costs), (one, other)


@pytest.mark.parametrize(("before", "after", "skip"), [(2, 1, 8), (1, 2, 2)])
def test_another_number_of_ranks_continues_at_the_batch_that_the_warning_names(
    before: int, after: int, skip: int, tmp_path: Path
) -> None:
    saved = dict(_rows(run_job(before, SCRIPT, [tmp_path, "save"])))
    result = run_job(after, SCRIPT, [tmp_path, "load", skip])
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
