"""The hidden size of a model, from each possible place in its config or weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from zeroaccel.config import Fact
from zeroaccel.setup.plan import facts_from_model


def _config(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(**attributes)


def _raises() -> None:
    raise ValueError("several text configs")


@pytest.mark.parametrize(
    ("config", "size", "source"),
    [
        (_config(hidden_size=64), 64, "model.config.hidden_size"),
        ({"hidden_size": 48}, 48, "model.config.hidden_size"),
        (_config(hidden_sizes=[32, 160, 96]), 160, "max(model.config.hidden_sizes)"),
        (_config(hidden_size=None, hidden_sizes=(8,)), 8, "max(model.config.hidden_sizes)"),
        (_config(text_config=_config(hidden_size=24)), 24, "model.config.text_config.hidden_size"),
        (_config(text_config={"hidden_sizes": [4, 2]}), 4, "max(model.config.text_config.hidden_sizes)"),
        (
            _config(get_text_config=lambda: _config(hidden_size=40)),
            40,
            "model.config.get_text_config().hidden_size",
        ),
    ],
)
def test_a_config_has_the_size(config: Any, size: int, source: str) -> None:
    model = nn.Linear(3, 5)
    model.config = config
    assert facts_from_model(model).hidden_size == Fact(size, source)


@pytest.mark.parametrize(
    "config",
    [
        None,
        _config(),
        _config(hidden_size="large", hidden_sizes=[]),
        _config(hidden_size=True),
        _config(get_text_config=_raises),
    ],
)
def test_without_a_config_the_weights_have_the_size(config: Any) -> None:
    model = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 12), nn.Linear(12, 6), nn.LayerNorm(6), nn.Conv1d(6, 6, 3))
    if config is not None:
        model.config = config
    fact = facts_from_model(model).hidden_size
    assert fact == Fact(6, "the last dimension of 2 of the model's 3 2-D weights, as its config has no hidden size")


def test_equally_common_widths_give_the_larger_and_no_2d_weights_none() -> None:
    fact = facts_from_model(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))).hidden_size
    assert fact is not None
    assert fact.value == 9
    assert facts_from_model(nn.Conv2d(3, 4, 2)).hidden_size is None
    assert facts_from_model(nn.Identity()).hidden_size is None


def test_the_configs_of_transformers_are_read() -> None:
    transformers = pytest.importorskip("transformers")
    model = nn.Identity()
    model.config = transformers.GPT2Config(n_embd=80)
    assert facts_from_model(model).hidden_size == Fact(80, "model.config.hidden_size")
    model.config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(hidden_size=96))
    fact = facts_from_model(model).hidden_size
    assert fact is not None
    assert fact.value == 96
