"""Routes of tokens to experts, and the operations of the host around its wait for the counts of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroaccel.comm.collective_tracker import DONE
from zeroaccel.parallel import expert_dispatch
from zeroaccel.parallel.expert_dispatch import Experts, Routes, _chunks, route


class _Twins:
    """Two ranks with equal tokens."""

    world_size, rank = 2, 0

    def all_gather(self, out: Tensor, own: Tensor, label: str) -> Any:
        out.copy_(own.repeat(2))
        return DONE


class _Operations(TorchDispatchMode):
    """Notes the names of torch's operations, and "WAIT" where the host waits for the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _routed(count: int, monkeypatch: pytest.MonkeyPatch, nbytes: int = 1 << 20) -> tuple[Routes, list[str]]:
    experts = Experts("mixture", nn.Identity(), count, ())
    choices = torch.arange(96).view(48, 2) * 7 % (count + 1)  # number `count` is ignored
    with _Operations() as operations, monkeypatch.context() as patch:
        wait = expert_dispatch._HostCopy.wait

        def noted(copy: Any) -> Any:
            operations.names.append("WAIT")
            return wait(copy)

        patch.setattr(expert_dispatch._HostCopy, "wait", noted)
        routes = route(experts, _Twins(), nbytes, choices, torch.zeros(48, 8))  # type: ignore[arg-type]
    return routes, operations.names


def test_the_host_sorts_before_it_waits_and_does_little_after(monkeypatch: pytest.MonkeyPatch) -> None:
    after = {}
    for count in (4, 64):
        _, names = _routed(count, monkeypatch)
        place = names.index("WAIT")
        assert "aten::sort" in " ".join(names[:place])
        assert "aten::sort" not in " ".join(names[place:])
        after[count] = len(names) - place - 1
    assert after[4] == after[64] <= 12, "torch operations with an idle device, whatever the number of experts"


def test_routes_are_those_of_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    (order, [one]), _ = _routed(8, monkeypatch)
    choices = (torch.arange(96) * 7 % 9).tolist()
    assert order.tolist() == sorted((place for place in range(96) if choices[place] < 8), key=lambda p: choices[p])
    own = [sum(choice == expert for choice in choices) for expert in range(8)]
    assert one.sent == [sum(own[:4]), sum(own[4:])]
    assert one.received == [sum(own[:4])] * 2
    assert one.ids.tolist() == [expert for expert in range(4) for _ in range(own[expert])] * 2
    assert one.fullest == 2 * max(own[:4])
    (same, chunks), _ = _routed(8, monkeypatch, nbytes=1)
    assert torch.equal(same, order)
    assert [(each.first, each.last) for each in chunks] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_chunks_equal_those_of_a_loop_over_experts() -> None:
    """Compared with the plain definition: an expert begins a chunk if it does not fit into the one before it."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        ranks, own, most = rng.integers(1, 5), rng.integers(1, 9), int(rng.integers(0, 60))
        counts = rng.integers(0, 12, (ranks, ranks, own))
        loads, expected, first = np.concatenate([counts.sum(0), counts.sum(1)]), [], 0
        for expert in range(1, own):
            if loads[:, first : expert + 1].sum(1).max() > most:
                expected.append((first, expert))
                first = expert
        assert list(_chunks(counts, most)) == [*expected, (first, own)]
