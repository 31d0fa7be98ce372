"""Errors of offload: raised on every rank, before training if possible, else immediately."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import complaint, message
from tests.support.training import Toy, batches, config, offloaded, train_step
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError, OffloadError
from zeroaccel.offload import file_io


def _engine(settings: dict[str, Any], seed: int = 7) -> Engine:
    torch.manual_seed(seed)
    return zeroaccel.initialize(Toy(), config=settings)[0]


def _step(engine: Engine, batch: Tensor) -> float:
    return train_step(engine, engine(batch))


def _fails(call: str, error: OSError, settings: dict[str, Any], root: Path) -> tuple[str, str, bool]:
    """Returns (error of the failing step, error of the next, whether training from the checkpoint has equal losses)."""
    engine = _engine(settings)
    tokens = batches(engine.collectives.rank, 4)
    _step(engine, tokens[0])
    engine.save_checkpoint(root, tag="one")
    expected = [_step(engine, batch) for batch in tokens[1:3]]
    real = getattr(os, call)

    def failing(*arguments: Any) -> int:
        raise error

    if engine.collectives.rank == 1:
        setattr(file_io.os, call, failing)
    told = message(OffloadError, _step, engine, tokens[3])
    setattr(file_io.os, call, real)
    refused = message(EngineStateError, _step, engine, tokens[3])
    engine.load_checkpoint(root, tag="one")
    again = [_step(engine, batch) for batch in tokens[1:3]]
    engine.destroy()
    return told, refused, again == expected


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_in_a_step_is_reported_on_every_rank(
    ranks: Ranks, tmp_path: Path, call: str, pipelined: bool
) -> None:
    files = offloaded(tmp_path, "nvme", pipeline_read=pipelined, pipeline_write=pipelined)
    error = OSError(errno.ENOSPC, "No space left on device")
    found = ranks(2).run(_fails, call, error, config(2, "bf16", **files), tmp_path / "saved")
    for told, refused, went_on in found:
        assert "No space left on device" in told
        assert "[rank 1]" in told
        assert "weights are a mixture" in refused
        assert "resume from the last checkpoint" in refused
        assert went_on


def _fails_in_a_pass(phase: str, settings: dict[str, Any], reads: int) -> tuple[str, bool]:
    """Returns (error of the failing pass, whether training continues as it would have without the error)."""
    losses, said = [], ""
    for failing in (False, True):
        engine = _engine(settings)
        rank, tokens = engine.collectives.rank, batches(engine.collectives.rank, 4)
        losses.append([_step(engine, tokens[0])])
        real, left = os.preadv, [reads]

        def preadv(*arguments: Any, real: Any = real, left: list[int] = left) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, "Input/output error")
            return int(real(*arguments))

        if phase == "forward" and failing and rank == 1:
            file_io.os.preadv = preadv
        try:
            loss = engine(tokens[3])
            if phase == "backward" and failing and rank == 1:
                file_io.os.preadv = preadv
            engine.backward(loss)
        except OffloadError as raised:
            said = str(raised)
        finally:
            file_io.os.preadv = real
        engine.reset()
        losses[-1] += [_step(engine, batch) for batch in tokens[1:]]
        engine.destroy()
    return said, losses[0] == losses[1]


@pytest.mark.parametrize("reads", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pass_whose_shards_cannot_be_read_ends_on_every_rank(
    ranks: Ranks, tmp_path: Path, phase: str, reads: int
) -> None:
    settings = config(3, "bf16", stage3_max_reuse_distance=0, **offloaded(tmp_path, "none", "nvme"))
    for said, goes_on in ranks(2).run(_fails_in_a_pass, phase, settings, reads):
        assert "cannot read (Input/output error)" in said
        assert said.endswith("[rank 1]")
        assert goes_on


class _DeviceOnly(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("device kernels only")


def _mistakes(cases: list[dict[str, Any]], missing_on: int) -> list[str]:
    """Returns the messages of `initialize`; a case with "client" has an optimizer that needs a device."""
    told = []
    for case in cases:
        case = dict(case)
        client = case.pop("client", False)
        if case.pop("apart", False) and torch.distributed.get_rank() != missing_on:
            for section in ("offload_optimizer", "offload_param"):
                if section in case["zero_optimization"]:
                    case["zero_optimization"][section]["nvme_path"] = "/tmp"
        optimizer = (lambda params: _DeviceOnly(params, lr=0.1)) if client else None
        if client:
            case.pop("optimizer")
        told.append(complaint(zeroaccel.initialize, Toy(), optimizer, config=case))
    return told


def test_mistakes_are_reported_on_every_rank_before_training(ranks: Ranks, tmp_path: Path) -> None:
    def case(states: str = "none", params: str = "none", stage: int = 3, **keys: Any) -> dict[str, Any]:
        folder = keys.pop("folder", tmp_path)
        return config(stage, "bf16", **offloaded(folder, states, params, **keys))

    expected = [
        (case("nvme", folder=tmp_path / "missing"), "does not exist"),
        ({**case("nvme", folder=tmp_path / "missing"), "apart": True}, "[rank 1]"),
        (case("none", "nvme", folder=Path("/dev/shm")), "which is a tmpfs"),
        (case("cpu", ratio=1.5), "offload_optimizer.ratio: expected a number of at most 1, got 1.5"),
        (case("cpu", ratio=-0.1), "offload_optimizer.ratio: expected a number of at least 0, got -0.1"),
        (case("nvme", buffer_count=2), "buffer_count: expected at least 3: one buffer for the masters"),
        (
            {**case("nvme"), "client": True},
            "_DeviceOnly cannot step in host memory (RuntimeError: device kernels only)",
        ),
        ({**case("cpu"), "client": True}, "_DeviceOnly cannot step in host memory (RuntimeError: device kernels only)"),
        ({**case("nvme"), "aio": {"block_size": 1000}}, "aio.block_size: expected a multiple of 4096"),
    ]
    for told in ranks(2).run(_mistakes, [case for case, _ in expected], missing_on=1):
        for (_, text), said in zip(expected, told, strict=True):
            assert text in said, (text, said)


def _too_large(settings: dict[str, Any], free: int) -> str:
    from zeroaccel.offload import offload_folder

    real = offload_folder.shutil.disk_usage
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload_folder.shutil, "disk_usage", lambda path: type(real(path))(1 << 40, 1 << 40, free))
        return complaint(lambda: zeroaccel.initialize(Toy(), config=settings)[0].destroy())


def test_ranks_that_share_a_disk_need_room_together(ranks: Ranks, tmp_path: Path) -> None:
    settings = config(2, "bf16", **offloaded(tmp_path, "nvme"))
    roomy = ranks(2).run(_too_large, settings, 1 << 30)
    assert roomy == ["nothing"] * 2
    for told in ranks(2).run(_too_large, settings, 100_000):  # enough for one rank, not for two
        assert "bytes of free space for 2 files of the ranks on" in told
        assert "got 100000" not in told or "100000 bytes free" in told
