"""The batch triangle."""

from __future__ import annotations

from typing import Any

import pytest

from zeroaccel.config import BatchSizes, load_config, solve_batch
from zeroaccel.errors import ConfigError

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _tree(*sizes: int | str | None) -> dict[str, Any]:
    return {name: size for name, size in zip(NAMES, sizes, strict=True) if size is not None}


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ((24, 4, 2), (24, 4, 2)),
        ((24, 4, None), (24, 4, 2)),
        ((24, None, 2), (24, 4, 2)),
        ((None, 4, 2), (24, 4, 2)),
        ((24, None, None), (24, 8, 1)),
        ((None, 4, None), (12, 4, 1)),
        ((24, "auto", "auto"), (24, 8, 1)),
        (("auto", 4, "auto"), (12, 4, 1)),
    ],
)
def test_what_is_not_given_is_derived(given: tuple[Any, ...], solved: tuple[int, int, int]) -> None:
    assert solve_batch(load_config(_tree(*given)), world_size=3) == BatchSizes(*solved)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (32, 4, 3),
            "train_batch_size: 32 is not 4 * 3 * 2 = 24 (train_batch_size 32, train_micro_batch_size_per_gpu 4, "
            "gradient_accumulation_steps 3, ranks 2); set train_batch_size to 24, or remove one of the three",
        ),
        (
            (30, 4, None),
            "train_batch_size: 30 is not a multiple of 4 * 2 = 8 (train_batch_size 30, train_micro_batch_size_per_gpu "
            "4, gradient_accumulation_steps not given, ranks 2); set train_batch_size to 24 or 32",
        ),
        (
            (3, None, 4),
            "train_batch_size: 3 is not a multiple of 4 * 2 = 8 (train_batch_size 3, train_micro_batch_size_per_gpu "
            "not given, gradient_accumulation_steps 4, ranks 2); set train_batch_size to 8",
        ),
        (
            (5, None, None),
            "train_batch_size: 5 is not a multiple of 1 * 2 = 2 (train_batch_size 5, train_micro_batch_size_per_gpu "
            "not given, gradient_accumulation_steps not given, ranks 2); set train_batch_size to 4 or 6",
        ),
        (
            (None, None, 4),
            "batch sizes: neither train_batch_size nor train_micro_batch_size_per_gpu is given (train_batch_size not "
            "given, train_micro_batch_size_per_gpu not given, gradient_accumulation_steps 4, ranks 2); "
            "set train_micro_batch_size_per_gpu",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_reported_with_all_four_numbers(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(load_config(_tree(*given)), world_size=2)
    assert str(caught.value) == message


def test_the_message_has_the_place_in_the_file() -> None:
    config = load_config('{\n  "train_batch_size": 5\n}')
    with pytest.raises(ConfigError, match=r"^<json>:2:3: train_batch_size: 5 is not a multiple"):
        solve_batch(config, world_size=2)


def test_a_data_parallel_size_must_be_the_number_of_ranks() -> None:
    config = load_config({"train_batch_size": 4, "data_parallel_size": 4})
    assert solve_batch(config, world_size=4) == BatchSizes(4, 1, 1)
    with pytest.raises(ConfigError) as caught:
        solve_batch(config, world_size=2)
    assert str(caught.value) == (
        "data_parallel_size: expected 2 ranks, got 4; remove the key, or start that many processes"
    )
