"""Run by Python at the start of every rank: seeds it, and notes each loss that backward begins from.

A script prints its losses rounded, or not at all. `FOREIGN_SCRIPTS_LOSSES` names the file that gets them, one line a
backward with all bits; the rank is added to the name. Without it, or in a process that is no rank, nothing happens.
With `FOREIGN_SCRIPTS_ORDER=one` every random sampler gives one order, in each epoch.

DDP's reducers are never freed: where one is the last to refer to a gloo group, torch 2.13 frees the group while it
has the interpreter's lock, and the group's thread may wait for that lock for ever.
"""

from __future__ import annotations

import ctypes
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


def _keep_reducers() -> None:
    from torch.nn.parallel import DistributedDataParallel

    initialize = DistributedDataParallel.__init__

    def kept(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        initialize(model, *args, **kwargs)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(model.reducer))

    DistributedDataParallel.__init__ = kept  # type: ignore[method-assign]


def _fix_order() -> None:
    import torch
    from torch.utils.data import RandomSampler

    def same(sampler: RandomSampler) -> Any:
        return iter(torch.randperm(len(sampler), generator=torch.Generator().manual_seed(0)).tolist())

    RandomSampler.__iter__ = same  # type: ignore[method-assign]


if _FILE and _RANK is not None:
    _note_losses(f"{_FILE}.{_RANK}")
    if os.environ.get("FOREIGN_SCRIPTS_ORDER") == "one":
        _fix_order()
    _keep_reducers()
