"""A frozen integer base under trained adapters: the bits of the unsharded model at every stage, or a named error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import train_step


class Packed(nn.Parameter):
    """A subclass of `nn.Parameter` with the data to unpack it, as in libraries for quantized weights."""

    scale: Tensor

    @staticmethod
    def pack(weight: Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / 127
        packed = Packed((weight / scale).round().to(torch.int8), requires_grad=False)
        packed.scale = scale
        return packed

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Packed:
        return torch.Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[return-value]


class Adapted(nn.Module):
    """A block of a frozen int8 matrix and two small trained ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Packed.pack(torch.randn(width, width))
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        base = self.weight.data.to(inputs.dtype) * self.weight.scale.to(inputs.dtype)
        result: Tensor = torch.tanh(inputs @ base.t() + self.up(self.down(inputs)))
        return result


def _train(stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted(12) for _ in range(3)])
    before = [block.weight.detach().clone() for block in model]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zeroaccel.initialize(model, config=config)
    generator = torch.Generator().manual_seed(engine.collectives.rank)
    losses = []
    for _ in range(4):
        losses.append(train_step(engine, engine(torch.randn(2, 12, generator=generator).bfloat16()).square().mean()))
    sharded = sum(
        buffer.dtype is torch.int8 and not buffer.persistent for unit in engine.units for buffer in unit.buffers
    )
    engine.destroy()
    assert all(torch.equal(block.weight, old) for block, old in zip(model, before, strict=True))
    assert all(type(block.weight) is Packed and block.weight.scale.shape == (12, 1) for block in model)
    return {"losses": losses, "weights": [p.detach().clone() for p in model.parameters()], "sharded": sharded}


def _stages() -> list[dict[str, Any]]:
    return [_train(stage) for stage in (0, 1, 2, 3)]


def test_a_base_in_integers_trains_alike_at_every_stage(ranks: Ranks) -> None:
    for results in ranks(2).run(_stages):
        whole = results[0]
        assert whole["losses"][0] != whole["losses"][-1]
        for result in results[1:]:
            assert result["losses"] == whole["losses"]
            assert all(torch.equal(one, other) for one, other in zip(result["weights"], whole["weights"], strict=True))
        assert [result["sharded"] for result in results] == [0, 0, 0, 3]
