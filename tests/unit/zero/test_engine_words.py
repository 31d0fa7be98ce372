"""An engine's description of itself, and the errors for misspelt arguments."""

from __future__ import annotations

import pytest
from torch import nn

import zeroaccel
from zeroaccel.logs import logger


def test_the_repr_of_an_engine_lists_its_settings() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    config |= {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine = zeroaccel.initialize(nn.Linear(4, 4), config=config)[0]
    try:
        assert "stage 2, 1 ranks, bfloat16, batch 4 x 2 x 1 = 8, tiers: none\n" in repr(engine)
    finally:
        engine.destroy()


def test_an_engine_without_a_config_is_for_inference(
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
def test_misspelt_arguments_are_refused_with_the_right_name(call: object, wrong: dict[str, object], meant: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
        call(**wrong)  # type: ignore[operator]
