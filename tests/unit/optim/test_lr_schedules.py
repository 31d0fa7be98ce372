"""The five schedules' rates against DeepSpeed's, rates of groups, resuming, and schedulers by name."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.log_lines import log_lines
from tests.unit.optim.lr_rates import BETA1, DEFAULTS, LR, RATES
from zeroaccel.errors import CheckpointError, ConfigError, UsageError
from zeroaccel.optim import lr_schedules
from zeroaccel.optim.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupLR,
    build_scheduler,
)
from zeroaccel.optim.optimizer_factory import build_optimizer

EXACT: dict[str, Any] = {"rel": 1e-12, "abs": 1e-18}


def adam(*lrs: float | None, lr: Any = LR) -> torch.optim.AdamW:
    """Returns an AdamW with a group per entry: the group's rate, or None for the optimizer's."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], **({} if own is None else {"lr": own})}
        for own in (lrs or (None,))
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), foreach=False)


def written(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings that `log_once` writes during the test."""
    monkeypatch.setattr("zeroaccel.logs._seen", set())
    with log_lines(logging.WARNING) as lines:
        yield lines


# -- the formulas


@pytest.mark.parametrize("case", RATES)
def test_rates_are_deepspeeds_step_for_step(case: str, notes: list[str]) -> None:
    kind, params, expected = RATES[case]
    optimizer = adam()
    scheduler = build_scheduler(kind, params, optimizer)
    rates = written(optimizer)
    for _ in expected[1:]:
        scheduler.step()
        assert list(scheduler.get_last_lr()) == written(optimizer)
        rates += written(optimizer)
    assert rates == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_deepspeeds(kind: str) -> None:
    params, expected = DEFAULTS[kind]
    optimizer = adam()
    scheduler: Any = build_scheduler(kind, params, optimizer)
    rates = {}
    for step in expected:
        scheduler.step(step)
        rates[step] = written(optimizer)[0]
    assert rates == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("case", BETA1)
def test_one_cycle_moves_beta1_and_leaves_beta2(case: str) -> None:
    _, params, _ = RATES[case]
    optimizer = adam()
    scheduler = OneCycle(optimizer, **params)
    moments = []
    for _ in BETA1[case]:
        moments.append(optimizer.param_groups[0]["betas"])
        scheduler.step()
    assert [beta1 for beta1, _ in moments] == pytest.approx(BETA1[case], **EXACT)
    assert {beta2 for _, beta2 in moments} == {0.95}


def test_one_cycle_returns_the_betas_of_the_current_step() -> None:
    optimizer = adam()
    scheduler = OneCycle(optimizer, 1e-4, 1e-3, cycle_first_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9)
    assert scheduler.get_mom() == [(0.9, 0.95)]  # the group already has the lower end
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    for beta1 in (0.85, 0.8, 0.85):
        scheduler.step()
        assert scheduler.get_mom() == [optimizer.param_groups[0]["betas"]] == [(pytest.approx(beta1), 0.95)]
    without = OneCycle(optimizer := adam(), 1e-4, 1e-3, cycle_momentum=False)
    without.step()
    assert without.get_mom() is None
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_one_cycle_says_that_an_optimizer_without_betas_has_no_momentum_to_cycle(notes: list[str]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.7)
    OneCycle(optimizer, 1e-4, 1e-3, cycle_first_step_size=2).step()
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert written(optimizer) == pytest.approx([5.5e-4])
    assert notes == ["OneCycle: cycle_momentum has no effect, because the optimizer has no betas"]


def test_one_cycle_refuses_a_beta1_that_has_grown_to_one() -> None:
    scheduler = OneCycle(
        adam(), 1e-4, 1e-3, cycle_first_step_size=1, decay_step_size=1, decay_mom_rate=0.1, cycle_max_mom=0.9
    )
    scheduler.step()
    scheduler.step()
    scheduler.step()  # 0.9 * 1.1
    with pytest.raises(ConfigError, match=r"decay_mom_rate: expected a rate that keeps beta1 .* got '1\.08 at step 4'"):
        scheduler.step()


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("WarmupLR", {}, [LR, LR, LR, LR]),
        ("WarmupLR", {"warmup_max_lr": 1e-3}, [1e-3, 1e-3, 1e-3, 1e-3]),
        ("WarmupLR", {"warmup_num_steps": 1e1, "warmup_type": "linear"}, [0.0, 0.0]),  # a whole number as a float
        ("WarmupDecayLR", {"total_num_steps": 4, "warmup_max_lr": 4e-3}, [4e-3, 4e-3, 3e-3, 2e-3]),
        ("WarmupCosineLR", {"total_num_steps": 2, "cos_min_ratio": 0.0}, [LR, LR / 2, 0.0, 0.0]),
    ],
)
def test_a_warmup_of_no_steps_is_at_the_peak_at_once(kind: str, params: dict[str, Any], expected: list[float]) -> None:
    optimizer = adam()
    scheduler = build_scheduler(kind, {"warmup_num_steps": 0, **params}, optimizer)
    rates = written(optimizer)
    for _ in expected[1:]:
        scheduler.step()
        rates += written(optimizer)
    assert rates == pytest.approx(expected, abs=1e-15)


def test_a_run_shorter_than_its_warmup_is_noted(notes: list[str]) -> None:
    WarmupCosineLR(adam(), total_num_steps=3, warmup_num_steps=5)
    assert len(notes) == 1
    assert "total_num_steps = 3 is less than warmup_num_steps = 5" in notes[0]


# -- groups


def test_a_scalar_peak_is_for_groups_without_a_rate_of_their_own(notes: list[str]) -> None:
    optimizer = adam(None, 2e-2, LR)
    scheduler = WarmupLR(optimizer, warmup_max_lr=1e-3, warmup_num_steps=2, warmup_type="linear")
    for _ in range(3):
        scheduler.step()
    assert written(optimizer) == pytest.approx([1e-3, 2e-2, 1e-3])
    WarmupLR(adam(None, 2e-2, LR), warmup_max_lr=1e-3)
    assert len(notes) == 1
    assert "1 (lr 0.02)" in notes[0]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear"}),
        ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 3}),
    ],
)
def test_a_group_with_a_rate_of_its_own_gets_the_same_shape(
    kind: str, params: dict[str, Any], notes: list[str]
) -> None:
    optimizer = adam(None, 2e-2)
    scheduler = build_scheduler(kind, params, optimizer)
    rates = [written(optimizer)]
    for _ in range(8):
        scheduler.step()
        rates.append(written(optimizer))
    assert max(own for _, own in rates) == pytest.approx(2e-2)
    assert all(own == pytest.approx(20 * shared) for shared, own in rates)


def test_cosine_and_range_test_scale_each_groups_rate(notes: list[str]) -> None:
    optimizer = adam(None, 2e-2)
    WarmupCosineLR(optimizer, total_num_steps=9, warmup_num_steps=4, warmup_type="linear").step(2)
    assert written(optimizer) == pytest.approx([LR / 2, 1e-2])
    optimizer = adam(None, 2e-2)
    LRRangeTest(optimizer, 1e-4, lr_range_test_step_size=10).step()
    assert written(optimizer) == pytest.approx([1.1e-4, 4.4e-4])


SCALARS: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_max_lr": 5e-3, "warmup_num_steps": 0}),
    ("WarmupDecayLR", {"warmup_max_lr": 5e-3, "warmup_num_steps": 0, "total_num_steps": 1000}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 5e-3, "cycle_first_step_size": 1}),
    ("LRRangeTest", {"lr_range_test_min_lr": 5e-3, "lr_range_test_step_size": 1000}),
]


def _largest(kind: str, params: dict[str, Any], optimizer: Any) -> list[float]:
    scheduler, rates = build_scheduler(kind, params, optimizer), [written(optimizer)]
    for _ in range(2):
        scheduler.step()
        rates.append(written(optimizer))
    return [max(of_group) for of_group in zip(*rates, strict=True)]


@pytest.mark.parametrize(("kind", "params"), SCALARS, ids=[kind for kind, _ in SCALARS])
def test_a_written_rate_is_no_default_whatever_its_value(kind: str, params: dict[str, Any]) -> None:
    """Regression: the scalar replaced a rate that equals the optimizer's or its class's, and Muon's own rates."""
    one, two = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    groups = [{"params": [one], "lr": float("1e-3")}, {"params": [two]}]
    close = functools.partial(pytest.approx, rel=0.01)
    for optimizer in (torch.optim.AdamW([dict(group) for group in groups]), build_optimizer("AdamW", {}, groups)):
        assert _largest(kind, params, optimizer) == close([1e-3, 5e-3])
    shared = build_optimizer("SGD", {"lr": 1e-3}, [{"params": [one], "lr": 1e-3}, {"params": [two]}])
    assert _largest(kind, params, shared) == close([5e-3 if kind == "LRRangeTest" else 1e-3, 5e-3])
    one.use_muon, two.use_muon = True, False
    for settings, expected in (
        ({"muon_lr": 0.02, "adam_lr": 1e-5}, [0.02, 1e-5]),
        ({"muon_lr": 0.02}, [0.02, 5e-3]),
        ({"adam_lr": 0.02}, [5e-3, 0.02]),
        ({"lr": 0.02}, [5e-3, 5e-3]),
        ({}, [5e-3, 5e-3]),
    ):
        muon = build_optimizer("Muon", settings, [one, two])
        assert _largest(kind, params, muon) == close(expected)


def test_a_list_has_one_value_per_group_whatever_their_rates() -> None:
    optimizer = adam(None, 2e-2)
    scheduler = WarmupLR(optimizer, warmup_min_lr=[1e-5, 1e-6], warmup_max_lr=(3e-3, 4e-3), warmup_num_steps=2)
    assert written(optimizer) == [1e-5, 1e-6]
    scheduler.step(5)
    assert written(optimizer) == pytest.approx([3e-3, 4e-3])


@pytest.mark.parametrize(
    ("kind", "params", "name"),
    [
        ("WarmupLR", {"warmup_max_lr": [1e-3]}, "warmup_max_lr"),
        ("WarmupLR", {"warmup_min_lr": [0.0] * 3}, "warmup_min_lr"),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": [1e-3]}, "cycle_max_lr"),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-3, "cycle_min_mom": [0.8]}, "cycle_min_mom"),
        ("LRRangeTest", {"lr_range_test_min_lr": []}, "lr_range_test_min_lr"),
    ],
)
def test_a_list_of_the_wrong_length_is_an_error(kind: str, params: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.params\.{name}: expected a number, or 2 of them"):
        build_scheduler(kind, params, adam(None, None))


def test_a_scalar_cannot_be_in_proportion_to_a_rate_of_zero() -> None:
    with pytest.raises(ConfigError, match="lr_range_test_min_lr: expected one value per param group"):
        LRRangeTest(adam(None, 1e-3, lr=0.0))


def test_param_groups_alone_are_enough_and_the_first_rate_stands_for_the_default() -> None:
    optimizer = Bare(1e-2, 1e-2, 1e-1)
    WarmupLR(optimizer, warmup_max_lr=1e-3, warmup_num_steps=0).step()
    assert written(optimizer) == [1e-3, 1e-3, 1e-1]
    with pytest.raises(UsageError, match="at least one param group"):
        WarmupLR(Bare())


def test_a_second_schedule_starts_from_the_first_rates_not_from_where_the_first_left_them() -> None:
    optimizer = adam(None, 2e-2)
    WarmupLR(optimizer)
    assert written(optimizer) == [0.0, 0.0]
    WarmupLR(optimizer).step(5000)
    assert written(optimizer) == [LR, 2e-2]


def test_tensor_rates_are_written_in_place_and_not_shared() -> None:
    default = torch.tensor(LR, dtype=torch.float64)
    optimizer = adam(None, None, lr=default)
    scheduler = WarmupLR(optimizer, warmup_max_lr=[1e-3, 2e-3], warmup_num_steps=0)
    held = optimizer.param_groups[0]["lr"]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert written(optimizer) == pytest.approx([1e-3, 2e-3])
    assert float(default) == LR


def test_a_group_added_later_is_an_error() -> None:
    optimizer = adam()
    scheduler = WarmupLR(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UsageError, match="the 1 param groups it was created with, got 2"):
        scheduler.step()


# -- state


@pytest.mark.parametrize("case", RATES)
def test_loading_restores_the_counter_and_the_rates(case: str, notes: list[str]) -> None:
    kind, params, _ = RATES[case]
    before = adam()
    saved: Any = build_scheduler(kind, params, before)
    for _ in range(4):
        saved.step()
    assert saved.state_dict() == {"last_batch_iteration": 3}
    after = adam()
    loaded: Any = build_scheduler(kind, params, after)
    loaded.load_state_dict(saved.state_dict())
    assert written(after) == written(before)
    assert loaded.get_last_lr() == saved.get_last_lr()
    assert after.param_groups[0]["betas"] == before.param_groups[0]["betas"]
    saved.step()
    loaded.step()
    assert written(after) == written(before)


def test_rates_follow_an_optimizer_that_replaced_its_groups_on_load() -> None:
    optimizer = adam()
    scheduler = WarmupLR(optimizer, warmup_num_steps=0)
    optimizer.load_state_dict(adam(lr=1.0).state_dict())
    scheduler.load_state_dict({"last_batch_iteration": 7})
    assert written(optimizer) == [LR]


def test_the_last_rates_are_known_before_the_first_step() -> None:
    assert WarmupLR(adam(), warmup_min_lr=1e-5).get_last_lr() == [1e-5]
    assert WarmupLR(adam(), warmup_num_steps=4, last_batch_iteration=3).get_last_lr() == pytest.approx([LR])


@pytest.mark.parametrize("state", [{}, {"last_epoch": 3}, {"last_batch_iteration": None}, {"last_batch_iteration": -2}])
def test_a_foreign_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="WarmupLR: expected last_batch_iteration"):
        WarmupLR(adam()).load_state_dict(state)


# -- by name


def test_the_names_are_deepspeeds_five() -> None:
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    assert set(VALID_LR_SCHEDULES) <= set(vars(lr_schedules))


class Bare:
    """An optimizer with `param_groups` alone, unlike torch's."""

    def __init__(self, *rates: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": rate} for rate in rates]


def test_a_torch_scheduler_by_name() -> None:
    optimizer = adam()
    scheduler = build_scheduler("StepLR", {"step_size": 1, "gamma": 0.5}, optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    optimizer.step()
    scheduler.step()
    assert written(optimizer) == [LR / 2]
    with pytest.raises(UsageError, match=r"StepLR: expected a torch\.optim\.Optimizer"):
        build_scheduler("StepLR", {"step_size": 1}, Bare(1.0))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("WarmUpLr", "did you mean 'WarmupLR'"),
        ("CosineAnealingLR", "did you mean 'CosineAnnealingLR'"),
        ("xyzzy", "choose one of LRRangeTest"),
        ("_LRScheduler", "choose one of|did you mean"),
        ("LRScheduler", "expected a known scheduler"),
        ("Counter", "expected a known scheduler"),
        ("ReduceLROnPlateau", "needs a metric"),
    ],
)
def test_an_unknown_type_is_an_error(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        build_scheduler(name, {}, adam())
    assert str(caught.value).startswith("scheduler.type")


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupLR", {"warmup_steps": 3}, r"scheduler\.params\.warmup_steps: .*did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"zzz": 3}, r"scheduler\.params\.zzz: .*it takes warmup_min_lr, "),
        ("WarmupLR", {"optimizer": 3}, r"scheduler\.params\.optimizer: expected an argument"),
        ("StepLR", {"step_siz": 3}, r"scheduler\.params\.step_siz: .*did you mean 'step_size'"),
        ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps: expected a value"),
        ("StepLR", {}, r"scheduler\.params\.step_size: expected a value"),
        ("StepLR", {"step_size": 1, "last_epoch": 4}, r"scheduler\.params of StepLR: .*initial_lr"),
        ("WarmupLR", {"warmup_num_steps": -1}, r"warmup_num_steps: expected a whole number of at least 0, got -1"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "warmup_num_steps: expected a whole number"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "warmup_num_steps: expected a whole number"),
        ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps: expected a whole number"),
        ("WarmupLR", {"warmup_num_steps": float("inf")}, "warmup_num_steps: expected a whole number"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "warmup_max_lr: expected a number"),
        ("WarmupLR", {"warmup_max_lr": float("nan")}, "warmup_max_lr: expected a number"),
        ("WarmupLR", {"warmup_max_lr": -1e-3}, "warmup_max_lr: expected a number of at least 0"),
        ("WarmupLR", {"warmup_type": "cubic"}, r"""warmup_type: expected "log" or "linear", got 'cubic'"""),
        ("WarmupLR", {"warmup_type": ["log"]}, "warmup_type: expected"),
        ("WarmupCosineLR", {"total_num_steps": 0}, "total_num_steps: expected a whole number of at least 1"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "expected a number above 0"),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1},
            "cycle_max_mom: .* less than 1, got",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": "no"},
            "expected true or false",
        ),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size: expected a whole number"),
        ("LRRangeTest", {"last_batch_iteration": -2}, "last_batch_iteration: expected a whole number of at least -1"),
    ],
)
def test_a_wrong_argument_is_named(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scheduler(kind, params, adam())
