"""The kernels on a CUDA device: they compile, and give the bits of the host's loops and of the torch operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tensors import every_pattern
from tests.unit.ops.test_device_kernels import DTYPES, OPTIMIZERS, OUTS, assert_same, spread
from zeroaccel.ops import reductions, shard_step, step_control
from zeroaccel.ops.device_kernels import DeviceKernels, kernels_for
from zeroaccel.ops.reductions import max_abs, max_abs_into, norm_exponent, square_sums, square_sums_into

pytestmark = pytest.mark.gpu

NUMEL = 1_000_003


@pytest.fixture
def kernels() -> DeviceKernels:
    found = kernels_for(torch.device("cuda", 0))
    assert found is not None, "the kernels do not compile; the log has the reason"
    return found


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a call that switches to torch operations."""

    def forget() -> None:
        for module in (reductions, step_control, shard_step):
            monkeypatch.setattr(module, "kernels_for", lambda device: None)

    return forget


def stepped(name: str, grads: list[Tensor], out_dtype: torch.dtype | None, device: str) -> list[Tensor]:
    """Returns master, state and rounded copy after three steps; the control of the second step prevents its update."""
    master = spread(grads[0].numel(), 10).to(device)
    optimizer = OPTIMIZERS[name](master)
    out = None if out_dtype is None else torch.full_like(master, 3.0, dtype=out_dtype)
    for place, grad in enumerate(grads):
        control = torch.tensor([0.37, float(place != 1)], device=device)
        group = optimizer.param_groups[0]
        optimizer.step_shard(group, master, grad.to(device), grad_scale=control, out=out)
        if place == 1:
            optimizer.undo_count([master])
    states = [value for value in optimizer.state[master].values() if isinstance(value, Tensor)]
    return [tensor.cpu() for tensor in (master, *states, *([] if out is None else [out]))]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("out_dtype", OUTS, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_have_the_bits_of_the_host(name: str, grad_dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    grads = [spread(NUMEL, seed).to(grad_dtype) for seed in (1, 2, 3)]
    assert_same(stepped(name, grads, out_dtype, "cuda"), stepped(name, grads, out_dtype, "cpu"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_operations_have_the_bits_of_the_host(name: str, without_kernels: Callable[[], None]) -> None:
    without_kernels()
    grads = [spread(100_003, seed).bfloat16() for seed in (1, 2, 3)]
    assert_same(stepped(name, grads, torch.bfloat16, "cuda"), stepped(name, grads, torch.bfloat16, "cpu"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_16_bit_gradient_has_the_bits_of_the_host(name: str, grad_dtype: torch.dtype) -> None:
    grads = [every_pattern(grad_dtype)]
    assert_same(stepped(name, grads, grad_dtype, "cuda"), stepped(name, grads, grad_dtype, "cpu"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_has_the_integers_of_the_host(
    dtype: torch.dtype, by_kernels: bool, without_kernels: Callable[[], None]
) -> None:
    if not by_kernels:
        without_kernels()
    values = [spread(numel, numel).to(dtype) for numel in (1, 77, NUMEL)]
    found, sums = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    for tensor in values:
        max_abs_into(tensor.cuda(), found)
    for tensor in values:
        square_sums_into(tensor.cuda(), found, sums)
    largest = max(max_abs(tensor) for tensor in values)
    parts = [square_sums(tensor, norm_exponent(largest)) for tensor in values]
    assert found.view(torch.float32).item() == largest
    assert sums.tolist() == [sum(high for high, _ in parts), sum(low for _, low in parts)]
    values[2][5] = math.nan
    max_abs_into(values[2].cuda(), found)
    assert int(found) >= 0x7F800000


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("by_kernels", [True, False])
def test_decisions_have_the_bits_of_torch_on_the_host(by_kernels: bool, without_kernels: Callable[[], None]) -> None:
    if not by_kernels:
        without_kernels()
    random = np.random.default_rng(0)
    for _ in range(200):
        value, scale = float(np.float32(random.lognormal(0, 20))), float(random.lognormal(0, 5))
        sums = [int(random.integers(0, 2**62)), int(random.integers(0, 2**62))]
        results = []
        for device in ("cuda", "cpu"):
            facts, largest = torch.empty(8, dtype=torch.float64, device=device), torch.tensor([value], device=device)
            control, summary = torch.empty(2, device=device), torch.empty(6, dtype=torch.float64, device=device)
            step_control.write_facts(largest.view(torch.int32), 3, 4, True, 5, facts)
            step_control.largest_of_facts(facts, largest.view(torch.int32))
            both = torch.tensor(sums, device=device)
            settings = {"scale": scale, "clipping": 1.0, "grad_factor": 0.9, "skip_overflow": True}
            step_control.finalize(facts, both, control=control, summary=summary, **settings)
            results.append((facts.tolist(), largest.tolist(), control.tolist(), summary.tolist()))
        assert results[0] == results[1]


def test_kernels_run_on_the_current_stream(kernels: DeviceKernels) -> None:
    """A launch waits for earlier work on its stream, here a fill behind half a second of other work."""
    values, largest = torch.zeros(1 << 20, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    kernels.max_abs_into(values, largest)  # the first launch may wait
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        values.fill_(2.5)
        kernels.max_abs_into(values, largest)
    assert not stream.query(), "the launch waited for the device"
    stream.synchronize()
    assert largest.view(torch.float32).item() == 2.5


def test_a_thread_that_has_chosen_no_device_launches_on_that_of_the_kernels() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    kernels = kernels_for(device)
    assert kernels is not None, "the kernels do not compile; the log has the reason"
    values, largest = torch.tensor([1.0, -4.0], device=device), torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(kernels.max_abs_into, values, largest).result()
    torch.cuda.synchronize(device)
    assert largest.view(torch.float32).item() == 4.0
