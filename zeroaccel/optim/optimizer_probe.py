"""Tries out what the update of an element depends on, by stepping copies of an optimizer on small tensors.

[Note: trial of an optimizer] Copies (`OptimizerCopy`) take twelve steps on small tensors of one to four dimensions,
in three runs: all tensors together, each tensor alone, and flat pieces of them, cut without regard to where a tensor
ends, as shards are. Together and alone must agree, or the rule is coupled; full tensors and pieces must agree, or it is
a rule per tensor. To agree is to have the same values, up to rounding, and the same numbers in states, groups and
attributes, so that a rule also shows which has accumulated something and not used it yet. What passes is tried once
more on tensors of thousands of elements, since some rules begin at a size, and on tensors of odd sizes, whose bits must
be those of the same values in a longer row. The gradients differ in scale from tensor to tensor and from step to step,
and are nearly orthogonal to the values at two steps, so that limits are met.

The work is bounded by counting operations, never by a clock, so that every rank comes to the same answer: a step of
very many operations is tried fewer times.

A trial cannot see a rule that begins after twelve steps and accumulates nothing before, or at more than 16384 elements
or two dimensions of more than 128; nor one for some of more than four kinds of settings of which only numbers differ.
The kind of such an optimizer has to be declared.

Nothing here communicates, and the optimizer, its parameters and all random states stay as they are. Tiers use the same
copies to find the states that an optimizer will have (`element_states`).
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class OptimizerCopy:
    """A copy of an optimizer, without its parameters and its state, to be stepped inside `isolated`.

    Made by hand, since `Optimizer.__getstate__` would drop the attributes of a subclass. Copied are attributes, param
    groups and inner optimizers. Not copied is a `step` of the instance, a scheduler's wrapper that steps the original.
    Of the hooks around a step those are part of the optimizer that are its own methods; others look at the training,
    and do not run.

    Args:
        optimizer: the original; it is not changed.

    Attributes:
        optimizer: the copy. Its groups have no `params`, its state is empty, its tensors are in host memory.

    Raises:
        Exception: whatever an attribute raises that cannot be copied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._originals = optimizer
        memo: dict[int, Any] = {}
        absent = nn.Parameter(torch.empty(0, device="cpu"))
        for param in _parameters(optimizer):
            memo[id(param)] = absent
        copies: list[tuple[Any, Any]] = []
        self.optimizer: Any = _shell(optimizer, memo, copies)
        for original, shell in copies:
            attributes = {name: value for name, value in vars(original).items() if name not in {"step", *_HOOKS}}
            vars(shell).update(copy.deepcopy(attributes, memo))
            for name in _HOOKS:
                if name in vars(original):
                    vars(shell)[name] = _own_hooks(vars(original)[name], original, shell)
        for group in self.optimizer.param_groups:
            group["params"] = []

    def place(self, tensors: Sequence[tuple[int, Tensor, Mapping[str, Any]]]) -> None:
        """Puts parameters in, as (param group, values, what the constructor noted of it in its state) each."""
        for index, tensor, notes in tensors:
            self.optimizer.param_groups[index]["params"].append(tensor)
            if notes:
                self.optimizer.state[tensor].update(notes)
        if _has_elements(self._originals):
            renew_state(self.optimizer)

    def step(self) -> None:
        """One step."""
        self.optimizer.step()

    def switch(self, mode: str) -> None:
        """Calls `train()` or `eval()`, which some optimizers have."""
        method = getattr(self.optimizer, mode, None)
        if callable(method):
            method()


