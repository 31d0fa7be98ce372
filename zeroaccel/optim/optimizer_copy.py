"""Copies of optimizers that can be stepped without a trace, and what their steps show.

A copy (`OptimizerCopy`) shows which states an optimizer will have (`element_states`), whether it steps the
parameters of its groups at all (`groups_out_of_reach`), and whether parameters depend on each other (`coupling`).
Nothing here communicates; the optimizer, its parameters and all random states stay as they are.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zeroaccel.comm.rank_device import ACCELERATOR

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

_STEPS = 12
_SHAPES = ((8, 12), (4, 6))  # some rules take matrices only
_MOST_GROUPS = 4
_SCALES = (1.0, 0.02, 30.0, 5.0)  # of the gradients, by tensor
_RAMP = (1.0, 2.0, 0.5, 10.0, 0.1, 100.0, 1.0, 30.0, 0.01, 1e5, 3.0, 1.0)  # of the gradients, by step
_RTOL = 1e-5
_ROUNDINGS = 4 * torch.finfo(torch.float32).eps


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
        self._original = optimizer
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

    def place(self, params: Sequence[tuple[int, Tensor]]) -> None:
        """Puts parameters in, as (param group, values) each, and has them trained."""
        for index, param in params:
            self.optimizer.param_groups[index]["params"].append(param)
        if _has_elements(self._original):
            renew_state(self.optimizer)
        train = getattr(self.optimizer, "train", None)  # which some optimizers have
        if callable(train):
            train()


@contextmanager
def isolated() -> Iterator[Callable[[], bool]]:
    """For steps of copies: the same random states each time, restored afterwards, and torch without modes and hooks.

    Yields:
        Whether a random number has been drawn since.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())  # its steps are real also where tensors are fake, and not counted
        if torch.empty(0).device.type != "cpu":  # torch 2.6's get_default_device() does not know of `with torch.device`
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a rule may be compiled, for every shape anew
        hooks = [getattr(optimizer_module, name, {}) for name in _HOOKS_OF_ALL]
        hooked = [dict(registered) for registered in hooks]
        threads = torch.get_num_threads()
        before = _random_states()
        devices = ACCELERATOR.module
        on_devices = devices.get_rng_state_all() if devices.is_initialized() else None
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
                devices.set_rng_state_all(on_devices)


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
    twin = OptimizerCopy(optimizer)
    param = nn.Parameter(torch.ones(shape))
    twin.place([(group, param)])
    param.grad = torch.ones(shape)
    twin.optimizer.step()
    return dict(twin.optimizer.state.get(param, {}))


def _holds_generator(optimizer: Optimizer) -> bool:
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
        start = torch.full((8, 12), 0.5)
        try:
            params = _stepped(optimizer, [(index, start) for index, _ in enumerate(optimizer.param_groups)], 2)
        except Exception:
            return []  # another check says what it needs
        return [index for index in suspects if torch.equal(params[index], start)]


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


class _NoCollectives(TorchDispatchMode):
    """Raises at a collective before it communicates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in {"c10d", "_c10d_functional"}:
            raise _CommunicationError
        return func(*args, **(kwargs or {}))


def coupling(optimizer: Optimizer) -> str:
    """Why its update of a parameter depends on other parameters, as a clause about "it"; "" where that is not seen.

    Small tensors, two for each of a few param groups, take twelve steps together and each alone. A rule that begins
    later, or draws random numbers, is not seen.
    """
    if _holds_generator(optimizer):
        return ""
    with isolated() as has_drawn:
        generator = torch.Generator().manual_seed(0)
        groups = range(min(len(optimizer.param_groups), _MOST_GROUPS))
        starts = [(group, _start(shape, generator)) for group in groups for shape in _SHAPES]
        try:
            together = _stepped(optimizer, starts, _STEPS)
        except _CommunicationError:
            return "its step communicates between ranks by itself"
        except Exception:
            return ""  # it takes no such tensors, and would raise at a step
        try:
            alone = [_stepped(optimizer, [start], _STEPS, index)[0] for index, start in enumerate(starts)]
        except Exception as error:
            return f"it cannot step one parameter without the others ({type(error).__name__}: {error})"
        compared = zip(together, alone, starts, strict=True)
        is_same = has_drawn() or all(_agree(one, other, start) for one, other, (_, start) in compared)
    return "" if is_same else "its update of a parameter depends on other parameters"


def _stepped(optimizer: Optimizer, starts: Sequence[tuple[int, Tensor]], steps: int, first: int = 0) -> list[Tensor]:
    """The values after some steps of a copy that has these parameters, (param group, values) each, and no other.

    Args:
        first: the number of the first of them, by which its gradients go.
    """
    twin = OptimizerCopy(optimizer)
    for group in twin.optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, (int, float, Tensor)):  # a warm-up may begin at 0, where nothing would differ
            rate_used = min(max(0.1, float(rate)), 1.0)
            group["lr"] = torch.full_like(rate, rate_used) if isinstance(rate, Tensor) else rate_used
    params = [nn.Parameter(start.clone()) for _, start in starts]
    twin.place([(group, param) for (group, _), param in zip(starts, params, strict=True)])
    for step in range(steps):
        for index, param in enumerate(params, first):
            varying = torch.randn(param.shape, generator=torch.Generator().manual_seed(16 * index + step))
            steady = torch.linspace(-1.0, 1.0, param.numel()).view(param.shape)
            param.grad = (steady + 0.5 * varying) * (_SCALES[index % len(_SCALES)] * _RAMP[step])
        with _NoCollectives():  # type: ignore[no-untyped-call]
            twin.optimizer.step()
    return [param.detach() for param in params]


def _start(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values of many magnitudes: in a small one also a small update shows."""
    values, magnitudes = (torch.rand(shape, generator=generator) for _ in "ab")
    return (values - 0.5) * 10 ** (-8 * magnitudes)


def _agree(one: Tensor, other: Tensor, start: Tensor) -> bool:
    """Whether two results are the same but for rounding, measured by how far they are from the start."""
    allowed = (one - start).abs() * _RTOL + one.abs() * _ROUNDINGS
    return bool((((one - other).abs() <= allowed) | (one == other) | (one.isnan() & other.isnan())).all())
