"""pytest plugin: CPUs stand in for the accelerators that tests of accelerate and transformers ask for.

Those tests look at the machine when their modules are imported, by decorators of the libraries' testing modules; these
are set before, so that a test that needs some accelerator, or two, runs on gloo ranks of this machine. What is CUDA's
own (device indices, NCCL, its memory counters) stays what it is, and shows in the tests that ask for it.
"""

from __future__ import annotations

from typing import Any

RANKS = 2


def pytest_configure(config: Any) -> None:
    """Before any test module is imported."""
    import accelerate.test_utils.testing as of_accelerate
    import transformers.testing_utils as of_transformers

    of_accelerate.device_count = RANKS
    of_accelerate.require_non_cpu = _as_it_is
    of_transformers.require_torch_accelerator = _as_it_is
    of_transformers.require_torch_non_multi_accelerator = _as_it_is
    of_transformers.BACKEND_DEVICE_COUNT["cpu"] = lambda: RANKS


def _as_it_is(test_case: Any) -> Any:
    return test_case
