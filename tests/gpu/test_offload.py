"""Host-resident state on a machine with a CUDA device: pinned slabs, hybrid updates, activations on the host."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.training import Toy, config, differences, train
from zeroaccel.activations import Activations
from zeroaccel.config.schema import ActivationCheckpointing
from zeroaccel.offload import page_locked
from zeroaccel.offload.device_lane import AdamLane
from zeroaccel.offload.host_buffers import aligned_bytes
from zeroaccel.ops import Adam, hybrid_update
from zeroaccel.ops.device_kernels import kernels_for
from zeroaccel.ops.hybrid_update import HybridUpdate

pytestmark = pytest.mark.gpu


def _on_device() -> Toy:
    return Toy().cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", [0.0, 0.4, None])
def test_a_device_gives_the_bits_of_the_host(ratio: float | None, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    kernels = kernels_for(device)
    assert kernels is not None, "the kernels do not compile; the log has the reason"
    numel = (1 << 22) + 777  # more than one tile
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(2, numel, generator=generator)
    results = []
    for split in (None, HybridUpdate(AdamLane(device, kernels), ratio)):
        master, out = start.clone().pin_memory(), torch.zeros(numel, dtype=dtype).pin_memory()
        optimizer = Adam([master], weight_decay=0.1)
        optimizer.hybrid = split
        for _ in range(3):
            group = optimizer.param_groups[0]
            optimizer.step_shard(group, master, gradient.to(dtype), grad_scale=0.3, out=out)
        results.append([master, *(v for v in optimizer.state[master].values() if isinstance(v, torch.Tensor)), out])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_pinned_slab_is_pinned_and_of_the_exact_size() -> None:
    nbytes = (33 << 20) + 4096
    slab = aligned_bytes(nbytes, pinned=True)
    assert slab.untyped_storage().nbytes() == nbytes
    assert slab.is_pinned()
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    slab.random_(0, 255)
    device.copy_(slab, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), slab)
    address = slab.data_ptr()
    del slab
    assert torch.cuda.cudart().cudaHostUnregister(address) != 0, "the slab was still locked"
    with contextlib.suppress(RuntimeError):  # this call reports the error of the previous one
        torch.ones(1, device="cuda")


def test_memory_that_cannot_be_locked_stays_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked, "_said", set())
    monkeypatch.setattr(page_locked, "_PORTABLE", 1 << 30)  # an invalid flag
    slab = aligned_bytes(1 << 20, pinned=True)
    assert not slab.is_pinned()
    torch.ones(8, device="cuda").sum().item()  # the error is cleared


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_share_for_the_device_changes_nothing(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_update, "_MIN_NUMEL", 64)

    def run(ratio: float | None) -> Any:
        section = {"device": "cpu", **({} if ratio is None else {"ratio": ratio})}
        return train(config(stage, "bf16", offload_optimizer=section), 6, make=_on_device)

    ratios: list[float | None] = [None, 0.5] if stage == 3 else [None]
    reference = run(1.0)
    assert np.isfinite(reference.losses).all()
    for ratio in ratios:
        assert differences(run(ratio), reference) == []


def test_activations_wait_on_the_host() -> None:
    blocks = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4)).cuda()
    results = []
    for section in (None, ActivationCheckpointing(cpu_checkpointing=True)):
        kept = Activations(section)
        torch.manual_seed(0)
        x = torch.randn(4096, 512, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = x * 1.0
        for block in blocks:
            y = kept.checkpoint(lambda value, block=block: torch.nn.functional.dropout(block(value).tanh(), 0.1), y)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        y.square().sum().backward()
        results.append((held, x.grad.clone()))
    assert torch.equal(results[0][1], results[1][1])
    assert results[1][0] <= results[0][0] - 3 * 4096 * 512 * 4, "the inputs stayed on the device"
