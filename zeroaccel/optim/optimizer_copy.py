"""Trial steps on copies of optimizers, without side effects.

Steps of an `OptimizerCopy` show which states an optimizer will have (`element_states`), if it steps the parameters in
its groups (`groups_out_of_reach`), and if parameters depend on each other (`coupling`). This module does not
communicate; it does not change the optimizer, its parameters or random states.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
_SHAPES = ((8, 12), (4, 6))  # some rules support only matrices
_MOST_GROUPS = 4
_SCALES = (1.0, 0.02, 30.0, 5.0)  # scales of the gradients, by tensor
_RAMP = (1.0, 2.0, 0.5, 10.0, 0.1, 100.0, 1.0, 30.0, 0.01, 1e5, 3.0, 1.0)  # scales of the gradients, by step
_RTOL = 1e-5
_ROUNDINGS = 4 * torch.finfo(torch.float32).eps


class OptimizerCopy:
    """A copy of an optimizer, without its parameters and its state, for steps inside `isolated`.

    It does not use `Optimizer.__getstate__`, which drops the attributes of a subclass. It copies attributes, param
    groups and inner optimizers, but not a `step` of the instance, which is a scheduler's wrapper that steps the
    original. It keeps step hooks that are methods of the optimizer itself; other hooks observe the training and do not
    run.

    Args:
        optimizer: the original, which does not change.

    Attributes:
        optimizer: the copy. Its groups have no `params`, its state is empty, its tensors are in host memory.

    Raises:
        Exception: any error of an attribute that cannot be copied.
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
        """Adds parameters, given as (param group, values), and switches the copy to training."""
        for index, param in params:
            self.optimizer.param_groups[index]["params"].append(param)
        if _has_state(self._original):
            renew_state(self.optimizer)
        train = getattr(self.optimizer, "train", None)  # a method of some optimizers
        if callable(train):
            train()


@contextmanager
def isolated() -> Iterator[Callable[[], bool]]:
    """Isolates steps of copies: fixed random states, restored afterwards, and torch without modes and hooks.

    Yields:
        A function that returns True if a random number has been drawn since.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())  # real steps even under fake tensors; modes do not count them
        if torch.empty(0).device.type != "cpu":  # torch 2.6's get_default_device() ignores `with torch.device`
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import takes 1.5 seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled rule would recompile for shapes
        hooks = [getattr(optimizer_module, name, {}) for name in _HOOKS_OF_ALL]
        hooked = [dict(registered) for registered in hooks]
        threads = torch.get_num_threads()
        before = _random_states()
        devices = ACCELERATOR.module
        on_devices = devices.get_rng_state_all() if devices.is_initialized() else None
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed uninitialized devices
        random.seed(0)
        np.random.seed(0)
        seeded = _random_states()
        torch.set_num_threads(1)  # tensors are small: on a busy machine, threads made factorisations 20 times slower
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
    """Returns True if its state comes from steps and not from its constructor, such as the state of torch's Adagrad.

    Empty states, as after `train()` of a schedule-free optimizer, and flags do not count. A state without a step
    counter is compared with the one that the constructor creates for its parameter.
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


