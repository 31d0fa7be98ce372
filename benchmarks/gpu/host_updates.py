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
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from tests.cuda_model.modelled_ranks import modelled_rank  # first: it loads the library before torch

from plans import SIZES, plan  # isort: skip
from tests.cuda_model.configurations import Case
from tests.cuda_model.stream_model import MAIN, Rates, StreamModel
from tests.cuda_model.training_loops import LOOPS, Program, new_engine

MEASURED = Rates(pinned=54e9, host=28 * 50e6 / 16.23e-3)
PLANS: Mapping[str, Mapping[str, Any]] = {
    "all in `step()`": {"update_during": "step"},
    "all, in the next forward": {"update_during": "forward"},
    "half in `step()`": {"update_during": "step", "ratio": 0.5},
    "half, in the next forward": {"update_during": "forward", "ratio": 0.5},
}
"""What the host updates, and when -> keys of `offload_optimizer`."""
_STEPS = 4


def step_ms(keys: Mapping[str, Any], size: str) -> tuple[float, float]:
    """Returns milliseconds of a step at stage 2 on one rank, and the peak of device memory in GiB.

    Raises:
        RuntimeError: the model found an access that nothing orders.
    """
    model = StreamModel(MEASURED)
    case = Case(plan(2, offload_optimizer={"device": "cpu", **keys}), 1, size=SIZES[size])
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
        raise RuntimeError(f"{keys}: {dict(model.findings)}")
    return (begins[-1] - begins[-2]) * 1e3, peak / 2**30


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="large")
    size = parser.parse_args().size
    print("| the host updates | ms | device memory, GiB |\n|---|---:|---:|")
    for name, keys in PLANS.items():
        ms, peak = step_ms(keys, size)
        print(f"| {name} | {ms:.0f} | {peak:.1f} |", flush=True)


if __name__ == "__main__":
    main()
