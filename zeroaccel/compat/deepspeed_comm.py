"""`deepspeed.comm`, where it is more than torch.distributed: joining the job, and the rank on this machine."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch

from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import UsageError

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""A file of variables for a launcher over ssh; `accelerate launch` imports the name in any case."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the job that torchrun's variables describe; a process group that exists is taken. (all ranks)

    Args:
        dist_backend: of the default group; "nccl" on a machine without CUDA, which callers pass by default, is gloo.
        auto_mpi_discovery, distributed_port: of no effect: a job is never looked for by asking MPI for it. One that
            mpirun started without torchrun's variables is refused, whatever they say.
        verbose: of no effect: joining logs nothing.
        dist_init_required: False says that there is a process group already, which is checked.

    Raises:
        UsageError: `init_method`, `rank` or `world_size` describe a job in another way; there is a `config`; or no
            process group where `dist_init_required` is False.
        ConfigError, CollectiveError: as for `init_process_group`.
    """
    if config is not None:
        raise UsageError(
            "deepspeed.init_distributed(config)",
            expected="None",
            got=type(config).__name__,
            fix="pass it to deepspeed.initialize, which reads its comms_logger",
        )
    require_process_group("deepspeed.init_distributed", dist_init_required)
    if init_method is not None or rank >= 0 or world_size > 0:
        raise UsageError(
            "deepspeed.init_distributed(init_method, rank, world_size)",
            expected="a job described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            got=f"init_method={init_method!r}, rank={rank}, world_size={world_size}",
            fix="use zeroaccel launch or torchrun, or call torch.distributed.init_process_group first",
        )
    no_cuda = not torch.cuda.is_available()
    init_process_group(None if no_cuda and dist_backend == "nccl" else dist_backend, timeout)
    _correct_accelerate_state()


def require_process_group(call: str, dist_init_required: bool | None) -> None:
    """Checks `dist_init_required=False`, which says that there is a process group.

    Raises:
        UsageError: there is none.
    """
    if dist_init_required is False and not torch.distributed.is_initialized():
        raise UsageError(
            f"{call}(dist_init_required=False)",
            expected="a process group that exists",
            got="none",
            fix="leave dist_init_required out, or call torch.distributed.init_process_group first",
        )


def is_initialized() -> bool:
    """Whether this process has joined a job."""
    _correct_accelerate_state()
    return torch.distributed.is_initialized()


def _correct_accelerate_state() -> None:
    """Sets the backend of accelerate's PartialState, which has none on a machine without accelerators.

    It would then take every rank for the only one of its job. PartialState is constructed around these calls: it exists
    before them, and its backend is read after them.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    module = sys.modules.get("accelerate.state")
    state = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    if state is not None and "backend" in state and state["backend"] is None:
        state["backend"] = torch.distributed.get_backend()


def get_local_rank() -> int:
    """The rank among those on this machine."""
    return init_process_group().local_rank
