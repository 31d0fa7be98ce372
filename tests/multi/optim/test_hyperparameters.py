"""Ranks whose optimizers or schedulers differ: all raise one error, before any update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import config, offloaded, recording, train_step
from zeroaccel import Accelerator, ZeroPlugin
from zeroaccel.comm.topology import init_process_group
from zeroaccel.compat.deepspeed_engine import initialize as deepspeed_initialize
from zeroaccel.engine import Engine
from zeroaccel.errors import UsageError

METRIC = 'scheduler.step(accelerator.reduce(loss.detach(), "mean"))'


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.head = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).float().square().mean()


def _model() -> Network:
    torch.manual_seed(3)
    return Network()


def _groups(model: nn.Module, **changes: Any) -> list[dict[str, Any]]:
    first = [param for param in model.parameters() if param.dim() > 1]
    second = [param for param in model.parameters() if param.dim() < 2]
    return [{"params": first, "weight_decay": 0.1}, {"params": second, "name": "vectors", **changes}]


def _engine(settings: dict[str, Any], **arguments: Any) -> Engine:
    """Makes an engine with two groups and the config's optimizer, or torch's if the config has none."""
    model = _model()
    if "optimizer" in settings:
        arguments["model_parameters"] = _groups(model)
    else:
        arguments["optimizer"] = torch.optim.AdamW(_groups(model), lr=1e-2)
    return zeroaccel.initialize(model, config=settings, **arguments)[0]


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 9, generator=torch.Generator().manual_seed(10 * step + rank))


def _backward(engine: Engine, step: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(_batch(engine.collectives.topology.rank, step).to(dtype)))


def _step(engine: Engine, step: int) -> None:
    _backward(engine, step)
    engine.step()


def _weights(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.iter_named_full_params()}


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- in each step


SET: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "lr": (lambda group: group.update(lr=0.05), "['lr'] of the group 'vectors' is 0.01 on rank 0 and 0.05 on rank 1"),
    "lr tensor": (lambda group: group.update(lr=torch.tensor(0.25)), "['lr'] of the group 'vectors' is 0.01 on rank 0"),
    "betas": (lambda group: group.update(betas=(0.5, 0.999)), "is (0.9, 0.999) on rank 0 and (0.5, 0.999) on rank 1"),
    "decay": (lambda group: group.update(weight_decay=0), "['weight_decay'] of the group 'vectors' is 0.01 on rank 0"),
    "flag": (
        lambda group: group.update(maximize=True),
        "['maximize'] of the group 'vectors' is False on rank 0 and Tr",
    ),
    "name": (lambda group: group.update(name="others"), "['name'] is 'vectors' on rank 0 and 'others' on rank 1"),
}


def _differ(settings: dict[str, Any], name: str) -> tuple[list[str], bool, bool, tuple[int, int]]:
    """Sets a value on rank 1 before the third step.

    Returns (errors of `step` and of `gradient_norm`, whether the weights are unchanged, whether later steps equal those
    of a run without the error, (steps, skipped steps)).

    `name`: the value to set.
    """
    engine = _engine(settings)
    wrong = engine.collectives.rank == 1
    _step(engine, 0)
    _step(engine, 1)
    engine.finish_update()
    before = _weights(engine)
    group = engine.optimizer.param_groups[1]
    kept = dict(group)
    if wrong:
        SET[name][0](group)
    said = []
    for call in (engine.step, engine.gradient_norm):
        said.append(message(UsageError, lambda call=call: (_backward(engine, 2), call())))
    counts = engine.global_steps, engine.skipped_steps
    engine.finish_update()
    unchanged = _equal(before, _weights(engine))
    group.update(kept)
    for step in range(2, 5):
        _step(engine, step)
    after = _weights(engine)
    engine.destroy()
    undisturbed = _engine(settings)
    for step in range(5):
        _step(undisturbed, step)
        if step == 1:
            undisturbed.finish_update()
    same = _equal(after, _weights(undisturbed))
    undisturbed.destroy()
    return said, unchanged, same, counts


@pytest.mark.parametrize(("stage", "name"), [*((stage, "lr") for stage in (0, 1, 3)), *((2, name) for name in SET)])
def test_a_group_that_differs_on_one_rank_is_reported_before_the_update(ranks: Ranks, stage: int, name: str) -> None:
    one, other = ranks(2).run(_differ, config(stage, optimizer=None), name, timeout=40)
    assert one == other
    (said, norm_said), unchanged, same, counts = one
    assert said == norm_said
    assert said.startswith(f"step 2: optimizer.param_groups[1]['{'lr' if name == 'lr tensor' else ''}"), said
    assert SET[name][1] in said
    assert ": expected one value on all ranks; set it from values that are equal on every rank" in said
    assert (METRIC in said) == (name in ("lr", "lr tensor", "betas", "decay"))
    assert (unchanged, same, counts) == (True, True, (2, 0))


@pytest.mark.parametrize("during", ["step", "next_step"])
@pytest.mark.parametrize(("stage", "states"), [(1, "cpu"), (3, "nvme")])
def test_updates_at_other_times_are_compared_too(
    ranks: Ranks, tmp_path: Path, during: str, stage: int, states: str
) -> None:
    keys = offloaded(tmp_path, states, update_during=during)
    settings = config(stage, bf16={"enabled": True, "check_grad_overflow": False}, **keys)
    one, other = ranks(2).run(_differ, settings, "lr", timeout=40)
    assert one == other
    (said, norm_said), unchanged, same, counts = one
    assert "step 2: optimizer.param_groups[1]['lr'] of the group 'vectors' is 0.01 on rank 0 and 0.05 on rank 1" in said
    assert said == norm_said
    assert (unchanged, same, counts) == (True, True, (2, 0))


def _with_an_update_under_way(settings: dict[str, Any], *, differs: bool) -> tuple[str, list[float], dict[str, Tensor]]:
    """Trains with a pending update; with `differs`, rank 1's rate is different while the second step's update waits."""
    engine = _engine(settings)
    _step(engine, 0)
    _step(engine, 1)
    said = ""
    if differs:
        kept = engine.optimizer.param_groups[1]["lr"]
        engine.optimizer.param_groups[1]["lr"] = kept * (1 + engine.collectives.rank)
        said = message(UsageError, _step, engine, 2)
        engine.optimizer.param_groups[1]["lr"] = kept
    losses = [train_step(engine, engine(_batch(engine.collectives.rank, step).bfloat16())) for step in range(2, 5)]
    weights = _weights(engine)
    engine.destroy()
    return said, losses, weights


def test_an_update_under_way_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    settings = config(2, "bf16", **offloaded(tmp_path, "cpu", update_during="next_step"))
    expected = ranks(2).run(functools.partial(_with_an_update_under_way, differs=False), settings)
    got = ranks(2).run(functools.partial(_with_an_update_under_way, differs=True), settings)
    for (_, losses, weights), (said, others, after) in zip(expected, got, strict=True):
        assert "['lr'] of the group 'vectors' is 0.01 on rank 0 and 0.02 on rank 1" in said
        assert losses == others
        assert _equal(weights, after)


def _overflow() -> tuple[str, int]:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = _engine({**config(2, optimizer=None), "fp16": fp16})
    said = ""
    for step in range(3):
        loss = engine(_batch(0, step).half())
        engine.backward(loss * 1e30 if step else loss)  # no finite gradient from the second step on
        if step == 2 and engine.collectives.rank == 1:
            engine.optimizer.param_groups[0]["lr"] *= 2
        try:
            engine.step()
        except UsageError as error:
            said = str(error)
    skipped = engine.skipped_steps
    engine.destroy()
    return said, skipped


def test_an_overflowing_step_is_compared_too(ranks: Ranks) -> None:
    for said, skipped in ranks(2).run(_overflow):
        assert said.startswith("step 2: optimizer.param_groups[0]['lr'] is 0.01 on rank 0 and 0.02 on rank 1: ")
        assert skipped == 1


def _late(back: bool) -> str:
    """Sets a rate on rank 1 between the norm and the step; with `back`, restores it after the step."""
    engine = _engine(config(2, optimizer=None))
    for step in range(3):
        _backward(engine, step)
        try:
            engine.gradient_norm()
        except UsageError as error:
            engine.destroy()
            return str(error)
        rates = engine.optimizer.param_groups[0]
        if step == 1 and engine.collectives.rank == 1:
            rates["lr"] = 0.5
        engine.step()
        if back:
            rates["lr"] = 0.01
    return "nothing"


@pytest.mark.parametrize("back", [False, True])
def test_changes_after_the_norm_are_compared_in_the_next_step(ranks: Ranks, back: bool) -> None:
    one, other = ranks(2).run(_late, back)
    assert one == other
    assert one.startswith(
        "the update in step 1: optimizer.param_groups[0]['lr'] is 0.01 on rank 0 and 0.5 on rank 1: expected one"
    )


def _rates_after_the_norm() -> tuple[list[float], str]:
    """Sets rates on all ranks after the norm, as many loops do, without an error; then different rates before it."""
    engine = _engine(config(1, optimizer=None))
    for step in range(4):
        _backward(engine, step)
        engine.gradient_norm()
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + step)
        engine.step()
    rates = engine.get_lr()
    engine.optimizer.param_groups[0]["lr"] = 0.5 + engine.collectives.rank
    _backward(engine, 4)
    said = message(UsageError, engine.gradient_norm)
    engine.destroy()
    return rates, said


def test_rates_that_all_ranks_set_after_the_norm_are_fine(ranks: Ranks) -> None:
    for rates, said in ranks(2).run(_rates_after_the_norm):
        assert rates == [1e-3 / 4] * 2
        assert said.startswith("step 4: optimizer.param_groups[0]['lr'] is 0.5 on rank 0 and 1.5 on rank 1: ")


class Counting(torch.optim.SGD):
    """Counts updates in each group that has elements on this rank."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"])


