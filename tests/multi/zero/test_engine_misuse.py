"""Unusual uses of an engine by programs: correct results, or one error on every rank."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import zeroaccel
from tests.support.log_lines import log_lines
from tests.support.pool import Ranks
from tests.support.refusals import complaint
from tests.support.training import ADAMW, SGD, WIDTH, Toy, batches, config, train_step
from zeroaccel import zero
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError, ZeroAccelError

Misuse = Callable[[Engine], Any]


def _loss(engine: Engine) -> torch.Tensor:
    loss: torch.Tensor = engine(batches(engine.collectives.rank, 1)[0])
    return loss


def _step(engine: Engine) -> None:
    train_step(engine, _loss(engine))


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
    "another parameter": (_new_parameter, "parameter norm.weight: expected a parameter that existed"),
    "another module": (_new_module, "parameter layers.1.up.weight: expected a parameter that existed"),
    "a second engine": (_second_engine, "a parameter of another engine"),
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
        found[name] = complaint(misuse, engine)
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
    elif kind in ("one memory", "overlap", "columns"):
        model, memory = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), torch.randn(6, 8)
        first, second = {
            "one memory": (memory[:4, :4], memory[:4, :4]),
            "overlap": (memory.view(-1)[:16].view(4, 4), memory.view(-1)[15:31].view(4, 4)),
            "columns": (memory[:4, :4], memory[:4, 4:]),  # side by side
        }[kind]
        model[0].weight.data, model[1].weight.data = first, second  # type: ignore[index]
    else:
        with torch.inference_mode():
            model = nn.Linear(4, 1)
    return complaint(lambda: zeroaccel.initialize(model, config=config(3))[0].destroy())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("lazy", "0.weight: expected a shape"),
        ("inference", "inference_mode()"),
        ("one memory", "parameters 0.weight and 1.weight: expected separate memory, or one nn.Parameter"),
        ("overlap", "parameters 0.weight and 1.weight: expected separate memory, or one nn.Parameter"),
        ("columns", "nothing"),
    ],
)
def test_parameters_that_cannot_be_trained_are_named(ranks: Ranks, kind: str, says: str) -> None:
    assert all(says in message for message in ranks(2).run(_unfit, kind))


# -- writes to parameters behind the engine's back

WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "an operator": lambda p: p.__iadd__(1),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "fill_": lambda p: p.fill_(1),
    "zero_ by nn.init": lambda p: nn.init.zeros_(p),
    "an index": lambda p: p.__setitem__(0, 1.0),
    "a view": lambda p: p.view(-1)[:1].fill_(0),
    "a part": lambda p: p.chunk(2)[1].zero_(),
    "detach": lambda p: p.detach().clamp_(-1, 1),
    "data": lambda p: p.data.fill_(1),
    "a parameter of it": lambda p: nn.Parameter(p).fill_(1),
    "an operator on data": lambda p: p.data.__imul__(0.5),
    "other data": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "out": lambda p: torch.add(torch.ones(p.shape), 1, out=p),
}
FQN = "layers.1.up.weight"
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "square": lambda p: p.square().sum(),
    "norm": lambda p: torch.norm(p),
    "cat": lambda p: nn.utils.parameters_to_vector([p]),
    "lerp_": lambda p: torch.zeros(p.shape).lerp_(p, 0.1),
    "_foreach_lerp_": lambda p: torch._foreach_lerp_([torch.zeros(p.shape)], [p], 0.1),
    "copy_": lambda p: torch.zeros(p.shape).copy_(p.detach()),
    "__setitem__": lambda p: torch.zeros(p.shape).__setitem__(slice(None), p.data[:]),
    "clone": lambda p: p.data.clone(),
    "numpy": lambda p: p.data.half().numpy(),
    "item": lambda p: p[0, 0].item(),
    "isnan": lambda p: nn.Parameter(p).isnan(),
    "sum": lambda p: [row.sum() for row in p],
    "equal": lambda p: torch.equal(torch.ones(p.shape), p),
    "pickling": pickle.dumps,
    "deepcopy": lambda p: copy.deepcopy(p.data),
}


def _averaged_from_before() -> str:
    model = Toy()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    engine, *_ = zeroaccel.initialize(model, config=config(3))
    return _said(lambda p: averaged.update_parameters(model), engine)


def _said(write: Callable[[nn.Parameter], Any], engine: Engine) -> str:
    with torch.no_grad():
        return complaint(write, engine.module.get_parameter(FQN))


def _uses_while_sharded() -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Returns the errors of each write and each read of values, and the permitted uses that fail."""
    engine, *_ = zeroaccel.initialize(Toy(), config=config(3))
    _step(engine)
    param = engine.module.get_parameter(FQN)
    said = {name: _said(write, engine) for name, write in WRITES.items()}
    reads = {
        "parameter": isinstance(param, nn.Parameter) and param.requires_grad and param.is_leaf,
        "facts": tuple(param.shape) == (2 * WIDTH + 1, WIDTH) and param.dtype is torch.float32,
        "counts": param.numel() == param.data.view(-1).shape[0]
        and param.stride() == (0, 0)
        and param.is_floating_point(),
        "identity": param in [param] and {param: 1}[param] == 1 and (param == None) is False,  # noqa: E711
        "others like it": torch.zeros_like(param).shape == param.shape and param.new_ones(3).sum() == 3,
        "shown": "nan" in repr(param),
        "the same data": setattr(param, "data", param.data) is None,
        "a parameter of it": nn.Parameter(param).requires_grad,
        "another by its type": type(type(param)(torch.ones(2))) is nn.Parameter,
        "requires_grad_": param.requires_grad_() is param,
        "as another": torch.ones(param.numel()).view_as(param).to(param).sum() == param.numel(),
    }
    read = {name: _said(action, engine) for name, action in READS.items()}
    copied = copy.deepcopy(param)
    read["a copy"] = _said(lambda p: copied.lerp_(torch.ones(p.shape), 0.5), engine)
    with torch.no_grad():
        copied.copy_(torch.ones(param.shape))
    reads["a filled copy"] = type(copied) is nn.Parameter and bool((copied == 1).all())
    _step(engine)
    with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        reads["whole"] = type(param) is nn.Parameter
        param.fill_(0.5)
    _step(engine)
    with zero.GatheredParameters(param):
        reads["written"] = bool((param - 0.5).abs().max() < 0.02)
    engine.destroy()
    reads["afterwards"] = bool((param.data.fill_(2) == 2).all()) and type(param) is nn.Parameter
    return said, read, [name for name, right in reads.items() if not right]


