"""What programs do to an engine that its loop does not foresee: the right numbers, or one sentence on every rank."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.multi.pool import Pool
from tests.multi.training import WIDTH, Toy, batches, config
from zeroaccel.errors import ZeroAccelError
from zeroaccel.zero.engine import Engine

Ranks = Callable[[int], Pool]
Misuse = Callable[[Engine], Any]


def _loss(engine: Engine) -> torch.Tensor:
    loss: torch.Tensor = engine(batches(engine.collectives.rank, 1)[0])
    return loss


def _step(engine: Engine) -> None:
    engine.backward(_loss(engine))
    engine.step()


def _retained_over_a_step(engine: Engine) -> None:
    loss = _loss(engine)
    engine.backward(loss, retain_graph=True)
    engine.step()
    loss.backward()


def _late_backward(engine: Engine) -> None:
    loss = _loss(engine)
    _step(engine)
    engine.backward(loss)


def _steps_the_optimizer(engine: Engine) -> None:
    engine.backward(_loss(engine))
    engine.optimizer.step()


def _new_parameter(engine: Engine) -> None:
    engine.module.norm.weight = nn.Parameter(torch.ones(WIDTH))
    _step(engine)


def _new_module(engine: Engine) -> None:
    engine.module.layers[1].up = nn.Linear(WIDTH, 2 * WIDTH + 1)
    _step(engine)


def _second_engine(engine: Engine) -> None:
    zeroaccel.initialize(engine.module, config=config(1))


def _traces(engine: Engine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        torch.jit.trace(engine.module, batches(0, 1)[0])


ALWAYS: dict[str, tuple[Misuse, str]] = {
    "a graph retained over a step": (_retained_over_a_step, "a backward through a forward from before the last update"),
    "a backward after the next step": (_late_backward, "a backward through a forward from before the last update"),
    "optimizer.step()": (_steps_the_optimizer, "optimizer.step(): the engine steps it"),
    "another parameter": (_new_parameter, "parameter norm.weight: expected one that was there"),
    "another module": (_new_module, "parameter layers.1.up.weight: expected one that was there"),
    "a second engine": (_second_engine, "one that another engine holds"),
    "a copied engine": (copy.deepcopy, "an engine cannot be copied or pickled"),
    "a pickled engine": (pickle.dumps, "an engine cannot be copied or pickled"),
}
SHARDED: dict[str, tuple[Misuse, str]] = {
    "the model's state dict": (lambda engine: engine.module.state_dict(), "state_dict(): "),
    "a block's state dict": (lambda engine: engine.module.layers[0].state_dict(), "layers.0.norm.weight is sharded"),
    "a pickled model": (lambda engine: pickle.dumps(engine.module), "pickling the model: "),
    "torch.jit.trace": (_traces, "torch.jit.trace of a sharded model"),
}


def _messages(stage: int) -> dict[str, str]:
    found = {}
    for name, (misuse, _) in {**ALWAYS, **(SHARDED if stage == 3 else {})}.items():
        engine, *_ = zeroaccel.initialize(Toy(), config=config(stage))
        try:
            misuse(engine)
        except ZeroAccelError as error:
            found[name] = str(error)
        engine.reset()
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_misuse_is_named(ranks: Ranks, stage: int) -> None:
    cases = {**ALWAYS, **(SHARDED if stage == 3 else {})}
    one, other = ranks(2).run(_messages, stage)
    assert one == other
    assert list(one) == list(cases)
    assert [name for name, (_, says) in cases.items() if says not in one[name]] == []


def _unfit(kind: str) -> str:
    if kind == "lazy":
        model: nn.Module = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    else:
        with torch.inference_mode():
            model = nn.Linear(4, 1)
    with pytest.raises(ZeroAccelError) as caught:
        zeroaccel.initialize(model, config=config(3))
    return str(caught.value)


@pytest.mark.parametrize(("kind", "says"), [("lazy", "0.weight: expected a shape"), ("inference", "inference_mode()")])
def test_parameters_that_cannot_be_trained_are_named(ranks: Ranks, kind: str, says: str) -> None:
    assert all(says in message for message in ranks(2).run(_unfit, kind))


def _copies(stage: int) -> list[float]:
    """Losses of the model in the engine, of a deep copy, of a pickled copy, and of the copy in an engine of its own."""
    batch = batches(0, 1)[0]
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage))
    _step(engine)
    with engine.gathered():
        twin = copy.deepcopy(engine.module)
    pickled = pickle.loads(pickle.dumps(twin))
    with torch.no_grad():
        losses = [float(model(batch)) for model in (engine, twin, pickled)]
    _step(engine)  # the copies do not follow
    second, *_ = zeroaccel.initialize(twin, config=config(stage))
    with torch.no_grad():
        losses.append(float(second(batch)))
    _step(second)
    second.destroy()
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_a_copy_of_the_model_is_an_ordinary_one(ranks: Ranks, stage: int) -> None:
    for losses in ranks(2).run(_copies, stage):
        assert len(set(losses)) == 1


def _wrapped(stage: int) -> bool:
    """Wrappers around modules may come after the engine: they bring no parameters."""
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage))
    _step(engine)
    engine.module.layers[1] = nn.Sequential(engine.module.layers[1])
    before = _loss(engine).item()
    _step(engine)
    after = _loss(engine).item()
    engine.destroy()
    return after < before


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_may_be_wrapped_later(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_wrapped, stage) == [True, True]
