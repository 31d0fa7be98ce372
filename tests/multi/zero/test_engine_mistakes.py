"""Wrong calls and configs: one clear error on every rank, also when one rank alone is wrong, and no rank hangs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.support.job import run_command
from tests.support.pool import Ranks
from tests.support.training import Toy, batches, config
from zeroaccel.errors import ConfigError, EngineStateError, UsageError, ZeroAccelError
from zeroaccel.logs import logger

Arguments = dict[str, Any]


def _without_optimizer(stage: int) -> dict[str, Any]:
    settings = config(stage)
    del settings["optimizer"]
    return settings


def _both_precisions(model: nn.Module) -> Arguments:
    return {"config": {**config(1, "bf16"), "fp16": {"enabled": True}}}


def _open_triangle(model: nn.Module) -> Arguments:
    return {"config": {**config(1, accumulation=3), "train_batch_size": 16}}


def _stage_4(model: nn.Module) -> Arguments:
    return {"config": config(4)}


def _misspelt(model: nn.Module) -> Arguments:
    return {"config": {**config(1), "gradient_cliping": 1.0}}


def _missing_file(model: nn.Module) -> Arguments:
    return {"config": "nowhere/ds_config.json"}


def _two_optimizers(model: nn.Module) -> Arguments:
    return {"config": config(1), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def _two_schedulers(model: nn.Module) -> Arguments:
    section = {"type": "WarmupLR", "params": {}}
    return {"config": config(1, scheduler=section), "lr_scheduler": lambda optimizer: optimizer}


def _scheduler_alone(model: nn.Module) -> Arguments:
    return {"config": _without_optimizer(1), "lr_scheduler": lambda optimizer: optimizer}


def _other_model(model: nn.Module) -> Arguments:
    return {"config": _without_optimizer(1), "optimizer": torch.optim.SGD(Toy().parameters(), lr=0.1)}


def _two_groups(model: nn.Module) -> Arguments:
    shared = model.embed.weight
    groups = [{"params": [shared]}, {"params": [model.norm.weight, shared]}]
    return {"config": config(1), "model_parameters": groups}


def _two_groups_of_an_object(model: nn.Module) -> Arguments:
    optimizer = torch.optim.SGD([{"params": [model.embed.weight]}, {"params": [model.norm.weight]}], lr=0.1)
    optimizer.param_groups[1]["params"].append(model.embed.weight)
    return {"config": _without_optimizer(1), "optimizer": optimizer}


def _unknown_optimizer(model: nn.Module) -> Arguments:
    return {"config": config(1, optimizer={"type": "Adamw2", "params": {}})}


def _unknown_setting(model: nn.Module) -> Arguments:
    return {"config": config(1, optimizer={"type": "AdamW", "params": {"lr": 1e-3, "momentum": 0.9}})}


def _no_module(model: nn.Module) -> Arguments:
    return {"config": config(1), "model": model.parameters}


def _no_optimizer(model: nn.Module) -> Arguments:
    return {"config": _without_optimizer(1), "optimizer": lambda params: None}


def _unmaterialized(model: nn.Module) -> Arguments:
    with torch.device("meta"):
        return {"config": config(3), "model": Toy()}


def _complex(model: nn.Module) -> Arguments:
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return {"config": config(2)}


def _fresh_optimizer(model: nn.Module) -> Arguments:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"config": _without_optimizer(1), "optimizer": optimizer}


def _stepped_optimizer(model: nn.Module) -> Arguments:
    arguments = _fresh_optimizer(model)
    model(batches(0, 1)[0]).backward()
    arguments["optimizer"].step()
    return arguments


def _unknown_leaf(model: nn.Module) -> Arguments:
    return {"config": config(3, leaf_module={"names": ["layers.7"]})}


CASES: dict[str, tuple[Callable[[nn.Module], Arguments], type[ZeroAccelError], tuple[str, ...]]] = {
    "both precisions": (_both_precisions, ConfigError, ("fp16", "bf16")),
    "batch triangle": (_open_triangle, ConfigError, ("16", "2 * 3 * 2 = 12", "train_batch_size")),
    "stage 4": (_stage_4, ConfigError, ("zero_optimization.stage", "0, 1, 2 or 3", "4")),
    "unknown key": (_misspelt, ConfigError, ("gradient_cliping", "gradient_clipping")),
    "missing file": (_missing_file, ConfigError, ("nowhere/ds_config.json",)),
    "optimizer twice": (_two_optimizers, ConfigError, ("optimizer", "config", "initialize()")),
    "scheduler twice": (_two_schedulers, ConfigError, ("scheduler", "config", "initialize()")),
    "scheduler without optimizer": (_scheduler_alone, UsageError, ("lr_scheduler", "optimizer")),
    "optimizer of another model": (_other_model, UsageError, ("optimizer.param_groups[0]['params'][0]", "same model")),
    "parameter in two groups": (_two_groups, ConfigError, ("embed.weight", "groups 0 and 1")),
    "parameter in two groups of an object": (_two_groups_of_an_object, ConfigError, ("embed.weight", "groups 0 and 1")),
    "unknown optimizer": (_unknown_optimizer, ConfigError, ("optimizer.type", "AdamW")),
    "unknown setting": (_unknown_setting, ConfigError, ("optimizer.params.momentum", "AdamW")),
    "no module": (_no_module, UsageError, ("initialize(model)", "torch.nn.Module")),
    "no optimizer": (_no_optimizer, UsageError, ("initialize(optimizer)", "NoneType")),
    "unmaterialized model": (_unmaterialized, UsageError, ("meta",)),
    "complex parameter": (_complex, UsageError, ("phase", "complex64", "view_as_real")),
    "optimizer that has stepped": (_stepped_optimizer, UsageError, ("SGD", "no state")),
    "unknown leaf": (_unknown_leaf, ConfigError, ("leaf_module.names", "layers.7")),
}


# What the other ranks do where that is not the plain config: the mistake is to be the only difference.
RIGHT: dict[str, Callable[[nn.Module], Arguments]] = {"optimizer that has stepped": _fresh_optimizer}


def _attempt(name: str, wrong_ranks: tuple[int, ...]) -> tuple[str, str]:
    """(class, message) of what `initialize` raised on this rank."""
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
    with pytest.raises(ConfigError) as caught:
        zeroaccel.initialize(Toy(), config=path)
    return str(caught.value)


def test_a_malformed_file_is_reported_by_line_and_column(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(1), indent=1).replace('"stage": 1,', '"stage" 1,'))
    one, other = ranks(2).run(_malformed, str(path))
    assert one == other
    assert f"{path}:5:" in one or f"{path}:6:" in one


# -- optimizers that need full parameters


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.float().square().mean()


def _trains_as(engine: Any, plain: nn.Module, reference: torch.optim.Optimizer) -> bool:
    """Whether two steps give the weights of a model that one process trains; destroys the engine."""
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x))
        engine.step()
        plain(x).backward()
        reference.step()
        reference.zero_grad()
    engine.destroy()
    pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _full_tensor_optimizer(kind: str, stage: int, lr: float) -> tuple[str, bool]:
    """(the error, whether training moved the weights as in one process)."""
    torch.manual_seed(3)
    model, plain = Matrices(), Matrices()
    plain.load_state_dict(model.state_dict())
    make = getattr(torch.optim, kind)
    reference = make(plain.parameters(), lr=lr)
    try:
        engine, *_ = zeroaccel.initialize(model, make(model.parameters(), lr=lr), config=_without_optimizer(stage))
    except ConfigError as error:
        return str(error), False
    return "", _trains_as(engine, plain, reference)


@pytest.mark.parametrize("lr", [1e-2, 1e-6])
@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_an_optimizer_that_needs_full_parameters_steps_as_in_torch(ranks: Ranks, kind: str, lr: float) -> None:
    for stage in (0, 1, 2, 3):
        assert ranks(2).run(_full_tensor_optimizer, kind, stage, lr) == [("", True)] * 2


def test_an_optimizer_that_needs_a_closure_is_refused(ranks: Ranks) -> None:
    for stage in (0, 3):
        one, other = ranks(2).run(_full_tensor_optimizer, "LBFGS", stage, 1e-2)
        assert one == other
        assert "LBFGS" in one[0]
        assert "closure" in one[0]


class WithAttributes(torch.optim.SGD):
    """Keeps a setting outside its groups, as many optimizers from elsewhere do."""

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
    engine, *_ = zeroaccel.initialize(model, optimizer, lr_scheduler=scheduler, config=_without_optimizer(1))
    engine.destroy()
    return float((model.layers[0].weight.detach() - before).abs().max())


def test_finding_the_kind_of_an_optimizer_leaves_it_and_the_model_alone(ranks: Ranks) -> None:
    assert ranks(2).run(_scheduled_optimizer_with_attributes)[0] == 0.0


class TwoRules(torch.optim.SGD):
    """Plain SGD, but a group that says so is stepped by its norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                scale = param.grad.norm() if group.get("by_norm") else 1.0
                param.data.add_(param.grad / scale, alpha=-group["lr"])


