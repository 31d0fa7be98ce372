"""Settings as readable texts that ranks compare: equal settings have equal texts, different ones different texts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from zeroaccel.optim.lr_schedules import WarmupLR
from zeroaccel.optim.rank_facts import (
    HyperparameterCheck,
    canonical,
    difference,
    optimizer_facts,
    param_group_facts,
    scheduler_facts,
    training_facts,
)


def _text(value: Any) -> str:
    return param_group_facts([{"value": value}])["optimizer.param_groups[0]['value']"]


class Rule:
    """A callable object, which LambdaLR accepts in place of a function."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.rank = steps

    def __call__(self, step: int) -> float:
        return 1.0 / self.steps


def _decay(step: int, total: int) -> float:
    return 1.0 - step / total


EQUAL: dict[str, tuple[Any, ...]] = {
    "numbers": (1, 1.0, numpy.float32(1), numpy.int64(1), torch.tensor(1.0), torch.tensor(1), numpy.array(1.0)),
    "zeros": (0, 0.0, -0.0, torch.tensor(-0.0)),
    "not a number": (math.nan, float("nan"), torch.tensor(math.nan), numpy.float64("nan")),
    "sequences": ((0.9, 0.95), [0.9, 0.95], torch.tensor([0.9, 0.95], dtype=torch.float64), numpy.array([0.9, 0.95])),
    "mappings": ({"a": 1, "b": 2.0}, {"b": 2, "a": 1.0}),
    "functions": (lambda step: 1, lambda step: 2),
    "objects": (object(), object()),
    "parameters": (nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))),
    "large tensors": (torch.zeros(17), torch.ones(17)),
    "partials": (functools.partial(_decay, total=8), functools.partial(_decay, total=8.0)),
    "callables": (Rule(4), Rule(4)),
    "sets": ({"a", "b", "c"}, {"c", "b", "a"}),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "numbers": (0.1, 0.1 + 1e-17 * 2),
    "large integers": (2**60, 2**60 + 1),
    "number and text": (1, "1"),
    "none": (None, "None"),
    "flags": (True, False),
    "texts": ("cos", "linear"),
    "sequences": ((0.9, 0.95), (0.9, 0.99)),
    "lengths": ((1, 2), (1, 2, 3)),
    "nested": ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}),
    "small tensors": (torch.zeros(3), torch.tensor([0, 0, 1])),
    "shapes": (torch.zeros(17), torch.zeros(18)),
    "partials": (functools.partial(_decay, total=8), functools.partial(_decay, total=9)),
    "functions": (_decay, len),
    "callables": (Rule(4), Rule(5)),
    "types": (object(), nn.Identity()),
    "dtypes": (torch.bfloat16, torch.float32),
    "infinite": (math.inf, -math.inf),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_settings_have_one_text(name: str) -> None:
    assert len({_text(value) for value in EQUAL[name]}) == 1
    assert len({repr(canonical(value)) for value in EQUAL[name]}) == 1


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_settings_have_different_texts(name: str) -> None:
    if name == "numbers":
        assert DIFFERENT[name][0] != DIFFERENT[name][1]
    assert len({_text(value) for value in DIFFERENT[name]}) == 2
    assert len({repr(canonical(value)) for value in DIFFERENT[name]}) == 2


def test_a_list_that_contains_itself_has_a_text() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert _text(endless).startswith("(1, (1, ")


@dataclass
class Ramp:
    length: int
    rank: int


def test_values_are_shown_in_a_short_form() -> None:
    shown = {
        0.1: "0.1",
        3.0: "3",
        1e-8: "1e-08",
        (0.9, 0.999): "(0.9, 0.999)",
        "cos": "'cos'",
        torch.bfloat16: "torch.bfloat16",
        functools.partial(_decay, 2, total=8): "partial of _decay(2, total=8)",
    }
    assert {value: _text(value) for value in shown} == shown
    assert _text(Ramp(3, 1)).endswith("Ramp(length=3)")
    assert _text({"start": 2, "kind": "cos"}) == "(kind='cos', start=2)"
    assert _text(torch.zeros(20)) == "torch.float32 of shape (20,)"


def _optimizer(lr: float = 0.1, **more: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [nn.Parameter(torch.zeros(2))], "name": "decay", "weight_decay": 0.1, **more},
        {"params": [nn.Parameter(torch.zeros(3))], "name": "rest"},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def test_settings_of_one_rank_are_left_out() -> None:
    own = [_optimizer(rank=rank, local_rank=rank, verbose=rank == 0, log_every=rank) for rank in range(2)]
    assert difference([optimizer_facts(optimizer) for optimizer in own]) is None
    assert not any("params" in address for address in optimizer_facts(own[0]) if "number" not in address)


def test_the_first_difference_names_group_key_values_and_ranks() -> None:
    everyone = [param_group_facts(_optimizer().param_groups) for _ in range(5)]
    for rank in (1, 3):
        everyone[rank]["optimizer.param_groups[1]['lr']"] = "0.05"
        everyone[rank]["optimizer.param_groups[1]['weight_decay']"] = "1"
    found = difference(everyone)
    assert str(found) == (
        "optimizer.param_groups[1]['lr'] of the group 'rest' is 0.1 on ranks 0, 2, 4 and 0.05 on ranks 1, 3 "
        "(1 more setting differs)"
    )
    assert difference(everyone[:1] * 3) is None


def test_many_different_values_are_cut() -> None:
    found = difference([{"a": str(rank)} for rank in range(100)])
    assert str(found) == (
        "a is 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3, 4 on rank 4, 5 on rank 5, 6 on rank 6, 7 on rank 7 "
        "and 92 more values on the others"
    )
    assert len(str(difference([{"a": letter * 1000} for letter in "xy"]))) < 300


