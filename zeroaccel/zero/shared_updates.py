"""Whether updates in host memory are shared with the device, by `offload_optimizer.ratio`.

Decides and connects; `ops/split_update.py` cuts, `offload/device_lane.py` is the way over the device.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger
from zeroaccel.offload.device_lane import CupyAdamLane, cupy_is_installed
from zeroaccel.ops.adam import Adam
from zeroaccel.ops.split_update import SplitUpdate

__all__ = ["share_updates"]


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
        optimizer.split = SplitUpdate(CupyAdamLane(device), ratio)
    elif ratio is not None:
        raise ConfigError(f"{where}.ratio", expected="1.0", got=ratio, fix=f"a share for the device needs {missing}")
