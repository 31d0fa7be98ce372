"""pytest plugin: replaces the accelerators that tests of accelerate and transformers require by CPUs.

When their modules are imported, those tests query the machine through decorators of the libraries' testing modules. The
plugin replaces the decorators first, so that a test that needs one or two accelerators runs on gloo ranks of this
machine. CUDA's own parts (device indices, NCCL, memory counters) are not replaced; tests that need them fail.
"""

from __future__ import annotations

from typing import Any

RANKS = 2


def pytest_configure(config: Any) -> None:
    """Replaces the decorators before any test module is imported."""
    import accelerate.test_utils.testing as of_accelerate
    import transformers.testing_utils as of_transformers

    of_accelerate.device_count = RANKS
    of_accelerate.require_non_cpu = _as_it_is
    of_transformers.require_torch_accelerator = _as_it_is
    of_transformers.require_torch_non_multi_accelerator = _as_it_is
    of_transformers.BACKEND_DEVICE_COUNT["cpu"] = lambda: RANKS


def _as_it_is(test_case: Any) -> Any:
    return test_case
