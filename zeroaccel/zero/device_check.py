"""Devices of what a program passes: a model to `initialize`, inputs to a forward. Named where they do not fit.

Weights in host memory go wherever the engine computes. Nothing else moves by itself: a model on another GPU than this
process's is one that the program put there, with its inputs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.comm.rank_device import ACCELERATOR, NOT_TRAINED_ON
from zeroaccel.errors import UsageError
from zeroaccel.nested import leaves_of

# How torch says that tensors of one operation are in different memories; some operations compare the types only.
_MIXED = re.compile(r"\bdevices?\b|\btorch\.(cuda\.)?\w*Tensor\b|weight type", re.IGNORECASE)
_MOST_NAMES = 3


def check_model_device(model: nn.Module, device: torch.device) -> None:
    """Refuses a model that lies on another accelerator than the engine, or on several.

    Args:
        device: where the engine computes.

    Raises:
        UsageError: parameters or buffers are neither there nor in host memory; with the device and names of each.
    """
    names: dict[torch.device, list[str]] = defaultdict(list)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta") and tensor.device != device:
            names[tensor.device].append(name)
    if not names:
        return
    found = ", ".join(f"{_listed(of_one)} on {place}" for place, of_one in names.items())
    if len(names) > 1:
        fix = "an engine has its model on one device: load it without device_map, and let the stage divide it"
    elif next(iter(names)).type != ACCELERATOR.type:
        fix = f"call model.cpu() first; {NOT_TRAINED_ON}"
    elif device.type == "cpu":
        fix = (
            "this process trains on the CPU: call model.cpu(), or let it train on the GPU, which takes a process group"
            ' with NCCL ("cpu:gloo,cuda:nccl") and no cpu=True'
        )
    else:
        (other,) = names
        fix = f'call model.to("{device}"), or torch.{other.type}.set_device({other.index}) before anything of zeroaccel'
    raise UsageError(
        "initialize(model): devices", expected=f"all of it on {device} or in host memory", got=found, fix=fix
    )


def misplaced_inputs(
    error: RuntimeError, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> UsageError | None:
    """What to raise for an error of a forward that inputs on another device caused; None where it has another cause.

    Inputs may be in host memory, lengths for instance, so they are looked at once an operation has failed.

    Args:
        device: of the parameters.
    """
    if not _MIXED.search(str(error)):
        return None
    elsewhere: dict[torch.device, list[str]] = defaultdict(list)
    named = {f"args[{index}]": value for index, value in enumerate(args)} | dict(kwargs)
    for name, value in named.items():
        for path, leaf in leaves_of(value):
            if isinstance(leaf, Tensor) and leaf.device != device:
                elsewhere[leaf.device].append(f"{name}{path}")
    if not elsewhere:
        return None
    return UsageError(
        "engine.forward",
        expected=f"inputs on {device}, where the parameters are",
        got=", ".join(f"{_listed(of_one)} on {place}" for place, of_one in elsewhere.items()),
        fix=f'pass the loader to prepare(), which moves batches, or move each with .to("{device}"); '
        f"torch says: {str(error).splitlines()[0]}",
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
