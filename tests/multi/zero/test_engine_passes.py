"""Unusual orders of forward, backward and step: the same bits at every stage, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import Block, Run, Toy, batches, config, differences, finished, train_step
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError

Driver = Callable[[Engine, Tensor], Tensor]


def plain(engine: Engine, batch: Tensor) -> Tensor:
    loss: Tensor = engine(batch)
    train_step(engine, loss)
    return loss


def two_forwards(engine: Engine, batch: Tensor) -> Tensor:
    one, other = engine(batch), engine(batch.flip(0) // 2)
    train_step(engine, one + 0.5 * other)
    return one


def two_graphs(engine: Engine, batch: Tensor) -> Tensor:
    one, other = engine(batch), engine(batch.flip(0) // 2)
    engine.backward(one)
    train_step(engine, other)
    return other


def two_graphs_last_first(engine: Engine, batch: Tensor) -> Tensor:
    one, other = engine(batch), engine(batch.flip(0) // 2)
    engine.backward(other)
    train_step(engine, one)
    return other


def retained_graph(engine: Engine, batch: Tensor) -> Tensor:
    loss = engine(batch)
    engine.backward(loss, retain_graph=True)
    train_step(engine, loss)
    return loss


def forward_without_backward(engine: Engine, batch: Tensor) -> Tensor:
    engine(batch // 2)
    return plain(engine, batch)


def _evaluate(engine: Engine, batch: Tensor) -> Tensor:
    engine.eval()
    with torch.no_grad():
        loss: Tensor = engine(batch)
    engine.train()
    return loss


def eval_between_steps(engine: Engine, batch: Tensor) -> Tensor:
    plain(engine, batch)
    return _evaluate(engine, batch)


def eval_before_backward(engine: Engine, batch: Tensor) -> Tensor:
    loss = engine(batch)
    seen = _evaluate(engine, batch)
    train_step(engine, loss)
    return seen + loss


def eval_before_step(engine: Engine, batch: Tensor) -> Tensor:
    engine.backward(engine(batch))
    seen = _evaluate(engine, batch)
    engine.step()
    return seen


def forward_before_step(engine: Engine, batch: Tensor) -> Tensor:
    """Runs a forward with gradients and without a backward: no unsharded weight may survive the update."""
    engine.backward(engine(batch))
    seen = engine(batch)
    engine.step()
    return seen.detach() + _evaluate(engine, batch)


def inference_mode_between_steps(engine: Engine, batch: Tensor) -> Tensor:
    plain(engine, batch)
    with torch.inference_mode():
        seen: Tensor = engine(batch).clone()
    return torch.tensor(seen.item())


def inner_module_alone(engine: Engine, batch: Tensor) -> Tensor:
    """Runs a block and modules of the root outside the root's forward, some with their own backward."""
    model = engine.module
    with torch.no_grad():
        seen = model.layers[1](model.embed(batch)).float().mean()
    loss = engine(batch)
    extra = model.norm(model.layers[2](model.embed(batch))).float().square().mean()
    train_step(engine, loss + 0.1 * extra)
    return seen + loss


def of_objects(engine: Engine, batch: Tensor) -> Tensor:
    return torch.tensor(train_step(engine, engine(batch).loss))


def direct_backward(engine: Engine, batch: Tensor) -> Tensor:
    loss: Tensor = engine(batch)
    loss.backward()
    engine.step()
    return loss


DRIVERS: dict[str, Driver] = {
    driver.__name__: driver
    for driver in (
        plain,
        two_forwards,
        two_graphs,
        two_graphs_last_first,
        retained_graph,
        forward_without_backward,
        eval_between_steps,
        eval_before_backward,
        eval_before_step,
        forward_before_step,
        inference_mode_between_steps,
        inner_module_alone,
        direct_backward,
        of_objects,
    )
}


def drive(settings: dict[str, Any], name: str, make: Callable[[], nn.Module] = Toy, steps: int = 3) -> Run:
    torch.manual_seed(7)
    model = make()
    engine, *_ = zeroaccel.initialize(model, config=settings)
    run = Run()
    for batch in batches(engine.collectives.rank, steps * engine.gradient_accumulation_steps()):
        run.losses.append(DRIVERS[name](engine, batch).item())
        run.norms.append(engine.get_global_grad_norm())
    return finished(engine, run)


