"""Operations on sharded parameters between `zero.Init` and an engine: they give the results of an ordinary model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import config
from zeroaccel import zero
from zeroaccel.errors import UsageError
from zeroaccel.zero.access.param_registry import handle_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.table = nn.Embedding(5, 6, max_norm=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) @ layer.weight.T
        return hidden.sum()


def _model(sharded: bool) -> Any:
    torch.manual_seed(0)
    with zero.Init(enabled=sharded):
        return Model()


def _reads(model: Any) -> list[Any]:
    weight, bias = model.layers[0].weight, model.layers[0].bias
    rows = weight[1:3].T
    results = [
        weight.sum(),
        weight.t().reshape(-1),
        rows + 1,
        rows.contiguous().view(-1).max(),
        torch.cat([bias, bias.data[:2]]),
        torch.equal(weight, model.layers[1].weight),
        F.linear(torch.ones(1, 6), weight, bias),
        [part.norm() for part in weight.detach().chunk(2)],
        [row.sum() for row in bias.data.view(2, 3)],
        weight.data.half(),
        model.state_dict()["layers.1.weight"].cpu().numpy().tobytes(),
        bias.tolist(),
        copy.deepcopy(model.state_dict())["layers.1.bias"],
    ]
    model(torch.tensor([0, 3])).backward()
    return results + [param.grad for param in model.parameters()]


def _writes(model: Any, rank: int) -> list[Any]:
    """Ranks write other values: all get those of rank 0."""
    first, second = model.layers
    with torch.no_grad():
        first.weight.add_(rank + 1)
        first.weight.data[1].mul_(2)
        first.weight.T[2, :2] = 7 + rank
        second.weight.copy_(first.weight.T)
        torch._foreach_mul_([first.bias, second.bias], 3)
        nn.init.constant_(model.table.weight[0], 0.5)
        model.table(torch.tensor([2]))  # max_norm writes
    second.bias.data = F.pad(second.bias.data, (0, 0))  # a no-op in a new tensor, as in transformers' tied heads
    second.weight.data = second.weight.data.T
    first.bias.data = torch.cat([first.bias.data, torch.ones(2)])
    model.load_state_dict({**model.state_dict(), "layers.1.bias": torch.full((6,), rank + 0.25)})
    model.table.bfloat16()
    return [param.dtype for param in model.parameters()]


def _values(model: Any) -> list[Tensor]:
    with zero.GatheredParameters(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


def _operations() -> None:
    plain, model = _model(False), _model(True)
    assert handle_of(model.layers[1].weight).slot.fqn == "layers.1.weight"  # type: ignore[union-attr]
    for one, other in zip(_reads(plain), _reads(model), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert _writes(plain, 0) == _writes(model, torch.distributed.get_rank())
    for one, other in zip(plain.parameters(), _values(model), strict=True):
        torch.testing.assert_close(other, one.detach(), rtol=0, atol=0)
    assert all(param.untyped_storage().nbytes() <= 4 for param in model.parameters())


def test_operations_equal_those_of_an_ordinary_model(ranks: Ranks) -> None:
    ranks(2).run(_operations)


def _copies() -> list[str]:
    plain, model = _model(False), _model(True)
    copied = copy.deepcopy(model.layers)
    assert all(param.untyped_storage().nbytes() <= 4 for param in copied.parameters())
    with torch.no_grad():
        copied[0].bias.zero_()
    for one, other in zip(plain.parameters(), _values(model), strict=True):
        assert torch.equal(one, other)
    model.head = copied[1]
    found = []

    def write_beside() -> None:
        with zero.GatheredParameters(model.head.weight, modifier_rank=0), torch.no_grad():
            model.head.weight.zero_()
        with zero.GatheredParameters(model.layers[1].weight, modifier_rank=0), torch.no_grad():
            model.layers[1].bias.zero_()

    found.append(message(UsageError, write_beside))
    engine, *_ = zeroaccel.initialize(model, config=config(3))
    states = engine.consolidated_state_dict()
    if states is not None:
        assert torch.equal(states["head.bias"], plain.layers[1].bias)
        assert float(states["head.weight"].abs().sum()) == 0
        assert torch.equal(states["layers.1.weight"], plain.layers[1].weight)
    engine.destroy()
    return found


def test_copies_are_sharded_parameters_of_their_own(ranks: Ranks) -> None:
    for (beside,) in ranks(2).run(_copies):
        assert "layers.1.bias written: expected writes to parameters that the block names" in beside


def _assigned(stage: int) -> list[Tensor]:
    engine, *_ = zeroaccel.initialize(_model(False), config=config(stage))
    weight = engine.module.layers[0].weight
    for sign in (1.0, -1.0):  # as PiSSA and OLoRA write a base weight
        with zero.GatheredParameters(weight, modifier_rank=1):
            weight.data = torch.full((6, 6), sign * torch.distributed.get_rank())
    with zero.GatheredParameters(weight, modifier_rank=0):
        weight.data = weight.data.T
    values = [zero.safe_get_full_fp32_param(weight).clone(), engine(torch.tensor([1])).detach()]  # type: ignore[union-attr]
    engine.destroy()
    return values


def test_values_assigned_to_data_reach_every_rank_and_master(ranks: Ranks) -> None:
    results = [values for stage in (1, 3) for values in ranks(2).run(_assigned, stage)]
    for weight, output in results:
        assert torch.equal(weight, torch.full((6, 6), -1.0))
        assert torch.equal(output, results[0][1])
