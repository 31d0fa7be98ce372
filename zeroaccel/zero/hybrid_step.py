"""Whether updates in host memory are shared with the device, by `offload_optimizer.ratio`, and may run beside others.

Decides and connects; `ops/hybrid_update.py` cuts, `offload/cupy_adam.py` is the way over the device.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from zeroaccel.config.shard_plan import UpdateTime
from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger
from zeroaccel.offload.cupy_adam import CupyAdamLane, cupy_is_installed
from zeroaccel.ops.elementwise import Adam
from zeroaccel.ops.hybrid_update import HybridUpdate
from zeroaccel.ops.shard_step import ShardStep

__all__ = ["check_update_time", "share_updates"]


def share_updates(optimizer: Optimizer, ratio: float | None, device: torch.device, where: str) -> None:
    """Lets an optimizer that steps in host memory use the device for a part of each update.

    Args:
        ratio: the part that the host's cores keep; None to measure it, where sharing is possible at all.
        device: of the engine. There is nothing to share on a CPU, which is the host.
        where: the path of `offload_optimizer` in the config.

    Raises:
        ConfigError: a ratio below 1 was asked for, and cannot be had.
    """
    if ratio == 1.0:
        return
    if device.type != "cuda":
        if ratio is not None:
            logger.info("%s.ratio: the training device is the host's own, which updates everything", where)
        return
    missing = None
    if not isinstance(optimizer, Adam) or optimizer.moments_dtype != "fp32":
        missing = "Adam or AdamW with fp32 moments"
    elif not cupy_is_installed():
        missing = "CuPy: pip install zeroaccel[cuda]"
    if missing is None:
        assert isinstance(optimizer, Adam), "checked above"
        optimizer.split = HybridUpdate(CupyAdamLane(device), ratio)
    elif ratio is not None:
        raise ConfigError(f"{where}.ratio", expected="1.0", got=ratio, fix=f"a share for the device needs {missing}")


def check_update_time(optimizer: Optimizer, during: UpdateTime, where: str) -> None:
    """Updates beside other work are for optimizers that take their settings with each update.

    Raises:
        ConfigError: this one reads them, and its state, as it goes.
    """
    if during != "step" and not isinstance(optimizer, ShardStep):
        raise ConfigError(
            f'{where}.update_during "{during}": {type(optimizer).__name__} updates in step() only',
            fix='name Adam, AdamW, Lion, Adagrad or SGD in the optimizer section, or set the key to "step"',
        )