def _counted() -> list[int]:
    model = _model()
    groups = [{**group, "rank": init_process_group().rank} for group in _groups(model)]
    groups[1]["lr"] = float("nan")  # this group has no elements on any rank
    groups[1]["params"] = []
    engine, *_ = zeroaccel.initialize(model, Counting(groups, lr=0.1), config=config(2, optimizer=None))
    for step in range(3):
        _step(engine, step)
        # The same number, as another type and as another object.
        engine.optimizer.param_groups[0]["weight_decay"] = [0.1, torch.tensor(0.1, dtype=torch.float64)][
            engine.collectives.rank
        ]
    counts = [group.get("step", 0) for group in engine.optimizer.param_groups]
    engine.destroy()
    return counts


def test_settings_that_may_differ_are_not_compared(ranks: Ranks) -> None:
    for counts in ranks(2).run(_counted):
        assert counts[0] >= 3
        assert counts[1] == 0


# -- without extra collectives


def _calls(settings: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    """Returns the labels of the small collectives of the third step, and its numbers of collectives by kind."""
    counted = recording()
    engine = _engine(settings, collectives=counted)
    for step in range(2):
        _step(engine, step)
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.5  # as a scheduler does
    counted.reset()
    before = counted.flight_recorder.issued()
    _step(engine, 2)
    issued = {kind: number - before[kind] for kind, number in counted.flight_recorder.issued().items()}
    small = [call.label for call in counted.calls if call.op not in ("all_gather", "reduce_scatter")]
    engine.destroy()
    return small, issued


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_comparison_of_a_step_costs_no_collective(ranks: Ranks, stage: int) -> None:
    for small, issued in ranks(2).run(_calls, config(stage, optimizer=None)):
        assert small == ["gradient overflow check", "gradient norm"]
        assert issued["control"] == 2


def test_a_late_update_takes_no_collective_more(ranks: Ranks, tmp_path: Path) -> None:
    extra = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    settings = config(2, **extra, **offloaded(tmp_path, "cpu", update_during="next_step"))
    for small, issued in ranks(2).run(_calls, settings):
        assert small == ["gradient overflow check", "gradient norm"]
        assert issued["control"] == 2


# -- frontends


def _plateau(stage: int, clips: bool, shared: bool) -> tuple[str, bool, list[float]]:
    """Trains with a loss that improves on rank 1 only; `shared` reduces it, as the error message tells."""
    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=stage))
    model = _model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule: Any = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rank = accelerator.process_index
    said, unchanged = "nothing", True
    for step in range(4):
        loss = model(_batch(rank, step)) * 0 + (1.0 / (1 + step) if rank == 1 else 1.0)
        accelerator.backward(loss)
        before = _weights(model)
        try:
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        except UsageError as error:
            said = str(error)
            unchanged = _equal(before, _weights(model))
            break
        schedule.step(accelerator.reduce(loss.detach(), "mean") if shared else loss.detach())
        optimizer.zero_grad()
    rates = [group["lr"] for group in optimizer.param_groups]
    accelerator.free_memory()
    return said, unchanged, rates


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_plateau_of_each_ranks_own_loss_is_reported(ranks: Ranks, stage: int, clips: bool) -> None:
    told = ranks(2).run(_plateau, stage, clips, False)
    assert len({said for said, *_ in told}) == 1
    for rank, (said, unchanged, rates) in enumerate(told):
        assert said.startswith("step 2: optimizer.param_groups[0]['lr'] is 0.05 on rank 0 and 0.1 on rank 1: expected")
        assert METRIC in said
        assert unchanged
        assert rates == [0.1 if rank == 1 else 0.05]
    assert [said for said, *_ in ranks(2).run(_plateau, stage, clips, True)] == ["nothing"] * 2


