"""A job of 1024 ranks on torch's fake backend: native collectives, and records that do not grow with the job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import Topology, current_topology, destroy

W = 1024


@pytest.fixture
def simulated() -> Iterator[Topology]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=W)
    yield current_topology()
    destroy()
    dist.destroy_process_group()


def test_no_watchdog_runs(simulated: Topology) -> None:
    assert simulated.watchdog is None
    assert (simulated.rank, simulated.world_size, simulated.local_world_size) == (3, W, 1)


def test_a_gather_uses_the_backend(simulated: Topology) -> None:
    out = torch.zeros(2 * W)
    Collectives(simulated).all_gather(out, torch.tensor([1.0, 2.0]), "unshard a").wait()
    # Every rank of the simulation contributes what this one does.
    assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat(W))


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="the simulation of torch 2.6 does not reduce")
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1 / W, 2 / W])
def test_the_backends_average_becomes_the_scaled_sum(simulated: Topology, result: torch.dtype, scale: float) -> None:
    flat = torch.arange(2.0 * W)
    out = torch.empty(2, dtype=result)
    work = Collectives(simulated).reduce_scatter(out, flat, "reduce a", scale)
    work.wait()
    work.wait()
    # The simulation's average is this rank's part.
    assert torch.equal(out, (flat[6:8] * scale * W).to(result))
    assert work.is_completed()


def test_control_goes_through_the_backend_too(simulated: Topology) -> None:
    collectives = Collectives(simulated)
    count = torch.tensor([1, 2])
    collectives.all_reduce(count, "sum", "count")
    assert count.tolist() == [W, 2 * W]
    assert collectives.gather_objects("x", "names") == ["x"] * W


def test_the_books_of_a_call_do_not_grow_with_the_job(simulated: Topology) -> None:
    collectives = Collectives(simulated)
    out, shard = torch.zeros(W), torch.zeros(1)
    collectives.all_gather(out, shard, "unshard a").wait()
    (entry,) = collectives.flight_recorder.recent()
    assert (entry.seq, entry.numel) == (1, W)
    assert len(collectives.flight_recorder.recent()) == 1
