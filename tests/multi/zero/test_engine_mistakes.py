"""Wrong calls and configs: one clear error on every rank, even if only one rank is wrong, and no rank hangs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.support.job import run_command
from tests.support.log_lines import log_lines
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import Toy, batches, config, train_step
from zeroaccel.errors import ConfigError, EngineStateError, UsageError, ZeroAccelError

Arguments = dict[str, Any]


def _two_groups_of_an_object(model: nn.Module) -> Arguments:
    optimizer = torch.optim.SGD([{"params": [model.embed.weight]}, {"params": [model.norm.weight]}], lr=0.1)
    optimizer.param_groups[1]["params"].append(model.embed.weight)
    return {"config": config(1, optimizer=None), "optimizer": optimizer}


def _unmaterialized(model: nn.Module) -> Arguments:
    with torch.device("meta"):
        return {"config": config(3), "model": Toy()}


def _complex(model: nn.Module) -> Arguments:
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return {"config": config(2)}


def _fresh_optimizer(model: nn.Module) -> Arguments:
    return _given(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def _stepped_optimizer(model: nn.Module) -> Arguments:
    arguments = _fresh_optimizer(model)
    model(batches(0, 1)[0]).backward()
    arguments["optimizer"].step()
    return arguments


def _given(optimizer: Any) -> Arguments:
    return {"config": config(1, optimizer=None), "optimizer": optimizer}


def _named(kind: str, **params: Any) -> Arguments:
    return {"config": config(1, optimizer={"type": kind, "params": params})}


WARMUP = {"type": "WarmupLR", "params": {}}
# unit/config tests the other config mistakes; these cases test that ranks agree on the error of one of them.
CASES: dict[str, tuple[Callable[[Any], Arguments], type[ZeroAccelError], tuple[str, ...]]] = {
    "batch triangle": (
        lambda model: {"config": {**config(1, accumulation=3), "train_batch_size": 16}},
        ConfigError,
        ("16", "2 * 3 * 2 = 12", "train_batch_size"),
    ),
    "unknown key": (
        lambda model: {"config": {**config(1), "gradient_cliping": 1.0}},
        ConfigError,
        ("gradient_cliping", "gradient_clipping"),
    ),
    "missing file": (lambda model: {"config": "nowhere/ds.json"}, ConfigError, ("nowhere/ds.json",)),
    "optimizer twice": (
        lambda model: {"config": config(1), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)},
        ConfigError,
        ("optimizer", "config", "initialize()"),
    ),
    "scheduler twice": (
        lambda model: {"config": config(1, scheduler=WARMUP), "lr_scheduler": lambda optimizer: optimizer},
        ConfigError,
        ("scheduler", "config", "initialize()"),
    ),
    "scheduler without optimizer": (
        lambda model: {"config": config(1, optimizer=None), "lr_scheduler": lambda optimizer: optimizer},
        UsageError,
        ("lr_scheduler", "optimizer"),
    ),
    "optimizer of another model": (
        lambda model: _given(torch.optim.SGD(Toy().parameters(), lr=0.1)),
        UsageError,
        ("optimizer.param_groups[0]['params'][0]", "same model"),
    ),
    "parameter in two groups": (
        lambda model: {
            "config": config(1),
            "model_parameters": [{"params": [model.embed.weight]}, {"params": [model.norm.weight, model.embed.weight]}],
        },
        ConfigError,
        ("embed.weight", "groups 0 and 1"),
    ),
    "parameter in two groups of an object": (_two_groups_of_an_object, ConfigError, ("embed.weight", "groups 0 and 1")),
    "unknown optimizer": (lambda model: _named("Adamw2"), ConfigError, ("optimizer.type", "AdamW")),
    "unknown setting": (
        lambda model: _named("AdamW", momentum=0.9),
        ConfigError,
        ("optimizer.params.momentum", "AdamW"),
    ),
    "no module": (
        lambda model: {"config": config(1), "model": model.parameters},
        UsageError,
        ("initialize(model)", "torch.nn.Module"),
    ),
    "no optimizer": (lambda model: _given(lambda params: None), UsageError, ("initialize(optimizer)", "NoneType")),
    "a closure": (lambda model: _given(torch.optim.LBFGS(model.parameters())), ConfigError, ("LBFGS", "closure")),
    "an update inside backward": (
        lambda model: _given(type("Lomo", (torch.optim.SGD,), {"fused_backward": None})(model.parameters())),
        ConfigError,
        ("Lomo", "inside backward", "AdamW"),
    ),
    "unmaterialized model": (_unmaterialized, UsageError, ("meta",)),
    "complex parameter": (_complex, UsageError, ("phase", "complex64", "view_as_real")),
    "optimizer that has stepped": (_stepped_optimizer, UsageError, ("SGD", "no state")),
    "unknown leaf": (
        lambda model: {"config": config(3, leaf_module={"names": ["layers.7"]})},
        ConfigError,
        ("leaf_module.names", "layers.7"),
    ),
}


# Arguments of the correct ranks if not the plain config, so that the mistake is the only difference.
RIGHT: dict[str, Callable[[nn.Module], Arguments]] = {"optimizer that has stepped": _fresh_optimizer}


def _attempt(name: str, wrong_ranks: tuple[int, ...]) -> tuple[str, str]:
    """Returns (class, message) of the error that `initialize` raised on this rank."""
    model = Toy()
    make = CASES[name][0] if torch.distributed.get_rank() in wrong_ranks else RIGHT.get(name)
    arguments: Arguments = {"config": config(1)} if make is None else make(model)
    try:
        zeroaccel.initialize(**{"model": model, **arguments})
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises_the_same_error(ranks: Ranks, name: str) -> None:
    _, kind, words = CASES[name]
    for wrong_ranks in ((0, 1), (1,)):
        one, other = ranks(2).run(_attempt, name, wrong_ranks, timeout=20)
        assert one == other
        assert one[0] == kind.__name__, one
        assert all(word in one[1] for word in words), one
        if wrong_ranks == (1,):
            assert "rank 1" in one[1]


def _malformed(path: str) -> str:
    return message(ConfigError, zeroaccel.initialize, Toy(), config=path)


def test_a_malformed_file_is_reported_by_line_and_column(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(1), indent=1).replace('"stage": 1,', '"stage" 1,'))
    one, other = ranks(2).run(_malformed, str(path))
    assert one == other
    assert f"{path}:5:" in one or f"{path}:6:" in one


# -- optimizers of unknown classes


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.float().square().mean()


class WithAttributes(torch.optim.SGD):
    """Keeps a setting outside its groups, as many third-party optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.factor = 0.5

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] * self.factor)


