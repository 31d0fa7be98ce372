"""Dtypes of a run: fp32 exceptions, the cast of inputs, the dtypes of module buffers, and the fp16 loss scale.

The scale that unscales a step's gradients is the one of their backward; it changes only afterwards.

[Note: buffers] A module computes with its buffers and parameters together, so they need one dtype: statistics of a
BatchNorm, vectors of a power iteration, codebooks. A floating-point buffer follows the parameters of its module, or of
the nearest module around it that has any, as after `model.bfloat16()`: it is cast where all of these are cast. Where
one of them had the dtype already, the program made a mixture that it can compute with, and the buffer stays as it is.
Frequencies and angles of rotary embeddings stay too: positions are multiplied with them, and in bf16 position 257 is
256.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import ConfigError, EngineStateError
from zeroaccel.logs import logger


class LossScale:
    """The factor of the loss before backward; this class is for bf16 and fp32, where it is 1 and never changes.

    Attributes:
        value: the factor.
        scales: whether losses are scaled at all.
    """

    value: float = 1.0
    scales: ClassVar[bool] = False

    def update(self, *, overflow: bool) -> None:
        """Adjusts the scale after a step."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers to resume from."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes."""
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
    """Halves after overflows, doubles after `window` steps without one.

    Attributes:
        value: the current scale.
        window: good steps before it doubles.
        hysteresis: overflows tolerated before it halves.
        consecutive_hysteresis: refill that tolerance after every good step, not only when the scale grows.
        minimum: it never goes below; an overflow there ends the run.
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
            EngineStateError: an overflow at the minimum scale.
        """
        # DeepSpeed's algorithm, so that a run that migrates skips and scales in the same steps.
        if overflow:
            self._lower()
            self.last_overflow = self.steps
        else:
            if self.consecutive_hysteresis:
                self.tolerance = self.hysteresis
            good = self.steps - self.last_overflow - 1  # an overflow starts the window anew
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
        """Plain numbers to resume from; window and limits come from the config of the resuming run."""
        return {
            "value": self.value,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "last_overflow": self.last_overflow,
        }


def kept_in_fp32(model: nn.Module, setting: str | Iterable[str] | None, dtype: torch.dtype) -> set[str]:
    """Names of parameters and buffers that stay fp32 whatever the training dtype.

    Args:
        setting: parts of module names; "auto" takes the model's own `_keep_in_fp32_modules` and
            `_keep_in_fp32_modules_strict`.
        dtype: that the others are trained in.
    """
    if setting == "auto":
        # transformers lists them per model class. What overflows in fp16, as T5's `wo`, is in the first list, which
        # does not count in bf16: modules of it compute in the dtype of their inputs.
        lists = ["_keep_in_fp32_modules_strict"] + (["_keep_in_fp32_modules"] if dtype is torch.float16 else [])
        parts = {name for attribute in lists for name in (getattr(model, attribute, None) or ())}
    else:
        parts = {setting} if isinstance(setting, str) else set(setting or ())
    if not parts:
        return set()
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    return {name for name in names if any(f".{part}." in f".{name}." for part in parts)}


_AUTOCAST_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


def not_autocast(model: nn.Module, setting: Iterable[str] | None, where: str) -> set[str]:
    """Names of parameters that stay fp32 under autocast: those of a module that is of none of the given classes.

    The others are stored in the dtype of autocast, which has the bits of casting their fp32 masters at each use, and
    saves autocast the copies of sharded weights that it would hold on to until backward.

    Args:
        setting: full names of module classes; None for those that DeepSpeed takes.
        where: the setting's address, for errors.

    Raises:
        ConfigError: what is named is not the class of a module.
    """
    classes = tuple(_module_class(name, where) for name in (_AUTOCAST_MODULES if setting is None else setting))
    # By identity: a weight that modules share is cast only where all of them compute with it in that dtype.
    others = (module for module in model.modules() if type(module) not in classes)
    fp32 = {id(param) for module in others for param in module.parameters(recurse=False)}
    return {name for name, param in model.named_parameters() if id(param) in fp32}


def _module_class(name: str, where: str) -> type[nn.Module] | None:
    """The class of a name such as "torch.nn.Linear"; None of a module that is not loaded, so that no model has it.

    Nothing is imported: that would run the code of any module that a config names.
    """
    package, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(package), attribute, None)
    if found is None and package and package not in sys.modules:
        logger.warning("%s: %s is not loaded, so no module of the model is a %s", where, package, attribute)
        return None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            where, expected='the full name of a module class, as "torch.nn.Linear"', got=name, fix="correct it"
        )
    return found


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in nested tuples, lists and dicts; every other object is passed as it is."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, value, is_leaf=lambda node: type(node) not in (tuple, list, dict))


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # 8 bits are codes with a separate scale
_ROTARY = re.compile(r"Rotary|RoPE|ROPE|Rope(?![a-z])")
_BUILT_AS = "_built_as"  # an attribute: a weak table would keep torch from swapping the tensor


@dataclass(frozen=True)
class BufferDtypes:
    """Decides the dtype of every floating-point buffer; see [Note: buffers].

    Attributes:
        precision: what parameters become.
        forced: dtype of all buffers by the config (`data_types.buffer_dtype`); None decides for each.
        fp32_names: parameters and buffers that are fp32 in any case.
    """

    precision: torch.dtype
    forced: torch.dtype | None
    fp32_names: frozenset[str]

    def of(self, model: nn.Module) -> dict[str, torch.dtype]:
        """fqn -> dtype of every floating-point buffer; call it before the engine casts the parameters."""
        follows = self._following(model)
        dtypes: dict[str, torch.dtype] = {}
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                # Integer buffers are indices and counters, such as `num_batches_tracked`.
                if buffer is None or not buffer.is_floating_point():
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                if fqn in self.fp32_names:
                    dtypes[fqn] = torch.float32
                elif self.forced is not None:
                    dtypes[fqn] = self.forced
                elif buffer.dtype not in _FLOATS or _holds_angles(module, name):
                    dtypes[fqn] = buffer.dtype
                else:
                    around = next((at for at in _outwards(prefix) if at in follows), None)
                    dtypes[fqn] = self.precision if around is not None and follows[around] else buffer.dtype
        return dtypes

    def _following(self, model: nn.Module) -> dict[str, bool]:
        """Prefix -> whether all floating parameters of a module are cast: its own, if it has any, else those below."""
        own: dict[str, bool] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            if param.is_floating_point() and name not in self.fp32_names:
                prefix = name.rpartition(".")[0]
                own[prefix] = own.get(prefix, True) and dtype_before(param) is not self.precision
        follows = dict(own)
        # A module without parameters, such as one that only holds a table, takes the answer of what lies below it.
        for prefix, is_cast in own.items():
            for outer in _outwards(prefix):
                if outer not in own:
                    follows[outer] = follows.get(outer, True) and is_cast
        return follows


def cast_buffers(model: nn.Module, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
    """Moves buffers to the device, and gives those named in `dtypes` their dtype."""
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
    """Makes the module buffers of all ranks those of rank 0. (all ranks)"""
    for name, buffer in model.named_buffers():
        if buffer.numel() and not buffer.is_meta:
            # A collective needs contiguous memory, and an expanded buffer has less memory than elements.
            flat = buffer.detach().contiguous()
            collectives.broadcast(flat, 0, f"buffer {name}")
            buffer.detach().copy_(flat)


def note_cast(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Records that the program made this parameter in `dtype`, before it is cast ahead of the engine."""
    vars(param).setdefault(_BUILT_AS, dtype)


