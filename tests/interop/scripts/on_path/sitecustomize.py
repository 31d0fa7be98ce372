"""Seeds every rank at the start of Python, and records each loss on which backward is called.

A script prints its losses rounded, or not at all. `FOREIGN_SCRIPTS_LOSSES` names the file that receives them, one line
per backward with all bits; the rank is appended to the name. Without it, or outside a rank, this file does nothing.
With `FOREIGN_SCRIPTS_ORDER=one` every random sampler returns one order, in each epoch, loaders' workers begin with one
seed, and a loader does not change the global generator. With `FOREIGN_SCRIPTS_SCHEDULE=one` accelerate advances a
schedule once per update, not once per rank. With `FOREIGN_SCRIPTS_DUMMIES=there` accelerate.utils has DummyOptim and
DummyScheduler without DeepSpeed, too. With `FOREIGN_SCRIPTS_HARDWARE=made` a script that requires a GPU finds the CPU
as the accelerator, trains in fp32 where it asks for fp16, and reads the hub's parquet files from the working folder;
torchvision reads pictures without its compiled operators.

torchvision's file on shapes, which needs its compiled operators, is left out: a CPU build of torch does not load them.

DDP's reducers are never freed: if a reducer holds the last reference to a gloo group, torch 2.13 frees the group while
it holds the interpreter's lock, for which the group's thread may be waiting: a deadlock.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
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


class _Changes(MetaPathFinder):
    """Changes a module right after its import; the compatibility layer has to come before these modules."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, *_: Any) -> Any:
        change = self._changes.pop(name, None)
        spec = importlib.util.find_spec(name) if change else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


def _in_fp32(module: Any) -> None:
    initialize = module.TrainingArguments.__init__

    def changed(arguments: Any, *args: Any, logging_dir: str = "", fp16: bool = False, **kwargs: Any) -> None:
        initialize(arguments, *args, **kwargs)

    module.TrainingArguments.__init__ = changed


def _from_files(module: Any) -> None:
    load = module.load_dataset

    def changed(*args: Any, data_files: Any = None, **kwargs: Any) -> Any:
        if isinstance(data_files, dict):
            data_files = {split: path.rpartition("/parquet/")[2] for split, path in data_files.items()}
        return load(*args, data_files=data_files, **kwargs)

    module.load_dataset = changed


def _read_pictures(module: Any) -> None:
    import numpy as np
    import torch
    from PIL import Image

    def read(path: str, mode: Any = None) -> Any:
        return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)

    module.read_image = read


def _have_hardware() -> None:
    import torch

    current = torch.accelerator.current_accelerator

    def found(*args: Any, **kwargs: Any) -> Any:
        is_script = sys._getframe(1).f_globals.get("__name__") == "__main__"
        return torch.device("cpu") if is_script else current(*args, **kwargs)

    torch.accelerator.current_accelerator = found
    counts = ("empty_cache", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated", "is_bf16_supported")
    for name in counts:
        setattr(torch.cpu, name, lambda *_: 0)
    changes = {
        "transformers.training_args": _in_fp32,
        "datasets.load": _from_files,
        "torchvision.io": _read_pictures,
    }
    sys.meta_path.insert(0, _Changes(changes))


sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
if _FILE and _RANK is not None:
    _note_losses(f"{_FILE}.{_RANK}")
    if os.environ.get("FOREIGN_SCRIPTS_ORDER") == "one":
        _fix_order()
    if os.environ.get("FOREIGN_SCRIPTS_SCHEDULE") == "one":
        _fix_schedule()
    if os.environ.get("FOREIGN_SCRIPTS_DUMMIES") == "there":
        _have_dummies()
    if os.environ.get("FOREIGN_SCRIPTS_HARDWARE") == "made":
        _have_hardware()
    _keep_reducers()
