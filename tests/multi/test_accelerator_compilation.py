"""Models that are compiled because the launcher or the script asks for it: the same numbers at every stage."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.multi.pool import Pool
from zeroaccel import Accelerator, ZeroPlugin, logs
from zeroaccel.accelerate.accelerator_arguments import Compilation, compilation_of
from zeroaccel.config.launch.launch_sources import LaunchedSettings
from zeroaccel.errors import ConfigError

Ranks = Callable[[int], Pool]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + torch.tanh(self.inner(inputs))
        return result


def _losses(stage: int, backend: str | None) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(3)], nn.Linear(8, 1))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    plugin = ZeroPlugin({"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero})
    accelerator = Accelerator(zero_plugin=plugin, dynamo_backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(3):
        loss = engine(torch.randn(2, 8, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses, model._compiled_call_impl is not None


def _all() -> list[tuple[list[float], bool]]:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's tracer asks for it itself
    return [_losses(0, None), *(_losses(stage, "eager") for stage in (0, 2, 3))]


def test_compiled_models_train_alike(ranks: Ranks) -> None:
    for plain, *compiled in ranks(2).run(_all):
        assert not plain[1]
        assert compiled == [(plain[0], True)] * 3


def test_blocks_are_compiled_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(2)])
    Compilation("eager", regional=True).apply(model)
    assert [module._compiled_call_impl is not None for module in model] == [False, True, True]
    assert model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("mode", "moves", "warns"),
    [
        ("reduce-overhead", True, True),
        ("max-autotune", True, True),
        ("reduce-overhead", False, False),
        (None, True, False),
    ],
)
def test_graphs_of_parameters_that_move_are_warned_of(
    mode: str | None, moves: bool, warns: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_seen", set())
    logger = logging.getLogger("zeroaccel")
    logger.addHandler(caplog.handler)
    try:
        Compilation("eager", mode).apply(nn.Linear(2, 2), parameters_move=moves)
    finally:
        logger.removeHandler(caplog.handler)
    expected = f'dynamo_mode "{mode}" records CUDA graphs'
    assert [record.getMessage().startswith(expected) for record in caplog.records] == [True] * warns


@pytest.mark.parametrize(
    ("argument", "launched", "expected"),
    [
        (None, LaunchedSettings(), None),
        ("no", LaunchedSettings(dynamo_mode="default"), None),
        (None, LaunchedSettings(dynamo_backend="no"), None),
        ("no", LaunchedSettings(dynamo_backend="eager"), None),
        (None, LaunchedSettings(dynamo_backend="eager", dynamo_use_fullgraph=True), Compilation("eager", None, True)),
        ("INDUCTOR", LaunchedSettings(dynamo_mode="max-autotune"), Compilation("inductor", "max-autotune")),
    ],
)
def test_who_decides(argument: Any, launched: LaunchedSettings, expected: Compilation | None) -> None:
    assert compilation_of(argument, launched, {}) == expected


def test_a_backend_that_is_not_there_is_named_with_its_source() -> None:
    with pytest.raises(ConfigError, match=r"--dynamo_backend: expected a backend of torch.compile .*got 'foo'"):
        compilation_of(None, LaunchedSettings(dynamo_backend="foo"), {"dynamo_backend": "--dynamo_backend"})


def test_how_without_what_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--dynamo_mode: says how to compile: expected a backend"):
        compilation_of(None, LaunchedSettings(dynamo_mode="default"), {"dynamo_mode": "--dynamo_mode"})
