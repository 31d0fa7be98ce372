"""The choice of a rank's device, on machines with simulated CUDA devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.log_lines import log_lines
from zeroaccel import logs
from zeroaccel.comm import environment, topology
from zeroaccel.comm.rank_device import (
    DeviceIdentity,
    check_one_device_each,
    identify,
    rank_device,
    sole_device,
    warn_of_unused_devices,
)
from zeroaccel.comm.topology import Topology, connect, destroy, init_process_group
from zeroaccel.errors import ConfigError


@dataclass
class Driver:
    """Simulated devices behind the functions of torch.cuda that the package calls."""

    count: int
    current: int = 0
    initialized: bool = False
    name: str = "NVIDIA H100 80GB HBM3"
    uuids: tuple[str, ...] = ("aaaa", "bbbb", "cccc", "dddd")

    def set_device(self, device: torch.device) -> None:
        self.current, self.initialized = device.index or 0, True

    def properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=self.name, uuid=self.uuids[device.index or 0])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    def install(count: int, **facts: object) -> Driver:
        driver = Driver(count, **facts)  # type: ignore[arg-type]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: driver.count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: driver.count > 0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: driver.initialized)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: driver.current)
        monkeypatch.setattr(torch.cuda, "set_device", driver.set_device)
        monkeypatch.setattr(torch.cuda, "get_device_properties", driver.properties)
        monkeypatch.setattr(logs, "_seen", set())
        return driver

    return install


@pytest.fixture
def user_group() -> Iterator[Callable[[str], None]]:
    def make(backend: str) -> None:
        end()  # a group that an earlier file's engines left
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def end() -> None:
        destroy()
        if dist.is_initialized():
            dist.destroy_process_group()

    yield make
    end()


def test_a_rank_takes_the_device_of_its_number_or_that_of_its_group(machine: Callable[..., Driver]) -> None:
    for visible in (2, 4):
        machine(visible)
        assert [rank_device(local, 2).index for local in range(2)] == [0, 1]
    assert rank_device(0, 2, torch.device("cuda", 3)).index == 3
    # Without a device of the group, the program's current device precedes that of the local rank.
    machine(4, current=3, initialized=True)
    assert rank_device(0, 2).index == 3
    assert rank_device(0, 2, torch.device("cuda", 1)).index == 1
    machine(4, current=0, initialized=True)  # the initial device of every process
    assert rank_device(2, 4).index == 2
    machine(1)  # a single visible device, for any local rank
    assert [rank_device(local, 8).index for local in range(8)] == [0] * 8


@pytest.mark.parametrize(("visible", "local_rank"), [(2, 2), (0, 0)])
def test_too_few_devices_are_named(machine: Callable[..., Driver], visible: int, local_rank: int) -> None:
    machine(visible)
    expected = f"LOCAL_RANK: expected less than the {visible} visible CUDA devices, got {local_rank}; start at most one"
    with pytest.raises(ConfigError, match=expected):
        rank_device(local_rank, 4)


def test_a_process_alone_takes_the_current_device(machine: Callable[..., Driver]) -> None:
    driver = machine(4)
    assert sole_device().index == 0, "a query for the current device would create a context"
    driver.set_device(torch.device("cuda", 3))
    assert sole_device().index == 3
    machine(0)
    with pytest.raises(ConfigError, match="NCCL without a visible CUDA device; make it with backend"):
        sole_device()


def test_ranks_with_one_gpu_are_named(machine: Callable[..., Driver]) -> None:
    machine(1)
    gpu = torch.device("cuda", 0)
    same = {rank: identify(gpu, "node1", shares=False) for rank in (0, 1)}
    with pytest.raises(ConfigError) as raised:
        check_one_device_each(same | {2: DeviceIdentity("node1", "other", "NVIDIA H100 80GB HBM3")})
    text = "devices of node1: expected one GPU for each rank, got 'ranks 0, 1 on NVIDIA H100 80GB HBM3, UUID aaaa'"
    assert text in str(raised.value)


def test_instances_of_a_gpu_and_shared_ones_by_request_pass(machine: Callable[..., Driver]) -> None:
    gpu = torch.device("cuda", 0)
    machine(1)
    check_one_device_each({rank: identify(gpu, "node1", shares=True) for rank in (0, 1)})
    check_one_device_each({rank: identify(torch.device("cpu"), "node1", shares=False) for rank in (0, 1)})
    machine(1, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    check_one_device_each({rank: identify(gpu, "node1", shares=False) for rank in (0, 1)})


@pytest.mark.parametrize(
    ("variables", "shares"), [({}, False), ({"NCCL_HOSTID": "a"}, True), ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, True)]
)
def test_variables_that_let_ranks_share_devices(
    variables: dict[str, str], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.ranks_may_share_devices() == shares


@pytest.mark.parametrize(
    ("version", "before", "after"),
    [((2, 6), None, "1"), ((2, 7), "0", "0"), ((2, 7), None, "1"), ((2, 8), None, None), ((2, 13), None, None)],
)
def test_old_torch_frees_in_the_order_of_the_stream(
    version: tuple[int, int], before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_AVOID_RECORD_STREAMS"
    monkeypatch.setenv(name, before or "")  # so that monkeypatch restores the variable
    if before is None:
        monkeypatch.delenv(name)
    environment.avoid_record_streams(version)
    assert os.environ.get(name) == after


def test_a_group_without_nccl_beside_devices_is_named(
    machine: Callable[..., Driver], user_group: Callable[[str], None]
) -> None:
    machine(2)
    user_group("gloo")
    with log_lines() as lines:
        assert init_process_group().device == torch.device("cpu")
    (line,) = lines
    assert '"cpu:gloo' in line
    assert "2 CUDA devices are unused; make the group with init_process_group(" in line
    destroy()
    dist.destroy_process_group()
    # No warning for a CPU group that the caller requested, or on a machine without devices.
    machine(2)
    with log_lines() as lines:
        assert init_process_group("gloo").device == torch.device("cpu")
        destroy()
        machine(0)
        warn_of_unused_devices("gloo")
    assert lines == []


def test_an_accelerator_that_training_does_not_use_is_named(
    machine: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for kind, count in (("cuda", 0), ("xpu", 1), ("mps", 1)):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind: torch.device(kind))
        with log_lines() as lines:
            assert init_process_group().device == torch.device("cpu")
            destroy()
        assert len(lines) == count
        assert all(f'not the accelerator "{kind}" that' in line and "torch's own FSDP" in line for line in lines)


@pytest.mark.parametrize(("known", "said"), [(11040, True), (12020, False), (0, False)])
def test_a_driver_too_old_for_devices_is_named(
    known: int, said: bool, machine: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(number: Any) -> int:
        number._obj.value = known
        return 0 if known else 3  # not initialized

    machine(0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(
        "zeroaccel.comm.rank_device.ctypes.CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=version)
    )
    with log_lines() as lines:
        assert init_process_group().device == torch.device("cpu")
        destroy()
    expected = (
        "training is on the CPU: this machine's NVIDIA driver supports CUDA 11.4; "
        "this torch needs a driver for CUDA 12.8"
    )
    assert [expected in line and "update the driver, or install" in line for line in lines] == [True] * said


def test_nccl_groups_are_connected_in_order_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With groups of two fake ranks: each kind of collective runs once per group, in the order of the call."""
    used: list[tuple[str, dist.ProcessGroup]] = []
    monkeypatch.setattr(topology, "issue_first", lambda kind, one, group: used.append((kind, group)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(1))
    place = _place("cpu:gloo,cuda:nccl", "cuda")
    first, second, alone = (_Group(n) for n in (2, 2, 1))
    sums, both = ("all_reduce",), ("all_reduce", "all_gather")
    connect(place, {"a": (first, sums), "b": (second, both), "c": (alone, both)})  # type: ignore[dict-item]
    connect(place, {"b": (second, sums), "a": (first, both)})  # type: ignore[dict-item]
    expected = [("all_reduce", first), ("all_reduce", second), ("all_gather", second), ("all_gather", first)]
    assert used == expected
    assert [call.label for call in place.flight_recorder.recent()] == [
        "connect a",
        "connect b",
        "connect b",
        "connect a",
    ]
    assert place.flight_recorder.longest_wait is None
    used.clear()
    connect(_place("gloo", "cpu"), {"a": (first, sums)})  # type: ignore[dict-item]
    assert used == []


class _Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def _place(backend: str, device: str) -> Topology:
    groups: Any = [_Group(2)] * 3
    return Topology(0, 2, 0, 2, torch.device(device, 0), backend, *groups, topology.FlightRecorder(), None, ((0, 1),))
