"""The dtypes of parameters and buffers, and the modules that form one unit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.multi.zero.test_engine_passes import drive
from tests.support.log_lines import log_lines
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import WIDTH, Block, Toy, batches, config, differences, recording, train_step
from zeroaccel import zero
from zeroaccel.errors import UsageError


class Mixed(Toy):
    """Buffers of several dtypes and a part to keep in fp32."""

    _keep_in_fp32_modules_strict = ("final",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.arange(4, dtype=torch.float64))
        self.register_buffer("small", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("absent", None)
        self.final = nn.LayerNorm(WIDTH)
        self.final.register_buffer("scale", torch.ones(WIDTH))
        self.finals = nn.Linear(WIDTH, WIDTH)  # its name only starts like a kept module

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        x = self.run_layers(self.embed(tokens[:, :-1]))
        x = self.finals(x.to(self.finals.weight.dtype)).to(self.final.weight.dtype)
        x = (self.final(x) * self.final.scale).to(self.embed.weight.dtype)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _dtypes(settings: dict[str, Any]) -> tuple[dict[str, str], int]:
    model = Mixed()
    model.table += torch.distributed.get_rank()
    engine, *_ = zeroaccel.initialize(model, config=settings)
    for batch in batches(engine.collectives.rank, 2):
        train_step(engine, engine(batch))
    found = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
    found |= {name: str(b.dtype).removeprefix("torch.") for name, b in model.named_buffers()}
    engine.destroy()
    assert model.absent is None
    assert model.table.tolist() == [0, 1, 2, 3]  # the values of rank 0
    assert not torch.equal(model.final.weight, torch.ones_like(model.final.weight))
    return found, int(model.count)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_dtypes_of_parameters_and_buffers(ranks: Ranks, stage: int) -> None:
    for found, count in ranks(2).run(_dtypes, config(stage, "bf16")):
        assert count == 2
        kept = {name: found[name] for name in ("count", "table", "small", "offset")}
        assert kept == {"count": "int64", "table": "bfloat16", "small": "bfloat16", "offset": "bfloat16"}
        assert found["embed.weight"] == found["finals.weight"] == "bfloat16"
        assert found["final.weight"] == found["final.scale"] == "float32"


def test_dtypes_asked_for(ranks: Ranks) -> None:
    types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["finals"]}
    for found, _ in ranks(2).run(_dtypes, config(3, "bf16", data_types=types)):
        assert {found[name] for name in ("table", "small", "offset", "final.scale", "final.weight")} == {"bfloat16"}
        assert found["count"] == "int64"
        assert found["finals.weight"] == "float32"


def _warnings(modules: list[str]) -> list[str]:
    with log_lines(logging.WARNING) as lines:
        _dtypes(config(3, "bf16", data_types={"keep_in_fp32_modules": modules}))
    return [line for line in lines if "keep_in_fp32_modules" in line]


def test_modules_that_do_not_exist_are_named(ranks: Ranks) -> None:
    (found,) = ranks(1).run(_warnings, ["final", "fina"])[0]
    assert found.startswith("data_types.keep_in_fp32_modules: no parameter or buffer")
    assert "module fina;" in found


def test_everything_is_fp32_without_a_precision(ranks: Ranks) -> None:
    for found, _ in ranks(2).run(_dtypes, config(3)):
        assert (found["table"], found["small"], found["offset"]) == ("float64", "bfloat16", "float32")
        assert {dtype for name, dtype in found.items() if name.endswith("weight")} == {"float32"}


class GivenMixed(Mixed):
    """A model with blocks in other dtypes; trained weights get the dtype of the precision, or fp32 if kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].to(torch.bfloat16)
        self.layers[2].to(torch.float16)