def forget_cast(param: nn.Parameter) -> None:
    """Drops that record: an engine has cast the parameter and the buffers of its module."""
    vars(param).pop(_BUILT_AS, None)


def dtype_before(param: nn.Parameter) -> torch.dtype:
    """The dtype that the program made a parameter in, whatever it was cast to while it was built or loaded."""
    dtype: torch.dtype = vars(param).get(_BUILT_AS, param.dtype)
    return dtype


def _holds_angles(module: nn.Module, name: str) -> bool:
    """Whether a buffer holds frequencies or angles, rather than the cosines and sines of these."""
    if name.endswith("inv_freq"):
        return True
    return bool(_ROTARY.search(type(module).__name__)) and "cos" not in name and "sin" not in name


def _outwards(prefix: str) -> Iterator[str]:
    """The prefix of a module, then those of the modules around it, that of the model, "", last."""
    while prefix:
        yield prefix
        prefix = prefix.rpartition(".")[0]
    yield ""


class Autocast:
    """Runs a model's forward under `torch.autocast`, from construction until `undo`.

    Also where the model is called without its engine, as `generate` does: parameters in 16 bits take no fp32 inputs.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._before = vars(model).get("forward")
        forward = type(model).forward if self._before is None else self._before

        @functools.wraps(forward)
        def under_autocast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                return forward(module, *args, **kwargs) if self._before is None else forward(*args, **kwargs)

        # A method of the instance, so that a copy of the model calls its own.
        vars(model)["forward"] = types.MethodType(under_autocast, model)

    def undo(self) -> None:
        """The model computes as before."""
        if self._before is None:
            del vars(self._model)["forward"]
        else:
            vars(self._model)["forward"] = self._before
