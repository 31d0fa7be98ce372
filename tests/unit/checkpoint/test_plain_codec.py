"""Plain data passes through JSON unchanged, and other objects are refused."""

from __future__ import annotations

import argparse
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zeroaccel.checkpoint.plain_codec import decode, encode
from zeroaccel.errors import CheckpointError, UsageError


def through_json(value: Any) -> Any:
    kept: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        kept[f"plain/{len(kept)}"] = tensor
        return f"plain/{len(kept) - 1}"

    return decode(json.loads(json.dumps(encode(value, "state", keep), allow_nan=False)), kept.__getitem__)


SCALARS = [None, True, -(2**80), 0.1, -0.0, float("inf"), float("nan"), "é\n", b"\x00\xff"]
LISTS = [[1, [2.5, None]], (1, (), ("a",)), {1, 2}]
MAPPINGS = [{"a": {"b": [1]}}, {1: "int", "1": "str", (2, 3): "tuple", None: 0}, {"$": "a dollar"}, {}]
ORDERED = [OrderedDict([("b", 1), ("a", 2)]), Counter({30: 2})]
PATHS = [Path("runs/1"), argparse.Namespace(lr=0.1, data=Path("x"), sizes=(1, 2))]


@pytest.mark.parametrize("value", [*SCALARS, *LISTS, *MAPPINGS, *ORDERED, *PATHS])
def test_values_keep_type_and_bits(value: Any) -> None:
    got = through_json({"x": value})["x"]
    assert type(got) is type(value)
    assert repr(got) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(0.1), torch.tensor(3), torch.tensor(float("inf"), dtype=torch.bfloat16), torch.tensor(True)],
)
def test_scalar_tensors_go_into_the_json(tensor: torch.Tensor) -> None:
    got = through_json((tensor,))[0]
    assert got.dtype == tensor.dtype
    assert torch.equal(got, tensor)


def test_other_tensors_are_kept_beside() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert through_json({"t": tensor})["t"] is tensor


class Text(str):
    """Not plain data: JSON would return it as a `str`."""


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ({"a": {"b": [0, object()]}}, r"state\['a'\]\['b'\]\[1\]"),
        ({"loss": np.float32(1)}, r"state\['loss'\].*numpy.float32.*\.item\(\)"),
        ({"rows": np.zeros(2)}, r"state\['rows'\]"),
        ({"call": print}, r"state\['call'\]"),
        ({Text("key"): 1}, r"state, key 'key'"),
        ({"sparse": torch.eye(2).to_sparse()}, r"state\['sparse'\].*dense"),
        ({"meta": torch.zeros(2, device="meta")}, r"state\['meta'\]"),
        (1j, "state: expected plain data"),
    ],
)
def test_everything_else_is_refused_by_its_key(value: Any, address: str) -> None:
    with pytest.raises(UsageError, match=address):
        encode(value, "state", lambda tensor: "")


@pytest.mark.parametrize(
    "value",
    [{"$": "os.system"}, {"$": "bytes", "base64": "*"}, {"$": "dict", "items": [[1]]}, {"$": "scalar", "dtype": "F99"}],
)
def test_invalid_encodings_are_an_error(value: Any) -> None:
    with pytest.raises(CheckpointError):
        decode([value], lambda key: torch.zeros(0))
