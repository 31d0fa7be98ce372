"""Optimizers that step on flat shards, on full tensors, or on all parameters at once; the trial changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.unit.optim.written_optimizers import (
    BeginsLate,
    ClipsAll,
    CountsInGroups,
    CountsParameters,
    EstimatesStepSize,
    Lars,
    Lookahead,
    MadeOfTwo,
    MakesStates,
    MatricesOnly,
    NeedsTheFirst,
    NeedsTwo,
    Noisy,
    NoisyByItself,
    ScheduleFree,
    Shampoo,
    Sign,
    StepsItsOwnList,
    Written,
)
from zeroaccel.errors import ConfigError
from zeroaccel.ops.elementwise import Adam
from zeroaccel.optim import optimizer_copy
from zeroaccel.optim.optimizer_copy import OptimizerCopy, element_states, has_stepped, isolated, renew_state
from zeroaccel.optim.optimizer_kinds import OptimizerKind, classify

ELEMENTWISE, PER_TENSOR, COUPLED = OptimizerKind.ELEMENTWISE, OptimizerKind.PER_TENSOR, OptimizerKind.COUPLED


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]


CASES: list[Any] = [
    (ClipsAll, COUPLED, "depends on other parameters"),
    (EstimatesStepSize, COUPLED, "depends on other parameters"),
    (CountsParameters, COUPLED, "depends on other parameters"),
    (NeedsTheFirst, COUPLED, "depends on other parameters"),
    (NeedsTwo, COUPLED, "cannot step one parameter without the others (IndexError: list index"),
    *((rule, PER_TENSOR, "class is not known") for rule in (BeginsLate, Lars, Shampoo, Noisy, NoisyByItself)),
    *((rule, PER_TENSOR, "class is not known") for rule in (MatricesOnly, Sign, CountsInGroups, ScheduleFree)),
    (lambda params: Lookahead(torch.optim.RMSprop(params)), PER_TENSOR, "class is not known"),
    (lambda params: torch.optim.Adafactor(params), PER_TENSOR, "factored"),
    (Adam, ELEMENTWISE, ""),
    (torch.optim.AdamW, ELEMENTWISE, ""),
    (type("Lion", (Sign,), {"__module__": "lion_pytorch.lion_pytorch"}), ELEMENTWISE, ""),
    (type("DAdaptAdam", (Sign,), {"__module__": "dadaptation.dadapt_adam"}), COUPLED, "one step size"),
]


@pytest.mark.parametrize(("make", "kind", "words"), CASES)
def test_each_optimizer_has_its_kind(make: Callable[[Any], Optimizer], kind: OptimizerKind, words: str) -> None:
    found = classify(make(_params()))
    assert found.groups == (kind,)
    assert words in found.reason
    assert bool(found.reason) == (kind is not ELEMENTWISE)


TORCHS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_classes_are_known_and_a_subclass_of_one_is_never_elementwise_unless_declared(name: str) -> None:
    known = getattr(torch.optim, name)
    assert classify(known(_params(), lr=0.0)).source == "known"
    subclass = type("Mine", (known,), {})(_params(), lr=0.0)
    assert (classify(subclass).groups, classify(subclass).source) == ((PER_TENSOR,), "unknown")
    assert classify(subclass, "elementwise").groups == (ELEMENTWISE,)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_torchs_rules_per_tensor_are_known(name: str) -> None:
    if (known := getattr(torch.optim, name, None)) is None:
        pytest.skip(f"this torch has no {name}")
    assert classify(known(_params()[:1])).source == "known"


def test_coupling_across_groups_makes_all_of_them_coupled() -> None:
    matrix, vector = _params()
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
    assert classify(ClipsAll(groups, weight_decay=0.0)).groups == (COUPLED, COUPLED)


class CountedSteps(torch.optim.AdamW):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        return super().step(closure)


def test_the_number_of_trial_steps_is_bounded() -> None:
    CountedSteps.steps = 0
    classify(CountedSteps([{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 * 0.9**depth} for depth in range(24)]))
    assert CountedSteps.steps == 12 * (1 + 4 * 2)


@pytest.mark.parametrize("declared", ["per_tensor", OptimizerKind.COUPLED])
def test_a_declared_kind_takes_precedence(declared: Any) -> None:
    found = classify(torch.optim.AdamW([{"params": [param]} for param in _params()]), declared)
    assert (found.groups, found.source) == ((OptimizerKind(declared),) * 2, "declared")
    assert OptimizerKind(declared).value in found.reason
    assert classify(Noisy(_params()), "elementwise").reason == ""


def test_unknown_and_contradicting_kinds_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"expected 'elementwise', 'per_tensor' or 'coupled', got 'flat'"):
        classify(torch.optim.AdamW(_params()), "flat")
    with pytest.raises(ConfigError, match=r'kind of optimizer Adafactor: expected "per_tensor", because its second'):
        classify(torch.optim.Adafactor(_params()), "elementwise")
    coupled = type("Prodigy", (Sign,), {"__module__": "prodigyopt.prodigy"})
    with pytest.raises(ConfigError, match=r'kind of optimizer Prodigy: expected "coupled", because it estimates one'):
        classify(coupled(_params()), "elementwise")


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match="SparseAdam: it needs sparse gradients"):
        classify(torch.optim.SparseAdam(_params()))


@pytest.mark.parametrize(
    ("make", "declared", "groups"),
    [
        (StepsItsOwnList, None, "group 0"),
        (lambda params: MadeOfTwo(params[:1], params[1:]), None, "groups 0, 1"),
        (lambda params: MadeOfTwo(params[:1], params[1:]), "elementwise", "groups 0, 1"),
        (lambda params: MadeOfTwo(params[:1], params[1:], by_itself=True), None, "group 1"),
    ],
)
def test_an_optimizer_that_steps_its_original_parameters_is_refused(make: Any, declared: Any, groups: str) -> None:
    params = _params()
    with pytest.raises(ConfigError, match=f"got 'no update of those in {groups}: an attribute refers to"):
        classify(make(params), declared)
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)


def test_inner_optimizers_that_share_the_groups_are_no_hindrance() -> None:
    optimizer = MadeOfTwo(*([param] for param in _params()))
    optimizer.param_groups = [group for inner in optimizer.inner for group in inner.param_groups]
    assert classify(optimizer).groups == (PER_TENSOR,) * 2


def _values(optimizer: Optimizer) -> dict[str, Any]:
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    return copy.deepcopy({name: value for name, value in vars(optimizer).items() if name != "param_groups"}, params)


@pytest.mark.parametrize("make", [EstimatesStepSize, CountsInGroups, ScheduleFree, Noisy, Shampoo])
def test_nothing_of_the_users_changes(make: Callable[[Any], Optimizer]) -> None:
    params = _params()
    optimizer = make(params)
    optimizer.param_groups[0]["scale"] = scale = torch.ones(3)
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    before = _values(optimizer), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    threads = torch.get_num_threads()
    classify(optimizer)
    assert {key: str(value) for key, value in _values(optimizer).items()} == {k: str(v) for k, v in before[0].items()}
    assert torch.equal(before[1], torch.get_rng_state())
    assert before[2] == random.getstate()
    assert np.array_equal(before[3], np.random.get_state()[1])
    assert torch.get_num_threads() == threads
    assert optimizer.param_groups[0]["scale"] is scale
    assert torch.equal(scale, torch.ones(3))
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    assert all(torch.equal(param, torch.ones_like(param)) and param.grad is None for param in params)


def test_hooks_and_schedulers_do_not_see_the_trial() -> None:
    seen: list[str] = []
    optimizer = CountedSteps(_params(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("any"))
    try:
        assert classify(optimizer).groups == (PER_TENSOR,)
        assert seen == []
        optimizer.step()
        assert "any" in seen
    finally:
        handle.remove()
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert handle.id not in (handle.hooks_dict_ref() or {})


class HookedByItself(Written):
    """Clips all gradients together before its step, in its own hook."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.register_step_pre_hook(self._clip)

    def _clip(self, *_: Any) -> None:
        norm = torch.stack([grad.norm() for _, _, grad, _ in self.held()]).norm()
        for _, _, grad, _ in self.held():
            grad.div_(norm + 1e-9)


