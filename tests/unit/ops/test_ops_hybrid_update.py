"""Hybrid updates on host and device: bits equal to a plain update at any ratio, and the measured ratio."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.ops.kernels_on_host import host_kernels
from zeroaccel.errors import ConfigError
from zeroaccel.offload import device_lane
from zeroaccel.offload.device_lane import AdamLane
from zeroaccel.ops import Adam, Lion, hybrid_update
from zeroaccel.ops.hybrid_update import HybridUpdate
from zeroaccel.zero.storage import placement
from zeroaccel.zero.storage.placement import share_updates

NUMEL = 5000


class Mirror:
    """A simulated device: copies tiles, steps them by the CPU's kernel while the host works, and copies them back."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.seen = 0
        self.waited = 0

    def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> Callable[[], float]:
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

        def wait() -> float:
            thread.join()
            mirror.waited += 1
            return time.perf_counter() - begun

        return wait


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_update, "_MIN_NUMEL", 1000)


def normal(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def stepped(split: HybridUpdate | None, dtype: torch.dtype, *, rounded: bool = True) -> list[Tensor]:
    """Returns master, moments and rounded copy after three steps."""
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
def test_no_bit_depends_on_the_cut(ratio: float | None, dtype: torch.dtype) -> None:
    mirror = Mirror()
    for rounded in (True, False):
        shared = stepped(HybridUpdate(mirror, ratio), dtype, rounded=rounded)
        alone = stepped(None, dtype, rounded=rounded)
        assert all(torch.equal(one, other) for one, other in zip(shared, alone, strict=True))
    assert (mirror.seen > 0) == (ratio != 1.0)


def test_a_measured_share_goes_where_both_parts_take_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device takes 4 seconds per element and the host 1, on a simulated clock: the host's share tends to 0.8."""
    now = 0.0
    monkeypatch.setattr(hybrid_update.time, "perf_counter", lambda: now)

    class Slow:
        def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> Callable[[], float]:
            return lambda: 4.0 * grad.numel()

    def on_host(parts: Sequence[Tensor], part: Tensor) -> None:
        nonlocal now
        now += part.numel()

    split = HybridUpdate(Slow(), None)
    for _ in range(3):
        split.run([torch.zeros(NUMEL) for _ in range(3)], torch.zeros(NUMEL), [], on_host)
    assert split.host_ratio == pytest.approx(0.8, abs=0.01)


class Clock:
    """The time of a simulated machine, which the host's work and waits advance."""

    def __init__(self) -> None:
        self.now = 0.0


class TimedEvent:
    """A stand-in for torch.cuda.Event; its stream has reached the time `now`, in seconds."""

    clock: Clock

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def record(self, stream: Any) -> None:
        self.at = stream.now = max(stream.now, self.clock.now)

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, end: TimedEvent) -> float:
        assert self.timed
        assert end.timed
        assert end.at <= self.clock.now, "the event was read before it passed"
        return (end.at - self.at) * 1e3


class TimedStream:
    """A stream of the device; `now` is the time in seconds at which its work ends."""

    def __init__(self, device: object = None) -> None:
        self.now = 0.0

    def wait_stream(self, other: TimedStream) -> None:
        self.now = max(self.now, other.now)


