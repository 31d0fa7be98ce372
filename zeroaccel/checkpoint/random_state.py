"""The state of every random generator of the process, saved and restored on request."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from zeroaccel.errors import CheckpointError

__all__ = ["random_state", "restore_random_state"]


def random_state(device: torch.device) -> dict[str, Any]:
    """Plain data and tensors: the generators of Python, numpy, torch and, where the engine is on one, the GPU."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts every generator where it was.

    Raises:
        CheckpointError: `state` is not one.
    """
    try:
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], device)
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"random state of the checkpoint: cannot be restored ({error})") from error