def test_an_optimizers_own_hook_is_part_of_it() -> None:
    assert classify(HookedByItself(_params())).groups == (COUPLED,)


def test_a_compiled_rule_is_compiled_in_training_only() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(inputs)
        return graph.forward

    class Compiled(Written):
        rule = staticmethod(torch.compile(lambda grad: grad / (grad.norm() + 1e-8), backend=backend))

        def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
            return self.rule(grad)  # type: ignore[no-any-return]

    optimizer = Compiled(params := _params())
    assert classify(optimizer).groups == (PER_TENSOR,)
    assert not compiled
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert compiled


def test_a_model_in_an_attribute_is_not_touched() -> None:
    model = nn.Linear(4, 4)
    optimizer = Sign(model.parameters())
    optimizer.model = model  # type: ignore[attr-defined]
    before = copy.deepcopy(model.state_dict())
    assert classify(optimizer).groups == (PER_TENSOR,)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tensor_rates_and_a_default_device_are_no_hindrance() -> None:
    class Mine(torch.optim.AdamW):
        pass

    with torch.device("meta"):
        params = [nn.Parameter(torch.ones(4, 4))]
        found = classify(Mine(params, lr=torch.tensor(0.0, device="cpu"), foreach=False))
        assert found.groups == (PER_TENSOR,)
        assert classify(ClipsAll(params)).groups == (COUPLED,)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        assert classify(ClipsAll(_params())).groups == (COUPLED,)