def test_uses_of_sharded_parameters_are_named(ranks: Ranks) -> None:
    for said, read, wrong in ranks(2).run(_uses_while_sharded):
        assert read.pop("a copy").startswith(f"a copy of parameter {FQN}: expected values: it was sharded when it was")
        begins = f"parameter {FQN}: expected no read of its values while it is sharded"
        assert {name: text for name, text in read.items() if not text.startswith(begins)} == {}
        assert [
            name for name, text in read.items() if f"got {name!r}; read it in the model's forward" not in text
        ] == []
        begins = f"parameter {FQN}: expected no write while it is sharded"
        assert [name for name in WRITES if not said[name].startswith(begins)] == []
        assert "got 'fill_'; write inside zero.GatheredParameters" in said["fill_"]
        assert wrong == []

    assert all("got 'copy_'" in said for said in ranks(2).run(_averaged_from_before))


class Penalised(Toy):
    """A model with a penalty on all weights, read outside their modules, and with a parameter among its outputs."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def penalty(self) -> torch.Tensor:
        return 1e-2 * torch.stack([param.square().sum() for param in self.parameters() if param.numel()]).sum()

    def forward(self, tokens: torch.Tensor) -> Any:
        loss = super().forward(tokens)
        return loss + self.penalty() if self.where == "forward" else loss


def _penalised(stage: int, where: str, optimizer: dict[str, Any]) -> list[float]:
    torch.manual_seed(5)
    model = Penalised(where)
    engine, *_ = zeroaccel.initialize(model, config=config(stage, optimizer=optimizer))
    losses = []
    for batch in batches(engine.collectives.rank, 4):
        loss = engine(batch)
        if where == "block":  # and backward outside
            with zero.GatheredParameters(model.parameters()):
                loss = loss + model.penalty()
        train_step(engine, loss)
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / 2)
    engine.destroy()
    return [*losses, float(sum(param.detach().double().abs().sum() for param in model.parameters()))]


def _penalised_runs() -> dict[str, list[list[float]]]:
    places = [(stage, where) for stage in (0, 3) for where in ("forward", "block")]
    return {kind["type"]: [_penalised(*place, kind) for place in places] for kind in (SGD, ADAMW)}


def test_weights_in_the_loss_train_as_in_a_plain_loop(ranks: Ranks) -> None:
    found, other = ranks(2).run(_penalised_runs)
    assert found == other
    for kind, make in (("SGD", torch.optim.SGD), ("AdamW", torch.optim.AdamW)):
        torch.manual_seed(5)
        model = Penalised("forward")
        optimizer = make(model.parameters(), **{"SGD": SGD, "AdamW": ADAMW}[kind]["params"])
        losses = []
        for parts in zip(batches(0, 4), batches(1, 4), strict=True):
            loss = (model(parts[0]) + model(parts[1])) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        losses.append(float(sum(param.detach().double().abs().sum() for param in model.parameters())))
        for run in found[kind]:
            assert run == pytest.approx(losses, rel=1e-5)
        assert found[kind][0] == found[kind][2]  # in forward, at stages 0 and 3
        assert found[kind][1] == found[kind][3]


def _read_unseen() -> str:
    """Reads a parameter in a way that torch's functions do not notice, so the step must detect it."""
    with log_lines() as log:
        engine, *_ = zeroaccel.initialize(Toy(), config=config(3))
        loss = _loss(engine)
        weight = engine.module.layers[1].up.weight
        with zero.GatheredParameters(weight), saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = loss + weight.square().sum()
        train_step(engine, loss)
        engine.destroy()
    return "\n".join(log)