@contextmanager
def isolated() -> Iterator[Callable[[], bool]]:
    """For steps of copies: the same random states each time, restored afterwards, and torch without modes and hooks.

    Yields:
        Whether a random number has been drawn since.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())  # the trial is real also where tensors are fake, and not counted
        if torch.empty(0).device.type != "cpu":  # torch 2.6's get_default_device() does not know of `with torch.device`
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a rule may be compiled, for every shape anew
        hooks = [getattr(optimizer_module, name, {}) for name in _HOOKS_OF_ALL]
        hooked = [dict(registered) for registered in hooks]
        threads = torch.get_num_threads()
        before = _random_states()
        on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed devices that are yet to start
        random.seed(0)
        np.random.seed(0)
        seeded = _random_states()
        torch.set_num_threads(1)  # tensors are small: threads of a busy machine took twenty times as long for factors
        for registered in hooks:
            registered.clear()
        try:
            yield lambda: not _same_states(seeded, _random_states())
        finally:
            for registered, entries in zip(hooks, hooked, strict=True):
                registered.update(entries)
            torch.set_num_threads(threads)
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])
            if on_devices is not None:
                torch.cuda.set_rng_state_all(on_devices)


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether its state comes from steps, rather than from its constructor, as that of torch's Adagrad does.

    Empty states, as the `train()` of a schedule-free optimizer leaves them, and flags are no state. A state that counts
    no steps is compared with what the constructor makes for its parameter.
    """
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            state = optimizer.state.get(param)
            if not isinstance(state, Mapping):
                continue
            if "step" in state:
                if bool(state["step"]):
                    return True
            elif any(isinstance(value, Tensor) for value in state.values()) and not _is_new(optimizer, index, param):
                return True
    return False


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; NaN, as sharded parameters show, is like NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _is_new(optimizer: Optimizer, index: int, param: Tensor) -> bool:
    group = {**optimizer.param_groups[index], "params": [param]}
    try:
        with isolated():
            fresh = type(optimizer)([group], **_settings(optimizer)).state.get(param, {})
    except Exception:
        return False  # it is not known what the constructor makes
    state = optimizer.state[param]
    return fresh.keys() == state.keys() and all(
        _same(value, fresh[name]) if isinstance(value, Tensor) and isinstance(fresh[name], Tensor) else True
        for name, value in state.items()
    )


