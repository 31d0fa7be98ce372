"""Decisions on the device: bits equal to the host's arithmetic, skipped updates, and restored step counts."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tensors import normal
from tests.unit.ops.kernels_on_host import host_kernels
from tests.unit.ops.test_ops_optimizers import rounded_sqrt
from zeroaccel.errors import UsageError
from zeroaccel.ops import SGD, Adagrad, Adam, Lion, RMSprop, reductions, step_control
from zeroaccel.ops.reductions import max_abs, max_abs_into, norm_exponent, norm_from, square_sums, square_sums_into
from zeroaccel.ops.shard_step import ShardOptimizer
from zeroaccel.ops.step_control import finalize, largest_of_facts, write_facts
from zeroaccel.zero.grad_norm import clip_factor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIMIZERS: dict[str, Callable[[Tensor], ShardOptimizer]] = {
    "adamw": lambda x: Adam([x], lr=0.01, weight_decay=0.1),
    "adam-bf16": lambda x: Adam([x], lr=0.01, adamw_mode=False, weight_decay=0.1, moments_dtype="bf16"),
    "adam-int8": lambda x: Adam([x], lr=0.01, moments_dtype="int8"),
    "lion": lambda x: Lion([x], lr=0.01, moments_dtype="bf16"),
    "rmsprop": lambda x: RMSprop([x], lr=0.01, momentum=0.9),
    "adagrad": lambda x: Adagrad([x], lr=0.01, initial_accumulator_value=0.1),
    "sgd": lambda x: SGD([x], lr=0.01, momentum=0.9, dampening=0.5),
}


def pattern_of(value: float) -> Tensor:
    return torch.tensor([value]).view(torch.int32)


# -- the largest magnitude and the sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [0.0, 65504.0, math.inf, -math.inf, math.nan])
def test_the_largest_of_several_tensors_stays_on_the_device(dtype: torch.dtype, special: float) -> None:
    tensors = [normal(numel).to(dtype) for numel in (1, 0, 1000)]
    tensors[2][77] = special
    found = torch.zeros(1, dtype=torch.int32)
    for tensor in tensors:
        max_abs_into(tensor, found)
    wanted = max(max_abs(tensor) for tensor in tensors)
    value = found.view(torch.float32).item()
    assert value == wanted if math.isfinite(wanted) else int(found) >= 0x7F800000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [0.0, 2.0**-24, 65504.0, math.inf, -math.inf, math.nan])
def test_torch_operations_find_the_same(dtype: torch.dtype, special: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for a device without kernels, here on the CPU."""
    monkeypatch.setattr(reductions, "_TILE_NUMEL", 300)
    values = (normal(1000) * 1e-3).to(dtype)
    values[777] = special
    found, largest = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    reductions._raise_largest(values, found)
    max_abs_into(values, largest)
    if math.isfinite(special):
        assert int(found) == int(largest)
        sums = torch.zeros(2, 2, dtype=torch.int64)
        reductions._add_square_sums(values, reductions._norm_scale(found), sums[0])
        square_sums_into(values, largest, sums[1])
        high, low = (sums[0] - sums[1]).tolist()
        assert high * 2**25 + low == 0  # the same sum, perhaps in two other parts
    else:
        assert min(int(found), int(largest)) >= 0x7F800000


def test_another_default_dtype_changes_nothing() -> None:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = torch.zeros(1, dtype=torch.int32)
        max_abs_into(torch.tensor([1.0, -3.5], dtype=torch.float32), found)
    finally:
        torch.set_default_dtype(default)
    assert found.view(torch.float32).item() == 3.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sums_are_those_of_the_host(dtype: torch.dtype) -> None:
    tensors = [normal(numel).to(dtype) for numel in (1, 0, 1000)]
    largest, sums = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for tensor in tensors:
        max_abs_into(tensor, largest)
    for tensor in tensors:
        square_sums_into(tensor, largest, sums)
    exponent = norm_exponent(max(max_abs(tensor) for tensor in tensors))
    parts = [square_sums(tensor, exponent) for tensor in tensors]
    assert sums.tolist() == [sum(high for high, _ in parts), sum(low for _, low in parts)]


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-1000, 1001)
    assert reductions.power_of_two(exponents).tolist() == [2.0**e for e in exponents.tolist()]