def test_a_step_names_gradients_that_are_nan_throughout(ranks: Ranks) -> None:
    for said in ranks(2).run(_read_unseen):
        assert f"the gradients of {FQN} are NaN throughout, and those of others are not" in said


def _write(engine: Engine) -> None:
    with torch.no_grad():
        engine.module.get_parameter(FQN).mul_(0.5)


def _halve(module: nn.Module, args: Any) -> None:
    module.weight.detach().mul_(0.5)


def _write_in_forward(engine: Engine) -> None:
    with engine.module.get_submodule("layers.1.up").register_forward_pre_hook(_halve), torch.no_grad():
        _loss(engine)


def _write_gathered(engine: Engine) -> None:
    with engine.gathered():
        _write(engine)


def _write_before_step(engine: Engine) -> None:
    engine.backward(_loss(engine))
    _write(engine)
    engine.step()


def _other_data(value: Callable[[torch.Tensor], torch.Tensor]) -> Misuse:
    def write(engine: Engine) -> None:
        param = engine.module.get_parameter(FQN)
        param.data = value(param.data)

    return write


UNSHARDED: dict[str, Misuse] = {
    "": _write,
    "forward": _write_in_forward,
    "gathered": _write_gathered,
    "step": _write_before_step,
    "data": _other_data(lambda data: data * 0.5),
    "shape": _other_data(lambda data: torch.zeros(3, WIDTH)),
    "dtype": _other_data(lambda data: data.half()),
}


