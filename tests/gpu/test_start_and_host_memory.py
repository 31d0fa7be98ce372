"""On a CUDA device: the choice of the device, tensors on other devices, page-locked states, background saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroaccel
from tests.support.training import Toy, batches, config
from zeroaccel.comm.topology import destroy, init_process_group
from zeroaccel.errors import UsageError

pytestmark = pytest.mark.gpu


def test_a_process_alone_computes_on_the_current_device() -> None:
    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    try:
        torch.cuda.set_device(last)
        destroy()
        assert init_process_group().device == torch.device("cuda", last)
    finally:
        destroy()
        torch.cuda.set_device(before)


def test_a_model_of_the_host_moves_and_inputs_do_not() -> None:
    engine, *_ = zeroaccel.initialize(Toy(), config=config(3, "bf16"))
    (batch,) = batches(0, 1)
    try:
        with pytest.raises(UsageError, match=r"engine.forward: expected inputs on cuda:\d.*args\[0\] on cpu"):
            engine(batch)
        assert engine(batch.cuda()).is_cuda
    finally:
        engine.destroy()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_masters_and_states_of_the_host_are_locked(precision: str, pinned: bool) -> None:
    section = {"device": "cpu", "pin_memory": pinned}
    engine, *_ = zeroaccel.initialize(Toy().cuda(), config=config(2, precision, offload_optimizer=section))
    try:
        for batch in batches(0, 2):
            engine.backward(engine(batch.cuda()))
            engine.step()
        optimizer = engine.sharded_optimizer
        assert optimizer is not None
        masters = [tensor for buffer in optimizer.buffers for tensor in buffer.masters.tensors()]
        states = [
            value
            for state in optimizer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        ]
        assert masters
        assert states
        for tensor in (*masters, *states):
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned() == pinned
    finally:
        engine.destroy()


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name[:16]: path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_a_background_save_has_the_state_of_its_step(tmp_path: Path) -> None:
    """Compares a synchronous save with one in the background of the next forward and backward."""
    saved = []
    for background in (False, True):
        torch.manual_seed(0)
        settings: dict[str, Any] = {**config(2, "bf16"), "checkpoint": {"async_save": background}}
        engine, *_ = zeroaccel.initialize(Toy(layers=20, width=256).cuda(), config=settings)
        folder = tmp_path / str(background)
        try:
            for number, batch in enumerate(batches(0, 4)):
                engine.backward(engine(batch.cuda()))
                engine.step()
                if number == 1:
                    engine.save_checkpoint(folder, tag="middle")
            engine.wait_for_checkpoint()
        finally:
            engine.destroy()
        saved.append(_bytes_of(folder))
    assert len(saved[0]) == 1
    assert saved[0] == saved[1]
