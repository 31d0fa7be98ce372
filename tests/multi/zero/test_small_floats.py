"""Frozen weights in 8-bit floats with a scale beside them: the engine carries their bits, or refuses them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import train_step
from zeroaccel import Accelerator, ZeroPlugin, zero
from zeroaccel.checkpoint.consolidate import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zeroaccel.errors import CheckpointError, UsageError
from zeroaccel.rollout.receiver import WeightReceiver

CODES = [
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if (dtype := getattr(torch, name, None)) is not None
]
WIDTH = 24


class Coded(nn.Module):
    """A matrix in codes and its scale, as parameters or buffers, under a trained adapter."""

    def __init__(self, dtype: torch.dtype, *, in_buffers: bool = False) -> None:
        super().__init__()
        codes, scale = (torch.rand(WIDTH, WIDTH) * 100 + 1).to(dtype), torch.tensor([0.00123])
        if in_buffers:
            self.register_buffer("weight", codes)
            self.register_buffer("weight_scale", scale)
        else:
            self.weight = nn.Parameter(codes, requires_grad=False)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.weight_scale.dtype is torch.float32
        base = (self.weight.float() * self.weight_scale).to(inputs.dtype)
        result: Tensor = torch.tanh(inputs @ base.t() / WIDTH + self.adapter(inputs))
        return result


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Coded(dtype), Coded(dtype, in_buffers=True), nn.Linear(WIDTH, 1))


def _engine(model: nn.Module, stage: int, **sections: Any) -> Any:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    zeros = {"stage": stage, "stage3_param_persistence_threshold": 0, **sections.pop("zero", {})}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zeros, **sections}
    return zeroaccel.initialize(model, optimizer, config=config)[0]


def _bits(state: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, list[int]]]:
    own = {name: state[name].detach() for name in state if name[0] in "01" and "adapter" not in name}
    return {name: (value.dtype, value.reshape(-1).view(torch.uint8).tolist()) for name, value in own.items()}


PLACES: list[tuple[int, str, dict[str, Any]]] = [
    (0, "fp32", {}),
    (3, "fp32", {}),
    (2, "bf16", {}),
    (3, "bf16", {"offload_param": {"device": "cpu"}}),
]


def _everywhere(dtype: torch.dtype, folder: str) -> list[list[float]]:
    """Trains at stages; compares the bits of the codes wherever they leave the engine."""
    expected = _bits(_model(dtype).state_dict())
    losses: list[list[float]] = []
    for stage, precision, section in PLACES:
        model, kind = _model(dtype), torch.bfloat16 if precision == "bf16" else torch.float32
        sections = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}} if precision == "bf16" else {}
        engine = _engine(model, stage, zero=section, **sections)
        rank = engine.collectives.rank
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank)).to(kind)
        losses.append([train_step(engine, engine(batch).float().square().mean()) for _ in range(2)])
        _compare_exports(engine, dtype, Path(folder, f"{stage}{precision}"))
        engine.destroy()
        assert _bits(model.state_dict()) == expected
    return losses


def _compare_exports(engine: Any, dtype: torch.dtype, folder: Path) -> None:
    model, rank, expected = engine.module, engine.collectives.rank, _bits(_model(dtype).state_dict())
    full = zero.safe_get_full_fp32_param(model[0].weight)
    assert full is not None
    assert _bits({"0.weight": full})["0.weight"] == expected["0.weight"]
    with pytest.raises(UsageError, match=r"safe_set_full_fp32_param\(0.weight\): .*codes in torch.float8"):
        zero.safe_set_full_fp32_param(model[0].weight, torch.ones(WIDTH, WIDTH))
    with zero.GatheredParameters(list(model[0].parameters())):
        assert _bits(model[0].state_dict(prefix="0.")).items() <= expected.items()
    state = engine.consolidated_state_dict()
    assert state is None if rank else _bits(state) == expected
    sent = {
        name: torch.zeros_like(value, dtype=value.dtype if name in expected else torch.float16)
        for name, value in _model(dtype).state_dict().items()
    }
    receiver = WeightReceiver(sent)
    assert [receiver.take(packet) for packet in engine.stream_weights(dtype=torch.float16)][-1]
    assert _bits(sent) == expected
    engine.save_checkpoint(folder, tag="t")
    engine.save_16bit_model(folder, "whole.bin")
    engine.save_16bit_model(folder, "whole.safetensors")
    engine.load_checkpoint(folder, tag="t")
    with torch.device("meta"):
        empty = _model(dtype)
    zero.load_safetensors(empty, folder / "whole.safetensors", dtype=torch.bfloat16)
    with zero.GatheredParameters(list(empty.parameters())):
        assert _bits(empty.state_dict()) == expected
    if rank == 0:
        assert _bits(torch.load(folder / "whole.bin")) == expected
        assert _bits(get_fp32_state_dict_from_zero_checkpoint(folder, "t")) == expected
        with pytest.raises(CheckpointError, match=r"0.weight is F8_\w+ in the checkpoint and F32 in the model"):
            load_state_dict_from_zero_checkpoint(_model(torch.float32), folder, "t")


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_in_8_bit_floats_keep_their_bits(ranks: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    """Regression: they were cast to the config's dtype without their scale."""
    for losses in ranks(2).run(_everywhere, dtype, str(tmp_path)):
        assert losses[0] == losses[1]
        assert losses[2] == losses[3]
        assert losses[0] == pytest.approx(losses[2], rel=0.02)


