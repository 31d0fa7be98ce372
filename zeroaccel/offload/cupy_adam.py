"""The CUDA lane of the hybrid step: Adam on host-resident state, in tiles, by a CuPy kernel on two streams.

The kernel is `updates.adam` operation by operation, each rounded once, so its bits are those of the CPU's. CuPy runs it
on torch's own streams (as external ones), so copies and kernel of a tile follow each other without events, and the
tiles of one stream overlap those of the other. CuPy is imported when a lane is made, and only then.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TILE_NUMEL = 1 << 22  # elements: 16 MiB per float32 tensor
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADS = 256

# Every operation by an intrinsic that rounds to nearest: a compiler may not contract those into FMAs.
_SOURCE = r"""
__device__ float number(const void* from, long long i, int kind) {
    if (kind == 0) return ((const float*)from)[i];
    if (kind == 1) return __uint_as_float((unsigned int)((const unsigned short*)from)[i] << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(((const unsigned short*)from)[i]));
    return value;
}

__device__ void rounded(void* to, long long i, int kind, float value) {
    if (kind == 0) {
        ((float*)to)[i] = value;
    } else if (kind == 1) {
        unsigned int bits = __float_as_uint(value);
        bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        ((unsigned short*)to)[i] = nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    } else {
        unsigned short half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
        ((unsigned short*)to)[i] = half;
    }
}

extern "C" __global__ void adam(
    float* master, float* exp_avg, float* exp_avg_sq, const void* grad, void* out, int grad_kind, int out_kind,
    long long numel, float grad_scale, float decay, float l2, float weight1, float beta2, float weight2,
    float inverse_root, float eps, float negative_step)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numel) return;
    float x = master[i], m = exp_avg[i], v = exp_avg_sq[i];
    float d = __fadd_rn(__fmul_rn(number(grad, i, grad_kind), grad_scale), __fmul_rn(l2, x));
    m = __fadd_rn(m, __fmul_rn(weight1, __fsub_rn(d, m)));
    v = __fadd_rn(__fmul_rn(v, beta2), __fmul_rn(__fmul_rn(weight2, d), d));
    float below = __fadd_rn(__fmul_rn(__fsqrt_rn(v), inverse_root), eps);
    x = __fadd_rn(__fmul_rn(x, decay), __fdiv_rn(__fmul_rn(negative_step, m), below));
    master[i] = x;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (out != nullptr) rounded(out, i, out_kind, x);
}
"""


def cupy_is_installed() -> bool:
    """Whether the `cuda` extra is installed; imports nothing."""
    return importlib.util.find_spec("cupy") is not None


class CupyAdamLane:
    """See `hybrid_update.DeviceLane`. For Adam with float32 moments.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        import cupy

        self._cupy: Any = cupy
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._kernel = cupy.RawKernel(_SOURCE, "adam", options=("--fmad=false",))

    def start(self, written: Sequence[Tensor], grad: Tensor, scalars: Sequence[np.generic]) -> _Tiles:
        """Queues all tiles, without blocking the host."""
        start_time, floats = time.perf_counter(), [value for value in scalars if isinstance(value, np.float32)]
        # Tiles alternate between two streams, so that the copies of one overlap with the kernel of the other.
        events = []
        for index, start in enumerate(range(0, grad.numel(), _TILE_NUMEL)):
            span = slice(start, min(start + _TILE_NUMEL, grad.numel()))
            with torch.cuda.stream(self._streams[index % 2]):
                self._tile([tensor[span] for tensor in written], grad[span], floats, self._streams[index % 2])
        for stream in self._streams:
            event = torch.cuda.Event(enable_timing=False)
            event.record(stream)
            events.append(event)
        return _Tiles(events, start_time)

    def _tile(
        self, written: Sequence[Tensor], grad: Tensor, floats: Sequence[np.float32], stream: torch.cuda.Stream
    ) -> None:
        # Copies in, kernel and copies out follow each other in the order of the stream, without events. The
        # allocator reuses a tile's memory for the next one of its stream: the device holds a few tiles at a time.
        states = [tensor.to(self._device, non_blocking=True) for tensor in written[:3]]
        source = grad.to(self._device, non_blocking=True)
        out = torch.empty_like(written[3], device=self._device) if len(written) > 3 else None
        arguments = (
            *(tensor.data_ptr() for tensor in (*states, source)),
            0 if out is None else out.data_ptr(),
            np.int32(_KINDS[source.dtype]),
            np.int32(0 if out is None else _KINDS[out.dtype]),
            np.int64(source.numel()),
            *floats,
        )
        # CuPy launches on torch's stream, so the kernel runs between the copies without an event.
        with self._cupy.cuda.ExternalStream(stream.cuda_stream, self._device.index or 0):
            self._kernel((-(-source.numel() // _THREADS),), (_THREADS,), arguments)
        # Back into the host's own tensors; the events of `start` tell when all of it is there.
        for host, tensor in zip(written, [*states, *([] if out is None else [out])], strict=True):
            host.copy_(tensor, non_blocking=True)


class _Tiles:
    """Tiles in flight; a `PendingUpdate`."""

    def __init__(self, events: Sequence[torch.cuda.Event], start_time: float) -> None:
        self._events = events
        self._start_time = start_time

    def wait(self) -> float:
        """Seconds from the start to the end of the last tile, as the host sees it."""
        for event in self._events:
            event.synchronize()
        return time.perf_counter() - self._start_time
