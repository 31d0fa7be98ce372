"""Dtypes of a run: fp32 exceptions, the cast of inputs, the dtypes of module buffers, and the fp16 loss scale.

The engine unscales a step's gradients by the loss scale of their backward; the scale changes only afterwards.

[Note: buffers] A module computes with its buffers and parameters together, so they need one dtype: statistics of a
BatchNorm, vectors of a power iteration, codebooks. A floating-point buffer follows the parameters of its module, or of
the nearest enclosing module with parameters, as after `model.bfloat16()`: it is cast if all of these are cast. If one
of them had the dtype already, the program made a mixture that it can compute with, and the buffer is unchanged.
Frequencies and angles of rotary embeddings are unchanged too: they multiply positions, and in bf16 position 257 becomes
256.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import ConfigError, EngineStateError
from zeroaccel.logs import logger
from zeroaccel.zero.module_names import plain_names
from zeroaccel.zero.tensor_subclasses import is_scale_beside_codes, is_small_float, scales_of


class LossScale:
    """The factor of the loss before backward; this base class, for bf16 and fp32, keeps it at 1.

    Attributes:
        value: the factor.
        scales: True if losses are scaled at all.
    """

    value: float = 1.0
    scales: ClassVar[bool] = False

    def update(self, *, overflow: bool) -> None:
        """Adjusts the scale after a step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers to resume from."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state."""
        for name, value in state.items():
            setattr(self, name, value)


class StaticLossScale(LossScale):
    """A fixed scale; a step that overflows is skipped with a warning."""

    scales: ClassVar[bool] = True

    def __init__(self, value: float) -> None:
        self.value = float(value)

    def update(self, *, overflow: bool) -> None:
        """Warns about a skipped step."""
        if overflow:
            logger.warning("gradients overflowed at the static loss scale %g; the step is skipped", self.value)


@dataclass
class DynamicLossScale(LossScale):
    """A scale that halves after overflows and doubles after `window` steps without one.

    Attributes:
        value: the current scale.
        window: number of good steps before it doubles.
        hysteresis: overflows tolerated before it halves.
        consecutive_hysteresis: refill that tolerance after every good step, not only when the scale grows.
        minimum: lower bound of the scale; an overflow there ends the run.
    """

    value: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    scales: ClassVar[bool] = True
    tolerance: int = -1
    steps: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            self.tolerance = self.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Counts the step and adjusts the scale.

        Raises:
            EngineStateError: the gradients overflowed at the minimum scale.
        """
        # DeepSpeed's algorithm, so that a migrated run skips and scales in the same steps.
        if overflow:
            self._lower()
            self.last_overflow = self.steps
        else:
            if self.consecutive_hysteresis:
                self.tolerance = self.hysteresis
            good = self.steps - self.last_overflow - 1  # an overflow restarts the window
            if good > 0 and good % self.window == 0:
                self.tolerance = self.hysteresis
                self.value *= 2.0
        self.steps += 1

    def _lower(self) -> None:
        if self.tolerance > 1:
            self.tolerance -= 1
            logger.log(logging.INFO, "gradients overflowed at loss scale %g; step skipped, scale kept", self.value)
            return
        if self.value <= self.minimum:
            raise EngineStateError(
                f"fp16.min_loss_scale: gradients overflow even at the smallest loss scale {self.value:g}",
                fix="look for infinities in the model or data, train in bf16, or lower fp16.min_loss_scale",
            )
        self.value = max(self.value / 2.0, self.minimum)
        logger.log(logging.INFO, "gradients overflowed; step skipped, loss scale lowered to %g", self.value)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers to resume from; the resuming run's config has window and limits."""
        return {
            "value": self.value,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "last_overflow": self.last_overflow,
        }


