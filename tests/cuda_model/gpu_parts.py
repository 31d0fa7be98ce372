"""Runs the parts of `benchmarks/gpu` on the model: it checks constructors and calls, but not the measured values.

For parts that start programs, it runs these programs' functions here. Queries of a device have stand-ins.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.cuda_model.modelled_ranks import modelled_rank  # first: it loads the library before torch

import torch  # isort: skip

from tests.cuda_model.fake_cupy import FakeCupy
from tests.cuda_model.network_size import Size
from tests.cuda_model.replacements import Replacements
from tests.cuda_model.stream_model import StreamModel

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_PLANS = ("stage 2", "stage 3", "stage 2, optimizer on host", "stage 3, both on host")  # models that parts name
_EXACT = ("stage 0", "stage 3, both on host")
_SIZE = Size(layers=2, tokens=32)


def run_part(name: str, report: Callable[[Any], object] = lambda figure: None) -> dict[str, Any]:
    """Returns the figures of a part, by name; the findings of the model; the error that it raised, if any; how many
    tensors the host filled with random numbers; and how many copies from the device it cast.

    Args:
        report: gets each figure at once.
    """
    sys.path[:0] = [str(BENCHMARKS / "gpu"), str(BENCHMARKS)]
    import campaign  # type: ignore[import-not-found]
    import contenders_on_gpu  # type: ignore[import-not-found]
    import experts_on_two_ranks  # type: ignore[import-not-found]
    import largest_model  # type: ignore[import-not-found]
    import parts  # type: ignore[import-not-found]
    import plans  # type: ignore[import-not-found]
    import two_ranks  # type: ignore[import-not-found]

    figures: dict[str, float | None] = {}
    error, model, replacements = "", StreamModel(), Replacements()
    draws: Counter[str] = Counter()
    casts: Counter[str] = Counter()

    def add(figure: Any) -> None:
        figures[figure.name] = figure.value
        report(figure)

    run = parts.Run("small", 60.0, add, {})
    try:
        with modelled_rank(2 if name in ("ranks", "two_ranks_more") else 1, model) as modelled:
            on_host, copy_across = modelled.cuda.on_host, modelled.cuda.copy_across

            def noted(what: str, *tensors: Any) -> None:
                draws[what] += what in ("normal_", "uniform_")
                on_host(what, *tensors)

            def copied(target: Any, source: Any, *, non_blocking: bool) -> None:
                casts.update(["cast"] * (target.device.type == "cpu" and target.dtype is not source.dtype))
                copy_across(target, source, non_blocking=non_blocking)

            replacements.set(modelled.cuda, "on_host", noted)
            replacements.set(modelled.cuda, "copy_across", copied)
            replacements.set(plans, "SIZES", {"small": _SIZE})
            for module in (parts, campaign, sys.modules["workloads"]):
                replacements.set(module, "SIZES", {"small": _SIZE})
                replacements.set(module, "PLANS", {key: plans.PLANS[key] for key in _PLANS})
            replacements.set(two_ranks, "SIZE", _SIZE)
            replacements.set(two_ranks, "STEPS", 1)
            replacements.set(two_ranks, "EXACT", {key: two_ranks.EXACT[key] for key in _EXACT})
            replacements.set(torch.version, "cuda", "12.9")
            sys.modules["cupy"] = FakeCupy()  # type: ignore[assignment]
            for attribute, value in _queries().items():
                replacements.set(torch.cuda, attribute, value)
            replacements.set(
                torch.profiler, "profile", lambda **_: contextlib.nullcontext(SimpleNamespace(events=list))
            )
            for attribute in ("torch_step", "fsdp2_step"):  # `tests/unit/house/test_gpu_plan.py` runs them
                replacements.set(contenders_on_gpu, attribute, lambda *_, **__: lambda: None)
            for module in (contenders_on_gpu, sys.modules["workloads"]):
                replacements.set(module, "compile_blocks", lambda network: None)
            if name == "ranks":
                two_ranks.results(two_ranks.ROUNDED["stage 3, quantized weights"])
            elif name == "two_ranks_more":
                experts_on_two_ranks.gathers_in_e4m3()
            else:
                replacements.set(largest_model, "MODELS", _smallest(largest_model.MODELS))
                for module in (parts, campaign):
                    replacements.set(module, "milliseconds", _once)
                    replacements.set(module, "device_milliseconds", _once)
                replacements.set(parts, "_seconds_from_cache", lambda: 0.0)  # in a process without the stand-in
                replacements.set(campaign, "_locking_seconds", lambda nbytes, prefaulted: (0.0, 0.0))
                {**parts.PARTS, **campaign.STAGES}[name](run)
    except Exception:
        error = traceback.format_exc()
    finally:
        replacements.undo()
        sys.modules.pop("cupy", None)
        del sys.path[:2]
    counts = {"host_draws": draws.total(), "host_casts": casts.total()}
    return {"figures": figures, "findings": dict(model.findings), "error": error, **counts}


def _once(call: Any, count: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    return 1.0


def _smallest(models: dict[str, Any]) -> dict[str, Any]:
    shape = {"hidden": 64, "layers": 2, "heads": 4, "vocabulary": 512, "sequence": 32, "batch": 1}
    return {name: replace(model, shape=replace(model.shape, **shape)) for name, model in models.items()}


def _queries() -> dict[str, Any]:
    """Returns device queries that the model lacks."""
    return {
        "get_device_capability": lambda device=None: (8, 0),
        "nccl": SimpleNamespace(version=lambda: (2, 28, 0)),
        "memory_stats": lambda device=None: defaultdict(int),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_sync_debug_mode": lambda mode: None,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
    }
