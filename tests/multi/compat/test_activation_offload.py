"""Contexts that store saved tensors elsewhere until backward, as TRL's offloading does: equal losses at stage 3."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.multi.compat.facade_engines import CONFIG, with_facade
from tests.support.pool import Ranks
from zeroaccel.compat import activation_checkpointing, parameters
from zeroaccel.compat.finder import _PATCHED
from zeroaccel.compat.parameters import ZeroParamStatus

pytestmark = pytest.mark.usefixtures("ranks_without_libraries")

_WIDTH, _ROWS = 8, 8192  # the head is a unit of its own


def _gathered(*params: Tensor | None) -> AbstractContextManager[None]:
    """Gathers what is absent, as TRL does around its chunked losses."""
    import deepspeed  # type: ignore[import-not-found]

    absent = [each for each in params if each is not None and each.ds_status is not ZeroParamStatus.AVAILABLE]
    context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(absent) if absent else nullcontext()
    return context


class _Head(torch.autograd.Function):
    """A product with a weight that backward gathers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        with parameters.gathering_saved(_gathered)(weight):
            return grad @ weight, grad.t() @ x


class _Offload(saved_tensors_hooks):
    """Copies every saved tensor and remembers the sizes of the storages, until its own `__enter__` spares weights."""

    def __init__(self) -> None:
        self.copied: list[int] = []
        self._saved: list[Tensor] = []
        super().__init__(self._pack, lambda number: self._saved[number])

    def _pack(self, tensor: Tensor) -> int:
        self.copied.append(tensor.untyped_storage().nbytes())
        self._saved.append(tensor.clone())
        return len(self._saved) - 1

    __enter__ = parameters.sparing_weights(saved_tensors_hooks.__enter__)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2)])
        self.head = nn.Linear(_WIDTH, _ROWS, bias=False)

    def forward(self, x: Tensor, way: str) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False).relu() if way == "checkpoint" else block(x).relu()
        with _gathered(self.head.weight):
            product: Tensor = _Head.apply(x, self.head.weight)
        return product


def _losses(way: str) -> tuple[list[float], list[int]]:
    import deepspeed

    offload = _Offload()
    contexts = {"offload": offload, "save_on_cpu": save_on_cpu(), "pinned": _pinned()}
    config = {**CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=_Model(), config=config)
    losses = []
    for step in range(3):
        x = torch.full((2, _WIDTH), 0.1 * (step + 1))
        with contexts.get(way, nullcontext()):
            loss = engine(x, way).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, offload.copied


def _pinned() -> Any:
    """Returns the context by which transformers stores activations, for a process without a device."""
    row = next(change for _, name, change in _PATCHED["transformers.modeling_utils"] if name == "save_on_cpu")
    return row(save_on_cpu)(pin_memory=True, device_type="cpu")


@pytest.mark.parametrize("way", ["offload", "save_on_cpu", "pinned", "checkpoint"])
def test_activations_stored_elsewhere_change_no_loss(ranks: Ranks, way: str) -> None:
    expected, _ = ranks(2).run(with_facade, _losses, "")[0]
    assert len(set(expected)) == 3
    for losses, copied in ranks(2).run(with_facade, _losses, way):
        assert losses == expected
        assert (max(copied, default=0) > 0) == (way == "offload")
        # Gathered weights stay where they are: 4 bytes of 8192 x 8 elements.
        assert 4 * _WIDTH * _ROWS not in copied


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device to offload from")
def test_trl_offloads_nothing_from_a_cpu() -> None:
    get = activation_checkpointing.offloading_from_devices(lambda **_: pytest.fail("TRL's own has no device there"))
    with get(model=nn.Linear(1, 1)) as nothing:
        assert nothing is None
