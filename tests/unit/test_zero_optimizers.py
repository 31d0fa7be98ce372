"""Optimizers by name, and the trial that tells whether one can step on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeroaccel.errors import ConfigError
from zeroaccel.zero.optimizer_kinds import classify
from zeroaccel.zero.optimizers import build_optimizer, known_optimizers


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


@pytest.mark.parametrize("name", ["adam", "AdamW", "LION", "adagrad", "Sgd"])
def test_own_optimizers_go_by_any_case(name: str) -> None:
    optimizer = build_optimizer(name, {"lr": 0.25}, _params())
    assert type(optimizer).__module__.startswith("zeroaccel.")
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_adam_decouples_weight_decay_unless_told_otherwise() -> None:
    def mode(name: str, **settings: Any) -> bool:
        return bool(build_optimizer(name, settings, _params()).param_groups[0]["adamw_mode"])

    assert mode("Adam")
    assert mode("AdamW")
    assert not mode("Adam", adam_w_mode=False)
    assert mode("AdamW", adam_w_mode=False)


def test_torchs_adam_can_be_asked_for() -> None:
    assert type(build_optimizer("Adam", {"torch_adam": True, "adam_w_mode": False}, _params())) is torch.optim.Adam
    fused = build_optimizer("AdamW", {"torch_adam": True, "foreach": True}, _params())
    assert type(fused) is torch.optim.AdamW
    assert fused.param_groups[0]["foreach"] is True


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "Adafactor"])
def test_any_class_of_torch_goes_by_its_name(name: str) -> None:
    assert type(build_optimizer(name, {"lr": 0.5}, _params())) is getattr(torch.optim, name)
    assert name in known_optimizers()


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("AdamX", {}, ("optimizer.type", "AdamX", "Adam")),
        ("rmsprop", {}, ("optimizer.type", "'RMSprop'")),
        ("OneBitAdam", {}, ("OneBitAdam", "1-bit")),
        ("Lamb", {}, ("Lamb", "norm")),
        ("AdamW", {"learning_rate": 1.0}, ("optimizer.params.learning_rate", "AdamW")),
        ("AdamW", {"beta": (0.9, 0.9)}, ("optimizer.params.beta", "'betas'")),
        ("RMSprop", {"betas": 1}, ("optimizer.params.betas", "RMSprop")),
        ("AdamW", {"lr": -1.0}, ("AdamW", "-1.0")),
        ("AdamW", {"max_grad_norm": 1.0}, ("max_grad_norm", "gradient_clipping")),
    ],
)
def test_what_cannot_be_built_is_told_with_an_address(name: str, settings: dict[str, Any], words: tuple[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(name, settings, _params())
    for word in words:
        assert word in str(caught.value)


def test_the_callers_groups_are_copied() -> None:
    group = {"params": _params(), "lr": 0.125}
    optimizer = build_optimizer("SGD", {"lr": 1.0}, [group])
    optimizer.param_groups[0]["lr"] = 2.0
    assert group["lr"] == 0.125


ELEMENTWISE = [
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip


@pytest.mark.parametrize("lr", [0.0, 1e-7, 1e-3])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_told_apart(name: str, lr: float) -> None:
    params = _params()
    optimizer = getattr(torch.optim, name)(params, lr=lr)
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert not classify(optimizer).reason
    after = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert after == before
    assert optimizer.param_groups[0]["params"] == params
    assert torch.equal(params[0], torch.ones(4, 4))


@pytest.mark.parametrize("lr", [0.0, 1e-7, 1e-3])
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_look_at_the_shape_are_told_apart(name: str, lr: float) -> None:
    assert classify(getattr(torch.optim, name)(_params(), lr=lr)).reason
