"""The calls on the way from `engine.step()` to a kernel, and from a module's hook to a collective, one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import zeroaccel
from tests.support.pool import Ranks

_PACKAGE = Path(zeroaccel.__file__).parent


def _calls(run: Callable[[], object], first: str, last: str) -> list[str]:
    """Returns "file:function" of the calls in progress when `first` has called `last`, the first time.

    Only calls of the package count, from `first` to `last`. A kernel is that of the update.
    """
    found: list[list[str]] = []

    def name(frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        return f"{path.relative_to(_PACKAGE)}:{frame.f_code.co_name}" if path.is_relative_to(_PACKAGE) else None

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        is_last = event == "call" and name(frame) == last
        if found or not is_last or frame.f_locals.get("kernel", "update") != "update":
            return
        calls: list[str] = []
        caller: FrameType | None = frame
        while caller is not None:
            if (place := name(caller)) is not None:
                calls.insert(0, place)
                if place == first:
                    found.append(calls)
                    return
            caller = caller.f_back

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found[0]


def _both_lists() -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine, *_ = zeroaccel.initialize(model, config=config)
    batch = torch.ones(2, 8).bfloat16()
    to_gather = _calls(lambda: engine(batch), "zero/hooks.py:before", "comm/collectives.py:all_gather")
    engine.reset()
    engine.backward(engine(batch).float().square().mean())
    to_kernel = _calls(engine.step, "engine.py:step", "ops/dispatch.py:launch")
    engine.destroy()
    return to_gather, to_kernel


def _files(calls: list[str]) -> int:
    return len({call.partition(":")[0] for call in calls})


def test_the_ways_to_a_kernel_and_to_a_collective_are_short(ranks: Ranks) -> None:
    to_gather, to_kernel = ranks(2).run(_both_lists)[0]
    print("\n".join(["to the collective:", *to_gather, "to the kernel:", *to_kernel]))
    assert (len(to_kernel), _files(to_kernel)) == (7, 4), to_kernel
    assert (len(to_gather), _files(to_gather)) == (6, 4), to_gather
    names = [call.partition(":")[2] for call in to_kernel]
    assert len(set(names)) == len(names), names
