"""Full parameters outside forward and backward: reading, writing, and generation while ranks diverge."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import SGD, WIDTH, Run, Toy, batches, config, differences, offloaded, train_step
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero import GatheredParameters, register_external_parameter


def build(settings: dict[str, Any]) -> tuple[Engine, Toy]:
    torch.manual_seed(7)
    model = Toy()
    engine, *_ = zeroaccel.initialize(model, config=settings)
    return engine, model


def steps(engine: Engine, count: int, skip: int = 0) -> list[float]:
    return [train_step(engine, engine(batch)) for batch in batches(engine.collectives.rank, skip + count)[skip:]]


def same_everywhere(engine: Engine, value: Tensor) -> bool:
    return len({bytes(one) for one in engine.collectives.gather_objects(value.numpy().tobytes(), "compare")}) == 1


def _writes(stage: int, precision: str, **changes: Any) -> Run:
    """Trains, writes in all permitted ways, and continues training."""
    engine, model = build(config(stage, precision, optimizer=SGD, **changes))
    run = Run(losses=steps(engine, 2))
    rank = engine.collectives.rank
    layer = model.layers[1]
    untouched = {name: value.clone() for name, value in engine.iter_named_full_params()}
    with GatheredParameters([None, layer.up.weight, model.offset, model.embed.weight, model.frozen], modifier_rank=1):
        assert torch.equal(layer.up.weight, untouched["layers.1.up.weight"])
        with torch.no_grad():
            layer.up.weight[3].fill_(100.0 + rank)  # the values of rank 1 are kept
            model.frozen.fill_(rank + 1.0)
            if rank == 1:
                model.embed.weight.data.mul_(0.5)
    with GatheredParameters(model.parameters()):
        assert torch.equal(layer.up.weight[3], torch.full((WIDTH,), 101.0).to(layer.up.weight.dtype))
        assert torch.equal(layer.up.weight[4:], untouched["layers.1.up.weight"][4:])
        assert model.frozen[0] == 2.0
        assert torch.equal(model.embed.weight, untouched["embed.weight"] * 0.5)
        assert same_everywhere(engine, model.embed.weight.detach().float())
        with GatheredParameters(layer.down.bias, modifier_rank=0), torch.no_grad():
            layer.down.bias.copy_(torch.arange(float(WIDTH)))
        assert engine.state_dict()["layers.1.down.bias"][2] == 2.0  # the outer context still holds all
    with GatheredParameters([]), GatheredParameters(None), GatheredParameters(model.norm.weight, enabled=False):
        pass
    run.losses += steps(engine, 3, skip=2)
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert bool((model.layers[1].up.weight[3] > 90).all())  # the optimizer continued from the written values
    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_reach_every_rank_the_shard_and_the_master(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    runs = [ranks(2).run(_writes, stage, precision) for stage in (0, 1, 2, 3)]
    runs.append(ranks(2).run(_writes, 3, precision, **offloaded(tmp_path, "nvme", "nvme")))
    assert runs[0][0].losses != runs[0][1].losses
    for other in runs[1:]:
        assert [differences(runs[0][rank], other[rank]) for rank in (0, 1)] == [[], []]


def _bits_survive() -> bool:
    """Elements that are not written keep the bits that bf16 cannot represent."""
    engine, model = build(config(3, "bf16"))
    steps(engine, 1)
    before = zeroaccel.zero.safe_get_full_fp32_param(model.layers[0].up.weight)
    with GatheredParameters(model.layers[0].up.weight, modifier_rank=0), torch.no_grad():
        model.layers[0].up.weight[0, 0] = 4.0
    after = zeroaccel.zero.safe_get_full_fp32_param(model.layers[0].up.weight)
    engine.destroy()
    assert before is not None
    assert after is not None
    assert after[0, 0] == 4.0
    after[0, 0] = before[0, 0]
    return torch.equal(before, after) and not torch.equal(before, before.bfloat16().float())


def test_a_write_leaves_other_elements_of_the_master_alone(ranks: Ranks) -> None:
    assert ranks(2).run(_bits_survive) == [True, True]


def _mistakes(stage: int) -> list[str]:
    engine, model = build(config(stage))
    rank = engine.collectives.rank
    weight = model.layers[0].up.weight
    found = []

    def attempt(error: type[Exception], action: Callable[[], object]) -> None:
        found.append(message(error, action))

    def write_on_one_rank() -> None:
        with GatheredParameters([weight, model.norm.weight]), torch.no_grad():
            if rank == 1:
                weight[1, 1] += 1.0

    def replace() -> None:
        with GatheredParameters(weight, modifier_rank=0):
            weight.data = torch.zeros(3, 3)

    def fail_on_one_rank() -> None:
        with GatheredParameters(weight, modifier_rank=0):
            if rank == 1:
                raise KeyError("mine")

    def train_inside() -> None:
        with GatheredParameters(weight):
            train_step(engine, engine(batches(rank, 1)[0]))

    def backward_inside() -> None:
        with engine.gathered():
            engine.backward(engine(batches(rank, 1)[0]))

    def nested() -> None:
        with engine.gathered(), engine.gathered():
            pass

    attempt(UsageError, write_on_one_rank)
    attempt(UsageError, lambda: GatheredParameters(weight, modifier_rank=2).__enter__())
    attempt(KeyError, fail_on_one_rank)
    attempt(EngineStateError, train_inside)
    engine.reset()
    attempt(EngineStateError, backward_inside)
    engine.reset()
    attempt(UsageError, nested)
    attempt(UsageError, lambda: engine.gathered(budget=-1).__enter__())
    attempt(UsageError, lambda: engine.gathered(budget=rank).__enter__())
    attempt(UsageError, lambda: register_external_parameter(model, "weight"))  # type: ignore[arg-type]
    register_external_parameter(model, weight)
    attempt(UsageError, replace)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_mistakes_are_named_on_every_rank(ranks: Ranks, stage: int) -> None:
    for rank, found in enumerate(ranks(2).run(_mistakes, stage)):
        assert "layers.0.up.weight written without a modifier_rank" in found[0]
        assert "norm" not in found[0]
        assert ("the write has been undone" in found[0]) == (stage == 3)
        assert "expected 0 to 1, got 2" in found[1]
        assert found[2] == ("'mine'" if rank == 1 else "\"'mine' [rank 1]\"")
        assert "engine.step() while parameters are gathered" in found[3]
        assert "backward inside engine.gathered()" in found[4]
        assert "expected no other engine.gathered() around it" in found[5]
        assert "a number of bytes" in found[6]
        assert "the same on all ranks" in found[7]
        assert "register_external_parameter" in found[8]
        assert "layers.0.up.weight: expected parameters that keep their shape and dtype" in found[9]
        assert "got 'a tensor of shape (3, 3) and torch.float32 assigned to .data'" in found[9]


def _generate(budget: int | None) -> dict[str, Any]:
    """Runs a different number of forwards per rank, in different orders; then continues training."""
    engine, model = build(config(3))
    rank = engine.collectives.rank
    before = steps(engine, 1)
    with torch.no_grad():
        expected = [engine(batch).item() for batch in batches(0, 2)]
    outputs = []
    with engine.gathered(budget), torch.no_grad():
        whole = sum(unit.state.value == "unsharded" for unit in engine.units)
        for _ in range(1 + 3 * rank):
            outputs.append([engine(batch).item() for batch in batches(0, 2)])
        if rank == 0:  # only a part of the model, on one rank only
            outputs.append(model.layers[2](torch.ones(1, WIDTH)).shape)
    assert all(unit.state.value == "sharded" for unit in engine.units if not unit.persistent)
    assert all(output == expected for output in outputs if isinstance(output, list))
    after = steps(engine, 2, skip=1)
    engine.destroy()
    return {"whole": whole, "count": len(outputs), "losses": before + after}


def test_ranks_that_stop_at_different_times(ranks: Ranks) -> None:
    plain = ranks(2).run(_plain_losses)
    unit_nbytes = 4 * (2 * WIDTH * (2 * WIDTH + 1) + 5 * WIDTH)
    for budget, least, most in ((0, 0, 0), (2 * unit_nbytes, 1, 3), (None, 4, 99)):
        results = ranks(2).run(_generate, budget)
        assert [result["count"] for result in results] == [2, 4]
        assert least <= results[0]["whole"] <= most, (budget, results)
        assert [result["losses"] for result in results] == plain


def _plain_losses() -> list[float]:
    engine, _ = build(config(3))
    losses = steps(engine, 3)
    engine.destroy()
    return losses


def _leaves_early() -> list[str]:
    """Raises an exception inside the context on one rank: the other rank finishes its forwards."""
    engine, _ = build(config(3))
    rank = engine.collectives.rank
    said: list[str] = []
    try:
        with engine.gathered(0), torch.no_grad():
            for index, batch in enumerate(batches(rank, 4)):
                if rank == 0 and index == 1:
                    raise ZeroDivisionError("here")
                engine(batch)
                said.append("batch")
    except ZeroDivisionError:
        said.append("raised")
    steps(engine, 1)
    engine.destroy()
    return said


def test_an_exception_on_one_rank_does_not_stop_the_others(ranks: Ranks) -> None:
    assert ranks(2).run(_leaves_early) == [["batch", "raised"], ["batch"] * 4]


def _part_alone(stage: int) -> tuple[list[float], list[float]]:
    """Calls inner modules of a block, and of the root, outside their unit's forward, with a backward."""
    engine, model = build(config(stage))
    x = torch.ones(2, WIDTH)
    norm = model.layers[1].norm.weight
    assert norm.shape == (WIDTH,)
    assert stage < 3 or "nan" in repr(norm)
    with torch.no_grad():
        alone = model.layers[1].up(x)
    losses = [float(alone.sum())]
    for _ in range(2):
        losses.append(train_step(engine, model.layers[1].down(model.layers[0].up(x)).square().mean()))
    losses += steps(engine, 1)
    engine.destroy()
    return losses, [float(param.detach().double().sum()) for param in model.parameters()]