def test_optimizers_that_have_stepped_are_recognized() -> None:
    switched = ScheduleFree(_params())
    switched.train()
    assert switched.state  # with empty dictionaries
    assert not has_stepped(switched)
    assert classify(switched).groups == (PER_TENSOR,)
    assert not has_stepped(torch.optim.Adagrad(_params()))
    assert not has_stepped(MakesStates(_params()))
    for make in (ScheduleFree, MakesStates, torch.optim.Adagrad, torch.optim.AdamW):
        optimizer = make(params := _params())
        if make is ScheduleFree:
            optimizer.train()  # type: ignore[attr-defined]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert has_stepped(optimizer)


def test_states_of_the_constructor_are_made_anew() -> None:
    optimizer = torch.optim.Adagrad(_params(), initial_accumulator_value=0.5)
    new = nn.Parameter(torch.ones(7))
    optimizer.param_groups[0]["params"] = [new]
    renew_state(optimizer)
    assert set(optimizer.state) == {new}
    assert torch.equal(optimizer.state[new]["sum"], torch.full((7,), 0.5))
    switched = ScheduleFree(_params())
    switched.train()
    renew_state(switched)
    assert not any(switched.state.values())


def test_states_per_element_are_listed_without_a_trace() -> None:
    optimizer = ScheduleFree(_params())
    before = torch.get_rng_state()
    assert element_states(optimizer, 0, (6,)) == {"z": torch.float32}
    assert optimizer.param_groups[0]["k"] == 0
    assert torch.equal(before, torch.get_rng_state())
    assert element_states(torch.optim.Adagrad(_params()), 0, (2, 3)) == {"sum": torch.float32}


class SeesValues(Written):
    """Adds a second state if a value is large."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["sum"] = state.get("sum", 0) + grad
        if group["reads"] and float(grad.max()) > 0.5:
            state["large"] = (grad > 0.5).clone()
        state["was_real"] = not isinstance(param, torch._subclasses.fake_tensor.FakeTensor)
        return grad


def test_states_are_found_without_values_where_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    found = optimizer_copy._state_after_step

    def noted(*arguments: Any) -> Any:
        state = found(*arguments)
        seen.append(state["was_real"])
        return state

    monkeypatch.setattr(optimizer_copy, "_state_after_step", noted)
    assert element_states(SeesValues(_params(), reads=False), 0, (1 << 20, 1 << 20)) == {"sum": torch.float32}
    expected = {"sum": torch.float32, "large": torch.bool}
    assert element_states(SeesValues(_params(), reads=True), 0, (2, 3)) == expected
    assert seen == [False, True]


def test_a_copy_of_an_optimizer_shares_nothing() -> None:
    optimizer = Lookahead(torch.optim.Adagrad(_params()))
    with isolated():
        twin = OptimizerCopy(optimizer).optimizer
    assert twin.inner is not optimizer.inner
    assert twin.param_groups is twin.inner.param_groups
    assert twin.fast_state is twin.inner.state
    assert len(optimizer.inner.state) == 2
    assert not twin.inner.state
