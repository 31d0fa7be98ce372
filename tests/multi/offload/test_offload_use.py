"""Offload in use: inference from the host or from files, offloaded states, the log line, the settings."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import Toy, batches, config, offloaded, train, train_step
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.offload.file_io import IoSettings
from zeroaccel.offload.host_buffers import HostArena
from zeroaccel.zero.storage.state_offload import OffloadedStates


def _infer(settings: dict[str, Any]) -> tuple[list[float], dict[str, int], int]:
    """Returns the losses of forwards without an optimizer, the bytes in tiers, and the parameters' bytes in memory."""
    torch.manual_seed(7)
    engine, optimizer, *_ = zeroaccel.initialize(Toy(), config=settings)
    assert optimizer is None
    engine.eval()
    with torch.no_grad():
        losses = [engine(batch).item() for batch in batches(engine.collectives.rank, 3)]
    found = losses, engine.tier_nbytes(), engine.model_state_nbytes()["params"]
    engine.destroy()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_inference_with_parameters_on_host_or_disk(
    ranks: Ranks, tmp_path: Path, world_size: int, precision: str
) -> None:
    def run(params: str) -> list[tuple[list[float], dict[str, int], int]]:
        settings = config(3, precision, optimizer=None, **offloaded(tmp_path, "none", params))
        return ranks(world_size).run(_infer, settings)

    here, host, files = run("none"), run("cpu"), run("nvme")
    for one, other, third in zip(here, host, files, strict=True):
        assert one[0] == other[0] == third[0]
        assert other[1]["params, host"] == other[2] > 0
        assert third[1] == {"params, nvme": other[2]}
        assert third[2] == 0  # between forwards, all bytes are in files


def _traffic(settings: dict[str, Any]) -> list[int]:
    """Returns the bytes of the third step's file accesses: (states read, states written, params read, written)."""
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    tiers = engine.tier_set.tiers
    seen: list[list[int]] = []
    for batch in batches(engine.collectives.rank, 3):
        train_step(engine, engine(batch))
        seen.append(
            [tiers[n].traffic[way].nbytes for n in ("optimizer, nvme", "params, nvme") for way in ("read", "write")]
        )
    engine.destroy()
    return [late - early for late, early in zip(seen[2], seen[1], strict=True)]


def test_a_step_moves_each_byte_once(ranks: Ranks, tmp_path: Path) -> None:
    """A step reads and writes states once, writes shards once, and reads them once per gather."""
    settings = config(3, "bf16", **offloaded(tmp_path, "nvme", "nvme"))
    settings["zero_optimization"]["sub_group_size"] = 10**9
    for read, written, params_read, params_written in ranks(2).run(_traffic, settings):
        assert read == written > 0
        assert params_written > 0
        assert params_written <= params_read <= 2 * params_written + 4096 * 8  # the frozen parameter is only read


def _parks(settings: dict[str, Any]) -> list[float]:
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    losses = []
    for index, batch in enumerate(batches(engine.collectives.rank, 4)):
        loss = engine(batch)
        engine.backward(loss)
        if index == 1:
            engine.offload_states(include=["optim_states", "hp_params"])
            with pytest.raises(EngineStateError, match=r"offloaded; call engine.reload_states\(\) first"):
                engine.step()
            with pytest.raises(EngineStateError, match="offloaded"):
                engine.forward(batch)
            with pytest.raises(EngineStateError, match="offloaded"):
                engine.offload_states()
            engine.reload_states()
            engine.reload_states()
        engine.step()
        losses.append(loss.item())
    with pytest.raises(UsageError, match="expected some of optim_states, hp_params"):
        engine.offload_states(include=["moments"])
    with pytest.raises(UsageError, match="expected \"cpu\", got 'nvme'"):
        engine.offload_states(device="nvme")
    engine.destroy()
    return losses


def test_states_go_away_and_come_back(ranks: Ranks) -> None:
    for stage in (2, 3):
        losses = ranks(2).run(_parks, config(stage, "bf16"))
        plain = ranks(2).run(_losses, config(stage, "bf16"))
        assert losses == plain


