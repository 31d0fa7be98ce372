"""The start writes weights and states once: buffers are not filled with zeros that the values then replace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroaccel
from tests.support.pool import Ranks
from zeroaccel.offload.host_buffers import aligned_bytes, aligned_nbytes
from zeroaccel.ops import SGD, Adam, RMSprop
from zeroaccel.ops.shard_step import ShardOptimizer
from zeroaccel.zero import safe_get_full_fp32_param

_FILLS = ("aten::zero_", "aten::fill_", "aten::zeros", "aten::full", "aten::new_full", "aten::new_zeros")


class _Filled(TorchDispatchMode):
    """Counts the elements that operations fill with one value."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in _FILLS and isinstance(out, Tensor):
            self.numel += out.numel()
        return out


def test_a_start_fills_no_buffer_of_weights(own_job: None) -> None:
    model = nn.Sequential(*(nn.Linear(63, 65) for _ in range(3)))
    numel = sum(param.numel() for param in model.parameters())
    values = [param.detach().clone() for param in model.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
    }
    with _Filled() as filled:
        engine, *_ = zeroaccel.initialize(model=model, config=config)
    assert 0 < filled.numel < numel / 20, "padding between and after parameters, and no more"
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(param, value.bfloat16())
    engine.destroy()


def _pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return aligned_bytes(aligned_nbytes(nbytes))[:nbytes].view(dtype).view(tuple(shape))


def test_states_in_new_pages_of_the_host_are_not_filled() -> None:
    def make(kind: type[ShardOptimizer], **settings: Any) -> tuple[int, list[Tensor], list[Tensor]]:
        states, filled = [], 0
        for from_pages in (True, False):
            param = torch.linspace(-1, 1, 5000)
            optimizer: Any = kind([param], **settings)
            if from_pages:
                optimizer.host_memory = _pages
            with _Filled() as written:
                optimizer._advance(optimizer.param_groups[0], param)
            filled += written.numel if from_pages else 0
            states.append([value for value in optimizer.state[param].values() if isinstance(value, Tensor)])
        return filled, *states

    for kind, settings in ((Adam, {}), (Adam, {"moments_dtype": "int8"}), (RMSprop, {}), (SGD, {"momentum": 0.9})):
        filled, found, wanted = make(kind, **settings)
        assert filled < 500, "the exponents of 8-bit blocks at most"
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class _Written(TorchDispatchMode):
    """Counts the bytes that copies write, and those that operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.allocated = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::copy_", "aten::_to_copy", "aten::clone"):
            self.copied += out.nbytes
        if func._schema.name in ("aten::empty", "aten::new_empty", "aten::_to_copy", "aten::clone"):
            self.allocated += out.nbytes
        return out


def _bytes_of_a_start(stage: int, dtype: torch.dtype, precision: str) -> tuple[float, float]:
    """Returns the bytes that a start copies, and allocates, per parameter; checks weights and masters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512, bias=False)) for _ in range(8))).to(dtype)
    numel = sum(param.numel() for param in model.parameters())
    values = [param.detach().clone() for param in model.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    with _Written() as written:
        engine, *_ = zeroaccel.initialize(model=model, config=config)
    with engine.gathered():
        for param, value in zip(model.parameters(), values, strict=True):
            assert torch.equal(param, value.bfloat16() if precision == "bf16" else value)
            master = safe_get_full_fp32_param(param)
            assert master is not None
            assert torch.equal(master, value.float())
    engine.destroy()
    return written.copied / numel, written.allocated / numel


def test_a_start_copies_weights_once_into_each_memory_that_stays(own_job: None) -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    # The memory of the fp32 values becomes the masters; the 16-bit weights are a copy of them.
    assert _bytes_of_a_start(2, fp32, "bf16") == pytest.approx((4 + 2, 4 + 2))
    # Parameters in the dtype of their buffer are copied into it, and from there to the masters.
    assert _bytes_of_a_start(2, bf16, "bf16") == pytest.approx((2 + 4, 2 + 4))
    assert _bytes_of_a_start(2, fp32, "fp32") == pytest.approx((4, 4))


def test_ranks_start_with_memory_for_the_initial_values_of_one_unit(ranks: Ranks) -> None:
    of_one_unit = 4 / 8
    for stage, of_shards in ((2, 0), (3, 2 / 2)):
        for copied, allocated in ranks(2).run(_bytes_of_a_start, stage, torch.float32, "bf16"):
            assert copied == pytest.approx(4 + 2 + 4 / 2 + of_shards, rel=1e-3)  # besides, the ranks compare facts
            assert allocated == pytest.approx(2 + 4 / 2 + of_shards + of_one_unit, rel=1e-3)