def test_a_setting_that_one_rank_lacks_is_absent() -> None:
    assert str(difference([{"a": "1", "b": "2"}, {"b": "2"}])) == "a is 1 on rank 0 and absent on rank 1"


def test_classes_come_first() -> None:
    optimizer = _optimizer()
    with_one = training_facts(optimizer, lr_scheduler.StepLR(optimizer, 3))
    assert list(with_one)[:2] == ["optimizer", "lr_scheduler"]
    found = difference([with_one, training_facts(_optimizer(), None)])
    assert str(found).startswith("lr_scheduler is torch.optim.lr_scheduler.StepLR on rank 0 and none on rank 1 (")
    found = difference([training_facts(_optimizer(), None), training_facts(None, None)])
    assert str(found).startswith("optimizer is torch.optim.adamw.AdamW on rank 0 and none on rank 1 (")


SCHEDULERS: dict[str, tuple[Any, str]] = {
    "StepLR": (lambda o, n: lr_scheduler.StepLR(o, 3 + n), "lr_scheduler.step_size is 3 on rank 0 and 4 on rank 1"),
    "OneCycleLR": (lambda o, n: lr_scheduler.OneCycleLR(o, 0.2, 30 + n), "lr_scheduler._schedule_phases is ((end"),
    "LambdaLR": (
        lambda o, n: lr_scheduler.LambdaLR(o, functools.partial(_decay, total=8 + n)),
        "lr_scheduler.lr_lambdas is (partial of _decay(total=8), partial of _decay(total=8)) on rank 0 and (partial of",
    ),
    "LambdaLR of objects": (lambda o, n: lr_scheduler.LambdaLR(o, Rule(4 + n)), "Rule(steps=4)"),
    "SequentialLR": (
        lambda o, n: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 5 + n)], [4]
        ),
        "lr_scheduler._schedulers[1].T_max is 5 on rank 0 and 6 on rank 1",
    ),
    "ReduceLROnPlateau": (
        lambda o, n: lr_scheduler.ReduceLROnPlateau(o, patience=1 + n),
        "lr_scheduler.patience is 1 on rank 0 and 2 on rank 1",
    ),
    "WarmupLR": (lambda o, n: WarmupLR(o, warmup_num_steps=5 + n), "_WarmUp(linear=False, num_steps=5) on rank 0"),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_are_compared_by_their_arguments(name: str) -> None:
    make, text = SCHEDULERS[name]
    one, same, other = (scheduler_facts(make(_optimizer(), number)) for number in (0, 0, 1))
    assert difference([one, same]) is None
    assert text in str(difference([one, other]))


# -- the digest of each step


class _Ranks:
    """A stand-in for collectives that has a number of ranks only."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


def _check(optimizer: torch.optim.Optimizer, world_size: int = 2) -> HyperparameterCheck:
    return HyperparameterCheck(optimizer, _Ranks(world_size))  # type: ignore[arg-type]


CHANGES: dict[str, Any] = {
    "lr": lambda group: group.update(lr=0.3),
    "betas": lambda group: group.update(betas=(0.8, 0.999)),
    "weight decay": lambda group: group.update(weight_decay=0.5),
    "flag": lambda group: group.update(amsgrad=True),
    "text": lambda group: group.update(name="others"),
    "tensor in place": lambda group: group["scale"].fill_(2.0),
    "list in place": lambda group: group["steps"].append(4),
    "mapping in place": lambda group: group["mixed"].update(a=2),
    "removed": lambda group: group.pop("eps"),
    "not a number": lambda group: group.update(lr=math.nan),
}


def _rich() -> torch.optim.Optimizer:
    return _optimizer(scale=torch.ones(()), steps=[1, 2], mixed={"a": 1}, foreign=object())


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_any_setting_changes_the_digest(name: str) -> None:
    optimizer, other = _rich(), _rich()
    check, others = _check(optimizer), _check(other)
    before = check.digest()
    assert before == check.digest() == others.digest() == _check(_rich()).digest()
    assert 0 < before < 2**52
    CHANGES[name](optimizer.param_groups[0])
    changed = check.digest()
    assert changed != before
    assert changed == check.digest()
    CHANGES[name](other.param_groups[0])
    assert others.digest() == changed


def test_a_digest_goes_by_values_and_not_by_how_they_came_about() -> None:
    one, other = _rich(), _rich()
    check, others = _check(one), _check(other)
    check.digest()
    one.param_groups[0]["weight_decay"], one.param_groups[1]["eps"] = 1, 0.5
    check.digest()
    one.param_groups[0]["weight_decay"] = 1.0
    one.param_groups[1] = dict(reversed(one.param_groups[1].items()))  # `load_state_dict` replaces groups, too
    other.param_groups[0]["weight_decay"], other.param_groups[1]["eps"] = torch.tensor(1), 0.5
    assert check.digest() == others.digest()


def test_keys_that_an_optimizer_adds_to_groups_are_not_compared() -> None:
    optimizer = _optimizer()
    check = _check(optimizer)
    before = check.digest()
    optimizer.param_groups[0]["step"] = 1  # counts only on ranks with elements of the group
    optimizer.param_groups[0]["params"] = []
    assert check.digest() == before


def test_a_group_that_came_later_is_compared() -> None:
    optimizer = _optimizer()
    check = _check(optimizer)
    before = check.digest()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    added = check.digest()
    assert added != before
    optimizer.param_groups.pop()
    assert check.digest() == before


def test_a_single_process_compares_nothing() -> None:
    optimizer = _optimizer()
    check = _check(optimizer, world_size=1)
    del optimizer.param_groups
    assert check.digest() == 0
    check.note_update()
