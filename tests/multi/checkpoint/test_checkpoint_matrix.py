"""From any number of ranks, stage and tier to any other: the same masters and moments, and the same training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_runs import PRECISIONS, TIERS, Snapshot, assembled, resume_all, save_all
from tests.support.pool import Ranks
from tests.support.training import Toy
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint

Saves = Callable[[int], tuple[Path, dict[str, list[Snapshot]]]]
EXACT = {1, 2, 4}  # numbers of ranks for which the mean of equal gradients is exact
LIMIT_SECONDS = 400.0
PLACES = [(0, "none"), *((stage, tier) for stage in (1, 2, 3) for tier in TIERS)]  # stage 0 has no shards to offload


def saved_once(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, cases: Sequence[tuple[str, int, str, str]]
) -> Saves:
    """Returns ``saves(N)``: a folder with a checkpoint of each case by N ranks, and the snapshots of these ranks."""
    made: dict[int, tuple[Path, dict[str, list[Snapshot]]]] = {}

    def by(world_size: int) -> tuple[Path, dict[str, list[Snapshot]]]:
        if world_size not in made:
            root = tmp_path_factory.mktemp(f"saved-by-{world_size}-")
            found = ranks(world_size).run(save_all, root, cases, timeout=LIMIT_SECONDS)
            made[world_size] = root, {tag: [rank[tag] for rank in found] for tag in found[0]}
        return made[world_size]

    return by


@pytest.fixture(scope="module")
def saves(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """One checkpoint of each stage and precision; the shards are in each of the tiers in turn."""
    return saved_once(
        ranks,
        tmp_path_factory,
        [
            (f"{stage}-{precision}", stage, precision, TIERS[(stage + turn) % 3])
            for stage in range(4)
            for turn, precision in enumerate(PRECISIONS)
        ],
    )


@pytest.fixture(scope="module")
def saves_of_all(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """One checkpoint of each stage, tier and precision."""
    return saved_once(
        ranks,
        tmp_path_factory,
        [(f"{stage}-{tier}-{precision}", stage, precision, tier) for stage, tier in PLACES for precision in PRECISIONS],
    )


@pytest.mark.parametrize("resumed", [1, 2, 3, 4])
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_any_ranks_and_stage_to_any_other(ranks: Ranks, saves: Saves, saved: int, resumed: int) -> None:
    shift = saved + resumed  # over the matrix, each stage meets all stages
    cases = [
        (f"{stage}-{precision}", (stage + shift * turn) % 4, precision)
        for stage in range(4)
        for turn, precision in enumerate(PRECISIONS[(stage + shift) % 3 :][:2])
    ]
    turned = [
        (*case, TIERS[(index + saved + 2 * resumed) % 3], bool((index + resumed) % 2))
        for index, case in enumerate(cases)
    ]
    check(ranks, saves, saved, resumed, turned)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("resumed", [1, 2, 3, 4])
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_every_stage_and_tier_to_every_other(ranks: Ranks, saves_of_all: Saves, saved: int, resumed: int) -> None:
    """All 1600 pairs of (ranks, stage, tier), alternating precisions and the order of param groups."""
    cases = []
    for before, (stage, tier) in enumerate(PLACES):
        for after, (then, there) in enumerate(PLACES):
            precision = PRECISIONS[(before + after + saved + resumed) % 3]
            cases.append((f"{stage}-{tier}-{precision}", then, precision, there, bool((before + saved) % 2)))
    check(ranks, saves_of_all, saved, resumed, cases)


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_full_weights_are_those_of_the_ranks(saves: Saves, saved: int) -> None:
    root, before = saves(saved)
    names = Toy().state_dict().keys()
    for tag, ranks_held in before.items():
        held = assembled(ranks_held)
        found = get_fp32_state_dict_from_zero_checkpoint(root, tag)
        assert found.keys() == names, tag
        for name, value in found.items():
            if name == "offset":  # a buffer
                assert torch.equal(value, torch.full((23,), 0.125)), tag
                continue
            canonical = "embed.weight" if name == "head.weight" else name
            (key,) = held.keys() & {f"master/{canonical}", f"value/{canonical}"}
            assert value.dtype == torch.float32
            assert torch.equal(value.flatten().view(torch.int32), held[key].float().view(torch.int32)), (tag, name)
        assert found["head.weight"] is found["embed.weight"]


def check(
    ranks: Ranks, saves: Saves, saved: int, resumed: int, cases: Sequence[tuple[str, int, str, str, bool]]
) -> None:
    """Resumes each case, and compares all snapshots with those of the ranks that saved."""
    root, before = saves(saved)
    found = ranks(resumed).run(resume_all, root, cases, timeout=LIMIT_SECONDS)
    for index, (tag, *rest, reverse) in enumerate(cases):
        where = (tag, *rest)
        after = [rank[index] for rank in found]
        expected, got = assembled(before[tag]), assembled(after)
        assert expected.keys() == got.keys(), where
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], where
        for rank in after:
            assert rank.counters == before[tag][0].counters, where
            assert rank.rates == before[tag][0].rates[:: -1 if reverse else 1], where
            assert repr(rank.client_state) == repr(before[tag][0].client_state), where
            if saved == resumed or {saved, resumed} <= EXACT:
                assert rank.losses == before[tag][0].losses, where
                wrong = [name for name, value in rank.weights.items() if not same(value, before[tag][0].weights[name])]
                assert wrong == [], where


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
