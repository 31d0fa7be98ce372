"""The step of plain torch, of FSDP2 and of DeepSpeed on one GPU with the same model, batch and settings as ours.

Without a GPU they are constructed, and step, on the CPU, which is how a test runs them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cuda_model.gated_network import GatedNetwork
from tests.cuda_model.network_size import Size

Step = Callable[[], object]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _network(size: Size) -> tuple[GatedNetwork, Tensor]:
    torch.manual_seed(0)
    with torch.device(_device()):
        return GatedNetwork(size), torch.randint(size.vocabulary, (1, size.tokens))


def torch_step(size: Size) -> Step:
    """Everything in bf16, without fp32 masters: less memory traffic than any of the others."""
    network, tokens = _network(size)
    model = network.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> None:
        model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2_step(size: Size) -> Step:
    """Blocks are sharded by `fully_shard`, in bf16 with fp32 masters and reductions in bf16, as ours are."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if _device() == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    network, tokens = _network(size)
    mesh = init_device_mesh(_device(), (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*network.layers, network):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> None:
        network(tokens).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_step(size: Size, config: dict[str, Any]) -> Step:
    """Raises ImportError where DeepSpeed is not installed."""
    import os

    # Without these it looks for ranks by MPI, where mpi4py is installed.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    import deepspeed

    network, tokens = _network(size)
    engine, *_ = deepspeed.initialize(model=network, config=copy.deepcopy(config))

    def step() -> None:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()

    return step
