"""Host-resident state on a machine with a CUDA device: pinned slabs, activations on the host."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.support.training import Toy
from zeroaccel.activations import Activations
from zeroaccel.config.schema import ActivationCheckpointing
from zeroaccel.offload import page_locked
from zeroaccel.offload.host_buffers import aligned_bytes

pytestmark = pytest.mark.gpu


def _on_device() -> Toy:
    return Toy().cuda()


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
    page_locked.unlock_dropped(wait=True)  # an event that was recorded now may not be complete yet
    assert torch.cuda.cudart().cudaHostUnregister(address) != 0, "the slab was still locked"
    with contextlib.suppress(RuntimeError):  # this call reports the error of the previous one
        torch.ones(1, device="cuda")


def test_memory_that_cannot_be_locked_stays_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked, "_said", set())
    monkeypatch.setattr(page_locked, "_PORTABLE", 1 << 30)  # an invalid flag
    slab = aligned_bytes(1 << 20, pinned=True)
    assert not slab.is_pinned()
    torch.ones(8, device="cuda").sum().item()  # the error is cleared


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
