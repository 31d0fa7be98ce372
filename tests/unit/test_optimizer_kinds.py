"""Which optimizers step on flat shards, on full tensors, or on all parameters at once; probing changes nothing."""

from __future__ import annotations

import copy
import inspect
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

from tests.unit.written_optimizers import (
    BeginsLate,
    ClipsAll,
    CountsInGroups,
    CountsParameters,
    CubeRoot,
    DecaysMatrices,
    DividesBySize,
    EstimatesStepSize,
    EvaluatesMeans,
    FactoredWhenLarge,
    HoldsObjects,
    Lars,
    Lookahead,
    MadeOfTwo,
    MakesStates,
    MatricesOnly,
    NeedsTheFirst,
    Noisy,
    NoisyByItself,
    NotesTheNorm,
    PreparesLate,
    ProjectsWhenOrthogonal,
    ScheduleFree,
    Shampoo,
    Sign,
    StepsItsOwnList,
    Written,
)
from zeroaccel.errors import ConfigError
from zeroaccel.ops.elementwise import Adam
from zeroaccel.optim import optimizer_probe
from zeroaccel.optim.optimizer_kinds import OptimizerKind, classify, has_stepped
from zeroaccel.optim.optimizer_probe import OptimizerCopy, element_states, isolated, renew_state

ELEMENTWISE, PER_TENSOR, COUPLED = OptimizerKind.ELEMENTWISE, OptimizerKind.PER_TENSOR, OptimizerKind.COUPLED


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]


makes_sums_late = pytest.mark.skipif(
    "full_like" not in inspect.getsource(torch.optim.Adagrad._init_group),
    reason="Adagrad of torch 2.6 makes its sums in the constructor only, and a copy of it fails in a trial",
)

CASES: list[Any] = [
    (ClipsAll, COUPLED, "depends on other parameters"),
    (EstimatesStepSize, COUPLED, "depends on"),
    (NotesTheNorm, COUPLED, "its attribute 'total' depends on all parameters"),
    (CountsParameters, COUPLED, "depends on other parameters"),
    (NeedsTheFirst, COUPLED, "depends on other parameters"),
    (BeginsLate, PER_TENSOR, "(seen at step 3)"),
    (PreparesLate, PER_TENSOR, "its state 'factor'"),
    (lambda params: FactoredWhenLarge(params, 0, 0), PER_TENSOR, "depends on other elements"),
    (lambda params: FactoredWhenLarge(params, 64, 0), PER_TENSOR, "depends on other elements"),
    (lambda params: FactoredWhenLarge(params, 4096, 0), PER_TENSOR, "in a large one"),
    (lambda params: FactoredWhenLarge(params, 0, 128), PER_TENSOR, "in a large one"),
    (DividesBySize, PER_TENSOR, "shape"),
    (DecaysMatrices, PER_TENSOR, "shape"),
    (Lars, PER_TENSOR, "depends on other elements"),
    (ProjectsWhenOrthogonal, PER_TENSOR, "depends on other elements"),
    (Shampoo, PER_TENSOR, ""),
    (EvaluatesMeans, PER_TENSOR, "eval()"),
    (HoldsObjects, PER_TENSOR, "its state 'holder' holds Holder objects"),
    (Noisy, PER_TENSOR, "random"),
    (NoisyByItself, PER_TENSOR, "random"),
    (MatricesOnly, PER_TENSOR, "matrices only"),
    (lambda params: torch.optim.Adafactor(params), PER_TENSOR, "factored"),
    (CubeRoot, PER_TENSOR, "rounds the last elements"),
    (Sign, ELEMENTWISE, ""),
    (CountsInGroups, ELEMENTWISE, ""),
    (ScheduleFree, ELEMENTWISE, ""),
    (MakesStates, ELEMENTWISE, ""),
    (lambda params: Lookahead(torch.optim.RMSprop(params)), ELEMENTWISE, ""),
    pytest.param(lambda params: Lookahead(torch.optim.Adagrad(params)), ELEMENTWISE, "", marks=makes_sums_late),
    (Adam, ELEMENTWISE, ""),
    (torch.optim.AdamW, ELEMENTWISE, ""),
]


