"""Optimizers by name, and the probe for optimizers that can step on shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.refusals import refused
from zeroaccel.errors import ConfigError
from zeroaccel.ops.tensorwise import Muon
from zeroaccel.optim.optimizer_factory import build_optimizer, known_optimizers
from zeroaccel.optim.optimizer_kinds import classify


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


@pytest.mark.parametrize("name", ["adam", "AdamW", "LION", "adagrad", "RMSPROP", "Sgd"])
def test_names_of_own_optimizers_ignore_case(name: str) -> None:
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


@pytest.mark.parametrize("name", ["Adamax", "NAdam", "Adafactor", "torch.optim.RMSprop"])
def test_any_class_of_torch_can_be_named(name: str) -> None:
    plain = name.removeprefix("torch.optim.")
    assert type(build_optimizer(name, {"lr": 0.5}, _params())) is getattr(torch.optim, plain)
    assert plain in known_optimizers()


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("AdamX", {}, ("optimizer.type", "AdamX", "Adam")),
        ("nadam", {}, ("optimizer.type", "'NAdam'")),
        ("SparseAdam", {}, ("SparseAdam", "dense")),
        ("torch.optim.LBFGS", {}, ("torch.optim.LBFGS", "closure")),
        ("Lamb", {"eps_inside_mode": True}, ("optimizer.params.eps_inside_mode", "'eps_inside_sqrt'")),
        ("Lamb", {"min_coeff": 20.0}, ("Lamb, min_coeff", "20.0")),
        ("Lamb", {"amsgrad": True}, ("Lamb, amsgrad", "no AMSGrad variant")),
        ("Muon", {"per_head": True}, ("optimizer.params.per_head", "did you mean 'per_head_muon'")),
        ("Muon", {}, ("parameter of shape (4, 4), attribute use_muon", "set it on every parameter")),
        ("AdamW", {"learning_rate": 1.0}, ("optimizer.params.learning_rate", "AdamW")),
        ("AdamW", {"beta": (0.9, 0.9)}, ("optimizer.params.beta", "'betas'")),
        ("RMSprop", {"betas": 1}, ("optimizer.params.betas", "RMSprop")),
        ("AdamW", {"lr": -1.0}, ("AdamW", "-1.0")),
    ],
)
def test_wrong_optimizers_are_reported_with_an_address(name: str, settings: dict[str, Any], words: tuple[str]) -> None:
    with refused(ConfigError, *words):
        build_optimizer(name, settings, _params())


class _Tiny(nn.Module):
    """The parts of a language model that Muon distinguishes."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.patch_embed = nn.Linear(4, 4, bias=False)
        self.block = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3, bias=False)
        self.norm = nn.LayerNorm(4)
        self.classes = nn.Linear(4, 8, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.classes


def _split(model: nn.Module, settings: dict[str, Any], params: Any = None) -> list[tuple[bool, float, list[str]]]:
    names = {id(param): fqn for fqn, param in model.named_parameters()}
    optimizer = build_optimizer("muon", settings, model.parameters() if params is None else params, model)
    assert type(optimizer) is Muon
    return [(g["use_muon"], g["lr"], [names[id(param)] for param in g["params"]]) for g in optimizer.param_groups]


HIDDEN = ["block.weight", "conv.weight"]
OTHERS = ["wte.weight", "patch_embed.weight", "block.bias", "norm.weight", "norm.bias", "classes.weight"]


def test_muon_takes_the_hidden_matrices() -> None:
    assert _split(_Tiny(), {}) == [(True, 0.02, HIDDEN), (False, 3e-4, OTHERS)]
    assert _split(_Tiny(), {"lr": 0.5, "adam_lr": 0.25}) == [(True, 0.5, HIDDEN), (False, 0.25, OTHERS)]
    assert _split(_Tiny(), {"muon_lr": 0.5, "lr": 0.25}) == [(True, 0.5, HIDDEN), (False, 0.25, OTHERS)]
    tied = _Tiny()
    tied.block.weight = tied.wte.weight
    assert _split(tied, {})[0] == (True, 0.02, ["conv.weight"])


def test_flags_on_parameters_and_groups_come_first() -> None:
    model = _Tiny()
    model.block.weight.use_muon = False  # type: ignore[assignment]
    model.wte.weight.use_muon = True  # type: ignore[assignment]
    assert _split(model, {})[0] == (True, 0.02, ["wte.weight", "conv.weight"])
    groups = [
        {"params": model.block.parameters(), "weight_decay": 0.5},
        {"params": [model.classes.weight], "use_muon": True, "lr": 0.75},
    ]
    assert _split(model, {"lr": 0.25}, groups) == [
        (False, 0.25, ["block.weight", "block.bias"]),
        (True, 0.75, ["classes.weight"]),
    ]
    model.block.weight.use_muon = "yes"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"parameter block.weight, attribute use_muon: expected True or False"):
        _split(model, {})


def test_our_rules_per_tensor_are_known() -> None:
    optimizer = build_optimizer("Muon", {}, (model := _Tiny()).parameters(), model)
    found = classify(optimizer)
    assert [kind.value for kind in found.groups] == ["per_tensor", "elementwise"]
    assert (found.reason, found.source) == ("it orthogonalises whole matrices", "known")
    found = classify(build_optimizer("LAMB", {}, _params()))
    assert ([kind.value for kind in found.groups], found.source) == (["per_tensor"], "known")


def test_the_callers_groups_are_copied() -> None:
    group = {"params": _params(), "lr": 0.125}
    optimizer = build_optimizer("SGD", {"lr": 1.0}, [group])
    optimizer.param_groups[0]["lr"] = 2.0
    assert group["lr"] == 0.125


class _Attention(nn.Module):
    """Four heads of queries and two of keys, of three rows each; a gated projection fits no number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=12)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(12, 12), nn.Linear(12, 6), nn.Linear(12, 6)
        self.o_proj, self.query = nn.Linear(12, 12), nn.Linear(12, 20)


def test_muon_per_head_groups_projections_by_their_heads() -> None:
    model = _Attention()
    names = {id(param): name.removesuffix(".weight") for name, param in model.named_parameters()}
    optimizer = build_optimizer("Muon", {"per_head_muon": True, "lr": 0.1}, model.parameters(), model)
    groups = [
        (group.get("heads", 1), [names[id(param)] for param in group["params"]])
        for group in optimizer.param_groups
        if group["use_muon"]
    ]
    assert groups == [(4, ["q_proj"]), (2, ["k_proj", "v_proj"]), (1, ["o_proj", "query"])]
    with pytest.raises(ConfigError, match="per_head_muon: expected a model of transformers whose attention"):
        build_optimizer("Muon", {"per_head_muon": True}, (tiny := _Tiny()).parameters(), tiny)
