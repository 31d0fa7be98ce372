"""The wrap policy: units from blocks, large leaves, ties, mixed dtypes and names in the config."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from zeroaccel.errors import ConfigError
from zeroaccel.zero.wrap_policy import LARGE_LEAF_NUMEL, LeafRules, group_parameters, has_expert_interface, is_mixture

WIDTH = 4


def _block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 1, 8)


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def _units(model: nn.Module, rules: LeafRules | None = None, **limits: int) -> dict[str, list[str]]:
    specs = group_parameters(model, rules=rules, **limits)
    found = [fqn for spec in specs for fqn, _ in spec.params]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters()), "each parameter is in one unit"
    return {spec.name: [fqn for fqn, _ in spec.params] for spec in specs}


def _linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Module:
    return nn.Linear(inputs, outputs)


def _layers(*blocks: nn.Module) -> nn.Module:
    return Model(layers=nn.ModuleList(blocks))


def _tied_block() -> nn.Module:
    block = Model(one=_linear(), two=_linear())
    block.two.weight = block.one.weight
    return block


def _mixtures() -> nn.Module:
    layers = nn.ModuleList(SwitchMoeLayer(gate=_linear(WIDTH, 3), experts=_experts()) for _ in range(2))
    return Model(model=SwitchMoeModel(moe_layers=layers, norm=nn.LayerNorm(WIDTH)))


ROWS = LARGE_LEAF_NUMEL // WIDTH
UNITS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a model that is one module": (lambda: nn.Linear(2, 2), "root"),
    "a model without parameters": (nn.Identity, ""),
    "a block within a block is part of it": (
        lambda: _layers(Model(parts=nn.ModuleList([_linear(), _linear()])), _block()),
        "layers.0 layers.1",
    ),
    "lists in lists and dictionaries are looked into": (
        lambda: Model(
            stages=nn.ModuleList([nn.ModuleList([_block()]), nn.Sequential(_block(), _block())]),
            towers=nn.ModuleDict({"left": _block()}),
        ),
        "stages.0.0 stages.1.0 stages.1.1 towers.left",
    ),
    "a sequential model is cut into its children": (lambda: nn.Sequential(_linear(), nn.ReLU(), _linear()), "0 2"),
    "a large leaf outside the blocks is a unit": (
        lambda: Model(
            embed=nn.Embedding(ROWS, WIDTH), small=nn.Embedding(ROWS - 1, WIDTH), layers=nn.ModuleList([_block()])
        ),
        "embed root layers.0",
    ),
    "a parameter tied within a unit belongs to it": (lambda: _layers(_tied_block()), "layers.0"),
    "a module used twice is one unit": (lambda: _layers(*[_block()] * 2, _block()), "layers.0 layers.2"),
    "experts of the root are the root's": (lambda: Model(experts=_experts(), norm=nn.LayerNorm(WIDTH)), "root"),
    "mixtures are cut into their layers": (_mixtures, "model.moe_layers.0 model.moe_layers.1 root"),
}


@pytest.mark.parametrize(("make", "units"), UNITS.values(), ids=UNITS)
def test_units_of_a_model(make: Callable[[], nn.Module], units: str) -> None:
    assert set(_units(make())) == set(units.split())


def test_blocks_of_a_list_are_units_and_the_rest_is_the_root() -> None:
    model = Model(embed=nn.Embedding(5, WIDTH), layers=nn.ModuleList([_block(), _block()]), head=nn.Linear(WIDTH, 5))
    units = _units(model)
    assert set(units) == {"root", "layers.0", "layers.1"}
    assert units["root"] == ["embed.weight", "head.weight", "head.bias"]


def test_a_parameter_tied_across_units_is_whole_in_each() -> None:
    rows = LARGE_LEAF_NUMEL // WIDTH
    model = Model(embed=nn.Embedding(rows, WIDTH), head=nn.Linear(WIDTH, rows, bias=False))
    model.head.weight = model.embed.weight
    (spec,) = group_parameters(model)
    assert spec.name == "tied(embed+head)"
    assert spec.modules == [model.embed, model.head]
    assert spec.numel == LARGE_LEAF_NUMEL


def test_small_parameters_are_persistent_within_the_bound() -> None:
    model = Model(layers=nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]))
    assert set(_units(model, persistence_threshold=WIDTH)["persistent"]) == {"layers.0.bias", "layers.1.bias"}
    bounded = _units(model, persistence_threshold=WIDTH, model_persistence_threshold=WIDTH)
    assert bounded["persistent"] == ["layers.0.bias"]
    assert "persistent" not in _units(model, persistence_threshold=0)
    specs = group_parameters(model, persistence_threshold=WIDTH)
    assert [spec.name for spec in specs if spec.persistent] == ["persistent"]


# -- leaves


class Chooser(Model):
    pass


def _chooser() -> Model:
    return Model(outer=Model(pick=Chooser(halves=nn.ModuleList([_block(), _block()]))))


@pytest.mark.parametrize(
    "rules",
    [
        LeafRules(classes=("Chooser",)),
        LeafRules(classes=(f"{__name__}.Chooser",)),
        LeafRules(names=("outer.pick",)),
        LeafRules(name_suffixes=("pick",)),
    ],
)
def test_a_named_leaf_travels_whole(rules: LeafRules) -> None:
    assert set(_units(_chooser())) == {"outer.pick.halves.0", "outer.pick.halves.1"}
    assert set(_units(_chooser(), rules)) == {"outer.pick"}


def test_a_leaf_within_a_block_is_a_unit_of_its_own() -> None:
    model = _layers(Model(norm=nn.LayerNorm(WIDTH), pick=Chooser(a=nn.Linear(2, 2))))
    assert set(_units(model, LeafRules(classes=("Chooser",)))) == {"layers.0", "layers.0.pick"}


def test_granularity_joins_modules_of_many_small_parts() -> None:
    fine = Model(parts=nn.ModuleList(nn.Linear(1, 1) for _ in range(9)))
    model = Model(fine=fine, layers=nn.ModuleList([_block()]))
    assert "fine" in _units(model, LeafRules(granularity=5))
    assert "layers.0" in _units(model, LeafRules(granularity=5))
    assert "fine.parts.3" in _units(model, LeafRules(granularity=1))


def test_a_leaf_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"leaf_module\.names.*layers\.9.*layers"):
        group_parameters(Model(layers=nn.ModuleList([_block()])), rules=LeafRules(names=("layers.9",)))


# -- mixtures of experts


def _experts(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class SwitchMoeLayer(Model):
    pass


class SwitchMoeModel(Model):
    pass


MIXTURES = {
    "experts": lambda: Model(wg=nn.Linear(WIDTH, 3), experts=_experts()),
    "shared experts": lambda: Model(
        gate=nn.Linear(WIDTH, 3), shared_experts=nn.Linear(WIDTH, WIDTH), experts=_experts()
    ),
    "fused experts": lambda: Model(router=nn.Linear(WIDTH, 3), experts=nn.Bilinear(WIDTH, WIDTH, 3)),
    "router and a list": lambda: Model(router=nn.Linear(WIDTH, 3), networks=_experts()),
    "class": lambda: SwitchMoeLayer(first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_is_found_by_itself(kind: str) -> None:
    mixture = MIXTURES[kind]()
    assert is_mixture("ffn", mixture)
    assert set(_units(Model(ffn=mixture, norm=nn.LayerNorm(WIDTH)))) == {"ffn", "root"}
    # In a block, it belongs to the block's unit.
    assert set(_units(Model(layers=nn.ModuleList([Model(ffn=mixture)])))) == {"layers.0"}


def test_a_mixture_is_found_by_its_name() -> None:
    assert is_mixture("moe", Model(a=nn.Linear(2, 2)))
    assert not is_mixture("moe", nn.Linear(2, 2))
    assert not is_mixture("mlp", Model(gate_proj=nn.Linear(2, 2), up=nn.Linear(2, 2)))
    assert not is_mixture("mlp", Model(gate=nn.Linear(2, 2), parts=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])))


def test_experts_of_any_transformers_5_are_recognized() -> None:
    """Later releases set further attributes: `has_gate` by 5.3, `_is_expert_parallel` since 5.18."""
    module = nn.Module()
    module.num_experts, module.has_bias = 4, False  # type: ignore[assignment]
    assert not has_expert_interface(module)
    module.is_transposed = False  # type: ignore[assignment]
    assert has_expert_interface(module)
