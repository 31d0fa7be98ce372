"""The loss scale step by step, names that stay fp32, and the dtype of each buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zeroaccel.errors import EngineStateError
from zeroaccel.zero.precision import (
    BufferDtypes,
    DynamicLossScale,
    LossScale,
    StaticLossScale,
    cast_buffers,
    kept_in_fp32,
    made_as,
    note_cast,
)


def _scales(overflows: str, **settings: Any) -> list[float]:
    """Returns the scale after each step; "x" is an overflow, "." none."""
    scale = DynamicLossScale(value=256.0, **settings)
    seen = []
    for step in overflows:
        scale.update(overflow=step == "x")
        seen.append(scale.value)
    return seen


@pytest.mark.parametrize(
    ("overflows", "settings", "expected"),
    [
        # The first overflow uses up the tolerance and each further one halves the scale; only growth restores it.
        ("xx.x", {}, [256, 128, 128, 64]),
        ("xxx", {"hysteresis": 3}, [256, 256, 128]),
        ("x", {"hysteresis": 1}, [128]),
        ("x.x.xx", {"consecutive_hysteresis": True}, [256, 256, 256, 256, 256, 128]),
        # The scale grows on the step after `window` good ones, and then every `window` steps.
        (".....", {"window": 2}, [256, 256, 512, 512, 1024]),
        ("x....", {"window": 2, "hysteresis": 1}, [128, 128, 128, 256, 256]),
        ("x...xx", {"window": 2}, [256, 256, 256, 512, 512, 256]),  # growth restores the tolerance
        ("xxxx", {"hysteresis": 1, "minimum": 16.0}, [128, 64, 32, 16]),
        ("xx", {"hysteresis": 1, "minimum": 100.0}, [128, 100]),
    ],
)
def test_the_scale_step_by_step(overflows: str, settings: dict[str, Any], expected: list[float]) -> None:
    assert _scales(overflows, **settings) == expected


def test_an_overflow_at_the_minimum_is_an_error() -> None:
    with pytest.raises(EngineStateError, match=r"fp16\.min_loss_scale.*64"):
        _scales("xxx", hysteresis=1, minimum=64.0)


@given(st.text("x.", max_size=40), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_resuming_changes_nothing(overflows: str, hysteresis: int, window: int, consecutive: bool) -> None:
    settings = {"hysteresis": hysteresis, "window": window, "consecutive_hysteresis": consecutive, "minimum": 2.0**-60}
    straight = _scales(overflows, **settings)
    scale = DynamicLossScale(value=256.0, **settings)
    for step, expected in zip(overflows, straight, strict=True):
        resumed = DynamicLossScale(value=1.0, **settings)
        resumed.load_state_dict(scale.state_dict())
        resumed.update(overflow=step == "x")
        assert resumed.value == expected
        scale = resumed


def test_static_scales_stay_the_same(caplog: pytest.LogCaptureFixture) -> None:
    for scale, value in ((LossScale(), 1.0), (StaticLossScale(128), 128.0)):
        for overflow in (True, False, True):
            scale.update(overflow=overflow)
        assert scale.value == value
    assert [record.getMessage().count("128") for record in caplog.records] == [1, 1]


class Model(nn.Module):
    _keep_in_fp32_modules = ("norm",)
    _keep_in_fp32_modules_strict = ("router",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.norms = nn.Linear(2, 2)
        self.inner = nn.Module()
        self.inner.router = nn.Linear(2, 2, bias=False)


def test_names_kept_in_fp32() -> None:
    norm = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    router = {"inner.router.weight"}
    model = Model()
    assert kept_in_fp32(model, "auto", torch.float16, str) == norm | router
    assert kept_in_fp32(model, "auto", torch.bfloat16, str) == router  # as in transformers, the strict list only
    assert kept_in_fp32(model, ("inner",), torch.bfloat16, str) == router
    assert kept_in_fp32(model, ("inner.router",), torch.bfloat16, str) == router
    assert (
        kept_in_fp32(model, (), torch.float16, str)
        == kept_in_fp32(nn.Linear(2, 2), "auto", torch.float16, str)
        == set()
    )


class Table(nn.Module):
    """Float buffers and no parameters."""

    def __init__(self, **tables: torch.Tensor) -> None:
        super().__init__()
        for name, table in tables.items():
            self.register_buffer(name, table)


def _dtypes(model: nn.Module, asked: torch.dtype | None = None, fp32: tuple[str, ...] = ()) -> dict[str, str]:
    found = BufferDtypes(torch.bfloat16, asked, frozenset(fp32)).of(model)
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}


def _normed_block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Table(mask=torch.zeros(2), index=torch.arange(2)))


def test_buffers_follow_the_parameters_that_are_cast() -> None:
    assert _dtypes(_normed_block()) == dict.fromkeys(("1.running_mean", "1.running_var", "2.mask"), "bfloat16")


def test_buffers_beside_parameters_that_are_in_the_precision_stay() -> None:
    model = _normed_block()
    model[0].bfloat16()
    assert _dtypes(model)["1.running_mean"] == "bfloat16"  # its module's own parameters are cast
    assert _dtypes(model)["2.mask"] == "float32"  # module 0 next to it is not cast
    nested = nn.Sequential(_normed_block(), nn.Linear(2, 2).bfloat16())
    assert _dtypes(nested)["0.2.mask"] == "bfloat16"  # the nearest module with parameters decides


def test_names_and_settings_of_the_config_come_first() -> None:
    assert _dtypes(_normed_block(), fp32=("1.running_var",))["1.running_var"] == "float32"
    assert set(_dtypes(_normed_block(), torch.float16, ("2.mask",)).values()) == {"float16", "float32"}
    kept = ("0.weight", "0.bias", "1.weight", "1.bias")  # no parameter is cast
    assert set(_dtypes(_normed_block(), fp32=kept).values()) == {"float32"}
    assert _dtypes(Table(mask=torch.zeros(1))) == {"mask": "float32"}  # a model without parameters


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("LlamaRotaryEmbedding", "inv_freq", "float32"),
        ("VisionRope2D", "freqs", "float32"),
        ("RoPE", "cache", "float32"),
        ("RotaryEmbedding", "cos_cached", "bfloat16"),
        ("RotaryEmbedding", "_sin_cached", "bfloat16"),
        ("Attention", "inv_freq", "float32"),
        ("Attention", "original_inv_freq", "float32"),
        ("Properties", "freqs", "bfloat16"),
        ("EuRopean", "freqs", "bfloat16"),
        ("Positions", "sines", "bfloat16"),
    ],
)
def test_rotary_frequencies_stay(kind: str, name: str, expected: str) -> None:
    table = type(kind, (Table,), {})(**{name: torch.ones(2)})
    assert _dtypes(nn.Sequential(nn.Linear(1, 1), table)) == {f"1.{name}": expected}


def test_codes_in_8_bits_stay() -> None:
    model = nn.Sequential(nn.Linear(1, 1), Table(codes=torch.ones(2).to(torch.float8_e4m3fn)))
    assert _dtypes(model) == {"1.codes": "float8_e4m3fn"}


def test_a_parameter_that_was_cast_while_it_was_built_counts_as_cast() -> None:
    model = _normed_block().bfloat16()
    model[1].running_mean = model[1].running_mean.float()
    assert _dtypes(model)["1.running_mean"] == "float32"
    for param in model[1].parameters():
        note_cast(param, torch.float32, param.device)
        note_cast(param, torch.bfloat16, param.device)  # the first note counts
        assert made_as(param)[0] is torch.float32
    assert _dtypes(model)["1.running_mean"] == "bfloat16"


def test_buffers_are_cast_in_place() -> None:
    model = _normed_block()
    model.register_buffer("table", torch.ones(2, dtype=torch.float64))
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    model.register_buffer("nothing", None)
    model[2].table = model.table
    model[2].register_buffer("again", model.table)
    cast_buffers(model, torch.device("cpu"), {"table": torch.float16, "2.again": torch.float16})
    assert model.table is model[2].again  # shared buffers stay shared
    assert (model.table.dtype, model.hidden.dtype, model.nothing) == (torch.float16, torch.float32, None)
    assert model[1].num_batches_tracked.dtype is torch.long
    assert "hidden" not in model.state_dict()