def _facade() -> str:
    model = _model()
    optimizer = torch.optim.AdamW(_groups(model), lr=0.1)
    init_process_group()
    engine, *_ = deepspeed_initialize(model=model, optimizer=optimizer, config=config(2, optimizer=None))
    _step(engine, 0)
    optimizer.param_groups[0]["lr"] = 0.1 + engine.collectives.rank
    _backward(engine, 1)
    said = message(UsageError, engine.step)
    engine.destroy()
    return said


def test_the_facade_compares_hyperparameters_too(ranks: Ranks) -> None:
    for said in ranks(2).run(_facade):
        assert said.startswith("step 1: optimizer.param_groups[0]['lr'] is 0.1 on rank 0 and 1.1 on rank 1: ")


# -- at construction


def _decay(step: int, total: int) -> float:
    return 1.0 - step / total


def _adamw(model: nn.Module, **more: Any) -> Optimizer:
    return torch.optim.AdamW(_groups(model, **more), lr=0.1)


Made = tuple[Callable[[nn.Module], Optimizer], Callable[[Optimizer], Any] | None]


def _cosine(length: int) -> Callable[[Optimizer], Any]:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, length)


def _partial(total: int) -> Callable[[Optimizer], Any]:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, functools.partial(_decay, total=total))


# Objects that each rank makes, and the message if two ranks differ.
MADE: dict[str, tuple[Callable[[int], Made], str]] = {
    "class": (
        lambda rank: ((torch.optim.Adam if rank else torch.optim.AdamW, None)),
        "optimizer is torch.optim.adamw.AdamW on rank 0 and torch.optim.adam.Adam on rank 1 (",
    ),
    "default": (
        lambda rank: (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5 + rank / 4), None),
        "optimizer.defaults['momentum'] is 0.5 on rank 0 and 0.75 on rank 1 (1 more setting differs)",
    ),
    "rate of a group": (
        lambda rank: (lambda model: _adamw(model, lr=0.1 * (1 + rank)), None),
        "optimizer.param_groups[1]['lr'] of the group 'vectors' is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "name of a group": (
        lambda rank: (lambda model: _adamw(model, name="one" if rank else "zero"), None),
        "optimizer.param_groups[1]['name'] is 'zero' on rank 0 and 'one' on rank 1",
    ),
    "groups": (
        lambda rank: (lambda model: torch.optim.SGD(_groups(model) if rank else model.parameters(), lr=0.1), None),
        "len(optimizer.param_groups) is 1 on rank 0 and 2 on rank 1 (",
    ),
    "scheduler": (
        lambda rank: (_adamw, _cosine(5) if rank else _partial(5)),
        "lr_scheduler is torch.optim.lr_scheduler.LambdaLR on rank 0 and torch.optim.lr_scheduler.CosineAnnealingLR on",
    ),
    "no scheduler": (
        lambda rank: (_adamw, None if rank else _cosine(5)),
        "lr_scheduler is torch.optim.lr_scheduler.CosineAnnealingLR on rank 0 and none on rank 1 (",
    ),
    "its argument": (
        lambda rank: (_adamw, _cosine(5 + rank)),
        "lr_scheduler.T_max is 5 on rank 0 and 6 on rank 1",
    ),
    "an argument of its function": (
        lambda rank: (_adamw, _partial(5 + rank)),
        "is (partial of _decay(total=5), partial of _decay(total=5)) on rank 0 and (partial of _decay(total=6), ",
    ),
}


