"""Chooses the device of a rank, and checks that no two ranks of a machine share one.

`topology.py` calls this once, after it has a default group. This module does not communicate: the ranks exchange their
`DeviceIdentity`, and each checks all of them.
"""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zeroaccel.errors import ConfigError
from zeroaccel.logs import log_once

CPU = torch.device("cpu")
NOT_TRAINED_ON = "train on the CPU, or with torch's own FSDP on this accelerator: zeroaccel only supports CUDA devices"
_HOW_TO_SHARE = "start at most one process per device, or limit each process to its own with CUDA_VISIBLE_DEVICES"


class DeviceKind(NamedTuple):
    """The kind of devices besides the CPU that training uses.

    Attributes:
        type: name of the device type in torch.
        backend: backend of process groups for tensors on such devices.
    """

    type: str
    backend: str

    @property
    def module(self) -> Any:
        """torch's module for the device type."""
        return torch.get_device_module(self.type)

    @property
    def default_backend(self) -> str:
        """Default backend of a job: gloo, and on machines with such devices their backend, too."""
        return f"cpu:gloo,{self.type}:{self.backend}" if self.module.is_available() else "gloo"


ACCELERATOR = DeviceKind("cuda", "nccl")


def old_driver() -> str:
    """Returns a message if the driver is too old for this torch, so that CUDA finds no device; otherwise ""."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no driver
        return ""
    newest = number.value // 1000, number.value % 1000 // 10
    # Within a major version of CUDA, an older driver supports a newer torch.
    if status or newest[0] >= int((torch.version.cuda or "0").split(".")[0]):
        return ""
    return (
        f"this machine's NVIDIA driver supports CUDA {newest[0]}.{newest[1]}; this torch needs a driver for CUDA"
        f" {torch.version.cuda}: update the driver, or install a torch for the CUDA that nvidia-smi shows"
    )


class DeviceIdentity(NamedTuple):
    """The hardware behind a rank's device.

    Attributes:
        host: name of the machine.
        uuid: UUID of the GPU; "" if ranks may share the device: a CPU, a GPU with MIG instances, or on request.
        name: name of the GPU, for messages.
    """

    host: str
    uuid: str
    name: str


def rank_device(local_rank: int, local_world_size: int, bound: torch.device | None = None) -> torch.device:
    """Returns the device of one of several ranks: the group's, else the program's choice, else by local rank.

    Args:
        bound: the device that the default group was made for, or None.

    Raises:
        ConfigError: fewer devices are visible than ranks were started on this machine.
    """
    if bound is not None and bound.type == ACCELERATOR.type and bound.index is not None:
        return bound
    # Device 0 is current in a process that has not chosen a device.
    if ACCELERATOR.module.is_initialized() and (chosen := ACCELERATOR.module.current_device()):
        return torch.device(ACCELERATOR.type, chosen)
    available = ACCELERATOR.module.device_count()
    # A launcher may show each process one device, as SLURM's --gpus-per-task does, and a process sees at most one MIG
    # instance. `check_one_device_each` checks that the ranks have different ones.
    if available == 1 and local_world_size > 1:
        return torch.device(ACCELERATOR.type, 0)
    if local_rank >= available:
        raise ConfigError(
            "environment: LOCAL_RANK",
            expected=f"less than the {available} visible CUDA devices",
            got=local_rank,
            fix=f"{_HOW_TO_SHARE}; set LOCAL_RANK=0 for each if it sees several of its own",
        )
    return torch.device(ACCELERATOR.type, local_rank)


def named_device(device: torch.device | str) -> torch.device:
    """Returns a device that the program names, with its index; without an index, the current one.

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
    """Returns the CUDA device of a job with one process: the current one if the program uses CUDA, else the first.

    Raises:
        ConfigError: no CUDA device is visible.
    """
    module = ACCELERATOR.module
    if not module.device_count():
        raise ConfigError(
            "process group: NCCL without a visible CUDA device",
            fix='make it with backend "gloo" to train on the CPU, or check CUDA_VISIBLE_DEVICES and the driver',
        )
    return torch.device(ACCELERATOR.type, module.current_device() if module.is_initialized() else 0)


def identify(device: torch.device, host: str, *, shares: bool) -> DeviceIdentity:
    """Returns the hardware behind a device of this process.

    Args:
        shares: True if ranks may share a GPU, because the environment configures NCCL for it.
    """
    if device.type == "cpu":
        return DeviceIdentity(host, "", str(device))
    properties = torch.get_device_module(device).get_device_properties(device)
    # All instances of a partitioned GPU may report the UUID of the GPU.
    shares = shares or " MIG " in f"{properties.name} "
    return DeviceIdentity(host, "" if shares else str(getattr(properties, "uuid", "")), properties.name)


def check_one_device_each(identities: Mapping[int, DeviceIdentity]) -> None:
    """Compares the devices of all ranks; raises the same error on all of them.

    Raises:
        ConfigError: two ranks have the same GPU. NCCL refuses that later, without naming it.
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
    """Warns once that a default group made by the program leaves CUDA devices unused.

    Args:
        backend: name that torch gives the group's backend.
    """
    if ACCELERATOR.module.is_available():
        log_once(
            logging.WARNING,
            f'the process group of this program has the backend "{backend}", without NCCL: training is on the CPU,'
            f" and {ACCELERATOR.module.device_count()} CUDA devices are unused; make the group with"
            ' init_process_group("cpu:gloo,cuda:nccl"), or let zeroaccel make it (set CUDA_VISIBLE_DEVICES="" to train'
            " on the CPU)",
        )


def warn_of_another_accelerator() -> None:
    """Warns once if training cannot use this machine's accelerator (XPU, MPS), or its driver is too old."""
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None and other.type != ACCELERATOR.type:
        log_once(
            logging.WARNING,
            "training is on the CPU: zeroaccel supports CUDA devices and CPUs, not the accelerator"
            f' "{other.type}" that this torch finds; {NOT_TRAINED_ON}',
        )
    elif not ACCELERATOR.module.is_available() and (reason := old_driver()):
        log_once(logging.WARNING, f"training is on the CPU: {reason}")