def _same(first: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors have the same values; NaNs, which sharded parameters show, are equal."""
    return first.shape == other.shape and bool(((first == other) | ((first != first) & (other != other))).all())


def _is_new(optimizer: Optimizer, index: int, param: Tensor) -> bool:
    group = {**optimizer.param_groups[index], "params": [param]}
    try:
        with isolated():
            fresh = type(optimizer)([group], **_settings(optimizer)).state.get(param, {})
    except Exception:
        return False  # the constructor's state is unknown
    state = optimizer.state[param]
    return fresh.keys() == state.keys() and all(
        _same(value, fresh[name]) if isinstance(value, Tensor) and isinstance(fresh[name], Tensor) else True
        for name, value in state.items()
    )


def renew_state(optimizer: Optimizer) -> None:
    """Creates the constructor's state for only the parameters that are now in the groups."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state = type(optimizer)(groups, **_settings(optimizer)).state


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the defaults that the constructor accepts; some classes keep counters in them."""
    accepted = inspect.signature(type(optimizer)).parameters
    accepts_all = any(accepted[name].kind is inspect.Parameter.VAR_KEYWORD for name in accepted)
    return {name: value for name, value in optimizer.defaults.items() if accepts_all or name in accepted}


_SMALL_NUMEL = 4096  # a real step of this many elements takes less time than the import of fake tensors


def element_states(optimizer: Optimizer, group: int, shape: tuple[int, ...]) -> dict[str, torch.dtype]:
    """Returns name -> dtype of the states with one value per element that a parameter of this shape gets.

    Runs a trial step: for a large matrix, whose rule may be slow, with fake tensors if the rule supports them.

    Args:
        group: index of the param group whose rule applies.

    Raises:
        Exception: any error of a step in host memory.
    """
    with isolated():
        state = None
        if math.prod(shape) > _SMALL_NUMEL:
            # An exception means that the rule needs values, which fake tensors do not have.
            with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
                state = _state_after_step(optimizer, group, shape)
        if state is None:
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
    """Returns True if the optimizer has a random generator."""
    values = [*vars(optimizer).values(), *(value for group in optimizer.param_groups for value in group.values())]
    return any(isinstance(value, _GENERATORS) for value in values)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for value in vars(optimizer).values():
        if isinstance(value, nn.Module):
            yield from value.parameters()


def _shell(optimizer: Any, memo: dict[int, Any], copies: list[tuple[Any, Any]]) -> Any:
    """Creates an empty object for the copy of `optimizer` and of each inner optimizer; registers them in `memo`."""
    shell = object.__new__(type(optimizer))
    memo[id(optimizer)] = shell
    copies.append((optimizer, shell))
    for name, value in vars(optimizer).items():
        if name == "state":
            memo[id(value)] = defaultdict(dict)
    # Before `deepcopy`, this walk copies tensors of the optimizer to host memory, and creates shells for inner
    # optimizers (such as a Lookahead's base), so that they are not copied with their parameters.
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
    found = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is original}
    return OrderedDict((key, hook.__func__.__get__(shell)) for key, hook in found.items())


def _has_state(optimizer: Any) -> bool:
    """Returns True if the state before the first step has values, which the constructor created."""
    states = getattr(optimizer, "state", {}).values()
    return any(bool(state) for state in states if isinstance(state, Mapping))


def _random_states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _same_states(first: tuple[Tensor, Any, Any], other: tuple[Tensor, Any, Any]) -> bool:
    arrays = all(np.array_equal(a, b) for a, b in zip(first[2], other[2], strict=True))
    return torch.equal(first[0], other[0]) and first[1] == other[1] and arrays


def groups_out_of_reach(optimizer: Optimizer) -> list[int]:
    """Returns the param groups that a step does not update after their parameters are replaced, as by shards.

    Such an optimizer refers to parameters outside its groups, for example through inner optimizers with separate
    groups. If there are such references, a step of a copy tests it.
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
            return []  # another check reports the reason
        return [index for index in suspects if torch.equal(params[index], start)]


def _parameters_elsewhere(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields the parameters that attributes refer to outside the optimizer's own param groups and states."""
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
    """Returns the reason that an update of a parameter depends on other parameters, as a clause about "it", or "".

    Compares twelve steps of small tensors, two for each of a few param groups, together and each alone. This does not
    detect rules that start later or draw random numbers.
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
            return ""  # the rule does not support such tensors, and will raise at a step
        try:
            alone = [_stepped(optimizer, starts, _STEPS, index)[index] for index, _ in enumerate(starts)]
        except Exception as error:
            return f"it cannot step one parameter without the others ({type(error).__name__}: {error})"
        compared = zip(together, alone, starts, strict=True)
        is_same = has_drawn() or all(_agree(first, other, start) for first, other, (_, start) in compared)
    return "" if is_same else "its update of a parameter depends on other parameters"


def _stepped(
    optimizer: Optimizer, starts: Sequence[tuple[int, Tensor]], steps: int, only: int | None = None
) -> list[Tensor]:
    """Returns the values after `steps` steps of a copy with only these parameters, given as (param group, values).

    Args:
        only: number of the one parameter that is stepped; a constructor that numbers its parameters has seen them all.
    """
    twin = OptimizerCopy(optimizer)
    for group in twin.optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, (int, float, Tensor)):  # a warm-up may start at 0, which would hide all differences
            rate_used = min(max(0.1, float(rate)), 1.0)
            group["lr"] = torch.full_like(rate, rate_used) if isinstance(rate, Tensor) else rate_used
    params = [nn.Parameter(start.clone()) for _, start in starts]
    twin.place([(group, param) for (group, _), param in zip(starts, params, strict=True)])
    stepped = {index: param for index, param in enumerate(params) if only in (None, index)}
    for group in twin.optimizer.param_groups:
        group["params"] = [param for param in group["params"] if any(param is target for target in stepped.values())]
    for step in range(steps):
        for index, param in stepped.items():
            varying = torch.randn(param.shape, generator=torch.Generator().manual_seed(16 * index + step))
            steady = torch.linspace(-1.0, 1.0, param.numel()).view(param.shape)
            param.grad = (steady + 0.5 * varying) * (_SCALES[index % len(_SCALES)] * _RAMP[step])
        with _NoCollectives():  # type: ignore[no-untyped-call]
            twin.optimizer.step()
    return [param.detach() for param in params]


def _start(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns values of many magnitudes: small updates are visible in small values."""
    values, magnitudes = (torch.rand(shape, generator=generator) for _ in "ab")
    return (values - 0.5) * 10 ** (-8 * magnitudes)


def _agree(first: Tensor, other: Tensor, start: Tensor) -> bool:
    """Returns True if two results are equal up to rounding, relative to their distance from the start."""
    allowed = (first - start).abs() * _RTOL + first.abs() * _ROUNDINGS
    return bool((((first - other).abs() <= allowed) | (first == other) | (first.isnan() & other.isnan())).all())
