"""Any number of ranks, stage and tier to any other: the same masters and moments, and the same training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.multi.checkpoint_runs import PRECISIONS, TIERS, Snapshot, assembled, resume_all, save_all
from tests.multi.pool import Pool

Ranks = Callable[[int], Pool]
Saves = Callable[[int], tuple[Path, dict[str, list[Snapshot]]]]
EXACT = {1, 2, 4}  # numbers of ranks whose mean of equal gradients is exact


@pytest.fixture(scope="module")
def saves(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """``saves(N)``: a folder of checkpoints by N ranks, one of each stage and precision, and what the ranks saw."""
    made: dict[int, tuple[Path, dict[str, list[Snapshot]]]] = {}

    def by(world_size: int) -> tuple[Path, dict[str, list[Snapshot]]]:
        if world_size not in made:
            root = tmp_path_factory.mktemp(f"saved-by-{world_size}-")
            found = ranks(world_size).run(save_all, root)
            made[world_size] = root, {tag: [rank[tag] for rank in found] for tag in found[0]}
        return made[world_size]

    return by


@pytest.mark.parametrize("resumed", [1, 2, 3, 4])
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_any_ranks_and_stage_to_any_other(ranks: Ranks, saves: Saves, saved: int, resumed: int) -> None:
    root, before = saves(saved)
    shift = saved + resumed  # over the matrix every stage meets every other
    cases = [
        (f"{stage}-{precision}", (stage + shift * turn) % 4, precision)
        for stage in range(4)
        for turn, precision in enumerate(PRECISIONS[(stage + shift) % 3 :][:2])
    ]
    turned = [
        (*case, TIERS[(index + saved + 2 * resumed) % 3], bool((index + resumed) % 2))
        for index, case in enumerate(cases)
    ]
    found = ranks(resumed).run(resume_all, root, turned)
    for index, (tag, *_, reverse) in enumerate(turned):
        after = [rank[index] for rank in found]
        expected, got = assembled(before[tag]), assembled(after)
        assert expected.keys() == got.keys(), tag
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], tag
        for rank in after:
            assert rank.counters == before[tag][0].counters, tag
            assert rank.rates == before[tag][0].rates[:: -1 if reverse else 1], tag
            assert repr(rank.client_state) == repr(before[tag][0].client_state), tag
            if saved == resumed or {saved, resumed} <= EXACT:
                assert rank.losses == before[tag][0].losses, tag
                wrong = [name for name, value in rank.weights.items() if not same(value, before[tag][0].weights[name])]
                assert wrong == [], tag


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
