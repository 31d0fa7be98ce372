"""Replaces vLLM on CPUs: the names that TRL's client imports, with a communicator over gloo.

TRL's client queries the trainer's CUDA device for an identifier, to reject a server on the same device; without CUDA it
gets a placeholder. TRL's online DPO queries torch for the client's accelerator and gets the CPU; others get none.
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
    """vLLM's engine inside the trainer's process; not replaced."""


class RequestOutput:
    """Result of the engine for a prompt."""


class SamplingParams:
    """Sampling parameters of the engine."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)
