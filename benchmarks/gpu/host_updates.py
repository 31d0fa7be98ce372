"""Steps with the optimizer in host memory on the stream model, at rates that one H100's machine had.

    python benchmarks/gpu/host_updates.py   # a table in Markdown; needs a C++ compiler

A step lasts from one call of the forward to the next, with the updates that it awaits. The host's rate is that of the
measured update: 16.23 ms for 50e6 elements, each with 28 bytes read and written (`results/gpu.md`, "lane").
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOST_RATE = 28 * 50e6 / 16.23e-3
PINNED_RATE = 54e9
"""Bytes per second."""
PLANS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "stage 2, all in `step()`": (2, {"update_during": "step"}),
    "stage 2, half in `step()`": (2, {"update_during": "step", "ratio": 0.5}),
    "stage 3, parameters on the host, all in `step()`": (3, {"update_during": "step"}),
    "stage 3, parameters on the host, all in the next forward": (3, {"update_during": "forward"}),
    "stage 3, parameters on the host, half in `step()`": (3, {"update_during": "step", "ratio": 0.5}),
    "stage 3, parameters on the host, half in the next forward": (3, {"update_during": "forward", "ratio": 0.5}),
}
"""Stage, share and time of updates on the host -> stage, and keys of `offload_optimizer`."""
_STEPS = 4


def step_ms(stage: int, keys: Mapping[str, Any], size: str) -> tuple[float, float]:
    """Returns milliseconds of a step on one rank, and the peak of device memory in GiB.

    Raises:
        RuntimeError: the model found an access that nothing orders.
    """
    from tests.cuda_model.modelled_ranks import modelled_rank  # first: it loads the library before torch

    from plans import SIZES, plan  # isort: skip
    from tests.cuda_model.configurations import Case
    from tests.cuda_model.stream_model import MAIN, Rates, StreamModel
    from tests.cuda_model.training_loops import LOOPS, Program, new_engine

    model = StreamModel(Rates(pinned=PINNED_RATE, host=HOST_RATE))
    params = {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    case = Case(plan(stage, offload_optimizer={"device": "cpu", **keys}, **params), 1, size=SIZES[size])
    begins = []
    with modelled_rank(1, model) as modelled:
        engine, tokens = new_engine(case)
        program = Program(case, model, engine, tokens)
        for _ in range(_STEPS):
            begins.append(model.moment(MAIN).seconds)
            LOOPS[case.loop](program)
        peak = model.peak_nbytes
        modelled.turns.finish()
        engine.destroy()
        modelled.turns.finish()
    shutil.rmtree(program.folder, ignore_errors=True)
    if model.findings:
        raise RuntimeError(f"stage {stage}, {keys}: {dict(model.findings)}")
    return (begins[-1] - begins[-2]) * 1e3, peak / 2**30


def main() -> None:
    """Prints the table."""
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("small", "large"), default="large")
    size = parser.parse_args().size
    print("| the host updates | ms | device memory, GiB |\n|---|---:|---:|")
    for name, (stage, keys) in PLANS.items():
        ms, peak = step_ms(stage, keys, size)
        print(f"| {name} | {ms:.0f} | {peak:.1f} |", flush=True)


if __name__ == "__main__":
    main()
