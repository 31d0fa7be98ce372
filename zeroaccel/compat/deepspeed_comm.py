"""`deepspeed.comm`: joins the job, and provides torch.distributed's calls with DeepSpeed's arguments.

The calls are the script's own collectives. The engine's collectives go through `zeroaccel.comm`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from zeroaccel.comm.topology import device_mesh, init_process_group, meet
from zeroaccel.compat.surface import PROFILED
from zeroaccel.errors import UsageError
from zeroaccel.logs import log_once

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""Name of a file with variables for a launcher over ssh; `accelerate launch` always imports the name."""


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
    """Joins the job described by torchrun's variables or by the arguments; reuses an existing process group.

    (all ranks)

    Args:
        dist_backend: backend of the default group; without CUDA, "nccl", the default of many callers, becomes gloo.
        auto_mpi_discovery, distributed_port: no effect: zeroaccel never asks MPI for a job. A job started by mpirun
            without torchrun's variables is refused.
        verbose: no effect: joining logs nothing.
        init_method: rendezvous, as in torch.distributed: "env://", "tcp://..." or "file://...".
        dist_init_required: False means that a process group exists, which is checked.
        config: no effect: `deepspeed.initialize` reads the config, and collectives are not logged.
        rank, world_size: of this process, and of the job; by default RANK and WORLD_SIZE.

    Raises:
        UsageError: `rank` or `world_size` differ from those of the job that this process has joined; or there is no
            process group although `dist_init_required` is False.
        ConfigError, CollectiveError: as for `init_process_group`.
    """
    require_process_group("deepspeed.init_distributed", dist_init_required)
    no_cuda = not torch.cuda.is_available()
    backend = None if no_cuda and dist_backend == "nccl" else dist_backend
    own_way = init_method not in (None, "env://") or rank >= 0 or world_size > 0
    if own_way and not torch.distributed.is_initialized():
        meet(backend, init_method or "env://", rank, world_size, timeout)
    init_process_group(backend, timeout)
    actual = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (rank >= 0 and rank != actual[0]) or (world_size > 0 and world_size != actual[1]):
        raise UsageError(
            "deepspeed.init_distributed(rank, world_size)",
            expected=f"the rank and world_size of this process in its job of {actual[1]} ranks",
            got=f"rank={rank}, world_size={world_size}",
            fix="remove both arguments",
        )
    _correct_accelerate_state()


def require_process_group(call: str, dist_init_required: bool | None) -> None:
    """Checks `dist_init_required=False`, which requires an existing process group.

    Raises:
        UsageError: there is no process group.
    """
    if dist_init_required is False and not torch.distributed.is_initialized():
        raise UsageError(
            f"{call}(dist_init_required=False)",
            expected="an existing process group",
            got="none",
            fix="remove dist_init_required, or call torch.distributed.init_process_group first",
        )


def is_initialized() -> bool:
    """True if this process has joined a job."""
    _correct_accelerate_state()
    return torch.distributed.is_initialized()


def _correct_accelerate_state() -> None:
    """Sets the backend of accelerate's PartialState, which is None on a machine without accelerators.

    Without a backend, every rank would take itself for the only one of its job. PartialState is constructed around
    these calls: it exists before them, and reads its backend after them.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    module = sys.modules.get("accelerate.state")
    state = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    if state is not None and "backend" in state and state["backend"] is None:
        state["backend"] = torch.distributed.get_backend()


def get_local_rank() -> int:
    """Returns the rank among the ranks on this machine."""
    return init_process_group().local_rank


# -- calls

NO_LOG = "deepspeed.comm: collectives are not logged (prof, log_name, configure); use torch.profiler"

# Later versions of torch rename these, and warn about the names that DeepSpeed uses.
_RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}


def __getattr__(name: str) -> Any:
    if name in PROFILED.split():
        later = getattr(torch.distributed, _RENAMED.get(name, name), None)
        return _without_profile(later or getattr(torch.distributed, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _without_profile(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch.distributed's call with additional arguments `prof`, `log_name` and `debug`, without effect."""

    @functools.wraps(call)
    def run(*args: Any, prof: bool = False, log_name: str = "", debug: str = "", **kwargs: Any) -> Any:
        if prof:
            log_once(logging.WARNING, NO_LOG)
        return call(*args, **kwargs)

    return run


def inference_all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    """Calls `all_reduce`; inference has no separate one. (all ranks of the group)"""
    return __getattr__("all_reduce")(tensor, op or torch.distributed.ReduceOp.SUM, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> list[Any] | None:
    """Gathers each input, (n,) on each of W ranks, into its output, (W n,). (all ranks of the group)

    Returns:
            Works to wait for, one per tensor, with `async_op`; otherwise None.
    """
    gather = __getattr__("all_gather_into_tensor")
    works = [gather(out, sent, group, async_op=True) for out, sent in zip(output_tensors, input_tensors, strict=True)]
    return _awaited(works, async_op=async_op)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "",
    debug: str = "",
) -> list[Any] | None:
    """Calls `all_reduce` for each tensor. (all ranks of the group)

    Returns:
        Works to wait for, one per tensor, with `async_op`; otherwise None.
    """
    reduce = __getattr__("all_reduce")
    works = [reduce(tensor, op or torch.distributed.ReduceOp.SUM, group, async_op=True) for tensor in tensors]
    return _awaited(works, async_op=async_op)


def _awaited(works: list[Any], *, async_op: bool) -> list[Any] | None:
    if async_op:
        return works
    for work in works:
        work.wait()
    return None


# -- groups


def get_world_group() -> Any:
    """Returns the group of all ranks."""
    return torch.distributed.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Returns the global rank of a rank in a group."""
    return torch.distributed.get_global_rank(group or get_world_group(), group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Returns the global ranks of a group, by default of the group of all ranks."""
    return torch.distributed.get_process_group_ranks(group or get_world_group())


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Creates a `DeviceMesh` over all ranks. (all ranks)"""
    return device_mesh(tuple(mesh_shape), tuple(mesh_dim_names))