def _scheduled_optimizer_with_attributes() -> float:
    model = Matrices()
    before = model.layers[0].weight.detach().clone()
    optimizer = WithAttributes(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine, *_ = zeroaccel.initialize(model, optimizer, lr_scheduler=scheduler, config=config(1, optimizer=None))
    engine.destroy()
    return float((model.layers[0].weight.detach() - before).abs().max())


def test_finding_the_kind_of_an_optimizer_leaves_it_and_the_model_alone(ranks: Ranks) -> None:
    assert ranks(2).run(_scheduled_optimizer_with_attributes)[0] == 0.0


class TwoRules(torch.optim.SGD):
    """Plain SGD, except that a marked group is stepped by its norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                scale = param.grad.norm() if group.get("by_norm") else 1.0
                param.data.add_(param.grad / scale, alpha=-group["lr"])


def _mixed_rules(stage: int) -> tuple[list[tuple[int, ...]], bool]:
    """Returns (shapes of the masters on both ranks, whether the weights equal those of the unsharded optimizer)."""
    torch.manual_seed(3)
    model, plain = Matrices(), Matrices()
    plain.load_state_dict(model.state_dict())

    def rules(of: nn.Module) -> TwoRules:
        one, other = of.parameters()
        return TwoRules([{"params": [one]}, {"params": [other], "by_norm": True}], lr=0.1)

    reference = rules(plain)
    engine, optimizer, *_ = zeroaccel.initialize(model, rules(model), config=config(stage, optimizer=None))
    shapes = [tuple(param.shape) for group in optimizer.param_groups for param in group["params"]]
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        train_step(engine, engine(x))
        plain(x).backward()
        reference.step()
        reference.zero_grad()
    engine.destroy()
    return shapes, all(map(torch.equal, model.parameters(), plain.parameters()))


def test_an_optimizer_of_unknown_class_steps_whole_tensors_in_every_group(ranks: Ranks) -> None:
    one, other = ranks(2).run(_mixed_rules, 2)
    assert one[1]
    assert other[1]
    assert sorted(one[0] + other[0]) == [(8, 8), (8, 8)], "each matrix is whole on one rank"


# -- different models


def _different_settings() -> str:
    accumulation = 1 + torch.distributed.get_rank()
    return message(UsageError, zeroaccel.initialize, Toy(), config=config(3, accumulation=accumulation))


def test_the_ranks_must_have_one_config(ranks: Ranks) -> None:
    one, other = ranks(2).run(_different_settings, timeout=20)
    assert one == other
    assert "accumulation=1 as on rank 0" in one
    assert "accumulation=2 on rank 1" in one


def _different(change: str) -> str:
    model = Toy(layers=2)
    if torch.distributed.get_rank() == 1:
        if change == "shape":
            model.layers[1].up = nn.Linear(23, 5)
        elif change == "frozen":
            model.layers[1].up.weight.requires_grad_(False)
        else:
            model.extra = nn.Parameter(torch.zeros(3))
    return message(UsageError, zeroaccel.initialize, model, config=config(3))


@pytest.mark.parametrize(("change", "word"), [("shape", "(5, 23)"), ("frozen", "frozen"), ("more", "extra")])
def test_the_ranks_must_have_one_model(ranks: Ranks, change: str, word: str) -> None:
    one, other = ranks(2).run(_different, change, timeout=20)
    assert one == other
    assert word in one
    assert "rank 1" in one


# -- calls at the wrong time


def _wrong_calls(stage: int) -> dict[str, str]:
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage))
    batch = batches(engine.collectives.rank, 1)[0]
    calls: dict[str, Callable[[], Any]] = {
        "step first": engine.step,
        "vector": lambda: engine.backward(engine(batch) * torch.ones(3)),
        "number": lambda: engine.backward(1.0),  # type: ignore[arg-type]
        "detached": lambda: engine.backward(engine(batch).detach()),
    }
    messages = {name: message(ZeroAccelError, call) for name, call in calls.items()}
    train_step(engine, engine(batch))
    with pytest.raises(EngineStateError):
        engine.step()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing
    assert engine.temperature is engine.module.temperature
    engine.destroy()
    return messages


@pytest.mark.parametrize("stage", [0, 3])
def test_wrong_calls_say_what_to_do_and_break_nothing(ranks: Ranks, stage: int) -> None:
    for messages in ranks(2).run(_wrong_calls, stage):
        assert "engine.backward(loss)" in messages["step first"]
        assert "(3,)" in messages["vector"]
        assert "float" in messages["number"]
        assert "gradient" in messages["detached"]


def test_an_incomplete_job_environment_is_reported_at_once() -> None:
    program = "import torch, zeroaccel\nzeroaccel.initialize(torch.nn.Linear(2, 2), config={'train_batch_size': 2})"
    result = run_command([sys.executable, "-c", program], env={"WORLD_SIZE": "2", "RANK": "0"})
    assert result.returncode == 1
    assert "MASTER_ADDR" in result.stderr.splitlines()[-1]


def _schedule_without_optimizer() -> tuple[bool, list[str]]:
    settings = {**config(3, optimizer=None), "scheduler": {**WARMUP, "params": {"warmup_num_steps": 2}}}
    with log_lines() as lines:
        engine, optimizer, _, scheduler = zeroaccel.initialize(nn.Linear(2, 2), config=settings)
    engine(torch.ones(1, 2))
    engine.destroy()
    return (optimizer, scheduler) == (None, None), lines


def test_a_scheduler_section_without_an_optimizer_is_ignored_with_a_warning(ranks: Ranks) -> None:
    for alone, lines in ranks(2).run(_schedule_without_optimizer):
        assert alone
        assert sum("scheduler is ignored: this engine is for inference" in line for line in lines) == 1


def _nothing_to_train(frozen: bool, listed: bool) -> str:
    model = torch.nn.Linear(2, 1).requires_grad_(not frozen)
    params = list(model.parameters()) if listed else []
    optimizer = torch.optim.AdamW([{"params": params}, {"params": []}])
    with pytest.raises(UsageError) as raised:
        zeroaccel.initialize(model, optimizer, config={"train_micro_batch_size_per_gpu": 2})
    return str(raised.value)


def test_an_optimizer_needs_a_trainable_parameter(ranks: Ranks) -> None:
    """Regression: the first step missed a backward."""
    where = "optimizer.param_groups: expected a parameter with requires_grad=True"
    for text in ranks(2).run(_nothing_to_train, True, True):
        assert f"{where}, got '2 parameters, all frozen'; call requires_grad_(True)" in text
    for text in ranks(2).run(_nothing_to_train, False, False):
        assert f"{where}, got 'no parameters'; pass parameters that train; the model has 2: weight, bias" in text
