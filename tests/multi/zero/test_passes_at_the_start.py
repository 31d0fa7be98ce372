"""The start writes weights and states once: buffers are not filled with zeros that the values then replace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroaccel
from zeroaccel.offload.host_buffers import aligned_bytes, aligned_nbytes
from zeroaccel.ops import SGD, Adam, RMSprop
from zeroaccel.ops.shard_step import ShardOptimizer

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
