"""Models compiled with CUDA graphs are refused, because sharded parameters move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroaccel.errors import UsageError
from zeroaccel.zero.compiled import check_no_recorded_graphs

# From modules that torch's compiler imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_graphs_are_refused_by_the_name_of_the_module(mode: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile(mode=mode)
    with pytest.raises(UsageError, match=r"torch\.compile of 1: expected a mode without CUDA graphs"):
        check_no_recorded_graphs(model)
    with pytest.raises(UsageError, match=r"torch\.compile of OptimizedModule"):
        check_no_recorded_graphs(torch.compile(nn.Linear(2, 2), mode=mode))


@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
def test_other_modes_pass(mode: str | None) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile(mode=mode)
    check_no_recorded_graphs(model)
    check_no_recorded_graphs(torch.compile(nn.Linear(2, 2), backend="eager"))