def _entries(dtype: torch.dtype, folder: str) -> None:
    expected = _bits(_model(dtype).state_dict())
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    for options in ({"dtype": torch.bfloat16}, {"config_dict_or_path": config}):
        with zero.Init(**options):
            model = _model(dtype)
        assert model[0].weight.dtype is dtype
        assert model[0].weight_scale.dtype is torch.float32
        engine = _engine(model, 3, bf16={"enabled": True})
        _compare_exports(engine, dtype, Path(folder))
        engine.destroy()
        assert _bits(model.state_dict()) == expected
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", zero_plugin=ZeroPlugin(zero_stage=2))
    model = _model(dtype)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    prepared, _ = accelerator.prepare(model, optimizer)
    state = accelerator.get_state_dict(prepared)
    assert not state or _bits(state) == expected
    accelerator.free_memory()
    # A checkpoint of codes does not fit a model of numbers, nor the other way round.
    for one, other in ((dtype, torch.float32), (torch.float32, dtype)):
        model = _model(one)
        engine = _engine(model, 3)
        engine.save_checkpoint(folder, tag="other")
        engine.save_16bit_model(folder, "other.safetensors")
        engine.destroy()
        model = _model(other)
        with pytest.raises(UsageError, match=r"0.weight: torch.\w+ in the file, torch.\w+ in the model"):
            zero.load_safetensors(model, Path(folder, "other.safetensors"))
        engine = _engine(model, 3)
        with pytest.raises(CheckpointError, match=r"0.weight: F\w+ in the checkpoint, F\w+ in the model"):
            engine.load_checkpoint(folder, tag="other")
        engine.destroy()


def test_no_entry_casts_codes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_entries, torch.float8_e4m3fn, str(tmp_path))


def _coded(trained: bool, in_buffers: bool, dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    codes = torch.ones(4, 4, dtype=torch.uint8).view(dtype)
    if in_buffers:
        model.register_buffer("codes", codes)
    else:
        model.codes = nn.Parameter(codes, requires_grad=trained)
    return model


def _refused(*of_codes: Any) -> str:
    with pytest.raises(UsageError) as raised:
        _engine(_coded(*of_codes), 3)
    return str(raised.value)


def _refused_in_init(*of_codes: Any) -> str:
    with pytest.raises(UsageError) as raised, zero.Init():
        nn.Sequential(_coded(*of_codes))
    return str(raised.value)


def test_codes_that_cannot_be_carried_are_refused(ranks: Ranks) -> None:
    for message in ranks(2).run(_refused, True, False, torch.float8_e5m2):
        assert "parameter codes: expected a frozen weight" in message
        assert "torch.float8_e5m2 with requires_grad=True" in message
    if hasattr(torch, "float4_e2m1fn_x2"):
        expected = "expected a dtype of at least 8 bits per element"
        for in_buffers, kind in ((False, "parameter"), (True, "buffer")):
            for message in ranks(2).run(_refused, False, in_buffers, torch.float4_e2m1fn_x2):
                assert f"{kind} codes: {expected}" in message
        for message in ranks(2).run(_refused_in_init, False, False, torch.float4_e2m1fn_x2):
            assert f"parameter codes of Sequential: {expected}" in message