def _losses(settings: dict[str, Any]) -> list[float]:
    return train(settings, 4).losses


def test_parked_storages_keep_their_views() -> None:
    whole = torch.arange(100.0)
    part = torch.nn.Parameter(whole[10:20])
    parked = OffloadedStates([whole, part], HostArena(pinned=False))
    assert parked.nbytes == 400
    assert whole.untyped_storage().nbytes() == 0
    parked.restore()
    assert torch.equal(part.detach(), torch.arange(10.0, 20.0))
    part.data.fill_(1.0)
    assert whole[15] == 1.0


def _log(settings: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    reports = logging.getLogger("zeroaccel.report")
    reports.addHandler(handler)
    try:
        train(settings, 4)
    finally:
        reports.removeHandler(handler)
    return lines


def test_the_log_says_what_the_update_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    keys = offloaded(tmp_path, "nvme", "nvme", pipeline_read=True, pipeline_write=True, ratio=0.5)
    settings = {**config(3, "bf16", **keys), "steps_per_print": 2, "wall_clock_breakdown": True}
    lines = [line for line in ranks(2).run(_log, settings)[0] if line.startswith("offload")]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("offload, s per step over 2 steps: update 0.")
        assert " hidden)" in line
        assert re.search(r", \d\S* GB of the optimizer on the device \|", line)
        assert "| optimizer on" in line
        assert "| params on" in line
        assert line.count("GB/s") == 4


def _kept(settings: dict[str, Any]) -> dict[str, int]:
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    found = engine.tier_nbytes()
    engine.destroy()
    return found


def test_max_in_cpu_keeps_the_first_shards_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    keys = offloaded(tmp_path, "none", "nvme")
    found = {}
    for numel in (0, 3000, 10**9):
        keys["offload_param"] = {**keys["offload_param"], "max_in_cpu": numel}
        found[numel] = ranks(2).run(_kept, config(3, "bf16", **keys))[0]
    assert set(found[0]) == {"params, nvme"}
    assert set(found[10**9]) == {"params, host"}
    assert 0 < found[3000]["params, host"] <= 6000
    assert sum(found[3000].values()) == found[0]["params, nvme"] == found[10**9]["params, host"]


def _settings_of_tiers(settings: dict[str, Any]) -> tuple[list[IoSettings], list[tuple[int, int]], bool, bool]:
    """Returns (file settings; (budget, largest sub-group) of states and of parameters; both pipeline flags)."""
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    tiers = engine.tier_set
    assert tiers is not None
    assert tiers.swapper is not None
    files: list[Any] = [tiers.swapper.tier, tiers.tiers["params, nvme"]]
    largest = max(group.range.numel for groups in tiers.swapper.sub_groups.values() for group in groups)
    found = [(file.buffers.budget_nbytes, largest) for file in files]
    how = [file.file.settings for file in files], found, tiers.swapper.pipeline_read, tiers.swapper.pipeline_write
    engine.destroy()
    return how


def test_the_knobs_of_files_reach_them(ranks: Ranks, tmp_path: Path) -> None:
    keys = offloaded(tmp_path, "nvme", "nvme", buffer_count=5, pipeline_read=True)
    keys["offload_param"] = {**keys["offload_param"], "buffer_count": 3, "buffer_size": 4096}
    settings = config(3, "bf16", **keys)
    settings["aio"] = {
        "block_size": 8192,
        "queue_depth": 3,
        "intra_op_parallelism": 2,
        "overlap_events": False,
        "checksum": True,
    }
    how, budgets, reads, writes = ranks(1).run(_settings_of_tiers, settings)[0]
    assert how == [IoSettings(8192, threads=6, overlap=False, checksum=True)] * 2
    (states, largest), (params, _) = budgets
    assert largest == 512  # sub_group_size
    assert states == 5 * 4 * largest * 2  # one more while the next is read
    assert params == 3 * 4096 * 2
    assert (reads, writes) == (True, False)
