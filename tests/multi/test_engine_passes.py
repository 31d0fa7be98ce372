"""Other orders of forward, backward and step than the textbook's: the same bits at every stage, or a clear error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroaccel
from tests.multi.pool import Pool
from tests.multi.training import Block, Run, Toy, batches, config, differences, recording
from zeroaccel.errors import EngineStateError
from zeroaccel.zero.engine import Engine

Ranks = Callable[[int], Pool]
Driver = Callable[[Engine, Tensor], Tensor]


def plain(engine: Engine, batch: Tensor) -> Tensor:
    loss: Tensor = engine(batch)
    engine.backward(loss)
    engine.step()
    return loss


def two_forwards(engine: Engine, batch: Tensor) -> Tensor:
    one, other = engine(batch), engine(batch.flip(0) // 2)
    engine.backward(one + 0.5 * other)
    engine.step()
    return one


def two_graphs(engine: Engine, batch: Tensor) -> Tensor:
    one, other = engine(batch), engine(batch.flip(0) // 2)
    engine.backward(one)
    engine.backward(other)
    engine.step()
    return other


def two_graphs_last_first(engine: Engine, batch: Tensor) -> Tensor:
    one, other = engine(batch), engine(batch.flip(0) // 2)
    engine.backward(other)
    engine.backward(one)
    engine.step()
    return other


def retained_graph(engine: Engine, batch: Tensor) -> Tensor:
    loss = engine(batch)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
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
    engine.backward(loss)
    engine.step()
    return seen + loss


def eval_before_step(engine: Engine, batch: Tensor) -> Tensor:
    engine.backward(engine(batch))
    seen = _evaluate(engine, batch)
    engine.step()
    return seen


def forward_before_step(engine: Engine, batch: Tensor) -> Tensor:
    """With gradients on, and no backward after it: nothing it made whole may outlive the update."""
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
    """A block, and modules that the root owns, outside the root's forward, some with a backward of their own."""
    model = engine.module
    with torch.no_grad():
        seen = model.layers[1](model.embed(batch)).float().mean()
    loss = engine(batch)
    extra = model.norm(model.layers[2](model.embed(batch))).float().square().mean()
    engine.backward(loss + 0.1 * extra)
    engine.step()
    return seen + loss


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
    )
}


def drive(settings: dict[str, Any], name: str, make: Callable[[], nn.Module] = Toy, steps: int = 4) -> Run:
    torch.manual_seed(7)
    model = make()
    engine, *_ = zeroaccel.initialize(model, config=settings)
    run = Run()
    for batch in batches(engine.collectives.rank, steps * engine.gradient_accumulation_steps()):
        run.losses.append(DRIVERS[name](engine, batch).item())
        run.norms.append(engine.get_global_grad_norm())
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run