def _mixed_rules(stage: int) -> tuple[list[tuple[int, ...]], bool]:
    """(shapes of the masters on both ranks, whether the weights are those of the optimizer on the unsharded model)."""
    torch.manual_seed(3)
    model, plain = Matrices(), Matrices()
    plain.load_state_dict(model.state_dict())

    def rules(of: nn.Module) -> TwoRules:
        one, other = of.parameters()
        return TwoRules([{"params": [one]}, {"params": [other], "by_norm": True}], lr=0.1)

    reference = rules(plain)
    engine, optimizer, *_ = zeroaccel.initialize(model, rules(model), config=_without_optimizer(stage))
    shapes = [tuple(param.shape) for group in optimizer.param_groups for param in group["params"]]
    return shapes, _trains_as(engine, plain, reference)


def test_an_optimizer_of_unknown_class_steps_whole_tensors_in_every_group(ranks: Ranks) -> None:
    one, other = ranks(2).run(_mixed_rules, 2)
    assert one[1]
    assert other[1]
    assert sorted(one[0] + other[0]) == [(8, 8), (8, 8)], "each whole on one rank"


# -- different models


def _different_settings() -> str:
    accumulation = 1 + torch.distributed.get_rank()
    with pytest.raises(UsageError) as caught:
        zeroaccel.initialize(Toy(), config=config(3, accumulation=accumulation))
    return str(caught.value)


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
    with pytest.raises(UsageError) as caught:
        zeroaccel.initialize(model, config=config(3))
    return str(caught.value)


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
    messages = {}
    for name, call in calls.items():
        with pytest.raises((UsageError, EngineStateError)) as caught:
            call()
        messages[name] = str(caught.value)
    engine.backward(engine(batch))
    engine.step()
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


def test_half_a_job_is_reported_at_once() -> None:
    program = "import torch, zeroaccel\nzeroaccel.initialize(torch.nn.Linear(2, 2), config={'train_batch_size': 2})"
    result = run_command([sys.executable, "-c", program], env={"WORLD_SIZE": "2", "RANK": "0"})
    assert result.returncode == 1
    assert "MASTER_ADDR" in result.stderr.splitlines()[-1]


def _schedule_without_optimizer() -> tuple[bool, list[str]]:
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    try:
        engine, optimizer, _, scheduler = zeroaccel.initialize(
            nn.Linear(2, 2), config={**_without_optimizer(3), "scheduler": section}
        )
    finally:
        logger.removeHandler(listener)
    engine(torch.ones(1, 2))
    engine.destroy()
    return (optimizer, scheduler) == (None, None), lines


def test_a_scheduler_section_without_an_optimizer_is_ignored_with_a_warning(ranks: Ranks) -> None:
    for alone, lines in ranks(2).run(_schedule_without_optimizer):
        assert alone
        assert sum("scheduler is ignored: this engine is for inference" in line for line in lines) == 1
