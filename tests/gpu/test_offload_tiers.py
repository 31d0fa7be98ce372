"""Offload on a CUDA device: all host tiers give the same bits, and the device holds only what is not offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroaccel
from tests.support.training import ADAMW, SGD, Toy, batches, config, differences, offloaded, train

pytestmark = pytest.mark.gpu


def _on_device() -> Toy:
    return Toy().cuda()


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pinned", [True, False])
def test_host_tiers_give_the_same_bits(tmp_path: Path, optimizer: dict[str, Any], precision: str, pinned: bool) -> None:
    runs = {}
    for stage in (1, 2, 3):
        for states in ("cpu", "nvme"):
            for params in ("none", "cpu", "nvme") if stage == 3 else ("none",):
                files = offloaded(tmp_path, states, params, pin_memory=pinned, pipeline_read=True)
                settings = config(stage, precision, 2, optimizer=optimizer, gradient_clipping=0.5, **files)
                runs[stage, states, params] = train(settings, 5, make=_on_device)
    for name, run in runs.items():
        assert differences(runs[name[0], "cpu", "none"], run) == [], name


def test_parameters_alone_may_go_anywhere(tmp_path: Path) -> None:
    """The device computes the update, so the run equals one without offload."""
    plain = train(config(3, "bf16"), 5, make=_on_device)
    for params in ("cpu", "nvme"):
        run = train(config(3, "bf16", **offloaded(tmp_path, "none", params)), 5, make=_on_device)
        assert differences(plain, run) == [], params


def test_states_on_the_host_take_no_memory_of_the_device(tmp_path: Path) -> None:
    held = {}
    for states, params in (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme")):
        engine, *_ = zeroaccel.initialize(
            Toy(layers=20, width=256).cuda(), config=config(3, "bf16", **offloaded(tmp_path, states, params))
        )
        for batch in batches(0, 2):
            engine.backward(engine(batch.cuda()))
            engine.step()
        torch.cuda.synchronize()
        numel = sum(unit.numel for unit in engine.units)
        held[states, params] = torch.cuda.memory_allocated() / numel
        engine.destroy()
        del engine
        torch.cuda.empty_cache()
    assert held["none", "none"] - held["cpu", "none"] > 11  # the master and the moments take 12 bytes
    assert held["cpu", "none"] - held["cpu", "cpu"] > 1.5
    assert held["nvme", "nvme"] < held["cpu", "none"] - 1.5


def test_parked_states_leave_the_device_and_come_back() -> None:
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(layers=20, width=256).cuda(), config=config(2, "bf16"))
    nbytes = 13 * sum(unit.numel for unit in engine.units)  # of 14 bytes: weights, masters and two moments
    first, second = batches(0, 2)
    engine.backward(engine(first.cuda()))
    engine.step()
    before = torch.cuda.memory_allocated()
    engine.offload_states()
    assert torch.cuda.memory_allocated() < before - nbytes
    engine.reload_states()
    assert torch.cuda.memory_allocated() >= before
    engine.backward(engine(second.cuda()))
    engine.step()
    engine.destroy()
