"""How ranks agree on their CUDA devices, each rank with a simulated driver."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.support.pool import Ranks
from zeroaccel.comm import topology
from zeroaccel.comm.topology import current_topology
from zeroaccel.errors import ConfigError


def _device_on_each(uuids: list[list[str]]) -> str:
    """Returns this rank's device, or the error; `uuids` lists the devices that are visible to each rank."""
    place = current_topology()
    own = uuids[place.rank]

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H100", uuid=own[device.index])

    with (
        mock.patch.object(torch.cuda, "device_count", return_value=len(own)),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
    ):
        try:
            return str(topology._agreed_device(None, place.rank, place.world_size, "node1", place.control_group))
        except ConfigError as error:
            return str(error)


@pytest.mark.parametrize(
    ("uuids", "devices"),
    [([["a", "b"]] * 2, ["cuda:0", "cuda:1"]), ([["a"], ["b"]], ["cuda:0", "cuda:0"])],
    ids=["all visible", "one visible to each"],
)
def test_ranks_have_a_device_each(ranks: Ranks, uuids: list[list[str]], devices: list[str]) -> None:
    assert ranks(2).run(_device_on_each, uuids) == devices


def test_one_device_between_two_ranks_is_refused_on_both(ranks: Ranks) -> None:
    said = ranks(2).run(_device_on_each, [["a"], ["a"]])
    assert said[0] == said[1]
    assert "devices of node1: expected one GPU for each rank, got 'ranks 0, 1 on NVIDIA H100, UUID a'" in said[0]


def test_a_missing_device_of_one_rank_is_reported_on_all(ranks: Ranks) -> None:
    said = ranks(2).run(_device_on_each, [["a", "b"], []])
    own = "environment: LOCAL_RANK: expected less than the 0 visible CUDA devices, got 1; start at most one process"
    assert said[1].startswith(own)
    assert said[0].startswith(f"rank 1: {own}")
