"""Bytes on each tier against the formulas, and a run whose states are four times its memory limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zeroaccel
from tests import time_limits
from tests.multi.zero.test_engine_traffic import Trained
from tests.support.environment import ROOT
from tests.support.pool import Ranks
from tests.support.training import SGD, batches, config, offloaded, train_step

States = dict[str, int]


def _states(settings: dict[str, Any]) -> tuple[int, States, States]:
    """Returns (N, bytes in memory, bytes in tiers) after two steps."""
    engine, *_ = zeroaccel.initialize(Trained(), config=settings)
    for batch in batches(engine.collectives.rank, 2):
        train_step(engine, engine(batch))
    engine.finish_update()  # a thread may still have a part of the states in memory
    found = sum(unit.numel for unit in engine.units), engine.model_state_nbytes(), engine.tier_nbytes()
    engine.destroy()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("precision", "own"), [("bf16", 2), ("fp32", 4)])
def test_bytes_per_parameter_on_each_tier(
    ranks: Ranks, tmp_path: Path, world_size: int, precision: str, own: int
) -> None:
    cases = [
        (stage, states, params, name)
        for stage, states, params in ((1, "nvme", "none"), (3, "nvme", "nvme"), (3, "cpu", "cpu"), (3, "none", "nvme"))
        for name in ("AdamW", "SGD")
    ]
    for stage, states, params, name in cases:
        moments = 8 if name == "AdamW" else 4
        settings = config(stage, precision, **offloaded(tmp_path, states, params))
        if name == "SGD":
            settings["optimizer"] = SGD
        for numel, memory, tiers in ranks(world_size).run(_states, settings):
            part = numel // world_size
            in_memory = moments + (4 if precision == "bf16" or params == "nvme" else 0)
            held = {"none": 0, "cpu": own, "nvme": 0}[params] * part if stage == 3 else own * numel
            assert memory["params"] == held, (stage, states, params)
            assert memory["optimizer"] == (0 if states == "nvme" else in_memory * part), (stage, states, params)
            expected = {}
            if params != "none":
                expected[f"params, {'host' if params == 'cpu' else 'nvme'}"] = own * part
            if states == "nvme":
                expected["optimizer, nvme"] = (4 + moments) * part
            assert tiers == expected, (stage, states, params)


@pytest.mark.parametrize("offload", [True, False])
def test_states_of_four_times_the_memory_limit(tmp_path: Path, offload: bool) -> None:
    command = [sys.executable, "-m", "tests.multi.offload.offload_under_limit", str(tmp_path), str(int(offload))]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=time_limits.seconds(100),
        check=False,
        env=environment,
    )
    if offload:
        assert done.returncode == 0, done.stderr[-3000:]
        assert "states are 4.0 times the limit" in done.stdout
    else:
        assert done.returncode != 0
        assert "memory" in done.stderr.lower()