# -- the decision


def host_decision(
    facts: Tensor, sums: Tensor | None, *, scale: float, clipping: float, grad_factor: float, skip_overflow: bool
) -> tuple[list[float], list[float]]:
    """Returns (control, summary) as the engine decides with host numbers."""
    largest, history, negative_history, settings, negative_settings, stop, order, negative_order = facts.tolist()
    finite = math.isfinite(largest)
    same = [history == -negative_history, settings == -negative_settings]
    norm = math.nan
    if finite and all(same) and sums is not None:
        norm = norm_from(int(sums[0]), int(sums[1]), norm_exponent(largest))
    grad_norm = math.inf if not finite else None if math.isnan(norm) else norm / scale
    clip = 1.0 if grad_norm is None else clip_factor(grad_norm, clipping)
    applies = all(same) and (finite or not skip_overflow)
    with np.errstate(over="ignore"):
        control = [float(np.float32(min(clip, grad_factor) / scale)), float(applies)]
    return control, [float(finite), norm, *map(float, same), stop, float(order == -negative_order)]


def random_sums(seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(random.integers(0, 2 ** random.integers(1, 63))) for _ in range(2)]


FACTS = [
    [0.0, 7.0, -7.0, 0.0, -0.0],
    [1.5, 7.0, -7.0, 9.0, -9.0],
    [2.0**-149, 7.0, -7.0, 9.0, -9.0],
    [float(np.finfo(np.float32).max), float(2**52 - 1), float(1 - 2**52), 9.0, -9.0],
    [math.inf, 7.0, -7.0, 9.0, -9.0],
    [1.5, 8.0, -7.0, 9.0, -9.0],
    [1.5, 7.0, -7.0, 9.0, -8.0],
    [math.inf, 8.0, -7.0, 9.0, -8.0],
]
SUMS = [None, [0, 0], [1, 3], [2**62, 2**62], [2**25 - 1, 2**25 - 1], *map(random_sums, range(8))]


