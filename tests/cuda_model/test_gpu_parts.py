"""The parts of `make gpu` on the stream model: the names that they use exist, and accept these arguments.

Not run here: `tests` and `sanitizer`, which start test suites, `meshes`, which compares values, and `side_by_side`,
whose programs of torch `tests/unit/house/test_gpu_plan.py` runs, and the stage `facts`, which it rehearses. Parts
measure memory that nothing wrote.
"""

from __future__ import annotations

import os

import pytest

from tests.cuda_model.conftest import ModelProcess

_FIGURES = {
    "machine": "copy on the device",
    "start": "third step",
    "promise": "SGD with momentum, stage 3, both on host",
    "kernels": "dequantize_add int4",
    "ranks": "",
    "largest": "13B, residual masters, bf16 moments, batch 4",
    "waits": "waits of the host, stage 3, both on host",
    "memory": "peak, stage 3, both on host",
    "overlap": "copies, stage 3, both on host",
    "host_update": f"residuals of masters, {len(os.sched_getaffinity(0))} threads",
    "host_training": "update, half of the optimizer on host",
    "seven_billion": "7B, float32 states, batch 4",
    "contenders": "FSDP2, compiled, median of the turns",
    "largest_int8": "13B, residual masters, int8 moments, batch 4",
    "more_kernels": "mark changed weights",
    "two_ranks_more": "",
    "files_and_states": "states back, turn 2",
}
_SLOW = {"promise", "waits", "memory", "overlap", "largest", "host_update", "host_training", "seven_billion"}
_SLOW |= {"contenders", "two_ranks_more", "files_and_states", "kernels"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in _FIGURES]
)
def test_a_part_runs_on_the_model(name: str, model_process: ModelProcess) -> None:
    outcome = model_process.part(name)
    assert not outcome.error
    assert not _FIGURES[name] or _FIGURES[name] in outcome.figures
    # Of the weights of 13B the host would draw one at a time for two minutes.
    assert not outcome.host_draws or name == "host_update"
    # Nor cast copies of them: that takes page by page of new memory.
    assert name != "largest_int8" or not outcome.host_casts
    assert all("READ BEFORE ANY WRITE" in finding for finding in outcome.findings), outcome.findings