def test_a_device_ten_times_as_fast_gets_ten_elevenths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's part ends long before the host waits, so its rate comes from the device's events."""
    clock = TimedEvent.clock = Clock()
    monkeypatch.setattr(hybrid_update.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch.cpu, "Event", TimedEvent)
    lane: Any = object.__new__(AdamLane)
    lane._module = torch.cpu
    lane._streams = [TimedStream() for _ in range(2)]
    monkeypatch.setattr(torch.cpu, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(device_lane, "_TILE_NUMEL", 1 << 10)

    def tile(written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic], stream: Any) -> None:
        stream.now = max(stream.now, clock.now) + grad.numel() * 2e-8  # per stream; there are two

    lane._tile = tile

    def on_host(parts: Sequence[Tensor], part: Tensor) -> None:
        clock.now += part.numel() * 1e-7

    split, x = HybridUpdate(lane, None), torch.zeros(1 << 20)
    for _ in range(30):
        split.run([x], x, [], on_host)
    assert split.host_ratio == pytest.approx(1 / 11, abs=0.01)


@pytest.mark.parametrize(("shared", "ratio"), [(0.9, 0.5), (1.0, 1.0), (1.1, 1.0)])
def test_the_host_goes_on_alone_where_sharing_saves_nothing(
    shared: float, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take equal times for half the elements; `shared` is the time of both together, bound by memory."""
    now, started = 0.0, False
    monkeypatch.setattr(hybrid_update.time, "perf_counter", lambda: now)

    class Lane:
        def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> Callable[[], float]:
            nonlocal started
            started = True
            return lambda: shared

    def on_host(parts: Sequence[Tensor], part: Tensor) -> None:
        nonlocal now
        now += shared if started else 1.0

    split, x = HybridUpdate(Lane(), None), torch.zeros(NUMEL)
    splits = []
    for _ in range(2 * hybrid_update._TRIAL_UPDATES):
        started = False
        split.run([x], x, [], on_host)
        splits.append(started)
    assert splits[:4] == [True, False, True, False]
    assert splits[-1] == (ratio < 1)
    assert split.host_ratio == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lane_has_the_bits_of_the_host(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane uses the device's kernel, compiled for the host, in tiles."""
    TimedEvent.clock = Clock()
    monkeypatch.setattr(torch.cpu, "Event", TimedEvent)
    monkeypatch.setattr(torch.cpu, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cpu, "Stream", TimedStream)
    monkeypatch.setattr(device_lane, "_TILE_NUMEL", 1 << 10)
    lane = AdamLane(torch.device("cpu"), host_kernels())
    for rounded in (True, False):
        shared = stepped(HybridUpdate(lane, 0.3), dtype, rounded=rounded)
        alone = stepped(None, dtype, rounded=rounded)
        assert all(torch.equal(one, other) for one, other in zip(shared, alone, strict=True))


def test_kernels_make_a_share_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "kernels_for", lambda device: host_kernels())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    for ratio in (0.5, None):
        optimizer = Adam([torch.zeros(1)])
        share_updates(optimizer, ratio, torch.device("cuda"), "zero_optimization.offload_optimizer")
        assert optimizer.hybrid is not None
        assert optimizer.hybrid.host_ratio == 0.5


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


def test_a_hybrid_optimizer_can_be_copied() -> None:
    optimizer = Adam([torch.zeros(1)])
    optimizer.hybrid = HybridUpdate(Mirror(), 0.5)
    assert copy.deepcopy(optimizer.hybrid) is optimizer.hybrid


@pytest.mark.parametrize("ratio", [0.5, 0.0])
def test_a_share_that_cannot_be_had_is_refused(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "kernels_for", lambda device: None)
    cuda = torch.device("cuda")
    refused = f"offload_optimizer.ratio: expected 1.0, got {ratio}; a ratio below 1 requires "
    for optimizer, needed in (
        (Adam([torch.zeros(1)]), "kernels on cuda, which could not be compiled (see the log)"),
        (Adam([torch.zeros(1)], moments_dtype="bf16"), "Adam or AdamW with fp32 moments"),
        (Lion([torch.zeros(1)]), "Adam or AdamW with fp32 moments"),
    ):
        with pytest.raises(ConfigError, match=f"{re.escape(refused)}{re.escape(needed)}"):
            share_updates(optimizer, ratio, cuda, "zero_optimization.offload_optimizer")
        for fine in (None, 1.0):
            share_updates(optimizer, fine, cuda, "zero_optimization.offload_optimizer")
        share_updates(optimizer, ratio, torch.device("cpu"), "zero_optimization.offload_optimizer")
        assert getattr(optimizer, "hybrid", None) is None