def test_a_part_of_a_block_called_by_itself(ranks: Ranks) -> None:
    assert ranks(2).run(_part_alone, 3) == ranks(2).run(_part_alone, 1)


def _without_an_engine() -> None:
    weight = nn.Parameter(torch.ones(3))
    with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight[0] = 2.0
    assert weight.tolist() == [2.0, 1.0, 1.0]
    assert zeroaccel.zero.safe_get_full_fp32_param(weight) is None
    engine, model = build(config(3))
    kept = model.layers[0].up.weight
    engine.destroy()
    with GatheredParameters(kept), torch.no_grad():
        kept.zero_()  # an ordinary parameter again


def test_ordinary_parameters_are_let_alone(ranks: Ranks) -> None:
    ranks(2).run(_without_an_engine)


def _one_of_two_buffers() -> list[float]:
    """Gathers from a unit whose frozen and trained parameters lie in two buffers; each context uses one of them."""
    model = Toy()
    model.layers[1].norm.requires_grad_(False)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine, *_ = zeroaccel.initialize(model, config=config(3))
    for name in ("layers.1.up.weight", "layers.1.norm.weight", "layers.1.down.weight", "layers.1.norm.weight"):
        param = model.get_parameter(name)
        with GatheredParameters(param):
            view = param.detach()[0]  # outlives the context
            assert torch.equal(param, values[name]), name
    assert torch.equal(view, values["layers.1.norm.weight"][0])
    losses = steps(engine, 2)
    engine.destroy()
    return losses


