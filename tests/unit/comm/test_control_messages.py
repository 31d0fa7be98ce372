"""In agreements, gathers of objects and barriers, each rank sends O(log W) messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.simulated_groups import run
from zeroaccel.comm.agree import agreed, from_rank, from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import ConfigError


def gather(ranks: Collectives) -> list[Any]:
    return ranks.gather_objects(None if ranks.rank % 3 == 1 else "x" * ranks.rank, "gather")


def total(ranks: Collectives) -> list[float]:
    numbers = torch.tensor([1.0, ranks.rank + 0.1, -1e8 if ranks.rank else 1e8])
    largest = numbers.clone()
    ranks.all_reduce(numbers, "sum", "sum")
    ranks.all_reduce(largest, "max", "largest")
    return [*numbers.tolist(), *largest.tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 33])
def test_every_rank_gets_all_rows_in_log_messages(world_size: int) -> None:
    rounds = math.ceil(math.log2(world_size))
    expected = [None if rank % 3 == 1 else "x" * rank for rank in range(world_size)]
    for found, sent in run(world_size, gather):
        assert found == expected
        assert sent.messages == 2 * rounds
        assert len(sent.targets) == rounds
    sums = [found for found, _ in run(world_size, total)]
    in_order = torch.tensor(
        [[1.0, rank + 0.1, -1e8 if rank else 1e8] for rank in range(world_size)], dtype=torch.float32
    )
    assert sums == [[*in_order.cumsum(0)[-1].tolist(), *in_order.amax(0).tolist()]] * world_size


def agree(ranks: Collectives) -> str:
    with agreed(ranks, "nothing wrong"):
        pass
    ranks.barrier("here")
    try:
        with agreed(ranks, "something wrong"):
            if ranks.rank in (2, 5):
                raise ConfigError("batch", expected="1", got=2)
    except ConfigError as error:
        return f"{from_rank_0(ranks, lambda: 7, 'value')}, {from_rank(ranks, 3, lambda: 'of 3', 'value')}: {error}"
    return ""


@pytest.mark.parametrize(("world_size", "agreement"), [(6, 3), (256, 8)])
def test_ranks_agree_in_log_messages(world_size: int, agreement: int) -> None:
    found = run(world_size, agree)
    assert {words for words, _ in found} == {"7, of 3: batch: expected 1, got 2 [ranks 2, 5]"}
    # An agreement without errors, a barrier, and one with errors (sizes, then texts), plus messages for the values.
    assert all(sent.messages <= 4 * agreement + 2 * 2 * agreement for _, sent in found)
    assert min(sent.messages for _, sent in found) >= 4 * agreement


def fails(ranks: Collectives) -> None:
    from_rank(ranks, 2, _refuse, "value")


def _refuse() -> None:
    raise ConfigError("a key", got=1)


def test_an_exception_of_any_rank_is_raised_by_all() -> None:
    with pytest.raises(ConfigError, match="a key"):
        run(4, fails)
