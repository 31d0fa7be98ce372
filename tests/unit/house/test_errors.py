"""The building blocks of error messages."""

from __future__ import annotations

import pytest

from zeroaccel.errors import compose, listed


@pytest.mark.parametrize(
    ("names", "expected"), [(["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_long_lists_are_cut(names: list[str], expected: str) -> None:
    assert listed(names, most=2) == expected


def test_an_address_comes_first_and_what_to_do_last() -> None:
    assert (
        compose("ds.json:1:2: a", expected="1", got=None, fix="write 1")
        == "ds.json:1:2: a: expected 1, got None; write 1"
    )
    assert compose("a") == "a"
