"""Training uses no process group, kind of collective or pair of ranks that was not connected at construction.

NCCL would connect it within a hook and block the host until the other ranks arrive, which may wait for this one.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.job import run_job
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES
from tests.support.pool import IMPORTS

SCRIPT = Path(__file__).with_name("first_uses.py")


def _first_uses(ranks: int, *cases: str) -> dict[str, list[str]]:
    """Returns, per case, the unconnected uses of each rank during training."""
    result = run_job(ranks, SCRIPT, cases, timeout=90, imports=IMPORTS)
    assert result.returncode == 0, result.stderr
    lines = [line.rpartition(": ") for line in result.stdout.splitlines()]
    return {case: [used for name, _, used in lines if name == case] for case in cases}


@NEEDS_STAGES
@NEEDS_SPLIT_LAYERS
def test_two_ranks_use_what_is_connected() -> None:
    cases = ("stages, unconnected", "stages", "several stages on a rank", "sequences", "split layers", "stage 3, Muon")
    found = _first_uses(2, *cases)
    # Without connecting: the schedule's messages, and those of the tied embedding within backward. The stages of torch
    # 2.15 also agree before their first step.
    unconnected = [used.removeprefix("all_reduce, ") for used in found.pop("stages, unconnected")]
    assert unconnected == ["messages of [0, 1], messages of [0, 1] alone"] * 2
    assert found == {case: ["nothing"] * 2 for case in cases[1:]}


def test_four_ranks_use_what_is_connected() -> None:
    cases = ("hpZ, unconnected", "stage 2", "stage 3", "hpZ", "MiCS", "qgZ")
    found = _first_uses(4, *cases)
    assert found.pop("hpZ, unconnected") == ["all_gather"] * 4
    assert found == {case: ["nothing"] * 4 for case in cases[1:]}
