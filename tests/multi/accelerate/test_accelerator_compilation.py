"""Models compiled by a request of the launcher or the script give the same numbers at every stage."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import train_step
from zeroaccel import Accelerator, ZeroPlugin, logs
from zeroaccel.accelerate.accelerator_arguments import Compilation, compilation_of
from zeroaccel.config import load_config
from zeroaccel.config.launch.launch_sources import LaunchedSettings
from zeroaccel.errors import ConfigError
from zeroaccel.setup import job


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
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's tracer triggers it
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
def test_argument_overrides_launcher_settings(
    argument: Any, launched: LaunchedSettings, expected: Compilation | None
) -> None:
    assert compilation_of(argument, launched, {}) == expected


def test_an_unknown_backend_is_named_with_its_source() -> None:
    with pytest.raises(ConfigError, match=r"--dynamo_backend: expected a backend of torch.compile .*got 'foo'"):
        compilation_of(None, LaunchedSettings(dynamo_backend="foo"), {"dynamo_backend": "--dynamo_backend"})


def test_a_mode_without_a_backend_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--dynamo_mode: options of torch\.compile: expected a backend"):
        compilation_of(None, LaunchedSettings(dynamo_mode="default"), {"dynamo_mode": "--dynamo_mode"})


# -- the `compile` section of the config, and `engine.compile`


def own_backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
    """Returns the graph's forward unchanged."""
    return graph.forward


def _trained(stage: int, section: dict[str, Any] | None = None, backend: str = "") -> tuple[list[float], Any, int]:
    """Returns the losses of four steps, the bytes of the weights, and the number of compiled graphs.

    Args:
        backend: backend for `engine.compile`, called after two steps.
    """
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's tracer triggers it
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(3)], nn.Linear(8, 1))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zeroaccel.initialize(model, config=settings | ({} if section is None else {"compile": section}))
    generator = torch.Generator().manual_seed(engine.collectives.rank)
    losses = []
    for step in range(4):
        if backend and step == 2:
            engine.compile(backend=backend)
        losses.append(train_step(engine, engine(torch.randn(2, 8, generator=generator)).square().mean()))
    engine.destroy()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    return losses, weights.numpy().tobytes(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _by_section(stage: int, backend: str) -> list[tuple[list[float], Any, int]]:
    sections = [
        {"enabled": True, "backend": backend, "kwargs": {"dynamic": False}},
        {"enabled": True, "disable": True, "backend": backend},
    ]
    return [_trained(stage), *(_trained(stage, section) for section in sections), _trained(stage, None, backend)]


@pytest.mark.parametrize(
    ("backend", "stage"),
    [
        ("eager", 3),
        *(pytest.param("eager", stage, marks=pytest.mark.slow) for stage in range(3)),
        *(pytest.param("aot_eager", stage, marks=pytest.mark.slow) for stage in range(4)),
    ],
)
def test_the_compile_section_and_engine_compile_change_no_bit(ranks: Ranks, stage: int, backend: str) -> None:
    for plain, *compiled in ranks(2).run(_by_section, stage, backend):
        assert plain[2] == 0
        assert [run[:2] for run in compiled] == [plain[:2]] * 3
        assert [run[2] > 0 for run in compiled] == [True, False, True]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, None),
        ({"enabled": False}, None),
        ({"disable": True}, None),
        ({"enabled": True, "kwargs": {"disable": True}}, None),
        ({"backend": "eager"}, None),
        ({"enabled": True}, ("inductor", None, False, None, None)),
        ({"enabled": "true", "backend": "EAGER"}, ("eager", None, False, None, None)),
        ({"disable": False, "backend": f"{__name__}.own_backend"}, (own_backend, None, False, None, None)),
        (
            {"enabled": True, "kwargs": {"mode": "default", "fullgraph": True, "options": {"max_autotune": True}}},
            ("inductor", None, True, None, {"max_autotune": True}),
        ),
        ({"enabled": True, "kwargs": {"mode": "max-autotune"}}, ("inductor", "max-autotune", False, None, None)),
    ],
)
def test_the_compile_section_is_read(section: dict[str, Any], expected: tuple[Any, ...] | None) -> None:
    found = job.compilation_of(load_config({"compile": section}))
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.backend, found.mode, found.fullgraph, found.dynamic, found.options) == expected


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"enabled": True, "backend": "inductr"}, r"compile\.backend: expected a backend of torch\.compile \(eager, "),
        ({"enabled": True, "backend": "no.such"}, r"compile\.backend: No module named 'no': expected module\.function"),
        (
            {"enabled": True, "kwargs": {"mode": "max-autotune", "options": {"trace": True}}},
            r"compile\.kwargs\.mode: set together with options; keep one of them",
        ),
        ({"enabled": True, "kwargs": {"mode": "fast"}}, r"compile\.kwargs\.mode: expected "),
        ({"enabled": True, "kwargs": {"full_graph": True}}, r'compile\.kwargs\.full_graph: unknown key; .*"fullgraph"'),
        ({"enabled": "maybe"}, r"compile\.enabled: expected true or false, got 'maybe'"),
    ],
)
def test_a_compile_section_that_is_wrong_is_refused_by_key(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job.compilation_of(load_config({"compile": section}))


@pytest.mark.parametrize(
    ("section", "notes"),
    [
        ({"backend": "eager"}, ['compile.backend: nothing is compiled; add "enabled": true']),
        ({"kwargs": {"fullgraph": True}}, ['compile.kwargs: nothing is compiled; add "enabled": true']),
        ({"enabled": False, "backend": "eager"}, ["compile.backend: nothing is compiled"]),
        ({"enabled": True, "disable": True}, ["compile.enabled: the model is not compiled because disable is true"]),
        ({"enabled": True, "backend": "eager"}, []),
    ],
)
def test_a_compile_section_that_does_nothing_leaves_a_note(section: dict[str, Any], notes: list[str]) -> None:
    assert list(load_config({"compile": section}).notes) == notes
