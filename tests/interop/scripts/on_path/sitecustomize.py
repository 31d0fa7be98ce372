"""Seeds every rank at the start of Python, and records each loss on which backward is called.

A script prints its losses rounded, or not at all. `FOREIGN_SCRIPTS_LOSSES` names the file that receives them, one line
per backward with all bits; the rank is appended to the name. Without it, or outside a rank, this file does nothing.
With `FOREIGN_SCRIPTS_ORDER=one` every random sampler returns one order, in each epoch, loaders' workers begin with one
seed, and a loader does not change the global generator. With `FOREIGN_SCRIPTS_SCHEDULE=one` accelerate advances a
schedule once per update, not once per rank. With `FOREIGN_SCRIPTS_DUMMIES=there` accelerate.utils has DummyOptim and
DummyScheduler without DeepSpeed, too.

DDP's reducers are never freed: if a reducer holds the last reference to a gloo group, torch 2.13 frees the group while
it holds the interpreter's lock, for which the group's thread may be waiting: a deadlock.
"""

from __future__ import annotations

import ctypes
import os
import random
from typing import Any

_FILE = os.environ.get("FOREIGN_SCRIPTS_LOSSES")
_RANK = os.environ.get("RANK")
_BASE_SEED = 8  # position among the arguments of a worker's loop


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


def _fix_schedule() -> None:
    from accelerate.scheduler import AcceleratedScheduler

    initialize = AcceleratedScheduler.__init__

    def once(schedule: AcceleratedScheduler, *args: Any, **kwargs: Any) -> None:
        initialize(schedule, *args, **kwargs)
        schedule.split_batches = True  # its only effect: one step per update

    AcceleratedScheduler.__init__ = once  # type: ignore[method-assign]


def _fix_order() -> None:
    import torch
    from torch.utils.data import RandomSampler
    from torch.utils.data._utils import worker
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def same(sampler: RandomSampler) -> Any:
        return iter(torch.randperm(len(sampler), generator=torch.Generator().manual_seed(0)).tolist())

    RandomSampler.__iter__ = same  # type: ignore[method-assign]
    begin = worker._worker_loop

    def seeded(*args: Any) -> None:
        begin(*args[:_BASE_SEED], 0, *args[_BASE_SEED + 1 :])

    worker._worker_loop = seeded
    initialize = _BaseDataLoaderIter.__init__

    def aside(iterator: Any, *args: Any, **kwargs: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            initialize(iterator, *args, **kwargs)

    _BaseDataLoaderIter.__init__ = aside  # type: ignore[method-assign]


def _have_dummies() -> None:
    import accelerate.utils
    from accelerate.utils import deepspeed

    for name in ("DummyOptim", "DummyScheduler"):
        setattr(accelerate.utils, name, getattr(deepspeed, name))


if _FILE and _RANK is not None:
    _note_losses(f"{_FILE}.{_RANK}")
    if os.environ.get("FOREIGN_SCRIPTS_ORDER") == "one":
        _fix_order()
    if os.environ.get("FOREIGN_SCRIPTS_SCHEDULE") == "one":
        _fix_schedule()
    if os.environ.get("FOREIGN_SCRIPTS_DUMMIES") == "there":
        _have_dummies()
    _keep_reducers()
