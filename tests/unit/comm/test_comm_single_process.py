"""Jobs without a network: one process, and 1024 ranks on torch's fake backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroaccel.comm import topology
from zeroaccel.comm.agree import agree_or_raise
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import CollectiveCall, RecordingCollectives
from zeroaccel.comm.topology import Topology, current_topology, destroy, init_process_group
from zeroaccel.comm.transport import BufferPool, MeterSource, NativeTransport, P2PTransport, transport_over
from zeroaccel.errors import ConfigError, EngineStateError


@pytest.fixture(autouse=True)
def _outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone() -> Iterator[Topology]:
    yield init_process_group("gloo")
    destroy()


def test_without_an_environment_the_process_is_the_job_whose_topology_is_made_once(alone: Topology) -> None:
    assert (alone.rank, alone.world_size, alone.local_rank, alone.local_world_size) == (0, 1, 0, 1)
    assert (alone.device, alone.watchdog, dist.get_world_size()) == (torch.device("cpu"), None, 1)
    assert init_process_group() is current_topology() is alone


def test_another_device_is_refused_once_the_ranks_are_connected(
    alone: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert init_process_group(device="cpu") is alone
    assert init_process_group(transports=transport_over) is alone
    with pytest.raises(EngineStateError, match=r"device.*expected cpu, got 'cuda:0'; pass it in the first call"):
        init_process_group(device="cuda:0")
    with pytest.raises(EngineStateError, match=r"init_process_group\(transports\)"):
        init_process_group(transports=lambda group, device, meter_source: transport_over(group, device, meter_source))


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("meta", '"cpu" or a CUDA device'),
        ("xpu", '"cpu" or a CUDA device'),
        ("cuda:7", r"one of the \d+ visible CUDA devices"),
    ],
)
def test_a_device_that_does_not_exist_is_refused(device: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"init_process_group\(device\): expected {expected}, got '{device}'"):
        init_process_group("gloo", device=device)
    assert not dist.is_initialized()


def test_the_transports_are_those_of_the_topology() -> None:
    asked: list[str] = []

    def transports(group: dist.ProcessGroup, device: str, meter_source: MeterSource) -> P2PTransport | NativeTransport:
        asked.append(device)
        return NativeTransport(group, meter_source)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        Collectives(init_process_group(device="cpu", transports=transports)).barrier("one")
        assert asked == ["cpu", "cpu", "cpu"]  # gathers, reductions, control
    finally:
        destroy()
        dist.destroy_process_group()


def test_several_ranks_on_cuda_devices_need_a_backend_for_their_tensors() -> None:
    cuda, backend = torch.device("cuda:0"), "cpu:gloo,cuda:gloo"
    with pytest.raises(ConfigError, match=r'device\): expected "cpu" with several ranks.*got \'cuda:0\'; use the nccl'):
        topology._require_data_backend(cuda, backend, transport_over)
    topology._require_data_backend(cuda, "cpu:gloo,cuda:nccl", transport_over)
    topology._require_data_backend(cuda, backend, lambda group, device, meter: NativeTransport(group, meter))
    topology._require_data_backend(torch.device("cpu"), "cpu:gloo", transport_over)


def test_destroy_ends_the_group_that_init_made(alone: Topology) -> None:
    destroy()
    assert not dist.is_initialized()
    with pytest.raises(EngineStateError, match="init_process_group"):
        current_topology()
    destroy()  # a second call does nothing
    assert init_process_group("gloo") is not alone


def test_the_users_own_group_is_taken_and_left() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert init_process_group().gather_group is dist.group.WORLD
        destroy()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_an_incomplete_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="not MASTER_ADDR, MASTER_PORT"):
        init_process_group()
    assert not dist.is_initialized()


def test_a_gather_is_a_copy(alone: Topology) -> None:
    collectives = Collectives(alone)
    shard, out = torch.arange(5.0), torch.zeros(5)
    work = collectives.all_gather(out, shard, "unshard a")
    work.wait()
    assert work.is_completed()
    assert torch.equal(out, shard)
    collectives.all_gather(out, out, "unshard a").wait()
    assert torch.equal(out, shard)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
def test_a_reduction_scales_and_rounds_once(alone: Topology, wire: torch.dtype, result: torch.dtype) -> None:
    flat = torch.randn(1000).to(wire)
    out = torch.empty(1000, dtype=result)
    Collectives(alone).reduce_scatter(out, flat, "reduce a", 1 / 3).wait()
    assert torch.equal(out, (flat.float() * torch.tensor(1 / 3)).to(result))


def test_control_collectives_leave_their_tensors_alone(alone: Topology) -> None:
    collectives = Collectives(alone)
    tensor = torch.tensor([1.0, -2.0])
    collectives.all_reduce(tensor, "sum", "norm")
    collectives.all_reduce(tensor, "max", "overflow")
    collectives.broadcast(tensor, 0, "weights")
    collectives.barrier("end")
    assert torch.equal(tensor, torch.tensor([1.0, -2.0]))
    assert collectives.gather_objects({"a": 1}, "names") == [{"a": 1}]


def test_a_shape_that_does_not_fit_is_our_bug(alone: Topology) -> None:
    collectives = Collectives(alone)
    with pytest.raises(AssertionError, match=r"unshard a: a gather of 4 elements, 3 on rank 0 of 1"):
        collectives.all_gather(torch.empty(4), torch.empty(3), "unshard a")
    with pytest.raises(AssertionError, match=r"unshard a: .*bfloat16"):
        collectives.all_gather(torch.empty(4), torch.empty(4, dtype=torch.bfloat16), "unshard a")
    with pytest.raises(AssertionError, match="reduce a: a reduction of 4 elements, 3 on rank 0 of 1"):
        collectives.reduce_scatter(torch.empty(3), torch.empty(4), "reduce a")


def test_an_error_is_raised_as_it_is(alone: Topology) -> None:
    collectives = Collectives(alone)
    agree_or_raise(collectives, None, "check")
    error = KeyError("x")
    with pytest.raises(KeyError) as caught:
        agree_or_raise(collectives, error, "check")
    assert caught.value is error


def test_a_recording_counts_calls_and_has_no_bytes_on_one_rank(alone: Topology) -> None:
    recording = RecordingCollectives(Collectives(alone))
    recording.all_gather(torch.empty(4), torch.ones(4), "unshard a").wait()
    recording.reduce_scatter(torch.empty(4), torch.ones(4, dtype=torch.bfloat16), "reduce a").wait()
    assert recording.calls == [
        CollectiveCall("all_gather", "unshard a", "float32", 4, 0),
        CollectiveCall("reduce_scatter", "reduce a", "bfloat16", 4, 0),
    ]
    assert recording.count() == 2
    assert recording.count("all_gather") == 1
    assert recording.count(label="reduce") == 1
    recording.reset()
    assert recording.calls == []


def test_scratch_memory_is_reused_but_never_shared() -> None:
    pool = BufferPool()
    first = pool.acquire(100, torch.float32)
    address = first.data_ptr()
    pool.release(first)
    again = pool.acquire(150, torch.bfloat16)
    assert (again.data_ptr(), again.shape, again.dtype) == (address, (150,), torch.bfloat16)
    pool.release(again)
    loans = [pool.acquire(50, torch.float32) for _ in range(3)]
    assert len({loan.data_ptr() for loan in loans}) == 3


def test_scratch_keeps_the_two_largest() -> None:
    pool = BufferPool()
    loans = [pool.acquire(numel, torch.uint8) for numel in (10, 30, 20)]
    kept = {loan.data_ptr() for loan in loans[1:]}
    for loan in loans:
        pool.release(loan)
    # Both loans are out at once, so that the pool must return both blocks that it kept.
    again = [pool.acquire(15, torch.uint8), pool.acquire(25, torch.uint8)]
    assert {loan.data_ptr() for loan in again} == kept


W = 1024


@pytest.fixture
def simulated() -> Iterator[Topology]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=W)
    yield current_topology()
    destroy()
    dist.destroy_process_group()


def test_a_simulated_job_has_no_watchdog(simulated: Topology) -> None:
    assert simulated.watchdog is None
    assert (simulated.rank, simulated.world_size, simulated.local_world_size) == (3, W, 1)


def test_a_gather_uses_the_backend(simulated: Topology) -> None:
    out = torch.zeros(2 * W)
    Collectives(simulated).all_gather(out, torch.tensor([1.0, 2.0]), "unshard a").wait()
    # Every rank of the simulation contributes this rank's values.
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


def test_the_record_of_a_call_does_not_grow_with_the_job(simulated: Topology) -> None:
    collectives = Collectives(simulated)
    out, shard = torch.zeros(W), torch.zeros(1)
    collectives.all_gather(out, shard, "unshard a").wait()
    (entry,) = collectives.flight_recorder.recent()
    assert (entry.seq, entry.numel) == (1, W)
    assert len(collectives.flight_recorder.recent()) == 1
