"""Starts a function on several processes of this machine, from a notebook or for tests.

The launcher forks the processes, so they can run functions of a notebook. The first process that fails ends the others,
and the caller gets its traceback. Use `zeroaccel launch` for scripts.

[Note: CUDA and forks] After a process has called the CUDA driver, even for the number of devices, processes forked from
it cannot use CUDA. So the launcher counts the devices in a forked process that ends at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from zeroaccel.comm.topology import destroy
from zeroaccel.errors import ConfigError, EngineStateError

_PRECISIONS = ("no", "fp16", "bf16")


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Runs `function(*args)` on `num_processes` ranks on the CPU with gloo, and waits for all of them.

    Raises:
        ProcessRaisedException: a rank failed; the message has its traceback.
        EngineStateError: this process has already joined a job.
        ConfigError: `num_processes` is below 1, or the system cannot fork.
    """
    _launch(function, args, num_processes, {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""})


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
) -> None:
    """Runs `function(*args)` on all GPUs of this machine, or on `num_processes` processes, and waits for them.

    Args:
        num_processes: number of processes on this machine. Defaults to one per GPU; without a GPU, the function runs in
            this process.
        mixed_precision: "no", "fp16" or "bf16", for an `Accelerator` that does not set it.
        use_port: port of the rendezvous. Defaults to a free port; several nodes need the same one.
        master_addr, node_rank, num_nodes: address of the first node, rank of this node and number of nodes.

    Raises:
        ProcessRaisedException: a rank failed; the message has its traceback.
        EngineStateError: this process already uses CUDA or a process group, which forked processes cannot share.
        ConfigError: an argument is out of range.

    Example:
        A cell of a notebook on a machine with two GPUs::

            def train():
                accelerator = zeroaccel.Accelerator()
                ...

            zeroaccel.notebook_launcher(train)
    """
    _check_arguments(mixed_precision, use_port, node_rank, num_nodes)
    devices = _visible_devices()
    if num_processes is None:
        num_processes = max(1, devices.count)
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision}
    on_devices = devices.count >= num_processes
    if not on_devices:
        variables |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    if num_processes * num_nodes == 1:
        with _set(variables):
            function(*args)
        return
    if on_devices and not devices.work_in_forks and not torch.cuda.is_initialized():  # `_launch` refuses that one
        raise EngineStateError(
            f"launching {getattr(function, '__name__', function)}: this process has called the CUDA driver, for example"
            " with torch.cuda.is_available(), so forked processes cannot use CUDA",
            fix="restart the notebook and call CUDA only inside the launched function, or set"
            " PYTORCH_NVML_BASED_CUDA_CHECK=1 before importing torch",
        )
    place = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(use_port if use_port is not None else _free_port()),
        "GROUP_RANK": str(node_rank),
    }
    _launch(function, args, num_processes, variables | place, num_nodes)


def _check_arguments(mixed_precision: str, use_port: int | str | None, node_rank: int, num_nodes: int) -> None:
    if mixed_precision not in _PRECISIONS:
        raise ConfigError("notebook_launcher(mixed_precision)", expected=", ".join(_PRECISIONS), got=mixed_precision)
    if not 0 <= node_rank < num_nodes:
        raise ConfigError("notebook_launcher(node_rank)", expected=f"0 to {num_nodes - 1}", got=node_rank)
    if num_nodes > 1 and use_port is None:
        raise ConfigError("notebook_launcher(use_port)", expected="the same port on all nodes", got=None)


def _launch(
    function: Callable[..., Any],
    args: Sequence[Any],
    num_processes: int,
    variables: Mapping[str, str],
    num_nodes: int = 1,
) -> None:
    where = f"launching {getattr(function, '__name__', function)}"
    if num_processes < 1:
        raise ConfigError(f"{where}: num_processes", expected="at least 1", got=num_processes)
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(where, expected="a system that can fork", fix="start a script with `zeroaccel launch`")
    if dist.is_initialized():
        raise EngineStateError(
            f"{where}: this process has already joined a job",
            fix="restart the notebook, and create Accelerator() only inside the launched function",
        )
    if torch.cuda.is_initialized():
        raise EngineStateError(
            f"{where}: this process uses CUDA, so forked processes cannot use it",
            fix="restart the notebook, and use CUDA only inside the launched function",
        )
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_processes * num_nodes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    start_processes(_rank_main, (function, tuple(args), shared | dict(variables)), num_processes, start_method="fork")


@dataclass(frozen=True)
class _VisibleDevices:
    """Number of CUDA devices that this process sees; `work_in_forks` is True if forked processes can use them."""

    count: int
    work_in_forks: bool


def _visible_devices() -> _VisibleDevices:
    """Counts the devices in a forked process; see [Note: CUDA and forks]."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return _VisibleDevices(torch.cuda.device_count(), work_in_forks=False)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_device_count, args=(sender,))
    process.start()
    sender.close()
    try:
        count: int | None = receiver.recv()
    except EOFError:  # the driver ended the process
        count = 0
    process.join()
    if count is None:  # this process already uses the driver, so it can call it for the count
        return _VisibleDevices(torch.cuda.device_count(), work_in_forks=False)
    return _VisibleDevices(count, work_in_forks=True)


def _send_device_count(sender: Connection) -> None:
    """Sends the number of devices from a forked process; None if it cannot use CUDA."""
    sender.send(None if torch.cuda._is_in_bad_fork() else torch.cuda.device_count())
    sender.close()


def _rank_main(index: int, function: Callable[..., Any], args: tuple[Any, ...], shared: Mapping[str, str]) -> None:
    first = int(shared["GROUP_RANK"]) * int(shared["LOCAL_WORLD_SIZE"])
    os.environ.update(shared, RANK=str(first + index), LOCAL_RANK=str(index), FORK_LAUNCHED="1")
    # A fork does not copy the parent's threads; a thread pool of torch with several threads would wait for them.
    torch.set_num_threads(1)
    function(*args)
    destroy()


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
