"""The loss scale step by step, and which names stay fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zeroaccel.errors import EngineStateError
from zeroaccel.zero.precision import DynamicLossScale, LossScale, StaticLossScale, kept_in_fp32


def _scales(overflows: str, **settings: Any) -> list[float]:
    """The scale after each step; "x" is an overflow, "." none."""
    scale = DynamicLossScale(value=256.0, **settings)
    seen = []
    for step in overflows:
        scale.update(overflow=step == "x")
        seen.append(scale.value)
    return seen


@pytest.mark.parametrize(
    ("overflows", "settings", "expected"),
    [
        # The first overflow costs the tolerance, each further one halves: it is refilled by growth only.
        ("xx.x", {}, [256, 128, 128, 64]),
        ("xxx", {"hysteresis": 3}, [256, 256, 128]),
        ("x", {"hysteresis": 1}, [128]),
        ("x.x.xx", {"consecutive_hysteresis": True}, [256, 256, 256, 256, 256, 128]),
        # It grows on the step after `window` good ones, and then every `window`.
        (".....", {"window": 2}, [256, 256, 512, 512, 1024]),
        ("x....", {"window": 2, "hysteresis": 1}, [128, 128, 128, 256, 256]),
        ("x...xx", {"window": 2}, [256, 256, 256, 512, 512, 256]),  # growth refills the tolerance
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


def test_scales_that_do_not_move(caplog: pytest.LogCaptureFixture) -> None:
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
    assert kept_in_fp32(model, "auto", torch.float16) == norm | router
    assert kept_in_fp32(model, "auto", torch.bfloat16) == router  # as transformers does: only the strict list
    assert kept_in_fp32(model, ("inner",), torch.bfloat16) == router
    assert kept_in_fp32(model, ("inner.router",), torch.bfloat16) == router
    assert kept_in_fp32(model, (), torch.float16) == kept_in_fp32(nn.Linear(2, 2), "auto", torch.float16) == set()