def _make(name: str, *, accelerated: bool) -> str:
    optimizer_of, schedule_of = MADE[name][0](init_process_group().rank)
    model = _model()
    optimizer = optimizer_of(model if "class" not in name else model.parameters())  # type: ignore[arg-type]
    schedule = [] if schedule_of is None else [schedule_of(optimizer)]
    if accelerated:
        accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=2))
        return message(UsageError, accelerator.prepare, model, optimizer, *schedule)
    made = {"lr_scheduler": next(iter(schedule), None), "config": config(2, optimizer=None)}
    return message(UsageError, zeroaccel.initialize, model, optimizer, **made)


def _make_all(*, accelerated: bool) -> dict[str, str]:
    return {name: _make(name, accelerated=accelerated) for name in MADE}


def test_optimizers_and_schedulers_are_compared_at_the_start(ranks: Ranks) -> None:
    one, other = ranks(2).run(functools.partial(_make_all, accelerated=False))
    assert one == other
    for name, (_, text) in MADE.items():
        assert one[name].startswith("initialize: "), name
        assert text in one[name], (name, one[name])
        assert "expected one value on all ranks; create the optimizer and its scheduler with the same" in one[name]


def test_prepared_objects_are_compared(ranks: Ranks) -> None:
    one, other = ranks(2).run(functools.partial(_make_all, accelerated=True))
    assert one == other
    for name in ("class", "scheduler", "no scheduler"):
        assert "expected the same objects on every rank" in one[name], name
    assert one["its argument"].startswith("prepare: CosineAnnealingLR.T_max is 5 on rank 0 and 6 on rank 1")
    assert "prepare: LambdaLR.lr_lambdas is (partial of _decay(total=5)" in one["an argument of its function"]
    for name in ("default", "rate of a group", "name of a group", "groups"):
        assert MADE[name][1] in one[name], (name, one[name])


def _refused_plateau() -> str:
    schedule, settings = lr_scheduler.ReduceLROnPlateau, config(1, optimizer=None)
    return message(
        UsageError, zeroaccel.initialize, _model(), torch.optim.AdamW, lr_scheduler=schedule, config=settings
    )


def test_the_engine_cannot_move_a_plateau(ranks: Ranks) -> None:
    for said in ranks(2).run(_refused_plateau):
        assert "ReduceLROnPlateau, which needs a metric at each step" in said
        assert "step it in the training loop with a metric that is the same on every rank" in said
