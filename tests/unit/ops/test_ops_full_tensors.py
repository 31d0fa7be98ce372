"""Muon and LAMB: the results of their papers and of the optimizers that they replace."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.refusals import refused
from tests.support.tensors import normal
from tests.unit.ops.kernels_on_host import HostRunner, host_library
from zeroaccel.errors import UsageError
from zeroaccel.ops import Adam, Lamb, Muon
from zeroaccel.ops.device_kernels import DeviceKernels
from zeroaccel.ops.shard_step import TensorStep
from zeroaccel.ops.tensorwise import orthogonalized


def trained(optimizer: torch.optim.Optimizer, steps: int = 5) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(steps):
        for index, param in enumerate(params):
            param.grad = normal(*param.shape, seed=100 * step + index)
        optimizer.step()
    return [param.detach() for param in params]


def test_lamb_is_its_formula() -> None:
    start = normal(6, 4)
    (mine,) = trained(Lamb([Parameter(start.clone())], lr=0.1, weight_decay=0.2, max_coeff=3.0))
    x, m, v = start.double(), torch.zeros(6, 4).double(), torch.zeros(6, 4).double()
    for step in range(5):
        grad = normal(6, 4, seed=100 * step).double()
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        update = m / (v.sqrt() + 1e-8) + 0.2 * x
        rate = 0.1 * math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        x = x - rate * (x.norm() / update.norm()).clamp(0.01, 3.0) * update
    torch.testing.assert_close(mine.double(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_coeff": 0.25}, 0.25),  # the weight is 1 and the first update 1, so the ratio is 1
        ({"min_coeff": 4.0}, 4.0),
        ({"bias_correction": False, "betas": (0.0, 0.0)}, 1.0),
        ({"eps_inside_sqrt": True, "eps": 3.0, "bias_correction": False, "betas": (0.0, 0.0)}, 2.0 * 0.5),
    ],
)
def test_lambs_settings(settings: dict[str, Any], expected: float) -> None:
    param = Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    Lamb([param], lr=0.125, **{"betas": (0.0, 0.0), "eps": 0.0, "max_coeff": 100.0, **settings}).step()
    assert 1 - param.item() == pytest.approx(0.125 * expected)


@pytest.mark.parametrize(("weight", "grad"), [(0.0, 1.0), (1.0, 0.0)])
def test_lamb_steps_plainly_where_a_norm_is_zero(weight: float, grad: float) -> None:
    param = Parameter(torch.full((3,), weight))
    param.grad = torch.full((3,), grad)
    Lamb([param], lr=0.25, betas=(0.0, 0.0)).step()
    torch.testing.assert_close(param.detach(), torch.full((3,), weight - 0.25 * grad))


@pytest.mark.parametrize(("method", "rounding"), [("standard", 0.06), ("gram", 1e-4)])  # bfloat16 and float32
@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32), (3, 8, 40), (1, 5)])
def test_a_matrix_is_orthogonalised(shape: tuple[int, ...], method: str, rounding: float) -> None:
    matrices = normal(*shape)
    before = matrices.clone()
    found = orthogonalized(matrices, method=method)
    assert torch.equal(matrices, before)
    assert not orthogonalized(torch.zeros(shape), method=method).any()
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    off = left.mT @ found @ right.mT
    assert (off - torch.diag_embed(torch.diagonal(off, dim1=-2, dim2=-1))).abs().max() < rounding
    torch.testing.assert_close(found, orthogonalized(matrices, method="gram"), rtol=rounding, atol=rounding)


def test_muon_is_torchs_except_for_rounding() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    for shape in ((16, 64), (64, 16)):
        start = normal(*shape)
        (mine,) = trained(Muon([{"params": [Parameter(start.clone())], "use_muon": True}], **settings))
        (theirs,) = trained(torch.optim.Muon([Parameter(start.clone())], **settings))
        assert (mine - theirs).norm() < 0.02 * (mine - start).norm()
        plain = [{"params": [Parameter(start.clone())], "use_muon": True, "nesterov": False}]
        assert (trained(Muon(plain, **settings))[0] - theirs).norm() > 0.05 * (mine - start).norm()


def test_the_other_groups_are_torchs_adamw() -> None:
    starts = [normal(5, 3), normal(7, seed=1)]
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    groups = [{"params": [Parameter(start.clone()) for start in starts], "use_muon": False}]
    mine = trained(Muon(groups, **settings))
    theirs = trained(torch.optim.AdamW([Parameter(s.clone()) for s in starts], foreach=False, **settings))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_convolutions_are_one_matrix_and_stacks_are_many() -> None:
    kernel, stack = normal(4, 2, 3, 3), normal(2, 4, 6)
    flat = [{"params": [Parameter(kernel.flatten(1).clone())], "use_muon": True}]
    (one,) = trained(Muon([{"params": [Parameter(kernel.clone())], "use_muon": True}]), 1)
    param = flat[0]["params"][0]  # type: ignore[index]
    param.grad = normal(4, 2, 3, 3, seed=0).flatten(1)
    Muon(flat).step()
    assert torch.equal(one.flatten(1), param.detach())
    (both,) = trained(Muon([{"params": [Parameter(stack.clone())], "use_muon": True}]), 1)
    for index in range(2):
        single = Parameter(stack[index].clone())
        single.grad = normal(2, 4, 6, seed=0)[index]
        Muon([{"params": [single], "use_muon": True}]).step()
        torch.testing.assert_close(both[index], single.detach())


def test_groups_have_the_settings_of_their_rule() -> None:
    matrix, vector = Parameter(normal(4, 4)), Parameter(normal(4))
    optimizer = Muon([{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}], momentum=0.5)
    first, second = optimizer.param_groups
    assert (first["lr"], first["momentum"], second["lr"], second["betas"]) == (0.02, 0.5, 3e-4, (0.9, 0.95))
    assert "betas" not in first
    assert "momentum" not in second
    trained(optimizer, 2)
    again = Muon(copy.deepcopy(optimizer.param_groups))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(trained(again, 1)[0], trained(optimizer, 1)[0])


@pytest.mark.parametrize(
    ("group", "settings", "words"),
    [
        ({}, {}, 'Muon, param group 0: expected "use_muon": True or False, got None'),
        ({"use_muon": True, "params": [Parameter(torch.ones(3))]}, {}, "parameter 0: expected at least two dimensions"),
        ({"use_muon": True}, {"lr": -1.0}, "lr: expected a number of at least 0, got -1.0"),
        ({"use_muon": True}, {"momentum": 1.0}, "momentum"),
        ({"use_muon": True}, {"ns_steps": 0}, "ns_steps"),
        ({"use_muon": True}, {"ns_method": "fast"}, '"standard" or "gram"'),
        ({"use_muon": False}, {"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_wrong_groups_and_settings_of_muon_are_reported(
    group: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with refused(UsageError, words):
        Muon([{"params": [Parameter(torch.ones(3, 3))], **group}], **settings)


# -- many tensors in few launches, as on a device, by kernels compiled for the host

_SHAPES = [(16, 40), (40, 16), (16, 40), (24, 24), (16, 40), (2, 8, 20), (6, 2, 3, 3)]
_VECTORS = [(3000,), (7,), (1,), (2000,)]


class _Operations(TorchDispatchMode):
    """Counts torch's launches on a device: operations other than views and those on host numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        launches = not (func.is_view or "empty" in func.name() or "unsafe_view" in func.name())
        self.count += launches and isinstance(result, Tensor) and result.dim() > 0
        return result