def _writes_while_unsharded(stage: int, precision: str, how: str) -> str:
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage, precision))
    _step(engine)
    said = complaint(lambda: (UNSHARDED[how](engine), _step(engine)))
    engine.reset()
    engine.destroy()
    return said


@pytest.mark.parametrize(
    ("stage", "precision", "how", "says"),
    [
        (1, "bf16", "", "lost at the next update from its master"),
        (2, "bf16", "step", "lost at the next update from its master"),
        (3, "fp32", "forward", "lost at the next gather"),
        (3, "bf16", "gathered", "lost at the next gather"),
        (0, "fp32", "", "nothing"),  # it is the master
        (2, "fp32", "step", "nothing"),
        (2, "bf16", "data", "got 'another tensor as .data, which is lost at the next update from its master'"),
        (1, "fp32", "data", "nothing"),
        (1, "fp32", "shape", "expected shape (47, 23), as when the engine was made, got (3, 23)"),
        (1, "fp32", "dtype", "expected torch.float32 on cpu, where the engine keeps it, got 'torch.float16 on cpu'"),
    ],
)
def test_writes_that_do_not_last_are_named(ranks: Ranks, stage: int, precision: str, how: str, says: str) -> None:
    for said in ranks(2).run(_writes_while_unsharded, stage, precision, how):
        assert says in said
        assert says == "nothing" or said.startswith(f"parameter {FQN}: expected ")


class Renormed(Toy):
    """torch's own write to a weight: it renormalizes the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.max_norm = 1.0


def _add_one(param: nn.Parameter) -> None:
    with zero.GatheredParameters(param):
        param.detach().add_(1)


def _allowed(stage: int) -> bool:
    """Tries permanent writes, and one that repeats at each use."""
    model = Renormed()
    engine, *_ = zeroaccel.initialize(model, config=config(stage, "bf16"))
    _step(engine)
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    _step(engine)
    state = {name: torch.ones_like(value) for name, value in Toy().state_dict().items()}
    engine.load_state_dict(state)
    _step(engine)
    with pytest.raises(ZeroAccelError, match="written without a modifier_rank"):
        _add_one(model.frozen)
    _step(engine)
    if stage < 3:  # no other code writes there
        with torch.no_grad():
            model.frozen.fill_(2)
        _step(engine)
    engine.destroy()
    return bool((model.frozen == 2).all()) or stage == 3


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_writes_that_last_are_allowed(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_allowed, stage) == [True, True]


def _moved(stage: int, how: str) -> dict[str, torch.Tensor]:
    """Returns the weights after a step, a permanent write, and another step."""
    torch.manual_seed(3)
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage))
    _step(engine)
    for name in (FQN, "frozen"):
        param = engine.module.get_parameter(name)
        if how == "gathered":
            with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
                param.mul_(0.5)
        elif how == "in place":
            with torch.no_grad():
                param.mul_(0.5)
        else:
            param.data = param.data * 0.5
    _step(engine)
    found = {name: value.clone() for name, value in engine.iter_named_full_params()}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_writes_that_last_have_the_same_effect(ranks: Ranks, stage: int) -> None:
    expected, _ = ranks(2).run(_moved, 3, "gathered")
    for how in ("in place", "other data"):
        for found in ranks(2).run(_moved, stage, how):
            assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def _copies(stage: int) -> list[float]:
    """Returns losses of the model in its engine, a deep copy, a pickled copy, and the copy in its own engine."""
    batch = batches(0, 1)[0]
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage))
    _step(engine)
    if engine.settings.plan.params:
        with pytest.raises(
            EngineStateError, match=r"of a copied \w+: [\w.]+ was sharded .*copy inside .*engine.gathered"
        ):
            copy.deepcopy(engine.module)(batch)
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
    """Wraps modules after the engine was made; wrappers add no parameters."""
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