@pytest.mark.parametrize(("make", "kind", "words"), CASES)
def test_each_optimizer_has_its_kind(make: Callable[[Any], Optimizer], kind: OptimizerKind, words: str) -> None:
    found = classify(make(_params()))
    assert found.groups == (kind,)
    assert words in found.reason
    assert bool(found.reason) == (kind is not ELEMENTWISE)


TORCHS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_classes_are_known_and_their_subclasses_prove_it(name: str) -> None:
    known = getattr(torch.optim, name)
    assert classify(known(_params(), lr=0.0)).source == "known"
    subclass = type("Mine", (known,), {})
    for lr in (0.0, 1e-7):
        found = classify(subclass(_params(), lr=lr))
        assert (found.groups, found.source) == ((ELEMENTWISE,), "probed")


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_torchs_rules_per_tensor_are_known_and_found_out(name: str) -> None:
    if (known := getattr(torch.optim, name, None)) is None:
        pytest.skip(f"this torch has no {name}")
    assert classify(known(_params()[:1])).source == "known"
    assert classify(type("Mine", (known,), {})(_params()[:1])).groups == (PER_TENSOR,)


class MixedByGroup(MatricesOnly):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return super().direction(group, param, grad, state) if group["use_muon"] else grad.sign()


class MixedByNote(MatricesOnly):
    """As Moonlight's Muon: one group, and a note about each parameter in its state."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params)
        for param in params:
            self.state[param]["use_muon"] = param.dim() == 2

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return super().direction(group, param, grad, state) if state["use_muon"] else grad.sign()


class MixedByFlag(MatricesOnly):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return super().direction(group, param, grad, state) if getattr(param, "use_muon", False) else grad.sign()


def test_a_group_that_is_elementwise_by_itself_stays_so() -> None:
    matrix, vector = _params()
    found = classify(MixedByGroup([{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}]))
    assert found.groups == (PER_TENSOR, ELEMENTWISE)
    assert "matrices only" in found.reason
    assert not has_stepped(MixedByNote(_params()))
    assert classify(MixedByNote(_params())).groups == (PER_TENSOR,)
    matrix.use_muon = True  # type: ignore[attr-defined]
    assert classify(MixedByFlag([matrix, vector])).groups == (PER_TENSOR,)
    assert classify(MixedByFlag([{"params": [vector]}, {"params": [matrix]}])).groups == (ELEMENTWISE, PER_TENSOR)


def test_coupling_across_groups_makes_all_of_them_coupled() -> None:
    matrix, vector = _params()
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
    assert classify(ClipsAll(groups, weight_decay=0.0)).groups == (COUPLED, COUPLED)


class CountedSteps(torch.optim.AdamW):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        return super().step(closure)


def _steps(optimizer: Optimizer) -> int:
    CountedSteps.steps = 0
    classify(optimizer)
    return CountedSteps.steps


def test_the_work_is_bounded() -> None:
    plain = _steps(CountedSteps(_params()))
    assert plain <= 12 * (5 + 1 + 1 + 2 + 1 + 2)
    layers = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 * 0.9**depth} for depth in range(24)]
    assert _steps(CountedSteps(layers)) == plain
    decays = [{"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.1 * 0.9**depth} for depth in range(24)]
    assert _steps(CountedSteps(decays)) == plain


class ManyOperations(Written):
    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        for _ in range(1000):
            grad = grad + 0.0
        return grad


def test_a_step_of_very_many_operations_is_tried_less_and_believed_less() -> None:
    found = classify(ManyOperations(_params()))
    assert found.groups == (PER_TENSOR,)
    assert "too many to try" in found.reason


@pytest.mark.parametrize("declared", ["per_tensor", OptimizerKind.COUPLED])
def test_what_is_declared_counts(declared: Any) -> None:
    found = classify(torch.optim.AdamW([{"params": [param]} for param in _params()]), declared)
    assert (found.groups, found.source) == ((OptimizerKind(declared),) * 2, "declared")
    assert OptimizerKind(declared).value in found.reason
    assert classify(Noisy(_params()), "elementwise").reason == ""


def test_a_kind_that_is_none_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"expected 'elementwise', 'per_tensor' or 'coupled', got 'flat'"):
        classify(torch.optim.AdamW(_params()), "flat")
    with pytest.raises(ConfigError, match=r'kind of optimizer Adafactor: expected "per_tensor", since its second'):
        classify(torch.optim.Adafactor(_params()), "elementwise")


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match="SparseAdam: it takes sparse gradients only"):
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
def test_one_that_steps_only_what_it_was_made_with_is_refused(make: Any, declared: Any, groups: str) -> None:
    params = _params()
    with pytest.raises(ConfigError, match=f"got 'no update of those in {groups}: it refers to the parameters"):
        classify(make(params), declared)
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)


def test_inner_optimizers_that_share_the_groups_are_no_hindrance() -> None:
    optimizer = MadeOfTwo(*([param] for param in _params()))
    optimizer.param_groups = [group for inner in optimizer.inner for group in inner.param_groups]
    assert classify(optimizer).groups == (ELEMENTWISE,) * 2


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
        assert classify(optimizer).groups == (ELEMENTWISE,)
        assert seen == []
        optimizer.step()
        assert "any" in seen
    finally:
        handle.remove()
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert handle.id not in (handle.hooks_dict_ref() or {})


class HookedByItself(Written):
    """Clips each gradient before its step, in a hook of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.register_step_pre_hook(self._clip)

    def _clip(self, *_: Any) -> None:
        for _, _, grad, _ in self.held():
            grad.div_(grad.norm() + 1e-9)