def renew_state(optimizer: Optimizer) -> None:
    """Makes the state that the constructor makes, for the parameters that are in the groups now, and no other."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state = type(optimizer)(groups, **_settings(optimizer)).state


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """What of its defaults its constructor takes; some keep counters there."""
    accepted = inspect.signature(type(optimizer)).parameters
    accepts_all = any(accepted[name].kind is inspect.Parameter.VAR_KEYWORD for name in accepted)
    return {name: value for name, value in optimizer.defaults.items() if accepts_all or name in accepted}


def element_states(optimizer: Optimizer, group: int, shape: tuple[int, ...]) -> dict[str, torch.dtype]:
    """Name -> dtype of the states that a parameter of this shape gets and that have one value per element.

    Found by a step without values where the rule can do without, since a matrix may be large and its rule slow.

    Args:
        group: index of the param group whose rule it is.

    Raises:
        Exception: whatever the optimizer raises at a step in host memory.
    """
    with isolated():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                state = _state_after_step(optimizer, group, shape)
        except Exception:  # it looks at values, which these tensors have not
            state = _state_after_step(optimizer, group, shape)
    return {name: v.dtype for name, v in state.items() if isinstance(v, Tensor) and v.dim() and v.shape == shape}


def _state_after_step(optimizer: Optimizer, group: int, shape: tuple[int, ...]) -> Mapping[str, Any]:
    trial = OptimizerCopy(optimizer)
    param = nn.Parameter(torch.ones(shape))
    trial.place([(group, param, {})])
    trial.switch("train")
    param.grad = torch.ones(shape)
    trial.step()
    return dict(trial.optimizer.state.get(param, {}))


def holds_generator(optimizer: Optimizer) -> bool:
    """Whether it draws from a generator of its own."""
    values = [*vars(optimizer).values(), *(value for group in optimizer.param_groups for value in group.values())]
    return any(isinstance(value, _GENERATORS) for value in values)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for value in vars(optimizer).values():
        if isinstance(value, nn.Module):
            yield from value.parameters()


def _shell(optimizer: Any, memo: dict[int, Any], copies: list[tuple[Any, Any]]) -> Any:
    """An empty object for the copy of `optimizer` and of each optimizer inside; registers them in `memo`."""
    shell = object.__new__(type(optimizer))
    memo[id(optimizer)] = shell
    copies.append((optimizer, shell))
    for name, value in vars(optimizer).items():
        if name == "state":
            memo[id(value)] = defaultdict(dict)
    # Walked by hand ahead of `deepcopy`: tensors of the optimizer are copied to host memory, and inner optimizers (a
    # Lookahead's base, for instance) get shells of their own instead of being copied with their parameters.
    pending = [value for name, value in vars(optimizer).items() if name != "state"]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in memo or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            memo[id(value)] = value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad)
        elif isinstance(value, Optimizer):
            _shell(value, memo, copies)
        elif type(value) in (dict, OrderedDict, defaultdict):
            pending.extend(value.values())
        elif type(value) in (list, tuple):
            pending.extend(value)
    return shell


def _own_hooks(hooks: Mapping[int, Any], original: Any, shell: Any) -> OrderedDict[int, Any]:
    own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is original}
    return OrderedDict((key, hook.__func__.__get__(shell)) for key, hook in own.items())


def _has_elements(optimizer: Any) -> bool:
    """Whether its state, of no step yet, has tensors, which the constructor made."""
    states = getattr(optimizer, "state", {}).values()
    return any(isinstance(v, Tensor) for state in states if isinstance(state, Mapping) for v in state.values())


def _random_states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _same_states(one: tuple[Tensor, Any, Any], other: tuple[Tensor, Any, Any]) -> bool:
    arrays = all(np.array_equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    return torch.equal(one[0], other[0]) and one[1] == other[1] and arrays


_SHAPES = ((32,), (8, 12), (8, 12), (4, 2, 8), (2, 3, 4, 4))  # two are alike, as some rules step such together
_LARGE_SHAPES = ((128, 128), (4352,))
_ODD_SHAPES = ((37,), (5, 9))
_SCALES = (1.0, 0.02, 30.0, 5.0, 0.3)  # of the gradients, by shape
_RAMP = (1.0, 2.0, 0.5, 10.0, 0.1, 100.0, 1.0, 30.0, 0.01, 1e5, 3.0, 1.0)  # of the gradients, by step
_ORTHOGONAL = (2, 8)  # steps
_EVAL_AFTER = 5  # steps
_MOST_OPERATIONS = 12_000  # of all tensors alone, in all steps
_ALIGNMENT = 32  # shards start and end at multiples of it
_MOST_SORTS = 4
_RATES = (0.1, 1.0)
_RTOL = 1e-5
_ROUNDINGS = 4 * torch.finfo(torch.float32).eps
_NAMES = frozenset({"params", "param_names", "name", "names", "group_name", "lr", "initial_lr", "max_lr", "min_lr"})

_ENDS = "it rounds the last elements of a tensor otherwise than the rest, so that only whole tensors give torch's bits"
_ELEMENTS = "its update of an element depends on other elements of its parameter, or on the parameter's shape"


@dataclass
class Findings:
    """The result of a trial.

    Attributes:
        coupled: why parameters depend on each other, as a clause about "it"; "" if they do not.
        groups: why a param group is not elementwise, by group; "" where it is.
    """

    coupled: str
    groups: list[str]


def try_out(optimizer: Optimizer) -> Findings:
    """See [Note: trial of an optimizer]. Changes neither the optimizer, nor what it has, nor a random state."""
    with isolated() as has_drawn:
        trial = _Trial(optimizer)
        trial.run()
        if (has_drawn() or holds_generator(optimizer)) and not trial.communicates:
            reason = "it draws random numbers, so that trials of it cannot be compared"
            return Findings("", [reason] * len(optimizer.param_groups))
        return trial.findings()


def groups_out_of_reach(optimizer: Optimizer) -> list[int]:
    """Param groups that its step does not update where their parameters are replaced, as shards replace them.

    It refers to the parameters themselves by another way than its groups, as one does that is made of optimizers with
    groups of their own. Found by a step of a copy, where there is such a way.
    """
    elsewhere = set(map(id, _parameters_elsewhere(optimizer)))
    suspects = [
        index for index, group in enumerate(optimizer.param_groups) if any(id(p) in elsewhere for p in group["params"])
    ]
    if not suspects:
        return []
    with isolated():
        try:
            start = torch.full((8, 12), 0.5)
            sorts = [_Sort(index, {}, {}) for index, _ in enumerate(optimizer.param_groups)]
            run = _Run(optimizer, [(sort, start) for sort in sorts])
            for _ in range(2):
                run.step([torch.ones_like(start)] * len(sorts))
        except Exception:
            return []  # another trial says what it needs
    return [index for index in suspects if torch.equal(run.params[index].detach(), start)]


def _parameters_elsewhere(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that its attributes refer to by another way than its own param groups and states."""
    groups = {id(group) for group in optimizer.param_groups} | {id(group["params"]) for group in optimizer.param_groups}
    pending: list[Any] = [optimizer]
    seen = {id(optimizer.param_groups), *groups}
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, Optimizer):
            pending.extend(attribute for name, attribute in vars(value).items() if name != "state")
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            pending.extend(value)


