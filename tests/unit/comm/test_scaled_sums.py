"""Sums on an accelerator with a scale other than 1/W: multiplied before they are added, and rounded once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroaccel.comm import transport
from zeroaccel.comm.transport import NativeTransport

GROUP: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 4)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operation of each reduction, in order."""
    seen: list[Any] = []
    monkeypatch.setattr(transport, "_premul_sum", lambda factor: ("premultiplied", factor))
    monkeypatch.setattr(transport, "_reduce_scatter", lambda out, flat, op, group, async_op: seen.append(op))
    monkeypatch.setattr(dist, "reduce", lambda part, target, op, group, async_op: seen.append(op))
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    return seen


@pytest.mark.parametrize(("backend", "scale", "scales"), [("nccl", 0.25, False), ("nccl", 1, True), ("gloo", 1, False)])
def test_only_scales_other_than_a_mean_are_multiplied(
    monkeypatch: pytest.MonkeyPatch, operations: list[Any], backend: str, scale: float, scales: bool
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"cuda:{backend}")
    assert NativeTransport(GROUP).scales(scale) == scales


def test_a_sum_is_multiplied_before_it_is_added(operations: list[Any]) -> None:
    ranks, out, flat = NativeTransport(GROUP), torch.empty(2), torch.empty(8)
    ranks.reduce_scatter(out, flat, (), 0)
    ranks.reduce_scatter(out, flat, (), 0, scale=2.0)
    ranks.reduce_scatter(torch.empty(8), flat, (8, 0, 0, 0), 0, scale=2.0)
    assert operations == [dist.ReduceOp.AVG, ("premultiplied", 2.0), ("premultiplied", 2.0)]
