"""The parts of `make gpu` on the stream model: the names that they use exist, and accept these arguments.

Not run here: `tests` and `sanitizer`, which start test suites, `meshes`, which compares values, and `side_by_side`,
whose programs of torch `tests/unit/house/test_gpu_plan.py` runs. Parts measure memory that nothing wrote.
"""

from __future__ import annotations

import pytest

from tests.cuda_model.conftest import ModelProcess

_FIGURES = {
    "machine": "copy on the device",
    "start": "third step",
    "promise": "SGD with momentum, stage 3, both on host",
    "kernels": "dequantize_add int4",
    "lane": "update, pageable, ratio measured",
    "ranks": "",
    "largest": "",
    "waits": "waits of the host, stage 3, both on host",
    "memory": "peak, stage 3, both on host",
    "overlap": "copies, stage 3, both on host",
}
_SLOW = {"promise", "waits", "memory", "overlap", "largest"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in _FIGURES]
)
def test_a_part_runs_on_the_model(name: str, model_process: ModelProcess) -> None:
    outcome = model_process.part(name)
    assert not outcome.error
    assert not _FIGURES[name] or _FIGURES[name] in outcome.figures
    assert all("READ BEFORE ANY WRITE" in finding for finding in outcome.findings), outcome.findings
