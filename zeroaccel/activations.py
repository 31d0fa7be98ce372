"""Activation checkpointing: drops activations in forward and recomputes them in backward from a function's inputs.

`checkpoint` uses torch's non-reentrant checkpoint, and can store the inputs elsewhere until backward
(`offload/activation_store.py`). The config's `activation_checkpointing` section selects the storage, for calls of
`checkpoint` in a model and for the repeated blocks of any model. Results, including random numbers, equal those of a
run without it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as recompute

from zeroaccel.comm.collectives import PartitionedTensors
from zeroaccel.config.schema import ActivationCheckpointing
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once, logger
from zeroaccel.offload.activation_store import ActivationStore

__all__ = ["Activations", "Profile", "Recomputation", "checkpoint", "configure", "repeated_blocks", "reset"]

_Result = TypeVar("_Result")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class Profile:
    """Cost of recomputation since the forward began.

    Attributes:
        calls: number of calls of checkpointed functions.
        forward_seconds: time inside them in forward, including the device's work on CUDA.
        recompute_seconds: time inside them in backward, measured in the same way.
        kept_nbytes: peak size of the memory allocated for the stored inputs.
    """

    calls: int = 0
    forward_seconds: float = 0.0
    recompute_seconds: float = 0.0
    kept_nbytes: int = 0


class Activations:
    """Recomputes functions, and stores their inputs according to a config.

    Args:
        section: section `activation_checkpointing` of a config.
        group: the tensor-parallel group, whose ranks call with equal inputs; required by `partition_activations`.
        calls: number of checkpointed calls in a forward, for `contiguous_memory_optimization` without
            `number_checkpoints`.

    Raises:
        UsageError: `number_checkpoints` or the group is missing, but the section requires it.
    """

    def __init__(
        self,
        section: ActivationCheckpointing | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        calls: int | None = None,
    ) -> None:
        self.section = section = section or ActivationCheckpointing()
        # The number of checkpointed calls sizes a contiguous buffer: the config's number, else that of wrapped blocks.
        slots = (section.number_checkpoints or calls) if section.contiguous_memory_optimization else None
        if section.contiguous_memory_optimization and not slots:
            raise UsageError(
                "activation_checkpointing.contiguous_memory_optimization",
                expected="number_checkpoints, the number of checkpointed calls in forward, which sizes the buffer",
                got=section.number_checkpoints,
            )
        if section.partition_activations and group is None:
            raise UsageError(
                "activation_checkpointing.partition_activations",
                expected="a tensor-parallel group, whose ranks hold the same activations",
                got=None,
                fix="call zeroaccel.activations.configure(tensor_parallel_group=...) first, or remove the key",
            )
        shares = PartitionedTensors(group) if section.partition_activations and group is not None else None
        self._moves_inputs = section.cpu_checkpointing or shares is not None or slots is not None
        self.store = ActivationStore(on_host=section.cpu_checkpointing, partition=shares, slots=slots)
        self.profile = Profile()

    def __deepcopy__(self, memo: dict[int, Any]) -> Activations:
        return self  # a copy of the model is recomputed with the same settings

    def __reduce__(self) -> Any:
        return Activations, ()  # stored inputs and process groups are not valid in another process

    def checkpoint(self, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """See the module's `checkpoint`."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            if not self._moves_inputs:
                traced: _Result = recompute(function, *args, use_reentrant=False, **kwargs)  # a part of the graph
                return traced
            _warn_not_compiled()
        leaves, spec = tree_flatten((args, kwargs))
        chosen = [index for index, leaf in enumerate(leaves) if _is_activation(leaf)]
        inputs = [leaves[index] for index in chosen]
        others = [None if index in set(chosen) else leaf for index, leaf in enumerate(leaves)]

        def run(*tensors: Tensor) -> _Result:
            merged = list(others)
            for index, tensor in zip(chosen, tensors, strict=True):
                merged[index] = tensor
            some_args, some_kwargs = tree_unflatten(merged, spec)
            with self._around(tensors):
                return function(*some_args, **some_kwargs)

        self.store.calls += 1
        # torch installs its own hooks inside `recompute`, so these receive only the tensors that it saves: the inputs.
        try:
            with saved_tensors_hooks(self._pack, self.store.fetch):
                result: _Result = recompute(run, *inputs, use_reentrant=False)
        finally:
            self.store.end_call()
        return result

    def _pack(self, tensor: Tensor) -> Any:
        return self.store.save(tensor) if tensor.numel() else tensor

    @contextmanager
    def _around(self, tensors: tuple[Tensor, ...]) -> Iterator[None]:
        """Times the call, and synchronizes with the device at both ends where the config enables it."""
        section = self.section
        again = torch._C._current_graph_task_id() != -1
        device = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
        waits = device is not None and (section.profile or section.synchronize_checkpoint_boundary)
        # A forward after recomputation belongs to the next micro-batch, so the profile of the last one is complete.
        if not again and self.profile.recompute_seconds:
            self._log()
        if waits:
            torch.get_device_module(device).synchronize(device)
        begun = time.perf_counter()
        try:
            yield
        finally:
            if waits:
                torch.get_device_module(device).synchronize(device)
            seconds = time.perf_counter() - begun
            if again:
                self.profile.recompute_seconds += seconds
            else:
                self.profile.calls += 1
                self.profile.forward_seconds += seconds
            self.profile.kept_nbytes = max(self.profile.kept_nbytes, self.store.stored_nbytes)

    def _log(self) -> None:
        profile, self.profile = self.profile, Profile()
        if self.section.profile:
            logger.warning(
                "activations: %d checkpointed calls, %.1f ms in forward, %.1f ms again in backward, %.1f MiB kept",
                profile.calls,
                profile.forward_seconds * 1e3,
                profile.recompute_seconds * 1e3,
                profile.kept_nbytes / 2**20,
            )


