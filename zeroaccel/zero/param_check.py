"""Checks that parameters keep the objects, dtypes, values and trainability that they had when the engine was made.

Programs may change these without the engine (`model.half()`, `param.requires_grad_(False)`, a new head). The engine
checks before it computes, so that such a change is an error with the parameter's name instead of a different training.

There are two detectors of writes: `ParamIntegrityCheck` compares torch's version counters at every step, which costs a
comparison per parameter and misses writes through `param.data`; `WriteDetector`, for `GatheredParameters` only, hashes
the bytes. `UntrainedWatch` finds parameters that no backward reaches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import EngineStateError, listed
from zeroaccel.logs import logger
from zeroaccel.ops.device_values import read_values
from zeroaccel.zero.layout import ALIGN_NUMEL, round_up
from zeroaccel.zero.param_unit import FlatBuffer, ParamUnit
from zeroaccel.zero.tensor_subclasses import local

_WATCHED_STEPS = 10
"""Steps after which the ranks compare which parameters had a gradient."""

_MIB = 2**20
_WORDS = 1 << 15  # int64 words hashed at a time, besides as many weights: they fit a core's cache
_DEVICE_WORDS = 1 << 23  # the same on an accelerator, where every kernel needs a launch


@dataclass
class _Observed:
    """A parameter in use; the fingerprint is (1,) int64 on its device, None if a writer entered first."""

    readers: int = 0
    writers: int = 0
    fingerprint: Tensor | None = None


class WriteDetector:
    """Fingerprints unsharded parameters, from the first reader that enters to the last that leaves.

    Taking a fingerprint does not wait for the parameter's device; comparing does, once for all parameters.
    """

    def __init__(self) -> None:
        self._observed: dict[tuple[int, int], _Observed] = {}

    def enter(self, buffer: FlatBuffer, index: int, *, writes: bool) -> None:
        """Registers a reader or, with `writes`, a writer that may change the parameter."""
        key = id(buffer), index
        observed = self._observed.get(key)
        if observed is None:
            observed = self._observed[key] = _Observed()
        if not writes and not observed.readers:
            observed.fingerprint = _fingerprint(buffer, index)
        observed.readers += not writes
        observed.writers += writes

    def changed(self, params: Sequence[tuple[FlatBuffer, int]]) -> list[bool]:
        """Returns True for each parameter written since its first reader entered, unless a writer is registered."""
        before, after, places = [], [], []
        for place, (buffer, index) in enumerate(params):
            observed = self._observed[id(buffer), index]
            if not observed.writers and observed.fingerprint is not None:
                before.append(observed.fingerprint)
                after.append(_fingerprint(buffer, index))
                places.append(place)
        answers = [False] * len(params)
        if places:
            for place, differs in zip(places, read_values(torch.cat(before) != torch.cat(after)), strict=True):
                answers[place] = differs
        return answers

    def observes(self, buffer: FlatBuffer, index: int) -> bool:
        """Returns True if a reader or a writer of the parameter is registered."""
        return (id(buffer), index) in self._observed

    def refresh(self, buffer: FlatBuffer, index: int) -> None:
        """Takes a new fingerprint, after a permitted change."""
        observed = self._observed[id(buffer), index]
        if observed.readers:
            observed.fingerprint = _fingerprint(buffer, index)

    def leave(self, buffer: FlatBuffer, index: int, *, writes: bool) -> None:
        """Undoes one `enter`."""
        observed = self._observed[id(buffer), index]
        observed.readers -= not writes
        observed.writers -= writes
        if not (observed.readers or observed.writers):
            del self._observed[id(buffer), index]


def _fingerprint(buffer: FlatBuffer, index: int) -> Tensor:
    slot = buffer.layout.slots[index]
    return fingerprint(buffer.full[slot.start : slot.start + round_up(slot.numel, ALIGN_NUMEL)])


def fingerprint(data: Tensor) -> Tensor:
    """Returns (1,) int64, a hash of the bits and their order. A change within any single 8 bytes always changes it.

    It computes on the data's device, without waiting.

    Args:
        data: (n,) contiguous, with a multiple of 8 bytes.

    Example:
        >>> fingerprint(torch.tensor([1, 2])), fingerprint(torch.tensor([2, 1]))
        (tensor([7]), tensor([5]))
    """
    words = data.detach().view(torch.uint8).view(torch.int64)
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    # Odd weights are invertible modulo 2^64, so no difference in one word becomes zero. Sums of int64 wrap.
    on_host = data.device.type == "cpu"
    length = _WORDS if on_host else _DEVICE_WORDS
    weights = _host_weights(length) if on_host else _weights(min(words.numel(), length), data.device)
    for number, start in enumerate(range(0, words.numel(), length)):
        chunk = words[start : start + length]
        factors = weights[: chunk.numel()]
        # dot of integers stores no products in memory; devices do not have it.
        total += (2 * number + 1) * (torch.dot(chunk, factors) if on_host else (chunk * factors).sum())
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count + 1, 2, device=device)


@functools.cache
def _host_weights(count: int) -> Tensor:
    return _weights(count, torch.device("cpu"))


_OTHERWISE = "set requires_grad before initialize() or prepare(), or destroy() the engine and make another"
_OTHER_SHAPE = "change it before initialize() or prepare(), or destroy() the engine and make another"


class ParamIntegrityCheck:
    """Compares the parameters with their state when the engine was made.

    Args:
        model: model of the engine.
        units: all units of the engine.
        trained: there is an optimizer; without one no gradients are collected.
    """

    def __init__(self, model: nn.Module, units: Sequence[ParamUnit], *, trained: bool) -> None:
        self._buffers = [buffer for unit in units for buffer in unit.buffers if buffer.params]
        named = [(s.fqn, p, b) for b in self._buffers for s, p in zip(b.layout.slots, b.params, strict=True)]
        self._model = model
        # An Embedding with max_norm writes to its weight at every lookup, and would do so again after a gather.
        writing = [module for module in model.modules() if getattr(module, "max_norm", None) is not None]
        # PEFT's target_parameters parametrize a weight in each forward, and torch then assigns it to itself.
        wrappers = [module for module in model.modules() if hasattr(module, "parameter_name")]
        writing += [inner for module in wrappers for inner in module.modules() if "base_layer" in module._modules]
        self._written = {id(param) for module in writing for param in module.parameters(recurse=False)}
        self._param_ids = {id(param) for _, param, _ in named}
        self._structure = _structure(model)
        self._trained = [(fqn, param) for fqn, param, buffer in named if trained and buffer.trainable]
        self._frozen = [(fqn, p) for fqn, p, _ in named if trained and not p.requires_grad]

    def check(self) -> None:
        """Checks the parameters before a forward.

        Raises:
            EngineStateError: the model has a trainable parameter that the engine does not know, a parameter has another
                dtype or device than the engine gave it, or as `check_writes`.
        """
        # Only metadata of `ShardedParameter`s is read here, so their `__torch_function__` has nothing to check.
        with torch._C.DisableTorchFunctionSubclass():
            self.check_writes()
            # Compare the module tree first: it is only necessary to walk all parameters by name after it has changed.
            if any(module._modules != children or _ids(module) != ids for module, children, ids in self._structure):
                self._check_parameters()
            # One parameter per buffer: calls such as `model.half()` change all of them.
            for buffer in self._buffers:
                _check_kind(buffer, 0)

    def check_writes(self) -> None:
        """Checks for writes, before a forward and an update; copies in tensors that were assigned as `.data`.

        Raises:
            EngineStateError: a parameter was written outside `GatheredParameters`, and the next gather or update would
                overwrite it; or it was assigned data with another dtype, device or shape.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for buffer in self._buffers:
                # A write lasts if the parameter is the only copy of its value: there is no shard to gather it from, and
                # no separate master to round it from.
                lasts = buffer.persistent and buffer.masters.aliases_weights
                if not lasts and [param._version for param in buffer.params] != buffer.versions:
                    for index, param in enumerate(buffer.params):
                        if param._version != buffer.versions[index] and id(param) not in self._written:
                            raise _lost(buffer, index, "an in-place write")
                # `param.data = other` changes no version counter, but the storage.
                storage = buffer.full.untyped_storage()._cdata
                for index, param in enumerate(buffer.params):
                    if type(param) is nn.Parameter and param.untyped_storage()._cdata != storage:
                        _check_kind(buffer, index)
                        if not lasts:
                            raise _lost(buffer, index, "another tensor as .data")
                        # It lasts, so copy the assigned values into the buffer that collectives use.
                        view = buffer.view(index)
                        view.copy_(param.data)
                        param.data = view

    def _check_parameters(self) -> None:
        """Checks changed modules: programs may add and remove wrappers, but no new trainable parameters."""
        for fqn, param in self._model.named_parameters():
            if param.requires_grad and id(param) not in self._param_ids:
                raise EngineStateError(
                    f"parameter {fqn}",
                    expected="a parameter that existed when the engine was made",
                    got="a new parameter, which the engine would not train",
                    fix="change the model before initialize() or prepare(); values are written inside"
                    " zero.GatheredParameters",
                )
        self._structure = _structure(self._model)

    def collects_gradients(self) -> bool:
        """Returns True if a backward leaves gradients at this engine's parameters; False if all are frozen.

        Raises:
            EngineStateError: some parameters were frozen, or others unfrozen, since the engine was made.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self._collects_gradients()

    def _collects_gradients(self) -> bool:
        # A model may be frozen for a while, such as a GAN's discriminator in the generator's step: then gradients only
        # pass through it. A part of it may not be: ranks would disagree on which buffers to reduce.
        fixed = next((fqn for fqn, param in self._trained if not param.requires_grad), None)
        if fixed is not None:
            moving = next((fqn for fqn, param in self._trained if param.requires_grad), None)
            if moving is None:
                return False
            raise EngineStateError(
                f"parameter {fixed}",
                expected="requires_grad=True, as when the engine was made",
                got=f"requires_grad=False, while {moving} is trained",
                fix=f"freeze the whole model, or a param group with lr 0; {_OTHERWISE}",
            )
        thawed = next((fqn for fqn, param in self._frozen if param.requires_grad), None)
        if thawed is not None:
            raise EngineStateError(
                f"parameter {thawed}",
                expected="requires_grad=False, as when the engine was made",
                got="requires_grad=True",
                fix=_OTHERWISE,
            )
        return bool(self._trained)

    def check_conversion(self, convert: Callable[[Tensor], Tensor], module: nn.Module) -> None:
        """Checks a conversion, such as `module.to(...)`, before it happens.

        Raises:
            EngineStateError: it would change a dtype or a device.
        """
        # Try it on an empty tensor of each kind: `fn` is a closure of nn.Module.to() that allows no other inspection.
        kinds = {(buffer.dtype, buffer.full.device) for buffer in self._buffers}
        kinds |= {(buffer.dtype, buffer.device) for buffer in module.buffers()}
        for dtype, device in kinds:
            after = convert(torch.empty(0, dtype=dtype, device=device))
            if after.dtype is not dtype or after.device != device:
                raise EngineStateError(
                    "engine.to(), .half(), .float() and similar calls",
                    expected=f"no change of {dtype} on {device}",
                    got=f"a change to {after.dtype} on {after.device}",
                    fix="convert the model before initialize() or prepare(), or choose the precision in the config",
                )


def _check_kind(buffer: FlatBuffer, index: int) -> None:
    param, slot = buffer.params[index], buffer.layout.slots[index]
    if param.dtype is not buffer.dtype or param.device != buffer.full.device:
        fix = (
            'call model.half(), .float() or .to() before initialize() or prepare(); "fp16" and "bf16" in'
            " the config choose the dtype"
        )
        if param.dtype is torch.float32:
            *_, module, _ = ("the model", *slot.fqn.split("."))
            fix += f'; if the module casts itself in its forward, set data_types.keep_in_fp32_modules to ["{module}"]'
        raise EngineStateError(
            f"parameter {slot.fqn}",
            expected=f"{buffer.dtype} on {buffer.full.device}, where the engine keeps it",
            got=f"{param.dtype} on {param.device}",
            fix=fix,
        )
    if local(param).shape != slot.shape:
        raise EngineStateError(
            f"parameter {slot.fqn}",
            expected=f"shape {slot.shape}, as when the engine was made",
            got=tuple(param.shape),
            fix=_OTHER_SHAPE,
        )


def _lost(buffer: FlatBuffer, index: int, write: str) -> EngineStateError:
    when = "update from its master" if buffer.persistent else "gather"
    return EngineStateError(
        f"parameter {buffer.layout.slots[index].fqn}",
        expected="changes by engine.step() only",
        got=f"{write}, which is lost at the next {when}",
        fix="write inside zero.GatheredParameters(param, modifier_rank=0)",
    )


def _structure(model: nn.Module) -> list[tuple[nn.Module, dict[str, nn.Module | None], list[int]]]:
    return [(module, dict(module._modules), _ids(module)) for module in model.modules()]


def _ids(module: nn.Module) -> list[int]:
    return list(map(id, module._parameters.values()))


class UntrainedWatch:
    """Compares the ranks after the first steps of an engine, and warns about parameters that no rank has trained.

    They cost memory for gradients, masters and optimizer states, and weight decay still shrinks them. Typical causes
    are a tower or a head that the loss does not use, and a base model that should have been frozen.

    Args:
        unreached: ids of the parameters that no backward has reached yet; emptied after the comparison.
    """

    def __init__(self, units: Iterable[ParamUnit], collectives: Collectives, unreached: set[int]) -> None:
        self._units, self._collectives, self._unreached = tuple(units), collectives, unreached
        self._steps = 0  # of this process: a resumed run did not see the earlier ones

    def step(self) -> None:
        """Called after each optimizer step; only one of the calls does anything. (all ranks)"""
        self._steps += 1
        if self._steps != _WATCHED_STEPS:
            return
        here = {
            slot.fqn: slot.whole_numel * buffer.dtype.itemsize
            for unit in self._units
            for buffer in unit.buffers
            for param, slot in zip(buffer.params, buffer.layout.slots, strict=True)
            if id(param) in self._unreached
        }
        self._unreached.clear()
        others = self._collectives.gather_objects(set(here), "parameters without a gradient")
        missing = {name: here[name] for name in here if all(name in other for other in others)}
        if missing and self._collectives.rank == 0:
            logger.warning("%s", self._text(missing))

    def _text(self, missing: dict[str, int]) -> str:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in missing)
        names = listed(list(missing if len(missing) <= 3 else modules), most=5)
        count = f"{len(missing)} trainable parameter{'s' if len(missing) > 1 else ''}"
        size = f"{sum(missing.values()) / _MIB:.3g} MiB of weights"
        return (
            f"{_WATCHED_STEPS} steps: {count} never had a gradient on any rank: {names}; {size}, with gradients, "
            "masters and optimizer states that train nothing. Call requires_grad_(False) on them before prepare() or "
            "initialize(), or use their outputs in the loss"
        )
