"""Elementwise optimizers: correct numbers, equal bits for any cut of the vector, and torch's optimizer interface."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests import time_limits
from tests.support.tensors import normal, same_bits
from zeroaccel.errors import UsageError
from zeroaccel.ops import (
    CPUSGD,
    SGD,
    Adagrad,
    Adam,
    CPUAdagrad,
    CPUAdam,
    CPULion,
    Lion,
    RMSprop,
    ShardStep,
    dispatch,
    shard_step,
)
from zeroaccel.ops.shard_step import ShardOptimizer

OPTIMIZERS = {
    "adamw": (Adam, {"weight_decay": 0.1}),
    "adam-l2": (Adam, {"weight_decay": 0.1, "adamw_mode": False, "bias_correction": False}),
    "lion": (Lion, {"weight_decay": 0.1}),
    "adagrad": (Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "rmsprop": (RMSprop, {"weight_decay": 0.1}),
    "rmsprop-centered": (RMSprop, {"momentum": 0.9, "centered": True}),
    "sgd": (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "dampened": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "adamw-bf16": (Adam, {"weight_decay": 0.1, "moments_dtype": "bf16"}),
    "lion-bf16": (Lion, {"weight_decay": 0.1, "moments_dtype": "bf16"}),
    "adagrad-bf16": (Adagrad, {"initial_accumulator_value": 0.1, "moments_dtype": "bf16"}),
}
BLOCKED = {
    "adamw-int8": (Adam, {"weight_decay": 0.1, "moments_dtype": "int8"}),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

every_optimizer = pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
every_format = pytest.mark.parametrize(
    ("optimizer_class", "options"), [*OPTIMIZERS.values(), *BLOCKED.values()], ids=[*OPTIMIZERS, *BLOCKED]
)
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _threads_as_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_num_threads", None)  # an engine of an earlier test may have set it


def advance(
    optimizer: ShardOptimizer, param: Tensor, grad: Tensor, grad_scale: float = 1.0, out: Tensor | None = None
) -> None:
    optimizer.step_shard(optimizer.param_groups[0], param, grad, grad_scale=grad_scale, out=out)


# ---- the numbers ----


def trained(make: Make, start: Tensor, steps: int) -> Tensor:
    param = Parameter(start.clone())
    optimizer = make([param])
    for step in range(steps):
        param.grad = normal(start.numel(), seed=step + 1)
        optimizer.step()
    return param.detach()


COUNTERPARTS: dict[str, tuple[Make, Make]] = {
    "adamw": (
        lambda params: Adam(params, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, weight_decay=0.1, foreach=False),
    ),
    "adam-l2": (
        lambda params: Adam(params, weight_decay=0.1, adamw_mode=False),
        lambda params: torch.optim.Adam(params, weight_decay=0.1, foreach=False),
    ),
    "adam-no-momentum": (
        lambda params: Adam(params, betas=(0.0, 0.95)),
        lambda params: torch.optim.AdamW(params, betas=(0.0, 0.95), weight_decay=0.0, foreach=False),
    ),
    "adagrad": (
        lambda params: Adagrad(params, **OPTIMIZERS["adagrad"][1]),
        lambda params: torch.optim.Adagrad(params, lr=1e-2, foreach=False, **OPTIMIZERS["adagrad"][1]),
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), COUNTERPARTS.values(), ids=COUNTERPARTS.keys())
def test_a_hundred_steps_end_within_a_few_ulp_of_torch(ours: Make, theirs: Make) -> None:
    start = normal(1003)
    mine, reference = trained(ours, start, 100), trained(theirs, start, 100)
    ulp = 2.0**-23 * torch.maximum(start.abs(), reference.abs()).clamp(min=0.1)
    assert ((mine - reference).abs() / ulp).max() <= 6
    assert not torch.allclose(reference, start)


@pytest.mark.parametrize("name", ["sgd", "nesterov", "dampened", "rmsprop", "rmsprop-centered"])
def test_sgd_and_rmsprop_are_torchs(name: str) -> None:
    """After 100 steps, rounding errors are relative to the largest value, and so is the tolerance."""
    kind, options = OPTIMIZERS[name]
    counterpart = getattr(torch.optim, kind.__name__)
    start = normal(1003)
    mine = trained(lambda params: kind(params, **options), start, 100)
    reference = trained(lambda params: counterpart(params, foreach=False, **options), start, 100)
    torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6 * reference.abs().max().item())


def test_without_bias_correction_adam_is_the_bare_formula() -> None:
    optimizer = Adam([start := normal(503)], lr=1e-2, bias_correction=False, weight_decay=0.1, betas=(0.8, 0.9))
    x, m, v = start.double(), torch.zeros(503).double(), torch.zeros(503).double()
    for step in range(5):
        grad = normal(503, seed=step + 1)
        m = 0.8 * m + 0.2 * grad.double()
        v = 0.9 * v + 0.1 * grad.double() ** 2
        x = x * (1 - 1e-3) - 1e-2 * m / (v.sqrt() + 1e-8)
        advance(optimizer, start, grad)
    torch.testing.assert_close(start.double(), x, rtol=1e-6, atol=1e-6)


def test_lion_is_the_algorithm_of_its_paper() -> None:
    optimizer = Lion([start := normal(503)], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    x, m = start.double(), torch.zeros(503).double()
    for step in range(5):
        grad = normal(503, seed=step + 1).double()
        x = x - 1e-2 * ((0.9 * m + 0.1 * grad).sign() + 0.1 * x)
        m = 0.99 * m + 0.01 * grad
        advance(optimizer, start, grad.float())
    torch.testing.assert_close(start.double(), x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.state[start]["exp_avg"].double(), m, rtol=1e-6, atol=1e-6)


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_16_bit_gradient_is_its_float32_value_and_the_scale_one_product(
    optimizer_class: type[ShardOptimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    grad = (normal(1003, seed=1) * 100).to(dtype)
    scaled, plain = normal(1003), normal(1003)
    advance(optimizer_class([scaled], **options), scaled, grad, grad_scale=1 / 3)
    advance(optimizer_class([plain], **options), plain, grad.float() * torch.tensor(1 / 3))
    assert same_bits(scaled, plain)


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_the_master_rounded_and_the_gradient_is_left_alone(
    optimizer_class: type[ShardOptimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    param, grad, out = normal(1003) * 1000, normal(1003, seed=1), torch.empty(1003, dtype=dtype)
    param[::9] *= 1e4  # beyond float16's range
    advance(optimizer_class([param], **options), param, grad, out=out)
    assert same_bits(out, param.to(dtype))
    assert torch.equal(grad, normal(1003, seed=1))


@every_optimizer
def test_a_nan_stays_in_its_element(optimizer_class: type[ShardOptimizer], options: dict[str, Any]) -> None:
    param, grad = normal(100), normal(100, seed=1)
    grad[41] = float("nan")
    advance(optimizer_class([param], **options), param, grad)
    assert param.isnan().nonzero().tolist() == [[41]]


# ---- no result depends on the layout ----


def three_steps(
    optimizer_class: type[ShardOptimizer],
    options: dict[str, Any],
    cuts: list[int],
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[list[Tensor], Tensor]:
    """Steps a vector in pieces, cut at `cuts`, each a separate view; returns its states and the rounded copy."""
    edges = [0, *cuts, 2003]
    master, out = normal(2003).to(device), torch.empty(2003, dtype=dtype, device=device)
    pieces = [master[start:stop] for start, stop in pairwise(edges)]
    optimizer = optimizer_class(pieces, **options)
    for step in range(3):
        grad = normal(2003, seed=step + 1) * 10.0 ** (normal(2003, seed=99) * 3)
        grad = grad.to(device, dtype)
        for piece, start, stop in zip(pieces, edges[:-1], edges[1:], strict=True):
            advance(optimizer, piece, grad[start:stop], grad_scale=0.7, out=out[start:stop])
    names = [name for name, value in optimizer.state[pieces[0]].items() if isinstance(value, Tensor)]
    states = [torch.cat([optimizer.state[piece][name] for piece in pieces]) for name in names]
    return [master, *states], out


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_gives_the_same_bits(
    optimizer_class: type[ShardOptimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """For moments in blocks, any cut between two blocks."""
    whole, whole_out = three_steps(optimizer_class, options, [], dtype)
    anywhere = [[1], [7, 8, 23, 1001], list(range(1, 60)), [2002]]
    between_blocks = [[32], [64, 96, 1024, 1984], list(range(32, 640, 32))]
    for cuts in between_blocks if options.get("moments_dtype") == "int8" else anywhere:
        pieces, pieces_out = three_steps(optimizer_class, options, cuts, dtype)
        assert all(same_bits(ours, theirs) for ours, theirs in zip(pieces, whole, strict=True))
        assert same_bits(pieces_out, whole_out)


@every_format
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_give_the_same_bits(
    optimizer_class: type[ShardOptimizer], options: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, _ = three_steps(optimizer_class, options, [], torch.bfloat16)
    monkeypatch.setattr(dispatch, "_MIN_SPAN_NUMEL", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together, _ = three_steps(optimizer_class, options, [], torch.bfloat16)
    assert all(same_bits(ours, theirs) for ours, theirs in zip(together, alone, strict=True))


def rounded_sqrt(tensor: Tensor) -> Tensor:
    return torch.from_numpy(np.sqrt(tensor.numpy()))


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_torch_path_gives_the_bits_of_the_kernel(
    optimizer_class: type[ShardOptimizer], options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a correctly rounded square root, as on CUDA; torch's on the CPU is sometimes off by one ulp."""
    monkeypatch.setattr(Tensor, "sqrt", rounded_sqrt)
    kernel, kernel_out = three_steps(optimizer_class, options, [], dtype)
    monkeypatch.setattr(shard_step, "_TILE_NUMEL", 320)
    monkeypatch.setattr(shard_step, "_ROUNDED_TILE_NUMEL", 320)

    def in_tiles(self: ShardOptimizer, written: Any, grad: Tensor, scalars: Any, *others: Any) -> None:
        self._update_in_tiles(written, grad, scalars, None)

    monkeypatch.setattr(ShardOptimizer, "_update_on_cpu", in_tiles)
    tiles, tiles_out = three_steps(optimizer_class, options, [], dtype)
    assert all(same_bits(ours, theirs) for ours, theirs in zip(tiles, kernel, strict=True))
    assert same_bits(tiles_out, kernel_out)


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_bits_of_the_kernel(
    optimizer_class: type[ShardOptimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    kernel, kernel_out = three_steps(optimizer_class, options, [], dtype)
    gpu, gpu_out = three_steps(optimizer_class, options, [], dtype, device="cuda")
    assert all(same_bits(ours.cpu(), theirs) for ours, theirs in zip(gpu, kernel, strict=True))
    assert same_bits(gpu_out.cpu(), kernel_out)


# ---- threads ----


def test_spans_cover_everything_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MIN_SPAN_NUMEL", 64)
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for numel in (0, 1, 63, 64, 129, 1000):
            spans = dispatch.in_spans(numel, lambda start, stop: list(range(start, stop)))
            assert list(chain.from_iterable(spans)) == list(range(numel))
            assert len(spans) <= threads


def test_a_chosen_number_of_threads_comes_before_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MIN_SPAN_NUMEL", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    dispatch.use_threads(3)
    assert len(dispatch.in_spans(1000, lambda start, stop: stop - start)) == 3
    dispatch.use_threads(None)
    assert dispatch.in_spans(1000, lambda start, stop: stop - start) == [1000]


def test_an_error_in_a_span_is_raised_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MIN_SPAN_NUMEL", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ended: list[int] = []

    def work(start: int, stop: int) -> None:
        if start == 0:
            raise ValueError("first span")
        time.sleep(0.05)
        ended.append(start)

    with pytest.raises(ValueError, match="first span"):
        dispatch.in_spans(128, work)
    assert ended == [64]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MIN_SPAN_NUMEL", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert dispatch.in_spans(128, lambda start, stop: stop - start) == [64, 64]
    child = os.fork()
    if child == 0:
        os._exit(dispatch.in_spans(128, lambda start, stop: stop - start) != [64, 64])
    limit = time_limits.Limit(20)
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and not limit.is_over():
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended, "the child waits for threads that the fork did not copy"
    assert os.waitstatus_to_exitcode(status) == 0


# ---- the interface of a torch optimizer ----


def test_the_protocol_and_the_names() -> None:
    assert (CPUAdam, CPULion, CPUAdagrad, CPUSGD) == (Adam, Lion, Adagrad, SGD)
    assert isinstance(Adam([torch.zeros(1)]), ShardStep)
    assert not isinstance(torch.optim.AdamW([torch.zeros(1)]), ShardStep)


def test_the_state_of_adam() -> None:
    param = Parameter(normal(6).view(2, 3))
    optimizer = Adam([param])
    for _ in range(2):
        param.grad = torch.ones(2, 3)
        optimizer.step()
    state = optimizer.state[param]
    assert state["step"] == 2
    assert {name: value.shape for name, value in state.items() if name != "step"} == {
        "exp_avg": param.shape,
        "exp_avg_sq": param.shape,
    }


@every_format
def test_a_loaded_state_continues_exactly(optimizer_class: type[ShardOptimizer], options: dict[str, Any]) -> None:
    def go_on(optimizer: ShardOptimizer, param: Parameter, seeds: range) -> None:
        for seed in seeds:
            param.grad = normal(101, seed=seed)
            optimizer.step()

    param = Parameter(normal(101))
    optimizer = optimizer_class([param], **options)
    go_on(optimizer, param, range(1, 4))
    saved, twin = copy.deepcopy(optimizer.state_dict()), Parameter(param.detach().clone())
    go_on(optimizer, param, range(4, 7))
    resumed = optimizer_class([twin], **options)
    resumed.load_state_dict(saved)
    go_on(resumed, twin, range(4, 7))
    assert same_bits(param, twin)
    for loaded in (resumed, copy.deepcopy(resumed)):
        assert loaded.defaults == optimizer.defaults
        assert loaded.param_groups[0].keys() == optimizer.param_groups[0].keys()


@pytest.mark.parametrize("ours_first", [True, False])
def test_states_travel_between_torchs_adamw_and_ours(ours_first: bool) -> None:
    makers: list[Make] = [
        lambda params: Adam(params, weight_decay=0.01),
        lambda params: torch.optim.AdamW(params, foreach=False),
    ]
    first, second = makers if ours_first else makers[::-1]
    param, reference = Parameter(normal(101)), Parameter(normal(101))
    before, plain = first([param]), first([reference])
    for step in range(6):
        if step == 3:
            after = second([param])
            after.load_state_dict(before.state_dict())
            before = after
        param.grad, reference.grad = normal(101, seed=step + 1), normal(101, seed=step + 1)
        before.step()
        plain.step()
    torch.testing.assert_close(param, reference, rtol=1e-6, atol=1e-7)


def test_groups_have_their_own_settings_and_a_scheduler_moves_them() -> None:
    still, moving = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = SGD([{"params": [still], "lr": 0.0}, {"params": [moving]}], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        still.grad, moving.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
        schedule.step()
    assert still.tolist() == [1.0] * 3
    assert moving.tolist() == [1.0 - 1.0 - 0.5] * 3


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    param = Parameter(torch.ones(3))
    optimizer = SGD([param, Parameter(torch.ones(1))], lr=0.5)  # the second never gets a gradient

    def closure() -> float:
        loss = param.sum() * 2
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 6.0
    assert param.tolist() == [0.0] * 3


@every_optimizer
def test_strided_empty_and_zero_dimensional_parameters(
    optimizer_class: type[ShardOptimizer], options: dict[str, Any]
) -> None:
    plain, strided = Parameter(normal(12).view(3, 4)), Parameter(normal(12).view(3, 4).t().contiguous().t())
    assert not strided.is_contiguous()
    scalar, vector, empty = Parameter(torch.tensor(0.5)), Parameter(torch.tensor([0.5])), Parameter(torch.empty(0, 3))
    params = [plain, strided, scalar, vector, empty]
    optimizer = optimizer_class(params, **options)
    for step in range(2):
        for param in params:
            param.grad = normal(param.numel(), seed=step + 1).view(param.shape)
        optimizer.step()
    assert torch.equal(plain, strided)
    assert scalar.item() == vector.item() != 0.5


def test_autograd_notices_that_the_weights_changed() -> None:
    param = Parameter(torch.ones(3))
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    Adam([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- refusals ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Adam(p, amsgrad=True), "amsgrad: expected False"),
        (lambda p: Adam(p, lr=-1.0), "Adam, lr: expected a number of at least 0, got -1.0"),
        (lambda p: Adam(p, eps=float("nan")), "Adam, eps"),
        (lambda p: Adam(p, weight_decay=-0.1), "Adam, weight_decay"),
        (lambda p: Adam(p, betas=(0.9, 1.0)), r"Adam, betas: expected two numbers in \[0, 1\)"),
        (lambda p: Lion(p, betas=(0.9,)), "Lion, betas"),
        (lambda p: Adagrad(p, lr_decay=-1.0), "Adagrad, lr_decay"),
        (lambda p: RMSprop(p, alpha=1.0), "RMSprop, alpha"),
        (
            lambda p: Adam(p, moments_dtype="fp8"),
            'Adam, moments_dtype: expected "fp32" or "bf16" or "int8", got \'fp8\'',
        ),
        (lambda p: Adagrad(p, moments_dtype="int8"), 'Adagrad, moments_dtype: expected "fp32" or "bf16", got'),
        (lambda p: Lion(p, moments_dtype="int8"), 'Lion, moments_dtype: expected "fp32" or "bf16", got'),
        (lambda p: SGD(p, momentum=-1.0), "SGD, momentum"),
        (lambda p: SGD(p, nesterov=True), "SGD, nesterov: expected momentum above 0 and dampening 0"),
    ],
)
def test_hyperparameters_out_of_range(make: Make, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make([torch.zeros(1)])


@pytest.mark.parametrize(
    ("param", "grad", "out", "message"),
    [
        (torch.zeros(3).double(), torch.zeros(3), None, r"expected float32 \(the master weights\), got torch.float64"),
        (torch.zeros(3).bfloat16(), torch.zeros(3), None, "got torch.bfloat16"),
        (torch.zeros(3), torch.zeros(3).double(), None, "gradient: expected a dense float32, bfloat16 or float16"),
        (torch.zeros(3), torch.zeros(3).to_sparse(), None, r"gradient: .*torch\.sparse_coo"),
        (torch.zeros(3), torch.zeros(4), None, "gradient: expected 3 elements on cpu, got '4 elements on cpu'"),
        (torch.zeros(3), torch.zeros(3, device="meta"), None, r"gradient: .*meta"),
        (torch.zeros(3), torch.zeros(3), torch.zeros(2), "out: expected 3 elements"),
        (torch.zeros(3), torch.zeros(3), torch.zeros(3).int(), r"out: .*torch\.int32"),
    ],
)
def test_tensors_that_do_not_fit(param: Tensor, grad: Tensor, out: Tensor | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        advance(Adam([param]), param, grad, out=out)


def test_a_state_that_does_not_fit() -> None:
    param = torch.zeros(3)
    optimizer = Adam([param])
    optimizer.state[param] = {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3).bfloat16()}
    with pytest.raises(UsageError, match=r"state of the parameter .*got '3 torch\.bfloat16 elements"):
        advance(optimizer, param, torch.zeros(3))
