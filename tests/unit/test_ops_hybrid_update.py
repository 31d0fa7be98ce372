"""Hybrid updates on host and device: bits equal to a plain update at any ratio; pinned memory of the exact size."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import time_limits
from zeroaccel.errors import ConfigError
from zeroaccel.offload.host_buffers import pinned_bytes
from zeroaccel.ops import Adam, Lion, hybrid_update
from zeroaccel.ops.hybrid_update import HybridUpdate
from zeroaccel.zero.storage import placement
from zeroaccel.zero.storage.placement import share_updates

NUMEL = 5000


class Mirror:
    """Simulated device: tiles are copied, stepped by the CPU's kernel while the host updates its part, copied back."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.seen = 0
        self.waited = 0

    def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> Any:
        begun, mirror = time.perf_counter(), self
        self.seen += grad.numel()

        def tiles() -> None:
            time.sleep(mirror.pause * grad.numel())
            worker = Adam([torch.zeros(1)])
            for start in range(0, grad.numel(), 1024):
                span = slice(start, start + 1024)
                away = [tensor[span].clone() for tensor in written]
                out = [None] if len(written) == 3 else []
                worker._update_on_cpu([*away, *out], grad[span].clone(), scalars)
                for host, tensor in zip(written, away, strict=True):
                    host[span].copy_(tensor)

        thread = threading.Thread(target=tiles)
        thread.start()

        class Tiles:
            def wait(self) -> float:
                thread.join()
                mirror.waited += 1
                return time.perf_counter() - begun

        return Tiles()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_update, "_MIN_NUMEL", 1000)


def normal(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def stepped(split: HybridUpdate | None, dtype: torch.dtype, *, rounded: bool = True) -> list[Tensor]:
    """Master, moments and rounded copy after three steps."""
    master, out = normal(0), torch.zeros(NUMEL, dtype=dtype)
    optimizer = Adam([master], weight_decay=0.1)
    optimizer.hybrid = split
    for step in range(3):
        grad = normal(step + 1).to(dtype)
        group = optimizer.param_groups[0]
        optimizer.step_shard(group, master, grad, grad_scale=0.3, out=out if rounded else None)
    state = optimizer.state[master]
    return [master, state["exp_avg"], state["exp_avg_sq"], out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.997, 1.0, None])
def test_the_cut_shows_in_no_bit(ratio: float | None, dtype: torch.dtype) -> None:
    mirror = Mirror()
    for rounded in (True, False):
        shared = stepped(HybridUpdate(mirror, ratio), dtype, rounded=rounded)
        alone = stepped(None, dtype, rounded=rounded)
        assert all(torch.equal(one, other) for one, other in zip(shared, alone, strict=True))
    assert (mirror.seen > 0) == (ratio != 1.0)


def test_a_measured_share_goes_where_both_parts_take_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own, the device takes 4 seconds an element and the host 1: the host's share tends to 0.8."""
    now = 0.0
    monkeypatch.setattr(hybrid_update.time, "perf_counter", lambda: now)

    class Slow:
        def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> Any:
            return self._Done(4.0 * grad.numel())

        class _Done:
            def __init__(self, seconds: float) -> None:
                self._seconds = seconds

            def wait(self) -> float:
                return self._seconds

    def on_host(parts: Sequence[Tensor], part: Tensor) -> None:
        nonlocal now
        now += part.numel()

    split = HybridUpdate(Slow(), None)
    for _ in range(3):
        split.run([torch.zeros(NUMEL) for _ in range(3)], torch.zeros(NUMEL), [], on_host)
    assert split.host_ratio == pytest.approx(0.8, abs=0.01)


def test_small_updates_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_update, "_MIN_NUMEL", NUMEL + 1)
    mirror = Mirror()
    stepped(HybridUpdate(mirror, 0.0), torch.float32)
    assert mirror.seen == 0


def test_an_error_on_the_host_waits_for_the_device() -> None:
    mirror = Mirror(pause=1e-6)

    def fails(parts: Sequence[Tensor], part: Tensor) -> None:
        raise ValueError("here")

    scalars = [np.float32(1), np.uint32(0), *[np.float32(0.5)] * 8]
    with pytest.raises(ValueError, match="here"):
        HybridUpdate(mirror, 0.5).run([torch.zeros(NUMEL) for _ in range(3)], torch.zeros(NUMEL), scalars, fails)
    assert mirror.waited == 1


def test_an_optimizer_that_shares_can_be_copied() -> None:
    optimizer = Adam([torch.zeros(1)])
    optimizer.hybrid = HybridUpdate(Mirror(), 0.5)
    assert copy.deepcopy(optimizer.hybrid) is optimizer.hybrid


@pytest.mark.parametrize("ratio", [0.5, 0.0])
def test_a_share_that_cannot_be_had_is_refused(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cupy_is_installed", lambda: False)
    cuda = torch.device("cuda")
    for optimizer, needed in (
        (Adam([torch.zeros(1)]), "CuPy"),
        (Adam([torch.zeros(1)], moments_dtype="bf16"), "Adam or AdamW with fp32 moments"),
        (Lion([torch.zeros(1)]), "Adam or AdamW with fp32 moments"),
    ):
        with pytest.raises(ConfigError, match=f"offload_optimizer.ratio: expected 1.0, got {ratio}; .* needs {needed}"):
            share_updates(optimizer, ratio, cuda, "zero_optimization.offload_optimizer")
        for fine in (None, 1.0):
            share_updates(optimizer, fine, cuda, "zero_optimization.offload_optimizer")
        share_updates(optimizer, ratio, torch.device("cpu"), "zero_optimization.offload_optimizer")
        assert getattr(optimizer, "split", None) is None


class Pool:
    """CuPy's pool, as far as it is used: what it hands out knows when it is given back."""

    class Memory(bytearray):
        pass

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.memory: weakref.ref[Any] | None = None

    def malloc(self, size: int) -> Any:
        self.asked.append(size)
        held = Pool.Memory(b"\xff" * (size + 512))
        self.memory = weakref.ref(held)
        return held


def test_a_pinned_slab_is_the_pools_memory_and_no_more() -> None:
    pool = Pool()
    slab = pinned_bytes(3000, pool)
    assert pool.asked == [3000]
    assert slab.shape == (3000,)
    assert not slab.any()
    assert pool.memory is not None
    slab.view(torch.float32)[0] = 1.5
    assert bytes(pool.memory()[:4]) == np.float32(1.5).tobytes()  # type: ignore[index]
    part = slab[100:200]
    del slab
    gc.collect()
    assert pool.memory() is not None, "a view is left"
    del part
    gc.collect()
    assert pool.memory() is None


def test_nothing_imports_cupy_on_a_machine_without_cuda() -> None:
    program = (
        "import sys, torch, zeroaccel\n"
        "import zeroaccel.offload.host_buffers, zeroaccel.offload.cupy_adam\n"
        "model = torch.nn.Linear(4, 4)\n"
        "offload = {'stage': 2, 'offload_optimizer': {'device': 'cpu', 'pin_memory': True}}\n"
        "settings = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': offload,\n"
        "    'optimizer': {'type': 'AdamW', 'params': {}}}\n"
        "engine, *_ = zeroaccel.initialize(model, config=settings)\n"
        "engine.backward(engine(torch.ones(1, 4)).sum()); engine.step(); engine.destroy()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'cupy']\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=time_limits.seconds(100)
    )
    assert result.returncode == 0, result.stderr