class GivenFloat64(Mixed):
    """A model in 64 bits: parameters kept in fp32 become fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_of_mixed_dtypes(ranks: Ranks, precision: str) -> None:
    expected = ranks(2).run(drive, config(0, precision), "plain", GivenMixed)
    for stage in (1, 2, 3):
        runs = ranks(2).run(drive, config(stage, precision), "plain", GivenMixed)
        assert [differences(a, b) for a, b in zip(expected, runs, strict=True)] == [[], []]
        assert {str(w.dtype) for n, w in runs[0].weights.items() if n != "final.weight"} >= {
            "torch.float32" if precision == "fp32" else "torch.bfloat16"
        }


def test_float64_is_cast_to_16_bits_that_were_asked_for(ranks: Ranks) -> None:
    for stage in (0, 3):
        first, second = (ranks(2).run(drive, config(stage, "bf16"), "plain", make) for make in (Mixed, GivenFloat64))
        assert [differences(a, b) for a, b in zip(first, second, strict=True)] == [[], []]


def _given_float64(case: str) -> str:
    model = Toy()
    if case == "frozen":
        model.frozen.data = model.frozen.data.double()
    elif case == "Init":
        with pytest.raises(UsageError) as caught, zero.Init(config_dict_or_path=config(3)):
            model = nn.Linear(4, 4, dtype=torch.float64)
        return str(caught.value)
    else:
        model.double()
    return message(UsageError, zeroaccel.initialize, model, config=config(1))


@pytest.mark.parametrize(
    ("case", "fqn"), [("all", "temperature"), ("frozen", "frozen"), ("Init", "weight of Linear number 0")]
)
@pytest.mark.parametrize("size", [1, 2])
def test_float64_is_not_made_less_precise_silently(ranks: Ranks, case: str, fqn: str, size: int) -> None:
    said = ranks(size).run(_given_float64, case)
    begins = f"parameter {fqn}: expected at most 32 bits: master weights"
    assert all(one.startswith(begins) and "got 'torch.float64'; call model.float()" in one for one in said)


def _asked_for_fp32() -> str:
    with zero.Init(dtype=torch.float32):
        model = nn.Linear(4, 4, dtype=torch.float64)
    engine, *_ = zeroaccel.initialize(model, config=config(3))
    dtype = str(engine.module.weight.dtype)
    engine.destroy()
    return dtype


def test_init_casts_what_it_is_configured_to(ranks: Ranks) -> None:
    assert ranks(2).run(_asked_for_fp32) == ["torch.float32"] * 2


class IntegerWeights(Toy):
    """Frozen integer weights, like those of quantized layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.table = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)
            layer.mask = nn.Parameter(torch.ones(WIDTH, dtype=torch.bool), requires_grad=False)
            layer.phase = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64), requires_grad=False)
            layer.forward = lambda x, layer=layer: (
                Block.forward(layer, x) + (layer.table * layer.mask * layer.phase.real).to(x.dtype) * 0.01
            )


def test_frozen_parameters_that_are_not_floating(ranks: Ranks) -> None:
    expected = ranks(2).run(drive, config(0, "bf16"), "plain", IntegerWeights)
    for one, other in zip(expected, ranks(2).run(drive, config(3, "bf16"), "plain", IntegerWeights), strict=True):
        assert differences(one, other) == []
        assert other.weights["layers.1.table"].tolist() == list(range(WIDTH))


# -- modules that are unsharded as one (leaf modules)


class Gated(nn.Module):
    """A mixture with uninformative names; the rank decides which half runs."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.halves[torch.distributed.get_rank() % 2](x)


class WithGated(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.chooser = Gated()

    def run_layers(self, x: Tensor) -> Tensor:
        return self.chooser(super().run_layers(x))


LEAVES: dict[str, dict[str, Any]] = {
    "class": {"leaf_module": {"classes": ["Gated"]}},
    "dotted class": {"leaf_module": {"classes": [f"{__name__}.Gated"]}},
    "name": {"leaf_module": {"names": ["chooser"]}},
    "suffix": {"leaf_module": {"name_suffixes": ["oser"]}},
    "granularity": {"stage3_module_granularity_threshold": 1500},
}


def _units(settings: dict[str, Any]) -> list[str]:
    engine, *_ = zeroaccel.initialize(WithGated(), config=settings)
    names = [unit.name for unit in engine.units]
    engine.destroy()
    return names


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_module_is_one_unit(ranks: Ranks, leaf: str) -> None:
    assert "chooser.halves.0" in ranks(2).run(_units, config(3))[0]
    settings = config(3, "bf16", **LEAVES[leaf])
    names = ranks(2).run(_units, settings)[0]
    assert "chooser" in names
    assert not any(name.startswith("chooser.") for name in names)
    if leaf == "granularity":
        return
    expected = ranks(2).run(drive, config(0, "bf16"), "plain", WithGated)
    sharded = ranks(2).run(drive, settings, "plain", WithGated)
    assert [differences(a, b) for a, b in zip(expected, sharded, strict=True)] == [[], []]


# -- compiled blocks


def _compiled_gathers() -> tuple[int, int]:
    import warnings

    counted = recording()
    model = Toy()
    for layer in model.layers:
        layer.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler reads .grad of every tensor
        settings = config(3, "bf16", stage3_max_reuse_distance=0)
        engine, *_ = zeroaccel.initialize(model, config=settings, collectives=counted)
        data = batches(engine.collectives.rank, 3)
        for batch in data[:2]:
            train_step(engine, engine(batch))
        counted.reset()
        train_step(engine, engine(data[2]))
    seen = counted.count("all_gather", "unshard layers"), counted.count("reduce_scatter", "reduce layers")
    engine.destroy()
    return seen


def test_compiled_blocks_stay_units(ranks: Ranks) -> None:
    assert ranks(2).run(_compiled_gathers) == [(6, 3)] * 2