def kept_in_fp32(
    model: nn.Module, setting: str | Iterable[str] | None, dtype: torch.dtype, plain: Callable[[str], str]
) -> set[str]:
    """Returns the names of parameters and buffers that stay fp32 in any training dtype.

    Args:
        setting: parts of module names; "auto" takes the model's own `_keep_in_fp32_modules` and
            `_keep_in_fp32_modules_strict`.
        dtype: training dtype of the others.
        plain: result of `plain_names` for the model.
    """
    if setting == "auto":
        # transformers lists them per model class. Modules that overflow in fp16, such as T5's `wo`, are in the first
        # list, which does not apply to bf16: there they compute in the dtype of their inputs.
        lists = ["_keep_in_fp32_modules_strict"] + (["_keep_in_fp32_modules"] if dtype is torch.float16 else [])
        parts = {name for attribute in lists for name in (getattr(model, attribute, None) or ())}
    else:
        parts = {setting} if isinstance(setting, str) else set(setting or ())
    if not parts:
        return set()
    names = [plain(name) for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    return {name for name in names if any(f".{component}." in f".{name}." for component in parts)}


_AUTOCAST_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


def not_autocast(model: nn.Module, setting: Iterable[str] | None, where: str, plain: Callable[[str], str]) -> set[str]:
    """Returns the names of parameters that stay fp32 under autocast: those of modules of other classes than given.

    The others are stored in autocast's dtype, which has the bits of a cast of their fp32 masters at each use, and saves
    the copies of sharded weights that autocast would keep until backward.

    Args:
        setting: full names of module classes; None for DeepSpeed's default.
        where: the setting's address, for errors.
        plain: result of `plain_names` for the model.

    Raises:
        ConfigError: a name is not that of a module class.
    """
    classes = tuple(_module_class(name, where) for name in (_AUTOCAST_MODULES if setting is None else setting))
    # By identity: a weight that modules share is cast only if all of them compute with it in that dtype.
    others = (module for module in model.modules() if type(module) not in classes)
    fp32 = {id(param) for module in others for param in module.parameters(recurse=False)}
    return {plain(name) for name, param in model.named_parameters() if id(param) in fp32}


def _module_class(name: str, where: str) -> type[nn.Module] | None:
    """Returns the class of a name such as "torch.nn.Linear"; None if its module is not loaded, so no model has it.

    It imports nothing, because an import would run the code of any module that a config names.
    """
    package, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(package), attribute, None)
    if found is None and package and package not in sys.modules:
        logger.warning("%s: %s is not loaded, so no module of the model is a %s", where, package, attribute)
        return None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            where, expected='the full name of a module class, such as "torch.nn.Linear"', got=name, fix="correct it"
        )
    return found


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in nested tuples, lists and dicts; leaves every other object unchanged."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in _FLOATS else leaf

    return tree_map(cast, value, is_leaf=lambda node: type(node) not in (tuple, list, dict))


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # 8 bits are codes with a separate scale
_ROTARY = re.compile(r"Rotary|RoPE|ROPE|Rope(?![a-z])")
_BUILT_AS = "_built_as"  # an attribute, because a weak table would prevent torch from swapping the tensor


