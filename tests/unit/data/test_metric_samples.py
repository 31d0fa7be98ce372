"""Which rows and items of data for metrics belong to real samples: 3 samples of a batch, of which 2 are real."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from zeroaccel.data.metric_samples import RealSamples, real_objects, real_rows
from zeroaccel.errors import UsageError

BATCH = RealSamples(real=2, size=3)
ROWS = torch.tensor([7, 8, 9])


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Scores:
    texts: Any
    loss: float


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (("7", "8", "9"), ("7", "8")),
        (["7", "8", "9"], ["7", "8"]),
        ({"a": {"b": ["7", "8", "9"]}, "loss": 0.5}, {"a": {"b": ["7", "8"]}, "loss": 0.5}),
        ((["7", "8", "9"], [1, 2, 3]), (["7", "8"], [1, 2])),
        ([["7", "8", "9"]], [["7", "8"]]),
        ([(1, 2), (3, 4), (5, 6)], [(1, 2), (3, 4)]),
        (Pair([7, 8, 9], "all"), Pair([7, 8], "all")),
        (Scores(["7", "8", "9"], 0.5), Scores(["7", "8"], 0.5)),
        ([0.5], [0.5]),
        (collections.OrderedDict(p=[7, 8, 9]), collections.OrderedDict(p=[7, 8])),
    ],
)
def test_objects_lose_their_repeated_samples(data: Any, expected: Any) -> None:
    (found,) = real_objects(data, BATCH)
    assert found == expected
    assert type(found) is type(expected)


def test_arrays_lose_their_repeated_rows() -> None:
    ((array, matrix, one),) = real_objects((ROWS.numpy(), np.ones((3, 4)), np.ones((1, 2))), BATCH)
    assert array.tolist() == [7, 8]
    assert (matrix.shape, one.shape) == ((2, 4), (1, 2))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (ROWS, [2]),
        ({"p": ROWS[:, None], "q": (ROWS, ROWS)}, [2, 2, 2]),
        ([ROWS, ROWS, ROWS], [2, 2, 2]),  # three columns
        (list(ROWS), [1, 1, 0]),  # three samples
        ([torch.ones(5), torch.ones(4), torch.ones(6)], [5, 4, 0]),
        ([{"boxes": torch.ones(5, 4), "scores": torch.ones(5)}] * 3, [5, 5, 5, 5, 0, 0]),
        ((torch.tensor(0.5), ROWS), [1, 2]),
        (torch.ones(1, 4), [1]),
    ],
)
def test_tensors_lose_their_repeated_rows(data: Any, expected: list[int]) -> None:
    assert list(real_rows(data, BATCH)) == expected


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ((1, 2, 3), r"at the top: .* got 'a tuple of 3 items \(int\)'"),
        ({"ids": [1, 2, 3, 4, 5, 6]}, r"at \['ids'\]: .* got 'a list of 6 items \(int\)'"),
        ([torch.ones(6).numpy()], r"at \[0\]: .* got 'ndarray of shape \(6,\)'"),
        ({"a": [{"b": {7, 8, 9}}]}, r"at \['a'\]\[0\]\['b'\]: .* got 'set'"),
        (collections.deque([7, 8, 9]), "at the top: .* got 'deque'"),
    ],
)
def test_data_that_show_no_samples_are_refused_by_name(data: Any, where: str) -> None:
    with pytest.raises(UsageError, match=where):
        real_objects(data, BATCH)
    assert real_objects(data, RealSamples(3, 3)) == real_objects(data, None) == [data]
    assert real_objects(data, RealSamples(0, 3)) == []


def test_tensors_that_show_no_samples_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"at \['p'\]: .* got 'Tensor of shape \(6,\)'"):
        list(real_rows({"p": torch.ones(6)}, BATCH))
    with pytest.raises(UsageError, match=r"got 'a tuple of 3 items \(Tensor\)'"):
        list(real_rows(tuple(ROWS), BATCH))
    assert list(real_rows([torch.ones(6), torch.tensor(1)], RealSamples(3, 3))) == [6, 1]
    assert list(real_rows([torch.ones(6), torch.tensor(1)], RealSamples(0, 3))) == [0, 0]