def test_parameters_of_one_buffer_of_several(ranks: Ranks) -> None:
    first, second = ranks(2).run(_one_of_two_buffers)
    assert all(map(math.isfinite, [*first, *second]))


def _write_beside(build_in_init: bool, modifier: int | None) -> list[str]:
    """Writes a parameter that shares a unit with the named one, on one rank; then trains, or reads the values."""
    torch.manual_seed(7)
    if build_in_init:
        with zeroaccel.zero.Init(config_dict_or_path=config(3)):
            model = Toy()
    else:
        engine, model = build(config(3))
    layer = model.layers[0].up
    with GatheredParameters([layer.weight, layer.bias]):
        before = layer.bias.detach().clone()

    def write() -> None:
        with GatheredParameters([layer.weight], modifier_rank=modifier), torch.no_grad():
            if torch.distributed.get_rank() == 1:
                layer.bias.fill_(9.0)

    found = message(UsageError, write)
    with GatheredParameters([layer.weight]):  # an outer block's names count for an inner one
        with GatheredParameters([layer.bias], modifier_rank=0), torch.no_grad():
            layer.bias.copy_(before)
        assert torch.equal(layer.bias, before)
    if not build_in_init:
        steps(engine, 1)
        engine.destroy()
    return [found]


@pytest.mark.parametrize("modifier", [None, 0])
@pytest.mark.parametrize("build_in_init", [False, True])
def test_a_write_to_another_parameter_of_the_unit_is_an_error_on_every_rank(
    ranks: Ranks, build_in_init: bool, modifier: int | None
) -> None:
    for found in ranks(2).run(_write_beside, build_in_init, modifier):
        assert "up.bias written: expected writes to parameters that the block names" in found[0]