@pytest.fixture(params=["torch", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes torch operations decide, or the CUDA kernels compiled for the host."""
    if request.param == "kernels":
        kernels = host_kernels()
        monkeypatch.setattr(step_control, "kernels_for", lambda device: kernels)
    return str(request.param)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("skip_overflow", [True, False])
@pytest.mark.parametrize("clipping", [0.0, 1.0, 1e-3])
def test_decisions_have_the_bits_of_the_host(clipping: float, skip_overflow: bool) -> None:
    decide = {"clipping": clipping, "skip_overflow": skip_overflow}
    for fact, both, scale, grad_factor in itertools.product(FACTS, SUMS, [1.0, 3.7, 65536.0], [1.0, 0.37, 7.0]):
        facts = torch.tensor([*fact, float(scale > 1.0), 3.0, -scale], dtype=torch.float64)
        sums = None if both is None else torch.tensor(both)
        control, summary = torch.full((2,), 5.0), torch.full((6,), 5.0, dtype=torch.float64)
        finalize(facts, sums, scale=scale, grad_factor=grad_factor, control=control, summary=summary, **decide)
        wanted = host_decision(facts, sums, scale=scale, grad_factor=grad_factor, **decide)
        assert repr((control.tolist(), summary.tolist())) == repr(wanted)  # repr, as NaN is not equal to itself


@pytest.mark.usefixtures("path")
def test_facts_of_ranks_are_joined_by_a_maximum() -> None:
    facts = torch.empty(2, 8, dtype=torch.float64)
    write_facts(pattern_of(1.5), 2**52 - 1, 3, False, 7, facts[0])
    write_facts(pattern_of(-math.nan) & 0x7FFFFFFF, 2**52 - 1, 4, True, 8, facts[1])
    joined = facts.amax(0)
    assert joined.tolist() == [math.inf, 2**52 - 1, 1 - 2**52, 4, -3, 1, 8, -7]
    largest = torch.zeros(1, dtype=torch.int32)
    largest_of_facts(facts[0], largest)
    assert int(largest) == int(pattern_of(1.5))
    largest_of_facts(joined, largest)
    assert int(largest) == 0x7F800000


# -- updates with a control


def stepped(name: str, grads: list[Tensor], controls: list[Tensor | float], *, tiles: bool) -> list[Tensor]:
    """Returns master, states and rounded copy after a step per gradient; `tiles` selects the path of other devices."""
    numel = grads[0].numel()
    master, out = normal(numel, seed=1), torch.full((numel,), 3.0, dtype=torch.bfloat16)
    optimizer = OPTIMIZERS[name](master)
    for grad, control in zip(grads, controls, strict=True):
        group = optimizer.param_groups[0]
        if tiles:
            optimizer._note_state(master)
            buffers, coefficients = optimizer._advance(group, master)
            scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (1.0, *coefficients)]
            assert isinstance(control, Tensor)
            optimizer._update_in_tiles([master, *buffers, out], grad, scalars, control)
        else:
            optimizer.step_shard(group, master, grad, grad_scale=control, out=out)
        if isinstance(control, Tensor) and not control[1]:
            optimizer.undo_count([master])
    return [master, *(v for v in optimizer.state[master].values() if isinstance(v, Tensor)), out]


@pytest.mark.parametrize("tiles", [False, True], ids=["host", "torch"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_control_is_a_factor_and_a_condition(name: str, tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "sqrt", rounded_sqrt)
    grads = [normal(777, seed=seed).to(torch.bfloat16) for seed in range(4)]
    wanted = stepped(name, [grads[0], grads[2], grads[3]], [0.3] * 3, tiles=False)
    controls: list[Tensor | float] = [torch.tensor([0.3, applies]) for applies in (1.0, 0.0, 1.0, 1.0)]
    found = stepped(name, grads, controls, tiles=tiles)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_step_that_does_not_apply_leaves_no_trace(name: str) -> None:
    master, grad = normal(500), normal(500, seed=1)
    optimizer = OPTIMIZERS[name](master)
    fresh = OPTIMIZERS[name](master.clone())
    twin = fresh.param_groups[0]["params"][0]
    before = copy.deepcopy(optimizer.state_dict())
    group, skip = optimizer.param_groups[0], torch.tensor([math.nan, 0.0])
    out = torch.full((500,), 3.0)
    for _ in range(2):
        optimizer.step_shard(group, master, grad, grad_scale=skip, out=out)
        optimizer.undo_count([master])
    assert optimizer.state_dict() == before
    assert torch.equal(master, twin)
    assert bool((out == 3.0).all())
    for each, param in ((optimizer, master), (fresh, twin)):
        each.step_shard(each.param_groups[0], param, grad, grad_scale=0.5, out=None)
    assert torch.equal(master, twin)
    states = zip(optimizer.state[master].values(), fresh.state[twin].values(), strict=True)
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in states)


@pytest.mark.parametrize("control", [torch.ones(2, dtype=torch.float64), torch.ones(3), torch.ones(2, device="meta")])
def test_a_control_that_does_not_fit_is_refused(control: Tensor) -> None:
    master = normal(8)
    optimizer = Adam([master])
    with pytest.raises(UsageError, match=r"2 torch\.float32 elements on cpu"):
        optimizer.step_shard(optimizer.param_groups[0], master, normal(8), grad_scale=control, out=None)
    assert not optimizer.state[master]
