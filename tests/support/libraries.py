"""Marks of tests that need a newer library than the oldest supported; this module imports no library."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def _is_release(library: str, numbers: str) -> bool:
    try:
        return version(library).startswith(f"{numbers}.")
    except PackageNotFoundError:
        return False


TRANSFORMERS_4 = _is_release("transformers", "4")
TRL_1_0 = _is_release("trl", "1.0")
NEEDS_CONVERSIONS = pytest.mark.skipif(
    TRANSFORMERS_4, reason="transformers 4 loads weights by itself; 5 converts them, with parts that zeroaccel replaces"
)
NEEDS_EXPERTS = pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 has no choice of experts' implementations")
