"""An engine's description of itself, and the errors for misspelt arguments."""

from __future__ import annotations

import pytest
from torch import nn

import zeroaccel
from zeroaccel.logs import logger


def test_an_engine_says_what_it_is_made_of() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    config |= {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine = zeroaccel.initialize(nn.Linear(4, 4), config=config)[0]
    try:
        assert "stage 2, 1 ranks, bfloat16, batch 4 x 2 x 1 = 8, tiers: none\n" in repr(engine)
    finally:
        engine.destroy()


def test_an_engine_without_a_config_says_what_it_is_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    engine = zeroaccel.initialize(nn.Linear(4, 4))[0]
    try:
        assert "no config and no optimizer, so the engine is for inference" in caplog.text
        assert "inference" in repr(engine)
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("call", "wrong", "meant"),
    [
        (zeroaccel.initialize, {"model": None, "optimiser": None}, "optimizer"),
        (zeroaccel.Accelerator, {"mixed_precison": "bf16"}, "mixed_precision"),
        (zeroaccel.ZeroPlugin, {"zero_stge": 2}, "zero_stage"),
    ],
)
def test_misspelt_arguments_are_told_the_name(call: object, wrong: dict[str, object], meant: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
        call(**wrong)  # type: ignore[operator]
