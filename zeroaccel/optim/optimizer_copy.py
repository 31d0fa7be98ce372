"""Copies of an optimizer that step on small tensors, while it, its parameters and all random states stay as they are.

`optimizer_kinds` finds out with them how an optimizer may be sharded, and tiers which states it keeps. Also here:
whether an optimizer has stepped, and how the state is made that its constructor makes. Nothing here communicates.
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
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["OptimizerCopy", "element_states", "has_stepped", "holds_generator", "isolated", "renew_state"]

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
        optimizer: what is copied; it is not changed.

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
        for original, made in copies:
            kept = {name: value for name, value in vars(original).items() if name not in {"step", *_HOOKS}}
            vars(made).update(copy.deepcopy(kept, memo))
            for name in _HOOKS:
                if name in vars(original):
                    vars(made)[name] = _own_hooks(vars(original)[name], original, made)
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
    """For steps of twins: the same random states each time, put back afterwards, and torch without modes and hooks.

    Yields:
        Whether a random number has been drawn since.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())  # the trial is real also where tensors are fake, and not counted
        if torch.get_default_device().type != "cpu":
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
            made = type(optimizer)([group], **_settings(optimizer)).state.get(param, {})
    except Exception:
        return False  # it is not known what the constructor makes
    state = optimizer.state[param]
    return made.keys() == state.keys() and all(
        _same(value, made[name]) if isinstance(value, Tensor) and isinstance(made[name], Tensor) else True
        for name, value in state.items()
    )


def renew_state(optimizer: Optimizer) -> None:
    """Makes the state that the constructor makes, for the parameters that are in the groups now, and no other."""
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state = type(optimizer)(groups, **_settings(optimizer)).state


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """What of its defaults its constructor takes; some keep counters there."""
    taken = inspect.signature(type(optimizer)).parameters
    takes_all = any(taken[name].kind is inspect.Parameter.VAR_KEYWORD for name in taken)
    return {name: value for name, value in optimizer.defaults.items() if takes_all or name in taken}


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
    twin.place([(group, param, {})])
    twin.switch("train")
    param.grad = torch.ones(shape)
    twin.step()
    return dict(twin.optimizer.state.get(param, {}))


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
    made = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    copies.append((optimizer, made))
    for name, value in vars(optimizer).items():
        if name == "state":
            memo[id(value)] = defaultdict(dict)
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
    return made


def _own_hooks(hooks: Mapping[int, Any], original: Any, made: Any) -> OrderedDict[int, Any]:
    own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is original}
    return OrderedDict((key, hook.__func__.__get__(made)) for key, hook in own.items())


def _has_elements(optimizer: Any) -> bool:
    """Whether its state, of no step yet, has tensors, which the constructor made."""
    states = getattr(optimizer, "state", {}).values()
    return any(isinstance(v, Tensor) for state in states if isinstance(state, Mapping) for v in state.values())


def _random_states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _same_states(one: tuple[Tensor, Any, Any], other: tuple[Tensor, Any, Any]) -> bool:
    arrays = all(np.array_equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    return torch.equal(one[0], other[0]) and one[1] == other[1] and arrays