def _gradients(params: list[Parameter], step: int, dtype: torch.dtype) -> list[Tensor]:
    return [normal(*param.shape, seed=100 * step + index).to(dtype) for index, param in enumerate(params)]


def stepped_together(optimizer: Any, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], int]:
    """Returns (masters and copies in the gradients' dtype, launches of the last step) after three steps."""
    runner = HostRunner(host_library(800))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    outs = [torch.zeros(param.numel(), dtype=dtype) for param in params]
    launches = 0
    for step in range(3):
        grads = _gradients(params, step, dtype)
        steps = [TensorStep(p, grad.flatten(), out) for p, grad, out in zip(params, grads, outs, strict=True)]
        runner.launched.clear()
        with _Operations() as operations:
            for group in optimizer.param_groups:
                own, steps = steps[: len(group["params"])], steps[len(group["params"]) :]
                optimizer.step_many(group, own, grad_scale=0.5, kernels=DeviceKernels(runner))
        launches = operations.count + len(runner.launched)
    return [*(param.detach() for param in params), *outs], launches


def stepped_one_by_one(optimizer: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(3):
        for param, grad in zip(params, _gradients(params, step, dtype), strict=True):
            param.grad = grad.float() * 0.5
        optimizer.step()
    return [*(param.detach() for param in params), *(param.detach().flatten().to(dtype) for param in params)]


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state[param] for group in optimizer.param_groups for param in group["params"]]


