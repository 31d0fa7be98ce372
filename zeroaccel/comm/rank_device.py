"""Which device a rank computes on, and whether the ranks of a machine have one each.

`topology.py` asks once, when it has a default group. Nothing here communicates: the ranks exchange their
`DeviceIdentity`, and each checks all of them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_once
from zeroaccel.ops.nvrtc import old_driver

CPU = torch.device("cpu")
NOT_TRAINED_ON = "train on the CPU, or with torch's own FSDP on this accelerator: zeroaccel knows no other than CUDA's"
_HOW_TO_SHARE = "start at most one process per device, or show each process its own by CUDA_VISIBLE_DEVICES"


class DeviceKind(NamedTuple):
    """The kind of devices besides the CPU that training uses.

    Attributes:
        type: torch's name.
        backend: of process groups for tensors there.
    """

    type: str
    backend: str

    @property
    def module(self) -> Any:
        """torch's module for it."""
        return torch.get_device_module(self.type)

    @property
    def default_backend(self) -> str:
        """Of a job that names none: gloo, and on a machine with such devices their backend, too."""
        return f"cpu:gloo,{self.type}:{self.backend}" if self.module.is_available() else "gloo"


ACCELERATOR = DeviceKind("cuda", "nccl")


class DeviceIdentity(NamedTuple):
    """The piece of hardware behind a rank's device.

    Attributes:
        host: the machine's name.
        uuid: of the GPU; "" where ranks may share it: a CPU, a GPU of several MIG instances, or by request.
        name: of the GPU, for messages.
    """

    host: str
    uuid: str
    name: str


def rank_device(local_rank: int, local_world_size: int, bound: torch.device | None = None) -> torch.device:
    """The device of one of several ranks: that of its group, or the one that the program chose; else by its number.

    Args:
        bound: the device that the default group was made for, if it was.

    Raises:
        ConfigError: fewer devices are visible than ranks were started on this machine.
    """
    if bound is not None and bound.type == ACCELERATOR.type and bound.index is not None:
        return bound
    # The first one is current in a process that has chosen none.
    if ACCELERATOR.module.is_initialized() and (chosen := ACCELERATOR.module.current_device()):
        return torch.device(ACCELERATOR.type, chosen)
    available = ACCELERATOR.module.device_count()
    # A launcher may show each process one device, as SLURM's --gpus-per-task does, and of MIG instances a process never
    # sees more. Whether the one is another for each rank is `check_one_device_each`'s to find out.
    if available == 1 and local_world_size > 1:
        return torch.device(ACCELERATOR.type, 0)
    if local_rank >= available:
        raise ConfigError(
            "environment: LOCAL_RANK",
            expected=f"less than the {available} visible CUDA devices",
            got=local_rank,
            fix=f"{_HOW_TO_SHARE}; with LOCAL_RANK=0 for each where it sees several",
        )
    return torch.device(ACCELERATOR.type, local_rank)


def named_device(device: torch.device | str) -> torch.device:
    """A device that the program names, with its index; the current one where it has none.

    Raises:
        ConfigError: it is neither the CPU nor a visible CUDA device.

    Example:
        >>> named_device("cpu")
        device(type='cpu')
    """
    named = torch.device(device)
    if named.type == "cpu":
        return CPU
    if named.type != ACCELERATOR.type:
        raise ConfigError(
            "init_process_group(device)", expected='"cpu" or a CUDA device', got=str(device), fix=NOT_TRAINED_ON
        )
    module = ACCELERATOR.module
    available = module.device_count()
    index = named.index if named.index is not None else module.current_device() if available else 0
    if index >= available:
        raise ConfigError(
            "init_process_group(device)",
            expected=f"one of the {available} visible CUDA devices",
            got=str(device),
            fix="check CUDA_VISIBLE_DEVICES and the installation of torch",
        )
    return torch.device(named.type, index)


def sole_device() -> torch.device:
    """The CUDA device of a process without others: the current one, which the program may have chosen; else the first.

    Raises:
        ConfigError: none is visible.
    """
    module = ACCELERATOR.module
    if not module.device_count():
        raise ConfigError(
            "process group: NCCL without a visible CUDA device",
            fix='make it with backend "gloo" to train on the CPU, or check CUDA_VISIBLE_DEVICES and the driver',
        )
    return torch.device(ACCELERATOR.type, module.current_device() if module.is_initialized() else 0)


def identify(device: torch.device, host: str, *, shares: bool) -> DeviceIdentity:
    """The hardware behind a device of this process.

    Args:
        shares: ranks may have the same GPU, as the environment asks NCCL for.
    """
    if device.type == "cpu":
        return DeviceIdentity(host, "", str(device))
    properties = torch.get_device_module(device).get_device_properties(device)
    # The instances of a partitioned GPU may all report the UUID of the GPU.
    shares = shares or " MIG " in f"{properties.name} "
    return DeviceIdentity(host, "" if shares else str(getattr(properties, "uuid", "")), properties.name)


def check_one_device_each(identities: Mapping[int, DeviceIdentity]) -> None:
    """Compares the devices of all ranks; raises on all of them alike.

    Raises:
        ConfigError: two ranks have the same GPU, which NCCL refuses, later and without a name.
    """
    ranks: dict[DeviceIdentity, list[int]] = defaultdict(list)
    for rank, identity in identities.items():
        if identity.uuid:
            ranks[identity].append(rank)
    for identity, sharing in ranks.items():
        if len(sharing) > 1:
            raise ConfigError(
                f"devices of {identity.host}",
                expected="one GPU for each rank",
                got=f"ranks {', '.join(map(str, sharing))} on {identity.name}, UUID {identity.uuid}",
                fix=_HOW_TO_SHARE,
            )


def warn_of_unused_devices(backend: str) -> None:
    """Says once that a default group made by the program leaves CUDA devices unused.

    Args:
        backend: of the group, as torch names it.
    """
    if ACCELERATOR.module.is_available():
        log_once(
            logging.WARNING,
            f'the process group of this program has the backend "{backend}", without NCCL: training is on the CPU,'
            f" and {ACCELERATOR.module.device_count()} CUDA devices are unused; make the group with"
            ' init_process_group("cpu:gloo,cuda:nccl"), or let zeroaccel make it (CUDA_VISIBLE_DEVICES="" says that the'
            " CPU is meant)",
        )


def warn_of_another_accelerator() -> None:
    """Says once that this machine's accelerator is none that training uses (XPU, MPS), or has too old a driver."""
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None and other.type != ACCELERATOR.type:
        log_once(
            logging.WARNING,
            "training is on the CPU: zeroaccel uses CUDA devices and CPUs, and not the accelerator"
            f' "{other.type}" that this torch finds; {NOT_TRAINED_ON}',
        )
    elif not ACCELERATOR.module.is_available() and (reason := old_driver()):
        log_once(logging.WARNING, f"training is on the CPU: {reason}")