def _same(one: list[Run], other: list[Run]) -> list[list[str]]:
    return [differences(a, b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("name", DRIVERS)
def test_any_order_of_calls_gives_the_same_bits(ranks: Ranks, name: str) -> None:
    expected = ranks(2).run(drive, config(0, "bf16"), name)
    for stage, changes in ((2, {}), (3, {}), (3, {"stage3_max_reuse_distance": 0})):
        assert _same(expected, ranks(2).run(drive, config(stage, "bf16", **changes), name)) == [[], []], changes


@pytest.mark.parametrize("stage", [0, 3])
def test_a_direct_backward_divides_by_the_accumulation_steps(ranks: Ranks, stage: int) -> None:
    runs = [ranks(2).run(drive, config(stage, accumulation=2), name) for name in ("plain", "direct_backward")]
    assert _same(*runs) == [[], []]


class Changing(Toy):
    """Every other forward runs the blocks in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.forwards += 1
        order = list(self.layers) if self.forwards % 2 else list(self.layers)[::-1]
        x = self.embed(tokens[:, :-1])
        for layer in order:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def test_a_forward_that_changes_its_order_gives_the_same_bits(ranks: Ranks) -> None:
    expected = ranks(2).run(drive, config(0, "bf16"), "plain", Changing, 6)
    assert _same(expected, ranks(2).run(drive, config(3, "bf16"), "plain", Changing, 6)) == [[], []]


# -- outputs that are not tensors


@dataclass
class Answer:
    hidden: Tensor
    note: str = "kept"


class Hidden:
    """Holds a tensor where nobody finds it without asking."""

    __slots__ = ("_get",)

    def __init__(self, hidden: Tensor) -> None:
        self._get = lambda: hidden

    @property
    def hidden(self) -> Tensor:
        return self._get()


class Dressed(Toy):
    """Blocks that return their tensor in a dataclass, a mapping with attributes, or an object of their own."""

    kind = "dataclass"

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x).hidden
        logits = self.head(self.norm(x))
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()), kind=self.kind
        )


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


def _drive_dressed(settings: dict[str, Any], kind: str) -> Run:
    torch.manual_seed(7)
    model = _dressed(kind)
    engine, *_ = zeroaccel.initialize(model, config=settings)
    run = Run()
    for batch in batches(engine.collectives.rank, 3):
        loss = engine(batch).loss
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.item())
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run


@pytest.mark.parametrize("kind", ["dataclass", "ModelOutput", "object", "closure"])
def test_outputs_may_be_objects(ranks: Ranks, kind: str) -> None:
    expected = ranks(2).run(_drive_dressed, config(0, "bf16"), kind)
    sharded = ranks(2).run(_drive_dressed, config(3, "bf16", stage3_max_reuse_distance=0), kind)
    assert _same(expected, sharded) == [[], []]


# -- exceptions


class Failing(Toy):
    """Raises in the middle of a forward or of its backward when told to."""

    failing = ""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.failing == "forward":
                raise ValueError("a batch that cannot be read")
            if index == 1 and self.failing == "backward":
                x.register_hook(_refuse)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


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
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run


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
    messages = []
    for call in (lambda: engine(batch), lambda: engine.backward(torch.ones((), requires_grad=True)), engine.step):
        with pytest.raises(EngineStateError) as caught:
            call()
        messages.append(str(caught.value))
    engine.reset()
    plain(engine, batch)
    engine.destroy()
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_half_a_backward_is_never_stepped(ranks: Ranks, stage: int) -> None:
    for message in ranks(2).run(_forget_the_reset, config(stage)):
        assert "engine.reset()" in message


class Careful(Toy):
    """Catches what one of its blocks raises, and goes on without that block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            try:
                x = layer(x)
            except ValueError:
                x = x * 0.5
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _reject(module: nn.Module, args: Any) -> None:
    raise ValueError("this block takes no such input")


def _careful() -> nn.Module:
    model = Careful()
    model.layers[1].register_forward_pre_hook(_reject)  # runs before any hook of the engine
    return model


def test_a_model_may_catch_what_its_blocks_raise(ranks: Ranks) -> None:
    expected = ranks(2).run(drive, config(0, "bf16"), "plain", _careful)
    assert _same(expected, ranks(2).run(drive, config(3, "bf16"), "plain", _careful)) == [[], []]


# -- several engines, and the end of one


def _alternate(stages: tuple[int, int], together: bool) -> list[Run]:
    engines, models = [], []
    for index, stage in enumerate(stages):
        torch.manual_seed(7 + index)
        models.append(Toy(layers=2 + index))
        engines.append(zeroaccel.initialize(models[-1], config=config(stage, "bf16"))[0])
    runs = [Run(), Run()]
    data = batches(engines[0].collectives.rank, 3)
    order: Iterator[tuple[int, Tensor]] = iter(
        [(i, b) for b in data for i in (0, 1)] if together else [(i, b) for i in (0, 1) for b in data]
    )
    for index, batch in order:
        runs[index].losses.append(plain(engines[index], batch).item())
    for engine, model, run in zip(engines, models, runs, strict=True):
        engine.destroy()
        run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return runs


@pytest.mark.parametrize("stages", [(3, 3), (1, 3)])
def test_two_engines_do_not_disturb_each_other(ranks: Ranks, stages: tuple[int, int]) -> None:
    apart, together = (ranks(2).run(_alternate, stages, order) for order in (False, True))
    for rank in range(2):
        assert _same(apart[rank], together[rank]) == [[], []]


def _destroy(stage: int) -> tuple[list[str], float]:
    torch.manual_seed(7)
    model = Toy()
    engine, *_ = zeroaccel.initialize(model, config=config(stage))
    batch = batches(engine.collectives.rank, 1)[0]
    before = plain(engine, batch).item()
    engine.destroy()
    engine.destroy()
    left = []
    for name, param in model.named_parameters():
        if not torch.isfinite(param).all():
            left.append(f"{name} is not whole")
        if param.untyped_storage().nbytes() != param.numel() * param.itemsize:
            left.append(f"{name} is a view of something larger")
        if param._post_accumulate_grad_hooks:
            left.append(f"{name} has a hook")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or type(module._parameters) is not dict:
            left.append(f"{name} has a hook")
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    loss = model(batch)
    loss.backward()
    assert loss.item() != before
    assert model.layers[0].up.weight.grad is not None
    with pytest.raises(EngineStateError, match="destroy"):
        engine(batch)
    return left, loss.item()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_destroy_gives_an_ordinary_model_back(ranks: Ranks, stage: int) -> None:
    for left, _ in ranks(2).run(_destroy, stage):
        assert left == []


# -- what a sharded model shows


def _look_between_steps() -> list[str]:
    engine, *_ = zeroaccel.initialize(Toy(), config=config(3, "bf16"))
    plain(engine, batches(engine.collectives.rank, 1)[0])
    wrong = []
    for (name, param), (_, whole) in zip(engine.module.named_parameters(), Toy().named_parameters(), strict=True):
        if param.shape != whole.shape or param.dtype is not torch.bfloat16 or param.numel() != whole.numel():
            wrong.append(f"{name} changed its face")
        if not (param + 1).isnan().all():
            wrong.append(f"{name} can be read although it is not here")
    assert "nan" in repr(engine.module.embed.weight)
    engine.module.norm.weight.clone().sum().item()
    with pytest.raises(EngineStateError, match="sharded"):
        engine.state_dict()
    engine.destroy()
    return wrong


def test_a_sharded_parameter_reads_nan(ranks: Ranks) -> None:
    assert ranks(2).run(_look_between_steps) == [[], []]


def test_parameters_smaller_than_the_world(ranks: Ranks) -> None:
    expected = ranks(4).run(drive, config(0), "plain", steps=3)
    for stage in (2, 3):
        assert _same(expected, ranks(4).run(drive, config(stage), "plain", steps=3)) == [[]] * 4


# -- inference


def _infer(stage: int, precision: str, with_gradients: bool) -> tuple[list[float], int]:
    torch.manual_seed(7)
    settings = {**config(stage, precision), "optimizer": None}
    del settings["optimizer"]
    engine, optimizer, loader, scheduler = zeroaccel.initialize(Toy(), config=settings)
    assert (optimizer, loader, scheduler) == (None, None, None)
    with torch.set_grad_enabled(with_gradients):
        losses = [engine(batch).item() for batch in batches(0, 5)]
    assert engine.model_state_nbytes()["optimizer"] == engine.model_state_nbytes()["gradients"] == 0
    with pytest.raises(EngineStateError, match="optimizer"):
        engine.backward(torch.ones((), requires_grad=True))
    with pytest.raises(EngineStateError, match="optimizer"):
        engine.step()
    remembered = len(engine.schedule.actions)
    engine.destroy()
    return losses, remembered


@pytest.mark.parametrize("with_gradients", [False, True])
def test_an_engine_for_inference_at_every_stage(ranks: Ranks, with_gradients: bool) -> None:
    answers = [ranks(2).run(_infer, stage, "bf16", with_gradients)[0] for stage in range(4)]
    assert all(losses == answers[0][0] for losses, _ in answers)
    # Five forwards of five units: what a pass remembers does not pile up.
    assert answers[3][1] < 20


# -- recomputation


class Recomputed(Toy):
    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class RecomputedReentrant(Recomputed):
    reentrant = True


def _count_gathers(make: Callable[[], nn.Module]) -> int:
    counted = recording()
    settings = config(3, "bf16", stage3_max_reuse_distance=0)
    engine, *_ = zeroaccel.initialize(make(), config=settings, collectives=counted)
    data = batches(engine.collectives.rank, 2)
    plain(engine, data[0])
    counted.reset()
    plain(engine, data[1])
    engine.destroy()
    return sum(call.op == "all_gather" and call.label.startswith("unshard layers") for call in counted.calls) - 3


@pytest.mark.parametrize("make", [Toy, Recomputed, RecomputedReentrant])
def test_recomputation_gathers_nothing_again(ranks: Ranks, make: type[nn.Module]) -> None:
    # Three blocks, gathered for forward and for backward; the three at the end are those of `destroy`.
    assert ranks(2).run(_count_gathers, make) == [6, 6]