def _parameters(shapes: list[tuple[int, ...]]) -> list[Parameter]:
    return [Parameter(normal(*shape, seed=500 + index)) for index, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"eps_inside_sqrt": True, "bias_correction": False, "max_coeff": 0.5}], ids=str
)
def test_lamb_steps_tensors_together(settings: dict[str, Any], dtype: torch.dtype) -> None:
    optimizers = [Lamb(_parameters(_SHAPES + _VECTORS), lr=0.1, weight_decay=0.1, **settings) for _ in range(2)]
    (mine, _), theirs = stepped_together(optimizers[0], dtype), stepped_one_by_one(optimizers[1], dtype)
    for one, other in zip(mine, theirs, strict=True):  # the kernels sum norms in another order
        torch.testing.assert_close(one, other, rtol=1e-6 if one.dtype is torch.float32 else 1e-2, atol=1e-6)
    for one, other in zip(*map(_states, optimizers), strict=True):
        assert one["step"] == other["step"] == 3
        assert torch.equal(one["exp_avg"], other["exp_avg"])
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])


def test_lamb_together_steps_plainly_where_a_norm_is_zero() -> None:
    params = [Parameter(torch.zeros(5)), Parameter(torch.ones(5))]
    steps = [TensorStep(params[0], torch.ones(5), None), TensorStep(params[1], torch.zeros(5), None)]
    optimizer = Lamb(params, lr=0.25, betas=(0.0, 0.0))
    kernels = DeviceKernels(HostRunner(host_library(800)))
    optimizer.step_many(optimizer.param_groups[0], steps, grad_scale=1.0, kernels=kernels)
    torch.testing.assert_close(params[0].detach(), torch.full((5,), -0.25))
    torch.testing.assert_close(params[1].detach(), torch.ones(5))


@pytest.mark.parametrize(("method", "rounding"), [("standard", 0.04), ("gram", 1e-4)])  # bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_muon_steps_tensors_together(method: str, rounding: float, dtype: torch.dtype) -> None:
    def made() -> Muon:
        groups = [
            {"params": _parameters(_SHAPES), "use_muon": True},
            {"params": _parameters(_VECTORS), "use_muon": False},
        ]
        return Muon(groups, lr=0.1, weight_decay=0.1, ns_method=method)

    optimizers = made(), made()
    (mine, _), theirs = stepped_together(optimizers[0], dtype), stepped_one_by_one(optimizers[1], dtype)
    starts = [param.detach() for param in (*_parameters(_SHAPES), *_parameters(_VECTORS))]
    for start, one, other in zip(starts, mine, theirs, strict=False):
        assert (one - other).norm() < rounding * (other - start).norm(), start.shape
    masters, copies = mine[: len(starts)], mine[len(starts) :]
    for master, copy_of in zip(masters, copies, strict=True):
        assert torch.equal(master.flatten().to(dtype), copy_of)
    for one, other in zip(*map(_states, optimizers), strict=True):
        assert one.keys() == other.keys()
        if "momentum_buffer" in one:
            assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


def test_muons_adamw_together_is_adam() -> None:
    group = {"params": _parameters(_VECTORS), "use_muon": False}
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    mine, _ = stepped_together(Muon([group], **settings))
    optimizer = Adam(_parameters(_VECTORS), **settings)
    for one, other in zip(mine, stepped_one_by_one(optimizer), strict=True):
        assert torch.equal(one, other)


def test_launches_do_not_grow_with_the_number_of_tensors() -> None:
    def launches(layers: int) -> list[int]:
        matrices, vectors = [(16, 40), (40, 16), (24, 24)] * layers, [(7,), (30,)] * layers
        muon = [
            {"params": _parameters(matrices), "use_muon": True},
            {"params": _parameters(vectors), "use_muon": False},
        ]
        return [stepped_together(optimizer)[1] for optimizer in (Muon(muon), Lamb(_parameters(matrices + vectors)))]

    # Muon for each of three shapes: 2 kernels, 3 for the norm, 3 in each of 5 iterations; a copy of the tall shape; one
    # for all vectors, whose step counts are on the host. LAMB: 2 kernels, and 3 for the norms.
    assert launches(2) == launches(8) == [3 * (2 + 3 + 3 * 5) + 1 + 1, 2 + 3]


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_muon_orthogonalizes_the_rows_of_each_head(method: str) -> None:
    start, grad = normal(12, 5), normal(12, 5, seed=1)
    whole, heads = Parameter(start.clone()), [Parameter(part.clone()) for part in start.chunk(3)]
    optimizer = Muon([{"params": [whole], "use_muon": True, "heads": 3}], lr=0.1, ns_method=method)
    alone = Muon([{"params": heads, "use_muon": True}], lr=0.1, ns_method=method)
    for _ in range(3):
        whole.grad = grad.clone()
        for param, part in zip(heads, grad.chunk(3), strict=True):
            param.grad = part.clone()
        optimizer.step()
        alone.step()
    assert torch.allclose(whole, torch.cat(list(heads)), atol=2e-3)
    assert not torch.allclose(whole, start, atol=0.05)
