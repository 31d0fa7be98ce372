"""Compiled models and blocks: the numbers of eager ones, graph breaks at units only, errors that name the module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import train_step
from zeroaccel.errors import ConfigError, EngineStateError, UsageError

_BLOCKS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + torch.tanh(self.dropout(self.inner(inputs)))
        return result


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), *[Block() for _ in range(_BLOCKS)], nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def _model() -> Network:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's tracer triggers it
    warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)  # inductor's
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    return Network()


def _engine(model: nn.Module, stage: int, optimizer: str = "SGD", **sections: Any) -> Any:
    params = {"lr": 0.1, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.1}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": optimizer, "params": params}}
    return zeroaccel.initialize(model, config=config | {"zero_optimization": zero} | sections)[0]


def _blocks(model: Network, **arguments: Any) -> None:
    for block in model.layers[1 : 1 + _BLOCKS]:
        block.compile(**arguments)


Way = Callable[[Any, Network, str], None]
_WAYS: dict[str, Way] = {
    "eager": lambda engine, model, backend: None,
    "engine": lambda engine, model, backend: engine.compile(backend=backend),
    "model": lambda engine, model, backend: model.compile(backend=backend),
    "blocks": lambda engine, model, backend: _blocks(model, backend=backend, fullgraph=True),
}


def _trained(stage: int, way: str, *, begin: int = 0, optimizer: str = "SGD", **sections: Any) -> tuple[Any, ...]:
    """Returns losses, weights, number of graphs, foreign reasons of graph breaks, and number of graph breaks.

    Args:
        begin: the step before which the model is compiled.
    """
    model = _model()
    engine = _engine(model, stage, optimizer, **sections)
    generator = torch.Generator().manual_seed(engine.collectives.rank)
    losses = []
    for step in range(3):
        if step == begin:
            _WAYS[way](engine, model, "aot_eager")
        losses.append(train_step(engine, engine(torch.randn(2, 8, generator=generator)).square().mean()))
    engine.destroy()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    counters = torch._dynamo.utils.counters
    breaks = counters["graph_break"]
    foreign = [reason for reason in breaks if "Hooks._around" not in reason or "torch.compiler.disable" not in reason]
    return losses, weights.numpy().tobytes(), counters["stats"]["unique_graphs"], foreign, sum(breaks.values())


def _pair(stage: int, way: str, recomputes: bool, optimizer: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    sections = {"activation_checkpointing": {"wrap_blocks": True}} if recomputes else {}
    begin = 1 if way == "model" else 0  # the model is compiled after the first step
    eager = _trained(stage, "eager", optimizer=optimizer, **sections)
    return eager, _trained(stage, way, begin=begin, optimizer=optimizer, **sections)


_CASES = [(3, "engine", True), (3, "blocks", False), (1, "blocks", True)]
_MORE = [(stage, way, again) for stage in range(4) for way in ("engine", "model", "blocks") for again in (True, False)]


@pytest.mark.parametrize(
    ("stage", "way", "recomputes"),
    [*_CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in _MORE if case not in _CASES)],
)
def test_compiled_training_has_the_bits_of_eager_and_graphs_end_at_units(
    ranks: Ranks, stage: int, way: str, recomputes: bool
) -> None:
    # At stage 3 each layer is a unit. The compiler counts a break for the hook before each of the five, and one for the
    # hook after each kind of layer, whose graphs are shared. The hooks of blocks compiled one by one are outside of the
    # graphs.
    graphs, ends = (3, _BLOCKS + 2 + 2) if way != "blocks" and stage == 3 else (1, 0)
    optimizer = "AdamW" if way == "blocks" else "SGD"
    for eager, compiled in ranks(2).run(_pair, stage, way, recomputes, optimizer):
        assert eager[2:] == (0, [], 0)
        assert compiled == (*eager[:2], graphs, [], ends)


def _refusals() -> list[str]:
    said = []
    batch = torch.ones(2, 8)
    model = _model()
    engine = _engine(model, 3)
    said.append(message(ConfigError, engine.compile, backend="aot_eagr"))
    before = torch._inductor.config.cpp.cxx
    torch._inductor.config.cpp.cxx = ("no-such-compiler",)
    try:
        said.append(message(ConfigError, engine.compile))
        _blocks(model)
        said.append(message(ConfigError, _engine, _model_of_compiled_blocks(), 3))
    finally:
        torch._inductor.config.cpp.cxx = before
    engine.compile(backend="eager", fullgraph=True)
    said.append(message(UsageError, engine, batch))
    said.append(message(EngineStateError, torch.compile(engine, backend="eager"), batch))
    engine.destroy()
    return said


def _model_of_compiled_blocks() -> Network:
    model = _model()
    _blocks(model)
    return model


def test_models_that_cannot_be_compiled_are_refused_by_name(ranks: Ranks) -> None:
    for name, compiler, own, fullgraph, engine in ranks(2).run(_refusals):
        assert name.startswith("engine.compile(backend): expected a backend of torch.compile (eager, aot_eager, ")
        assert compiler.startswith('engine.compile(backend): "inductor": expected a C++ compiler on each machine')
        assert 'use the backend "aot_eager"' in compiler
        assert own.startswith('torch.compile of layers.1: "inductor": expected a C++ compiler')
        assert fullgraph.startswith("torch.compile of Network: expected one graph, because fullgraph is set, got")
        assert fullgraph.endswith("gather hooks break a graph at each sharded unit")
        assert engine.startswith("torch.compile(engine): expected the model to be compiled")


def _by_inductor(stage: int, recomputes: bool) -> tuple[list[float], list[float], list[float]]:
    """Returns losses of the engine, of a plain loop, and of the same loop without a compiler, on equal batches."""
    model = _model().eval()
    engine = _engine(model, stage, **({"activation_checkpointing": {"wrap_blocks": True}} if recomputes else {}))
    model.eval()
    engine.compile()
    losses: list[list[float]] = [[], [], []]
    for index, compiled in enumerate((True, True, False)):
        generator = torch.Generator().manual_seed(7)
        plain = _model().eval() if index else model
        if index and compiled:
            plain.compile()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9) if index else None
        for _ in range(3):
            loss = (plain if index else engine)(torch.randn(2, 8, generator=generator)).square().mean()
            losses[index].append(loss.item())
            (loss.backward if index else lambda: engine.backward(loss))()  # noqa: B023
            (optimizer or engine).step()
            if optimizer is not None:
                optimizer.zero_grad()
    engine.destroy()
    return losses[0], losses[1], losses[2]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recomputes"), [(0, False), (3, False), (3, True)])
def test_inductor_differs_from_eager_as_in_a_plain_process(ranks: Ranks, stage: int, recomputes: bool) -> None:
    for ours, plain, eager in ranks(2).run(_by_inductor, stage, recomputes):
        own = max(abs(a - b) for a, b in zip(plain, eager, strict=True))
        assert ours == pytest.approx(plain, abs=max(own, 1e-7), rel=0)
