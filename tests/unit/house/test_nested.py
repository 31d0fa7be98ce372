"""Nested containers of tensors: every kind that a model or a loader returns keeps its type and order."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from zeroaccel.nested import batch_size_of, map_tensors, tensors_of, to_device

Pair = namedtuple("Pair", ["first", "second"])


class Batch(NamedTuple):
    inputs: Tensor
    labels: Any


class Tokens(UserDict):  # type: ignore[type-arg]
    """Like transformers' BatchEncoding: a mapping that is not a dict, with its own `to`."""

    def to(self, device: str) -> Tokens:
        return Tokens({key: value.to(device) for key, value in self.items()})


class Output(OrderedDict):  # type: ignore[type-arg]
    """Like transformers' ModelOutput before its registration with pytree."""


class Rows(list):  # type: ignore[type-arg]
    pass


class Boxes:
    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.device = "nowhere"

    def to(self, device: str) -> Boxes:
        moved = Boxes(self.values)
        moved.device = str(device)
        return moved


@dataclass
class Record:
    values: Tensor


class Fixed(UserDict):  # type: ignore[type-arg]
    """A mapping whose constructor takes no dict."""

    def __init__(self) -> None:
        super().__init__()
        self["a"] = torch.ones(2)


def _negated(data: Any) -> Any:
    return map_tensors(lambda tensor: -tensor, data)


@pytest.mark.parametrize(
    "data",
    [
        [torch.ones(2), (torch.ones(3), "text"), None],
        {"b": torch.ones(2), "a": {"c": torch.ones(1)}},
        Pair(torch.ones(2), [torch.ones(1)]),
        Batch(torch.ones(2), {"x": torch.ones(4)}),
        Tokens({"ids": torch.ones(2, 3), "mask": torch.ones(2, 3)}),
        Output(loss=torch.ones(()), logits=torch.ones(2, 5)),
        Rows([torch.ones(2), torch.ones(3)]),
        OrderedDict(z=torch.ones(1), a=torch.ones(1)),
        [Tokens({"ids": [torch.ones(2)]}), Rows([Pair(torch.ones(1), Output(a=torch.ones(3)))])],
        torch.max(torch.ones(2, 3), dim=1),
        {},
        [],
    ],
    ids=lambda data: type(data).__name__,
)
def test_containers_keep_type_and_order(data: Any) -> None:
    mapped = _negated(data)
    assert type(mapped) is type(data)
    before, after = list(tensors_of(data)), list(tensors_of(mapped))
    assert [tuple(tensor.shape) for tensor in before] == [tuple(tensor.shape) for tensor in after]
    assert all(torch.equal(-old, new) for old, new in zip(before, after, strict=True))
    if isinstance(data, dict):
        assert list(mapped) == list(data)


def test_objects_that_are_not_containers_stay_the_same() -> None:
    record, boxes = Record(torch.ones(2)), Boxes(torch.ones(2))
    mapped = _negated([record, boxes, "text", 3])
    assert mapped[0] is record
    assert mapped[1] is boxes
    assert mapped[2:] == ["text", 3]
    assert list(tensors_of([record, boxes])) == []


def test_a_mapping_that_takes_no_dict_becomes_a_dict() -> None:
    mapped = _negated(Fixed())
    assert type(mapped) is dict
    assert torch.equal(mapped["a"], -torch.ones(2))


def test_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    batches = pytest.importorskip("transformers")
    output = outputs.CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2, 3))
    mapped = _negated(output)
    assert type(mapped) is type(output)
    assert list(mapped) == ["loss", "logits"]
    assert torch.equal(mapped.logits, -output.logits)
    assert len(list(tensors_of(output))) == 2
    encoding = batches.BatchEncoding({"input_ids": torch.ones(2, 3)})
    assert type(_negated(encoding)) is type(encoding)
    assert type(to_device(encoding, "cpu")) is type(encoding)


def test_sizes_of_batches() -> None:
    assert batch_size_of({"scale": torch.ones(()), "x": torch.ones(5, 2)}) == 5
    assert batch_size_of(["a", "b"]) == 2
    assert batch_size_of({"a": 1}) is None


def test_objects_with_a_method_to_move_themselves_use_it() -> None:
    boxes = Boxes(torch.ones(2))
    assert to_device(boxes, "meta").device == "meta"
    moved = to_device([boxes, torch.ones(2), ("text", Tokens({"ids": torch.ones(1)}))], "meta")
    assert moved[0].device == "meta"
    assert moved[1].device.type == "meta"
    assert moved[2][1]["ids"].device.type == "meta"
    packed = pack_padded_sequence(torch.ones(3, 2, 1), [3, 1])
    assert type(to_device(packed, "cpu")) is type(packed)
