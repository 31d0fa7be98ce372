"""Steps of plain torch, FSDP2 and DeepSpeed on one GPU, with the same model, batch and settings as zeroaccel.

Without a GPU they run on the CPU, which a test uses.
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


def compile_blocks(network: GatedNetwork) -> None:
    """Compiles the forward of each block by inductor: the hooks of an engine stay outside, for every contender."""
    for layer in network.layers:
        layer.forward = torch.compile(layer.forward)


def torch_step(size: Size, *, compiles: bool = False) -> Step:
    """Returns a step in bf16 without fp32 masters, which needs less memory traffic than the others."""
    network, tokens = _network(size)
    model = network.bfloat16()
    if compiles:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> None:
        model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2_step(size: Size, *, compiles: bool = False) -> Step:
    """Returns a step with `fully_shard` per block: bf16 with fp32 masters and reductions in bf16, like zeroaccel."""
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
    if compiles:
        compile_blocks(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> None:
        network(tokens).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_step(size: Size, config: dict[str, Any], *, compiles: bool = False) -> Step:
    """Returns a step of DeepSpeed. Raises ImportError if DeepSpeed is not installed."""
    import os

    # Without these variables it looks for ranks by MPI if mpi4py is installed.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    import deepspeed

    network, tokens = _network(size)
    engine, *_ = deepspeed.initialize(model=network, config=copy.deepcopy(config))
    if compiles:
        compile_blocks(network)

    def step() -> None:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()

    return step