class _CommunicationError(Exception):
    """A step called a collective."""


class _OperationCounter(TorchDispatchMode):
    """Counts operations, and raises at a collective before it communicates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if getattr(func, "namespace", "") in {"c10d", "_c10d_functional"}:
            raise _CommunicationError
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class _Sort:
    """Parameters that an optimizer may treat in a way of their own.

    Attributes:
        group: a param group that has such; there may be more with the same settings.
        flags: boolean attributes of the parameters.
        notes: what the constructor noted of them in its state: numbers, flags and words.
        dims: how many dimensions they have.
    """

    group: int
    flags: Mapping[str, bool]
    notes: Mapping[str, Any]
    dims: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class _Sample:
    """A tensor of the trial: its values at the start, and what its gradients are made of, all of its shape."""

    sort: _Sort
    start: Tensor
    steady: Tensor
    varying: Tensor
    scale: float

    def gradient(self, step: int, value: Tensor) -> Tensor:
        turned = self.varying.flatten().roll(step).view(self.start.shape)
        gradient = (self.steady + turned * 0.5) * (self.scale * _RAMP[step])
        if step in _ORTHOGONAL:
            rows, directions = (x.reshape(x.shape[0] if x.dim() > 1 else 1, -1) for x in (gradient, value.nan_to_num()))
            squares = directions.square().sum(1, keepdim=True).clamp(min=1e-30)
            along = (rows * directions).sum(1, keepdim=True) / squares
            gradient = (rows - directions * (along * 0.99)).view(self.start.shape)
        return gradient


class _Run:
    """A copy of the optimizer with tensors to step.

    Args:
        starts: values, and the sort of each.
        is_full: they stand for parameters, rather than for pieces, which bear no flags.

    Attributes:
        params: the tensors.
    """

    def __init__(self, optimizer: Optimizer, starts: Sequence[tuple[_Sort, Tensor]], *, is_full: bool = True) -> None:
        self._copy = OptimizerCopy(optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups if _is_number(group.get("lr"))]
        rate = min(max(_RATES[0], *rates), _RATES[1]) if rates else _RATES[0]
        for group in self._copy.optimizer.param_groups:
            if _is_number(group.get("lr")):  # at the rate itself, which may be 0 in a warm-up, nothing might differ
                group["lr"] = torch.full_like(lr, rate) if isinstance(lr := group["lr"], Tensor) else rate
        self.params = [nn.Parameter(start.clone()) for _, start in starts]
        for (sort, _), param in zip(starts, self.params, strict=True):
            vars(param).update(sort.flags if is_full else {})
        self._copy.place([(sort.group, p, sort.notes) for (sort, _), p in zip(starts, self.params, strict=True)])
        self._copy.switch("train")

    def step(self, gradients: Iterable[Tensor]) -> None:
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient.clone()
        self._copy.step()

    def switch(self, mode: str) -> None:
        self._copy.switch(mode)

    def value(self) -> Tensor:
        """(N,) all values in one row."""
        return _row(self.params)

    def states(self) -> list[dict[str, Any]]:
        """Of each tensor."""
        states = self._copy.optimizer.state
        return [{**state} if isinstance(state := states.get(param), Mapping) else {} for param in self.params]

    def numbers(self, group: int) -> dict[str, float]:
        """The numbers that the optimizer keeps in a group and in its attributes."""
        optimizer = self._copy.optimizer
        numbers = {
            f"its param group's {name!r}": v for name, v in optimizer.param_groups[group].items() if name != "lr"
        }
        numbers |= {f"its attribute {name!r}": value for name, value in vars(optimizer).items()}
        return {name: float(value) for name, value in numbers.items() if _is_number(value)}


class _Trial:
    """See [Note: trial of an optimizer]. For one use, inside `isolated`.

    Attributes:
        communicates: a step called a collective.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._of_groups = _sorts(optimizer)
        self._sorts = list(dict.fromkeys(sort for sorts in self._of_groups for sort in sorts))
        self._coupled = ""
        self._doubts: dict[_Sort, str] = {}
        self.communicates = False

    def findings(self) -> Findings:
        groups = [next((self._doubts[sort] for sort in sorts if sort in self._doubts), "") for sorts in self._of_groups]
        return Findings(self._coupled, groups)

    def run(self) -> None:
        try:
            self._try_small()
            if not self._coupled:
                self._try_large()
                self._try_ends()
        except _CommunicationError:
            self._coupled, self.communicates = "its step communicates between ranks by itself", True
        except Exception as error:
            for sort in self._sorts:
                self._doubt(sort, f"it fails in a trial ({_described(error)})")

    def _doubt(self, sort: _Sort, reason: str) -> None:
        self._doubts.setdefault(sort, reason)

    def _try_small(self) -> None:
        generator = torch.Generator().manual_seed(0)
        watch = _OperationCounter()
        alone = self._begun_alone([s for sort in self._sorts for s in _samples(sort, _SHAPES, generator)], watch)
        if self._coupled or not alone:
            return
        steps = max(2, min(len(_RAMP), _MOST_OPERATIONS // max(1, watch.count)))
        together = self._run_of(list(alone))
        pieces = {sort: self._pieces_of(sort, list(alone)) for sort in dict.fromkeys(sample.sort for sample in alone)}
        for step in range(steps):
            if step:
                gradients = {sample: sample.gradient(step, run.params[0].detach()) for sample, run in alone.items()}
                for sample, run in alone.items():
                    run.step([gradients[sample]])
            else:  # they have taken it
                gradients = {sample: sample.gradient(step, sample.start) for sample in alone}
            with self._watched():
                together.step(gradients.values())
            self._step_pieces(pieces, gradients)
            last = step == steps - 1
            if self._is_coupled(together, alone, f"at step {step + 1}", look_inside=last):
                return
            self._compare_pieces(pieces, alone, f"at step {step + 1}", look_inside=last or step == 0)
            if step == _EVAL_AFTER:
                for mode in ("eval", "train"):
                    for run in (together, *alone.values(), *pieces.values()):
                        run.switch(mode)
                    if self._is_coupled(together, alone, f"in {mode}()"):
                        return
                    self._compare_pieces(pieces, alone, f"in {mode}()")
        self._check_progress(alone)
        for sort in pieces if steps < len(_RAMP) else ():
            self._doubt(sort, f"its step takes {watch.count // len(alone)} operations per parameter, too many to try")

    def _watched(self) -> AbstractContextManager[object]:
        """Against collectives in a later step, where there may be some."""
        watches = torch.distributed.is_available() and torch.distributed.is_initialized()
        return _OperationCounter() if watches else nullcontext()

    def _begun_alone(self, samples: Sequence[_Sample], watch: _OperationCounter) -> dict[_Sample, _Run]:
        """After the first step of each tensor alone; without those that the optimizer does not take."""
        begun: dict[_Sample, _Run] = {}
        refused: dict[_Sample, Exception] = {}
        for sample in samples:
            try:
                run = self._run_of([sample])
                with watch:
                    run.step([sample.gradient(0, sample.start)])
                begun[sample] = run
            except _CommunicationError:
                raise
            except Exception as error:
                refused[sample] = error
        if refused and self._takes(samples):
            why = _described(next(iter(refused.values())))
            self._coupled = f"it cannot step one parameter without the others ({why})"
        for sample, reason in refused.items():
            if sample.start.dim() in sample.sort.dims or all(other.sort is not sample.sort for other in begun):
                self._doubt(sample.sort, f"it fails in a trial ({_described(reason)})")
        return begun

    def _takes(self, samples: Sequence[_Sample]) -> bool:
        try:
            self._run_of(samples).step(sample.gradient(0, sample.start) for sample in samples)
        except Exception:
            return False
        return True

    def _run_of(self, samples: Sequence[_Sample]) -> _Run:
        return _Run(self._optimizer, [(sample.sort, sample.start) for sample in samples])

    def _pieces_of(self, sort: _Sort, samples: Sequence[_Sample]) -> _Run:
        starts = _pieces([sample.start for sample in samples if sample.sort is sort])
        return _Run(self._optimizer, [(sort, start) for start in starts], is_full=False)

    def _step_pieces(self, pieces: dict[_Sort, _Run], gradients: Mapping[_Sample, Tensor]) -> None:
        """Removes the pieces that cannot be stepped."""
        for sort, run in list(pieces.items()):
            try:
                run.step(_pieces([gradient for sample, gradient in gradients.items() if sample.sort is sort]))
            except Exception as error:
                self._doubt(sort, f"it cannot step on a flat piece of a parameter ({_described(error)})")
                del pieces[sort]

    def _is_coupled(
        self, together: _Run, alone: Mapping[_Sample, _Run], when: str, *, look_inside: bool = False
    ) -> bool:
        for sample, param, run in zip(alone, together.params, alone.values(), strict=True):
            if not _agree(param.detach(), run.params[0].detach(), sample.start):
                self._coupled = f"its update of a parameter depends on other parameters (seen {when})"
                return True
            if look_inside:
                theirs = run.numbers(sample.sort.group)
                for name, number in together.numbers(sample.sort.group).items():
                    if not _close(number, theirs.get(name)):
                        self._coupled = f"{name} depends on all parameters (seen {when})"
                        return True
        return False

    def _compare_pieces(
        self, pieces: dict[_Sort, _Run], alone: Mapping[_Sample, _Run], when: str, *, look_inside: bool = False
    ) -> None:
        """Removes the pieces whose results differ from those of full tensors."""
        for sort, run in list(pieces.items()):
            full = {sample: of_full for sample, of_full in alone.items() if sample.sort is sort}
            starts = _row([sample.start for sample in full])
            reason = ""
            if not _agree(_row([of_full.params[0] for of_full in full.values()]), run.value(), starts):
                reason = f"{_ELEMENTS} (seen {when})"
            elif look_inside:
                reason = _difference([state for one in (*full.values(), run) for state in _placed(one)])
            if reason:
                self._doubt(sort, reason)
                del pieces[sort]

    def _check_progress(self, alone: Mapping[_Sample, _Run]) -> None:
        for sort in self._sorts:
            ends = {sample: run.value() for sample, run in alone.items() if sample.sort is sort}
            if any(not bool(value.isfinite().all()) for value in ends.values()):
                self._doubt(sort, "its steps in a trial end in numbers that are not finite")
            elif ends and all(torch.equal(value, sample.start.flatten()) for sample, value in ends.items()):
                self._doubt(sort, "its steps in a trial leave the parameters of its groups as they were")

    def _try_large(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for sort in self._sorts:
            samples = _samples(sort, _LARGE_SHAPES, generator)
            if sort in self._doubts:
                continue
            alone = {sample: self._run_of([sample]) for sample in samples}
            pieces = {sort: self._pieces_of(sort, samples)}
            for step in range(len(_RAMP)):
                gradients = {sample: sample.gradient(step, run.params[0].detach()) for sample, run in alone.items()}
                for sample, run in alone.items():
                    run.step([gradients[sample]])
                self._step_pieces(pieces, gradients)
                inside = step in (0, len(_RAMP) - 1)
                self._compare_pieces(pieces, alone, f"in a large one at step {step + 1}", look_inside=inside)
                if not pieces:
                    break

    def _try_ends(self) -> None:
        """Compares tensors with the same in a longer row: some kernels round the last elements otherwise."""
        generator = torch.Generator().manual_seed(2)
        for sort in self._sorts:
            samples = _samples(sort, _ODD_SHAPES, generator)
            if sort in self._doubts:
                continue
            full = self._run_of(samples)
            rows = _Run(self._optimizer, [(sort, _padded(sample.start)) for sample in samples], is_full=False)
            for step in range(len(_RAMP)):
                gradients = [sample.gradient(step, sample.start) for sample in samples]
                full.step(gradients)
                rows.step(map(_padded, gradients))
            for param, row in zip(full.params, rows.params, strict=True):
                if not torch.equal(param.detach().flatten(), row.detach()[: param.numel()]):
                    self._doubt(sort, _ENDS)


def _padded(tensor: Tensor) -> Tensor:
    """As a parameter lies in a flat buffer."""
    return nn.functional.pad(tensor.detach().flatten(), (0, -tensor.numel() % _ALIGNMENT))


def _samples(sort: _Sort, shapes: Sequence[tuple[int, ...]], generator: torch.Generator) -> list[_Sample]:
    """Values of many magnitudes: in a small one also a small update shows."""
    samples = []
    for shape, scale in zip(shapes, _SCALES, strict=False):
        start, steady, varying = torch.randn(3, *shape, generator=generator, device="cpu", dtype=torch.float32)
        start *= 10 ** (-8 * torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32))
        steady[..., ::7] = varying[..., ::7] = 0.0
        samples.append(_Sample(sort, start, steady, varying, scale))
    return samples


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All tensors in one row, cut at aligned places that are not theirs."""
    row = _row(tensors)
    blocks = row.numel() // _ALIGNMENT
    cuts = sorted({0, _ALIGNMENT, blocks // 2 * _ALIGNMENT, (blocks - 2) * _ALIGNMENT, row.numel()})
    return [row[start:end] for start, end in pairwise(cuts)]


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _agree(one: Tensor, other: Tensor, start: Tensor) -> bool:
    """Whether two results are the same but for rounding, measured by how far they are from the start."""
    if torch.equal(one, other):
        return True
    allowed = (one - start).abs() * _RTOL + one.abs() * _ROUNDINGS
    same = ((one - other).abs() <= allowed) | (one == other) | (one.isnan() & other.isnan())
    return bool(same.all())


def _close(one: float, other: float | None) -> bool:
    if other is None:
        return False
    return one == other or abs(one - other) <= _RTOL * max(abs(one), abs(other)) or (one != one and other != other)


def _placed(run: _Run) -> list[tuple[int, dict[str, Any]]]:
    return [(param.numel(), state) for param, state in zip(run.params, run.states(), strict=True)]


def _difference(states: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """Why states are not those of an elementwise rule, one value per element or the same number for all; or ""."""
    numbers: dict[tuple[str, int], float] = {}
    for numel, state in states:
        for name, entry in state.items():
            for index, value in enumerate(_leaves(entry)):
                if _is_number(value):
                    number = float(value)
                    if not _close(number, numbers.setdefault((name, index), number)):
                        return f"its state {name!r} depends on all elements of a parameter"
                elif not isinstance(value, Tensor):
                    return f"its state {name!r} holds {type(value).__name__} objects, whose contents are not known"
                elif value.numel() != numel:
                    return f"its state {name!r} has not one value per element of a parameter"
    return ""


def _leaves(entry: object) -> Iterator[Any]:
    """The tensors, numbers and objects in a state's entry, without texts and flags."""
    if isinstance(entry, Mapping):
        entry = list(entry.values())
    if isinstance(entry, (list, tuple, deque)):
        for item in entry:
            yield from _leaves(item)
    elif entry is not None and not isinstance(entry, (bool, str)):
        yield entry


def _described(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):  # some keep them as tensors of one element
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sorts(optimizer: Optimizer) -> list[list[_Sort]]:
    """The sorts of each param group; groups with equal settings share theirs."""
    keys = [_settings_key(group, _exactly) for group in optimizer.param_groups]
    if len(set(keys)) > _MOST_SORTS:
        keys = [_settings_key(group, _roughly) for group in optimizer.param_groups]
    sorts: dict[Any, _Sort] = {}
    of_groups = []
    for index, (group, key) in enumerate(zip(optimizer.param_groups, keys, strict=True)):
        mine: dict[_Sort, None] = {}
        for param in group["params"]:
            flags = {k: v for k, v in vars(param).items() if isinstance(v, bool) and not k.startswith("_")}
            state = optimizer.state.get(param) or {}
            notes = {k: v for k, v in state.items() if isinstance(v, (bool, int, float, str))}
            sort = sorts.setdefault((key, _exactly(flags), _exactly(notes)), _Sort(index, flags, notes))
            sort.dims.add(param.dim())
            mine[sort] = None
        if not mine:
            mine[sorts.setdefault((key, _exactly({}), _exactly({})), _Sort(index, {}, {}))] = None
        of_groups.append(list(mine))
    return of_groups


def _settings_key(group: Mapping[str, Any], reduced: Callable[[object], object]) -> tuple[Any, ...]:
    return tuple((name, reduced(value)) for name, value in sorted(group.items()) if name not in _NAMES)


def _exactly(value: object) -> object:
    """Something hashable, equal for equal settings."""
    if isinstance(value, (list, tuple)):
        return tuple(_exactly(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _exactly(item)) for name, item in value.items()))
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value).__name__, value)
    return (type(value).__name__, id(value))


def _roughly(value: object) -> object:
    """The same, equal for numbers that differ, but in being 0."""
    if isinstance(value, (list, tuple)):
        return tuple(_roughly(item) for item in value)
    return ("number", value == 0) if _is_number(value) else _exactly(value)
