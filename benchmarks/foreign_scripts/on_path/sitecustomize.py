"""Run by Python at the start of every rank: seeds it, and notes each loss that backward begins from.

A script prints its losses rounded, or not at all. `FOREIGN_SCRIPTS_LOSSES` names the file that gets them, one line a
backward with all bits; the rank is added to the name. Without it, or in a process that is no rank, nothing happens.
"""

from __future__ import annotations

import os
import random
from typing import Any

_FILE = os.environ.get("FOREIGN_SCRIPTS_LOSSES")
_RANK = os.environ.get("RANK")


def _note_losses(path: str) -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    backward = torch.Tensor.backward

    def noted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if loss.numel() == 1:
            with open(path, "a") as file:
                file.write(f"{float(loss.detach())!r}\n")
        backward(loss, *args, **kwargs)

    torch.Tensor.backward = noted  # type: ignore[method-assign]


if _FILE and _RANK is not None:
    _note_losses(f"{_FILE}.{_RANK}")
