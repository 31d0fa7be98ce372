"""Stands in for vLLM on CPUs: the names that TRL's client imports, its communicator over gloo.

TRL's client asks the trainer's CUDA device for an identifier, to refuse a server on the same one; here is none. TRL's
online DPO asks torch for the accelerator that the client works with, and gets the CPU; everybody else gets none.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch

__version__ = "0.20.0"


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(uuid=f"no CUDA device: {device}")


_accelerator = torch.accelerator.current_accelerator


def _current(*args: Any, **kwargs: Any) -> torch.device | None:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return torch.device("cpu") if caller.startswith("trl.experimental.online_dpo") else _accelerator(*args, **kwargs)


if not torch.cuda.is_available():
    torch.cuda.get_device_properties = _properties
    torch.accelerator.current_accelerator = _current


class LLM:
    """vLLM's engine inside the trainer's process, which is not stood in for."""


class RequestOutput:
    """What the engine gives for a prompt."""


class SamplingParams:
    """How the engine samples."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)
