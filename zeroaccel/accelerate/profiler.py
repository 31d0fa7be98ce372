"""torch's profiler as a few settings and a context manager: what `Accelerator.profile` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroaccel.errors import UsageError

__all__ = ["ProfileKwargs", "profile"]


@dataclass
class ProfileKwargs:
    """Settings of torch.profiler.profile.

    Attributes:
        activities: "cpu", "cuda"; by default those of the device.
        schedule_option: arguments of torch.profiler.schedule: wait, warmup, active, repeat, skip_first.
        on_trace_ready: called with the profiler when a trace is complete.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: as of torch.
        output_trace_dir: folder for `profile_<rank>.json`, which Chrome and Perfetto read.
    """

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@contextmanager
def profile(settings: ProfileKwargs, rank: int, device: torch.device) -> Iterator[Any]:
    """The profiler, running.

    Raises:
        UsageError: an activity that is none, or a folder that cannot be made; before anything runs.
    """
    folder = None if settings.output_trace_dir is None else Path(settings.output_trace_dir)
    if folder is not None:
        _make(folder)
    known = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
    wanted = settings.activities or sorted({"cpu", device.type})
    for name in wanted:
        if name not in known:
            raise UsageError("ProfileKwargs(activities)", expected='"cpu" or "cuda"', got=name)
    schedule = torch.profiler.schedule(**settings.schedule_option) if settings.schedule_option else None
    with torch.profiler.profile(
        activities=[known[name] for name in wanted],
        schedule=schedule,
        on_trace_ready=settings.on_trace_ready,
        record_shapes=settings.record_shapes,
        profile_memory=settings.profile_memory,
        with_stack=settings.with_stack,
        with_flops=settings.with_flops,
        with_modules=settings.with_modules,
    ) as running:
        yield running
    if folder is not None:
        running.export_chrome_trace(str(folder / f"profile_{rank}.json"))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = "ProfileKwargs(output_trace_dir)"
        raise UsageError(where, expected="a folder that can be made", got=f"{folder} ({error.strerror})") from error