@dataclass(frozen=True)
class BufferDtypes:
    """Decides the dtype of every floating-point buffer; see [Note: buffers].

    Attributes:
        precision: dtype that parameters get.
        forced: dtype of all buffers by the config (`data_types.buffer_dtype`); None decides per buffer.
        fp32_names: names of parameters and buffers that are always fp32.
    """

    precision: torch.dtype
    forced: torch.dtype | None
    fp32_names: frozenset[str]

    def of(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Returns fqn -> dtype of every floating-point buffer; call it before the engine casts the parameters."""
        follows, plain = self._following(model), plain_names(model)
        dtypes: dict[str, torch.dtype] = {}
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                # Integer buffers are indices and counters, such as `num_batches_tracked`.
                if buffer is None or not buffer.is_floating_point():
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                if is_small_float(buffer) or is_scale_beside_codes(module, name):
                    dtypes[fqn] = buffer.dtype
                elif plain(fqn) in self.fp32_names:
                    dtypes[fqn] = torch.float32
                elif self.forced is not None:
                    dtypes[fqn] = self.forced
                elif _holds_angles(module, name):
                    dtypes[fqn] = buffer.dtype
                else:
                    around = next((at for at in _outwards(prefix) if at in follows), None)
                    dtypes[fqn] = self.precision if around is not None and follows[around] else buffer.dtype
        return dtypes

    def _following(self, model: nn.Module) -> dict[str, bool]:
        """Returns prefix -> True if all floating-point parameters of a module are cast: its own, or those below it."""
        results: dict[str, bool] = {}
        plain = plain_names(model)
        for name, param in model.named_parameters(remove_duplicate=False):
            if param.is_floating_point() and plain(name) not in self.fp32_names and scales_of(param) is None:
                prefix = name.rpartition(".")[0]
                results[prefix] = results.get(prefix, True) and made_as(param)[0] is not self.precision
        follows = dict(results)
        # A module without parameters, such as one that only holds a table, takes the result of the modules below it.
        for prefix, is_cast in results.items():
            for outer in _outwards(prefix):
                if outer not in results:
                    follows[outer] = follows.get(outer, True) and is_cast
        return follows


def cast_buffers(model: nn.Module, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
    """Moves buffers to the device, and casts those named in `dtypes`."""
    moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # a buffer that modules share stays one tensor
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            target = dtypes.get(f"{prefix}.{name}" if prefix else name, buffer.dtype)
            key = id(buffer), target
            if key not in moved:
                moved[key] = buffer.to(device=device, dtype=target)
            module._buffers[name] = moved[key]


def broadcast_buffers(model: nn.Module, collectives: Collectives) -> None:
    """Broadcasts the module buffers of rank 0 to all ranks. (all ranks)"""
    for name, buffer in model.named_buffers():
        if buffer.numel() and not buffer.is_meta:
            # A collective needs contiguous memory, but an expanded buffer has less memory than elements.
            flat = buffer.detach().contiguous()
            collectives.broadcast(flat, 0, f"buffer {name}")
            buffer.detach().copy_(flat)


def note_cast(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Records the dtype and device with which the program made this parameter, before both change."""
    vars(param).setdefault(_BUILT_AS, (dtype, device))


def forget_cast(param: nn.Parameter) -> None:
    """Removes that record, after an engine has cast the parameter and the buffers of its module."""
    vars(param).pop(_BUILT_AS, None)


def made_as(param: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    """Returns the dtype and device of a parameter before it was cast and moved, while it was built or loaded."""
    made: tuple[torch.dtype, torch.device] = vars(param).get(_BUILT_AS, (param.dtype, param.device))
    return made


def _holds_angles(module: nn.Module, name: str) -> bool:
    """Returns True if a buffer holds frequencies or angles, rather than their cosines and sines."""
    if name.endswith("inv_freq"):
        return True
    return bool(_ROTARY.search(type(module).__name__)) and "cos" not in name and "sin" not in name


def _outwards(prefix: str) -> Iterator[str]:
    """Yields the prefix of a module, then the prefixes of enclosing modules, ending with the model's, ""."""
    while prefix:
        yield prefix
        prefix = prefix.rpartition(".")[0]
    yield ""


class Autocast:
    """Runs a model's forward under `torch.autocast`, from construction until `undo`.

    It also applies if the model is called without its engine, as in `generate`: 16-bit parameters need 16-bit inputs.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._before = vars(model).get("forward")
        forward = type(model).forward if self._before is None else self._before

        @functools.wraps(forward)
        def under_autocast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                return forward(module, *args, **kwargs) if self._before is None else forward(*args, **kwargs)

        # A method of the instance, so that a copy of the model calls its own copy.
        vars(model)["forward"] = types.MethodType(under_autocast, model)

    def undo(self) -> None:
        """Restores the model's own forward."""
        if self._before is None:
            del vars(self._model)["forward"]
        else:
            vars(self._model)["forward"] = self._before
