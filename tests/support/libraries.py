"""Versions of Hugging Face libraries, for tests of what only newer ones have; it imports none of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def _is_of(library: str, major: str) -> bool:
    try:
        return version(library).partition(".")[0] == major
    except PackageNotFoundError:
        return False


TRANSFORMERS_4 = _is_of("transformers", "4")
NEEDS_CONVERSIONS = pytest.mark.skipif(
    TRANSFORMERS_4, reason="transformers 4 loads weights by itself; 5 converts them, with parts that zeroaccel replaces"
)