def _same(one: list[Run], other: list[Run]) -> list[list[str]]:
    return [differences(a, b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("name", [name for name in DRIVERS if name != "of_objects"])
def test_any_order_of_calls_gives_the_same_bits(ranks: Ranks, name: str) -> None:
    expected = ranks(2).run(drive, config(0, "bf16"), name)
    for stage, changes in ((2, {}), (3, {}), (3, {"stage3_max_reuse_distance": 0})):
        assert _same(expected, ranks(2).run(drive, config(stage, "bf16", **changes), name)) == [[], []], changes


@pytest.mark.parametrize("stage", [0, 3])
def test_a_direct_backward_divides_by_the_accumulation_steps(ranks: Ranks, stage: int) -> None:
    runs = [ranks(2).run(drive, config(stage, accumulation=2), name) for name in ("plain", "direct_backward")]
    assert _same(*runs) == [[], []]


class Changing(Toy):
    """Runs the blocks in the opposite order in every other forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def run_layers(self, x: Tensor) -> Tensor:
        self.forwards += 1
        for layer in list(self.layers)[:: 1 if self.forwards % 2 else -1]:
            x = layer(x)
        return x


def test_a_forward_that_changes_its_order_gives_the_same_bits(ranks: Ranks) -> None:
    expected = ranks(2).run(drive, config(0, "bf16"), "plain", Changing, 6)
    assert _same(expected, ranks(2).run(drive, config(3, "bf16"), "plain", Changing, 6)) == [[], []]


# -- outputs that are not tensors


@dataclass
class Answer:
    hidden: Tensor
    note: str = "kept"


class Hidden:
    """Holds a tensor that no traversal of containers finds."""

    __slots__ = ("_get",)

    def __init__(self, hidden: Tensor) -> None:
        self._get = lambda: hidden

    @property
    def hidden(self) -> Tensor:
        return self._get()


class Dressed(Toy):
    """Blocks that return their tensor in a dataclass, a mapping with attributes, or a custom object."""

    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(tokens), kind="dressed")

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).hidden
        return x


def _dressed(kind: str) -> nn.Module:
    from transformers.utils import ModelOutput  # the class whose subclasses transformers' models return

    @dataclass
    class Output(ModelOutput):
        hidden: Tensor | None = None

    wrap = {
        "dataclass": Answer,
        "ModelOutput": lambda x: Output(hidden=x),
        "object": lambda x: SimpleNamespace(hidden=x),
        "closure": Hidden,
    }
    model = Dressed()
    for layer in model.layers:
        layer.forward = lambda x, layer=layer: wrap[kind](Block.forward(layer, x))
    return model


@pytest.mark.parametrize("kind", ["dataclass", "ModelOutput", "object", "closure"])
def test_outputs_may_be_objects(ranks: Ranks, kind: str) -> None:
    expected = ranks(2).run(drive, config(0, "bf16"), "of_objects", partial(_dressed, kind))
    sharded = ranks(2).run(drive, config(3, "bf16", stage3_max_reuse_distance=0), "of_objects", partial(_dressed, kind))
    assert _same(expected, sharded) == [[], []]


# -- exceptions


class Failing(Toy):
    """Raises in the middle of a forward or of its backward, on demand."""

    failing = ""

    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.failing == "forward":
                raise ValueError("a batch that cannot be read")
            if index == 1 and self.failing == "backward":
                x.register_hook(_refuse)
        return x


def _refuse(grad: Tensor) -> None:
    raise ValueError("a gradient that cannot be computed")


def _train_through(settings: dict[str, Any], failing: str) -> Run:
    torch.manual_seed(7)
    model = Failing()
    engine, *_ = zeroaccel.initialize(model, config=settings)
    run = Run()
    for step, batch in enumerate(batches(engine.collectives.rank, 4)):
        if failing and step in (0, 2):
            model.failing = failing
            with pytest.raises(ValueError, match="cannot be"):
                engine.backward(engine(batch // 2))
            model.failing = ""
            engine.reset()
        run.losses.append(plain(engine, batch).item())
        run.norms.append(engine.get_global_grad_norm())
    return finished(engine, run)


@pytest.mark.parametrize("failing", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_after_an_exception_and_a_reset_training_goes_on(ranks: Ranks, stage: int, failing: str) -> None:
    expected = ranks(2).run(_train_through, config(stage, "bf16"), "")
    assert _same(expected, ranks(2).run(_train_through, config(stage, "bf16"), failing)) == [[], []]


def _forget_the_reset(settings: dict[str, Any]) -> str:
    model = Failing()
    engine, *_ = zeroaccel.initialize(model, config=settings)
    batch = batches(engine.collectives.rank, 1)[0]
    model.failing = "backward"
    with pytest.raises(ValueError, match="cannot be"):
        engine.backward(engine(batch))
    model.failing = ""
    calls = (lambda: engine(batch), lambda: engine.backward(torch.ones((), requires_grad=True)), engine.step)
    messages = [message(EngineStateError, call) for call in calls]
    engine.reset()
    plain(engine, batch)
    engine.destroy()
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_half_a_backward_is_never_stepped(ranks: Ranks, stage: int) -> None:
    assert all("engine.reset()" in said for said in ranks(2).run(_forget_the_reset, config(stage)))


class Careful(Toy):
    """Catches the exception of a block, and continues without that block."""

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x)
            except ValueError:
                x = x * 0.5
        return x


def _reject(module: nn.Module, args: Any) -> None:
    raise ValueError("this block takes no such input")


def _careful() -> nn.Module:
    model = Careful()
    model.layers[1].register_forward_pre_hook(_reject)  # runs before any hook of the engine
    return model


def test_a_model_may_catch_what_its_blocks_raise(ranks: Ranks) -> None:
    expected = ranks(2).run(drive, config(0, "bf16"), "plain", _careful)
    assert _same(expected, ranks(2).run(drive, config(3, "bf16"), "plain", _careful)) == [[], []]