_current = Activations()
_group: dist.ProcessGroup | None = None


def checkpoint(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Calls ``function(*args, **kwargs)``, drops its saved activations, and recomputes them in backward.

    The config of the last `initialize` (or `configure`) selects the storage of inputs that require gradients. Other
    inputs, such as masks and positions, stay in place because blocks share them. Nested calls, several outputs, keyword
    arguments and frozen inputs are supported; the recomputation draws the same random numbers as forward.

    Example:
        >>> import torch
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> x = torch.ones(2, 4, requires_grad=True)
        >>> checkpoint(block, x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 4])
    """
    return _current.checkpoint(function, *args, **kwargs)


def configure(
    section: ActivationCheckpointing | None = None, *, tensor_parallel_group: dist.ProcessGroup | None = None
) -> None:
    """Sets how later calls of `checkpoint` in this process store inputs. `initialize` applies a config's section.

    Args:
        tensor_parallel_group: this rank's group for `partition_activations`; it stays set until `reset`.

    Raises:
        UsageError: `number_checkpoints` or the group is missing, but the section requires it.
    """
    global _current, _group
    group = tensor_parallel_group or _group
    activations = Activations(section, group=group)
    _current, _group = activations, group


def reset() -> None:
    """Undoes `configure`: `checkpoint` keeps inputs in place, and no group is set."""
    global _current, _group
    _current, _group = Activations(), None


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (fqn, block) for the children of the outermost lists that share their class with a sibling."""
    blocks: list[tuple[str, nn.Module]] = []

    def walk(fqn: str, module: nn.Module) -> None:
        kinds = Counter(type(child) for child in module.children()) if isinstance(module, _LISTS) else Counter()
        for name, child in module.named_children():
            if not any(True for _ in child.parameters()):
                continue
            child_fqn = f"{fqn}.{name}" if fqn else name
            if kinds[type(child)] > 1 and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                blocks.append((child_fqn, child))
            else:
                walk(child_fqn, child)

    walk("", model)
    return blocks


class Recomputation:
    """Applies a config's section to a model and to `checkpoint`, from `apply` to `undo`.

    Raises:
        UsageError: the model has no repeated block to recompute.
    """

    def __init__(self, model: nn.Module, section: ActivationCheckpointing) -> None:
        self._blocks = [block for _, block in repeated_blocks(model)] if section.wrap_blocks else []
        if section.wrap_blocks and not self._blocks:
            raise UsageError(
                "activation_checkpointing.wrap_blocks",
                expected="a model with repeated blocks (modules of one class in a ModuleList or Sequential)",
                got=type(model).__name__,
                fix="call zeroaccel.activations.checkpoint in the model, and remove the key",
            )
        if section.contiguous_memory_optimization and not (self._blocks or section.number_checkpoints):
            section = section.model_copy(update={"contiguous_memory_optimization": False})  # the config's notes say so
        if section.partition_activations and _group is None:
            log_once(
                logging.WARNING,
                "activation_checkpointing.partition_activations: inputs are not partitioned: there is no "
                "tensor-parallel group; call zeroaccel.activations.configure(tensor_parallel_group=...)",
            )
            section = section.model_copy(update={"partition_activations": False})
        self._activations = Activations(section, group=_group, calls=len(self._blocks))
        self._before = _current

    @classmethod
    def of(cls, model: nn.Module, section: ActivationCheckpointing) -> Recomputation | None:
        """Returns the recomputation that a section requests; None for the section's defaults."""
        return None if section == type(section)() else cls(model, section)

    def apply(self) -> None:
        """Patches the blocks so that backward recomputes them; calls of `checkpoint` store inputs in the same way."""
        global _current
        self._before, _current = _current, self._activations
        for block in self._blocks:
            block.__dict__["forward"] = _Recomputed(block.forward, self._activations)

    def undo(self) -> None:
        """Restores the blocks and the settings of `checkpoint`."""
        global _current
        if _current is self._activations:
            _current = self._before
        for block in self._blocks:
            forward = block.__dict__.get("forward")
            if isinstance(forward, _Recomputed):
                forward.restore(block)


@_disable_dynamo
def _warn_not_compiled() -> None:
    log_once(
        logging.WARNING,
        "activation_checkpointing: recomputed functions are not compiled, because a graph cannot move their inputs; "
        "remove cpu_checkpointing, partition_activations and contiguous_memory_optimization, or torch.compile",
    )


class _Recomputed:
    """Replacement for a block's forward. A copy of the block gets a replacement that calls the copy."""

    def __init__(self, forward: Callable[..., Any], activations: Activations) -> None:
        self._forward = forward
        self._activations = activations

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._activations.checkpoint(self._forward, *args, **kwargs)

    def restore(self, block: nn.Module) -> None:
        """Restores the block's previous forward."""
        del block.__dict__["forward"]
        if self._forward != block.forward:  # an earlier patch, e.g. of another library
            block.__dict__["forward"] = self._forward


def _is_activation(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel() > 0 and not isinstance(leaf, nn.Parameter)
