"""Masters, gradients and optimizer states of single parameters: right at every stage, with padding and two groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import WIDTH, Toy, batches, config, offloaded
from zeroaccel import zero
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError, UsageError


def build(stage: int, precision: str, accumulation: int = 1, **changes: Any) -> tuple[Engine, Toy]:
    """Makes an engine with two param groups of different rates."""
    torch.manual_seed(7)
    model = Toy(layers=2)
    named = dict(model.named_parameters())
    first = [p for n, p in named.items() if p.requires_grad and "norm" not in n]
    second = [p for n, p in named.items() if p.requires_grad and "norm" in n]
    optimizer = torch.optim.AdamW([{"params": first, "lr": 1e-2}, {"params": second, "lr": 1e-3}])
    settings = config(stage, precision, accumulation, gradient_clipping=1e6, optimizer=None, **changes)
    engine, *_ = zeroaccel.initialize(model, optimizer, config=settings)
    return engine, model


def backward(engine: Engine, index: int) -> None:
    engine.backward(engine(batches(engine.collectives.rank, index + 1)[index]))


def _everything(stage: int, precision: str, world_size: int, **changes: Any) -> dict[str, Tensor]:
    """Reads all values, changes some, takes a step, and reads again."""
    engine, model = build(stage, precision, **changes)
    backward(engine, 0)
    engine.step()
    backward(engine, 1)
    found: dict[str, Tensor] = {}
    rank = engine.collectives.rank

    def read(when: str) -> None:
        for name, param in model.named_parameters():
            full = zero.safe_get_full_fp32_param(param)
            assert full is not None
            assert full.shape == param.shape
            assert full.dtype is torch.float32
            found[f"{when} {name}"] = full
            local = zero.safe_get_local_fp32_param(param)
            assert local is not None
            assert all_local(local) == param.numel(), name
            if not param.requires_grad:
                with pytest.raises(UsageError, match="one that an optimizer updates"):
                    zero.safe_get_full_optimizer_state(param, "exp_avg")
                continue
            for key in ("exp_avg", "exp_avg_sq"):
                state = zero.safe_get_full_optimizer_state(param, key)
                assert state is not None
                assert state.shape == param.shape
                found[f"{when} {name} {key}"] = state
                part = zero.safe_get_local_optimizer_state(param, key)
                assert part is not None
                assert all_local(part) == param.numel()
            grad = zero.safe_get_full_grad(param)
            if grad is not None:
                found[f"{when} {name} grad"] = grad
                own = zero.safe_get_local_grad(param)
                assert own is not None
                assert all_local(own) == param.numel()
                assert set(own.tolist()) <= set(grad.flatten().tolist())

    def all_local(part: Tensor) -> int:
        return sum(engine.collectives.gather_objects(part.numel(), "local"))

    read("before")
    assert (f"before {next(iter(dict(model.named_parameters())))} grad") in found
    weight, bias, scale = model.layers[0].up.weight, model.layers[1].down.bias, model.norm.weight
    generator = torch.Generator().manual_seed(3)
    zero.safe_set_full_fp32_param(weight, torch.randn(weight.shape, generator=generator))
    zero.safe_set_full_grad(weight, torch.randn(weight.shape, generator=generator))
    zero.safe_set_full_optimizer_state(weight, torch.rand(weight.shape, generator=generator), "exp_avg_sq")
    zero.safe_set_full_optimizer_state(scale, torch.rand(scale.shape, generator=generator), "exp_avg")
    for getter, setter, key in (
        (zero.safe_get_local_fp32_param, zero.safe_set_local_fp32_param, ()),
        (zero.safe_get_local_grad, zero.safe_set_local_grad, ()),
        (zero.safe_get_local_optimizer_state, zero.safe_set_local_optimizer_state, ("exp_avg",)),
    ):
        old = getter(bias, *key)
        setter(bias, old * 2 + 1, *key)  # type: ignore[operator]
        new = getter(bias, *key)
        assert torch.equal(new, old * 2 + 1), (setter, old, new)
    read("set")
    engine.step()
    assert zero.safe_get_full_grad(weight) is None
    read("after")
    whole = {name: value.clone() for name, value in engine.iter_named_full_params()}
    for name, value in whole.items():
        assert torch.equal(value.float(), found[f"after {name}"].to(value.dtype).float()), name
    engine.destroy()
    return found if rank == world_size - 1 else {}


@pytest.mark.parametrize(("precision", "world_size", "stages"), [("bf16", 2, (0, 1, 3)), ("fp16", 3, (2,))])
def test_every_stage_shows_and_takes_the_same_values(
    ranks: Ranks, tmp_path: Path, precision: str, world_size: int, stages: tuple[int, ...]
) -> None:
    first, *others = (ranks(world_size).run(_everything, stage, precision, world_size)[-1] for stage in stages)
    files = offloaded(tmp_path, "nvme", "nvme")
    others.append(ranks(world_size).run(_everything, 3, precision, world_size, **files)[-1])
    assert len(first) > 80
    for other in others:
        assert [name for name in first if not torch.equal(first[name], other[name])] == []
    assert not torch.equal(first["set layers.0.up.weight grad"], first["before layers.0.up.weight grad"])


def _against_autograd() -> None:
    """The gradient is the mean over ranks and micro-steps, whatever the loss scale."""
    engine, model = build(2, "fp16", accumulation=2)
    for index in (0, 1):
        backward(engine, index)
        if index == 0:
            engine.step()
    found = zero.safe_get_full_grad(model.layers[0].up.weight)
    engine.destroy()
    torch.manual_seed(7)
    plain = Toy(layers=2).half()
    for rank in (0, 1):
        for batch in batches(rank, 2):
            (plain(batch) * 256 / 4).backward()
    expected = plain.layers[0].up.weight.grad.float() / 256
    assert found is not None
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-4)


def test_a_gradient_is_the_mean_without_the_loss_scale(ranks: Ranks) -> None:
    ranks(2).run(_against_autograd)


def _mistakes() -> list[str]:
    engine, model = build(1, "bf16", accumulation=2)
    weight = model.layers[0].up.weight
    rank = engine.collectives.rank
    found: list[str] = []

    def attempt(error: type[Exception], function: Callable[..., Any], *args: Any) -> None:
        found.append(message(error, function, *args))

    attempt(UsageError, zero.safe_get_full_optimizer_state, weight, "exp_avg")
    attempt(EngineStateError, zero.safe_set_full_grad, weight, torch.zeros(weight.shape))
    assert zero.safe_get_full_grad(weight) is None
    backward(engine, 0)
    attempt(EngineStateError, zero.safe_get_local_grad, weight)
    engine.step()
    backward(engine, 1)
    engine.step()
    attempt(UsageError, zero.safe_get_full_optimizer_state, weight, "momentum")
    attempt(UsageError, zero.safe_set_full_fp32_param, weight, torch.zeros(3))
    attempt(UsageError, zero.safe_set_full_fp32_param, weight, torch.full(weight.shape, float(rank)))
    attempt(UsageError, zero.safe_set_local_fp32_param, weight, torch.zeros(3 if rank else weight.numel()))
    attempt(UsageError, zero.safe_set_full_fp32_param, torch.nn.Parameter(torch.ones(2)), torch.ones(2))
    engine.destroy()
    return found


def test_mistakes_are_named_on_every_rank(ranks: Ranks) -> None:
    for found in ranks(2).run(_mistakes):
        expected = (
            "there is no state yet",
            "layers.0.up.weight): it has no gradient",
            "before the accumulation boundary",
            "expected one of ['exp_avg', 'exp_avg_sq']",
            f"expected shape ({2 * WIDTH + 1}, {WIDTH}), got (3,)",
            "expected the same on all ranks",
            "elements on this rank",
            "a parameter of an engine",
        )
        for text, words in zip(found, expected, strict=True):
            assert words in text, text


def _two_groups_of_two() -> list[bool]:
    """Shards within pairs of ranks: a shard's offset follows from the place in the pair, not from the rank."""
    torch.manual_seed(7)
    model = Toy(layers=1)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine, *_ = zeroaccel.initialize(model, config=config(3, "bf16", mics_shard_size=2))
    named = dict(model.named_parameters())
    found = [torch.equal(zero.safe_get_full_fp32_param(named[name]), value) for name, value in before.items()]
    bias = model.layers[0].up.bias
    zero.safe_set_full_fp32_param(bias, torch.arange(float(bias.numel())))
    backward(engine, 0)
    grad = zero.safe_get_full_grad(bias)
    zero.safe_set_local_grad(bias, zero.safe_get_local_grad(bias) * 0 + 1)  # type: ignore[operator]
    assert zero.safe_get_full_grad(bias).unique().tolist() == [1.0]  # type: ignore[union-attr]
    with zero.GatheredParameters(bias, modifier_rank=3), torch.no_grad():
        assert bias[4] == 4
        bias[5] = 100.0 + engine.collectives.rank
    written = zero.safe_get_full_fp32_param(bias)
    sums = engine.collectives.gather_objects((float(grad.double().sum()), written.tolist()), "compare")  # type: ignore[union-attr]
    engine.destroy()
    return [*found, written[5] == 103.0, len({str(one) for one in sums}) == 1]  # type: ignore[index]


def test_shards_within_groups_of_ranks(ranks: Ranks) -> None:
    for found in ranks(4).run(_two_groups_of_two):
        assert all(found), found
