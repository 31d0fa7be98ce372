"""Moments in bfloat16 and in 8-bit blocks: their range, unbiased rounding, and training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from tests.support.tensors import normal
from zeroaccel.ops import Adam, Lion
from zeroaccel.ops.moments import decode, encode, random_bits, write_rounded
from zeroaccel.ops.updates import BLOCK_NUMEL
from zeroaccel.zero.layout import ALIGN_NUMEL

magnitudes = st.floats(min_value=2.0**-80, max_value=2.0**100, width=32)
signed_values = st.one_of(magnitudes, magnitudes.map(lambda value: -value), st.just(0.0))


def test_no_cut_of_a_layout_divides_a_block() -> None:
    assert ALIGN_NUMEL % BLOCK_NUMEL == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(signed_values, min_size=1, max_size=70), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_block_has_the_documented_precision(values: list[float], signed: bool, random: int) -> None:
    plain = torch.tensor(values, dtype=torch.float32)
    plain = plain if signed else plain.abs()
    for noise in (None, torch.full((len(values),), random)):
        codes, exponents = encode(plain, signed=signed, random=noise)
        held = decode(codes, exponents, signed=signed)
        for index, start in enumerate(range(0, len(values), BLOCK_NUMEL)):
            block, kept = plain[start : start + BLOCK_NUMEL], held[start : start + BLOCK_NUMEL]
            largest = block.abs().max().item()
            if largest == 0:
                assert torch.equal(kept, block)
                continue
            exponent = int(exponents[index]) - 127
            assert exponent - (math.frexp(largest)[1] - 1) in (0, 1)
            least = 2.0 ** (exponent - (14 if signed else 30))  # the steps do not shrink below it
            step = torch.maximum(block.abs(), torch.tensor(least)) / 8
            share = 1.0 if noise is not None else 0.5
            assert ((kept - block).abs() <= 2 * step * share).all()
            assert (kept.sign() * block.sign() >= 0).all()
        if not signed:
            assert torch.equal(held > 0, plain > 0), "a positive square became 0, or 0 became positive"
        assert torch.equal(held.bfloat16().float(), held)
        assert torch.equal(decode(*encode(held, signed=signed), signed=signed), held), "a second encoding differs"


def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not() -> None:
    values = normal(96).abs()
    values[40] = math.inf
    held = decode(*encode(values, signed=False), signed=False)
    assert held[32:64].isnan().all()
    assert not held[:32].isnan().any()
    assert not held[64:].isnan().any()


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_rounding_at_random_has_no_bias(form: str) -> None:
    """With 1000 keys, the mean is within five standard errors of the value; nearest rounding misses it."""
    values = (normal(512) * 1e-3).abs()
    total = torch.zeros(512, dtype=torch.float64)
    for key in range(1000):
        random = random_bits(normal(512, seed=5), values, key * 0x9E3779B9 & 0xFFFFFFFF)
        if form == "bf16":
            kept = torch.empty(512, dtype=torch.bfloat16)
            write_rounded(kept, values, random)
        else:
            kept = decode(*encode(values, signed=True, random=random), signed=True)
        total += kept.double()
    step = values.double() * 2.0 ** (-7 if form == "bf16" else -3)
    assert ((total / 1000 - values).abs() < 5 * 0.5 * step / math.sqrt(1000)).all()
    assert (total / 1000 - values).mean().abs() < 5 * 0.5 * step.mean() / math.sqrt(512_000)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_moment_decays_in_steps_that_nearest_rounding_would_swallow(form: str) -> None:
    """After one gradient of 1 and 1999 of 0, the second moment is 1e-3 * 0.999**1999; nearest rounding keeps 1e-3."""
    params = [Parameter(normal(3200))]
    optimizer = Adam(params, lr=0.0, moments_dtype=form)
    for step in range(1, 2001):
        grad = torch.ones(3200) if step == 1 else torch.zeros(3200)
        optimizer.step_shard(optimizer.param_groups[0], params[0], grad, grad_scale=1.0, out=None)
    held = optimizer.portable(optimizer.state[params[0]])["exp_avg_sq"].float().mean().item()
    assert held == pytest.approx(1e-3 * 0.999**1999, rel=0.1)


@pytest.mark.parametrize(("kind", "form"), [(Adam, "bf16"), (Adam, "int8"), (Lion, "bf16")])
def test_training_comes_as_far_as_with_float32(kind: type[Adam] | type[Lion], form: str) -> None:
    """Least squares with noisy gradients and scales from 0.03 to 30: the final loss is within a tenth of float32's."""
    scales = 10.0 ** torch.linspace(-1.5, 1.5, 2048)[torch.randperm(2048, generator=torch.Generator().manual_seed(1))]
    target = normal(2048, seed=2)

    def loss_after(moments_dtype: str) -> float:
        weight = Parameter(torch.zeros(2048))
        optimizer = kind([weight], lr=1e-2, moments_dtype=moments_dtype)
        for step in range(400):
            noise = normal(2048, seed=10 + step)
            weight.grad = scales * ((weight.detach() - target) + 0.3 * noise)
            optimizer.step()
        return float((weight.detach() - target).square().mean())

    plain = loss_after("fp32")
    assert plain < 0.1
    assert loss_after(form) == pytest.approx(plain, rel=0.1, abs=1e-3)


@pytest.mark.parametrize(("form", "per_element"), [("fp32", 8.0), ("bf16", 4.0), ("int8", 2 + 2 / BLOCK_NUMEL)])
def test_bytes_per_element(form: str, per_element: float) -> None:
    weight = Parameter(torch.ones(3200))
    weight.grad = torch.ones(3200)
    optimizer = Adam([weight], moments_dtype=form)
    optimizer.step()
    tensors = [value for value in optimizer.state[weight].values() if isinstance(value, Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == per_element * 3200


@pytest.mark.parametrize("saved_as", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("loaded_as", ["fp32", "bf16", "int8"])
def test_any_format_loads_any_other(saved_as: str, loaded_as: str) -> None:
    weight = Parameter(normal(1000))
    before = Adam([weight], moments_dtype=saved_as)
    for step in range(3):
        weight.grad = normal(1000, seed=step)
        before.step()
    after = Adam([weight], moments_dtype=loaded_as)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    held, loaded = before.portable(before.state[weight]), after.portable(after.state[weight])
    coarser = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 2.0**-4}[loaded_as]
    for name in ("exp_avg", "exp_avg_sq"):
        block = held[name].float().abs().max().item()
        exact = coarser == 0 or saved_as == loaded_as or (saved_as, loaded_as) == ("int8", "bf16")
        torch.testing.assert_close(
            loaded[name].float(), held[name].float(), rtol=0 if exact else coarser, atol=0 if exact else block * 2**-16
        )
    weight.grad = normal(1000, seed=9)
    after.step()  # a step works
    assert torch.optim.AdamW([weight]).load_state_dict(before.state_dict()) is None
