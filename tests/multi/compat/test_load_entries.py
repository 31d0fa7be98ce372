"""`from_pretrained` at stage 3 by its entry points and arguments: values of one process on all ranks, or an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.job import FACADE, run_job
from tests.support.libraries import NEEDS_CONVERSIONS

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = NEEDS_CONVERSIONS
REFUSED = {
    "other sizes": "You set `ignore_mismatched_sizes` to `False`",
    "device_map": "DeepSpeed Zero-3 is not compatible with passing a `device_map`",
    "unknown method, int8": "FOLDER has weights in 8 bits: model.layers.0.mlp.down_proj.weight: I8",
    "modelopt FP8": "FOLDER has weights in 8 bits: model.layers.0.mlp.down_proj.weight: F8_E4M3",
    "modelopt NVFP4": "FOLDER has weights in 8 bits: model.layers.0.mlp.down_proj.weight: U8",
}


def test_values_are_those_of_one_process(tmp_path: Path) -> None:
    result = run_job(2, "tests/multi/compat/load_entries.py", [tmp_path], timeout=150, imports=FACADE)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    rows = {row["name"]: row for row in lines}
    assert len(rows) == 21
    for name, row in rows.items():
        if name in REFUSED:
            assert all(REFUSED[name] in error for error in row["errors"]), row
        else:
            assert (row["plain"], row["errors"]) == ("", ["", ""]), row
            assert (row["differs"], row["record"], row["unequal"]) == ([], [], []), row
