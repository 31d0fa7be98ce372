"""Stands in for vLLM on CPUs: the names that TRL's client imports, its communicator over gloo.

TRL's client asks the trainer's CUDA device for an identifier, to refuse a server on the same one; here is none.
"""

from types import SimpleNamespace
from typing import Any

import torch

__version__ = "0.20.0"


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(uuid=f"no CUDA device: {device}")


if not torch.cuda.is_available():
    torch.cuda.get_device_properties = _properties


class LLM:
    """vLLM's engine inside the trainer's process, which is not stood in for."""


class RequestOutput:
    """What the engine gives for a prompt."""


class SamplingParams:
    """How the engine samples."""