def test_an_optimizers_own_hook_is_part_of_it() -> None:
    assert classify(HookedByItself(_params())).groups == (PER_TENSOR,)


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
    assert classify(optimizer).groups == (ELEMENTWISE,)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tensor_rates_and_a_default_device_are_no_hindrance() -> None:
    class Mine(torch.optim.AdamW):
        pass

    with torch.device("meta"):
        params = [nn.Parameter(torch.ones(4, 4))]
        found = classify(Mine(params, lr=torch.tensor(0.0, device="cpu"), foreach=False))
        assert found.groups == (ELEMENTWISE,)
        assert classify(BeginsLate(params)).groups == (PER_TENSOR,)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        assert classify(BeginsLate(_params())).groups == (PER_TENSOR,)
        assert classify(Sign(_params())).groups == (ELEMENTWISE,)


def test_what_has_stepped_is_reported_from_what_is_new() -> None:
    switched = ScheduleFree(_params())
    switched.train()
    assert switched.state  # of empty dictionaries
    assert not has_stepped(switched)
    assert classify(switched).groups == (ELEMENTWISE,)
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
    """Keeps a second state where a value is large."""

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["sum"] = state.get("sum", 0) + grad
        if group["reads"] and float(grad.max()) > 0.5:
            state["large"] = (grad > 0.5).clone()
        state["was_real"] = not isinstance(param, torch._subclasses.fake_tensor.FakeTensor)
        return grad


def test_states_are_found_without_values_where_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    found = optimizer_probe._state_after_step

    def noted(*arguments: Any) -> Any:
        state = found(*arguments)
        seen.append(state["was_real"])
        return state

    monkeypatch.setattr(optimizer_probe, "_state_after_step", noted)
    assert element_states(SeesValues(_params(), reads=False), 0, (1 << 20, 1 << 20)) == {"sum": torch.float32}
    expected = {"sum": torch.float32, "large": torch.bool}
    assert element_states(SeesValues(_params(), reads=True), 0, (2, 3)) == expected
    assert seen == [False, True]


def test_a_twin_shares_nothing() -> None:
    optimizer = Lookahead(torch.optim.Adagrad(_params()))
    with isolated():
        twin = OptimizerCopy(optimizer).optimizer
    assert twin.inner is not optimizer.inner
    assert twin.param_groups is twin.inner.param_groups
    assert twin.fast_state is twin.inner.state
    assert len(optimizer.inner.state) == 2
    assert not twin.inner.state
