"""The places of a machine that have ranks after a loss, and the message of a machine that finds no other one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import NoReturn

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from tests.support.refusals import message
from zeroaccel.cli.launch import agent
from zeroaccel.cli.launch.agent import Places, killed_ranks
from zeroaccel.cli.launch.launch_plan import Program, plan_launch
from zeroaccel.config.launch.launch_settings import launch_settings
from zeroaccel.errors import CollectiveError


def places_of(log: list[str], fewest: int, device: str = "cpu") -> Places:
    settings = launch_settings({"num_processes": 4, "min_processes": fewest, "max_restarts": 9, "use_cpu": True})
    plan = plan_launch(settings, Program(sys.executable, kind="executable"), os.environ)
    object.__setattr__(plan, "device", device)
    plan.environment.pop("CUDA_VISIBLE_DEVICES", None)  # type: ignore[attr-defined]
    return Places(plan, log.append)


def test_a_place_is_left_out_when_it_is_lost_twice_in_a_row() -> None:
    log: list[str] = []
    places = places_of(log, 2)
    for lost in ([1], [2], [1], []):
        places.note_loss(lost)
    assert (places.used, log) == ((0, 1, 2, 3), [])
    places.note_loss([1])
    places.note_loss([1, 3])
    assert places.used == (0, 2, 3)
    assert log == ["process 1 was lost twice in a row: continuing with 3 processes"]
    places.note_loss([2])  # local rank 2 is at place 3, which the attempt before lost too
    assert places.used == (0, 2)
    for _ in range(3):
        places.note_loss([0, 1])
    assert places.used == (0, 2)


def test_all_places_stay_where_the_job_needs_them() -> None:
    log: list[str] = []
    places = places_of(log, 4)
    for _ in range(3):
        places.note_loss([1])
    assert (places.used, log) == ((0, 1, 2, 3), [])


def test_the_ranks_that_are_left_keep_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    places = places_of([], 2, "cuda")
    assert "CUDA_VISIBLE_DEVICES" not in places.additions(0)
    for _ in range(2):
        places.note_loss([1])
    assert places.additions(1)["CUDA_VISIBLE_DEVICES"] == "0,2,3"
    assert places.additions(1)["LOCAL_SIZE"] == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert places.additions(1)["CUDA_VISIBLE_DEVICES"] == "4,6,7"


def test_a_signal_has_ended_a_killed_rank() -> None:
    ended = [subprocess.Popen([sys.executable, "-c", code]) for code in ("", "1/0", "import time; time.sleep(60)")]
    ended[2].send_signal(signal.SIGKILL)
    for process in ended:
        process.wait()
    handlers = {rank: SimpleNamespace(proc=process) for rank, process in enumerate(ended)}
    assert killed_ranks(handlers) == [2]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RendezvousClosedError(),
            "{machine}: the job at {place} has ended; the other machines did not wait for this one",
        ),
        (RendezvousTimeoutError(), "{machine} did not meet the others at {place}: RendezvousTimeoutError"),
    ],
)
def test_a_machine_that_meets_no_other_says_why(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def raise_it(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(agent.RankAgent, "run", raise_it)
    settings = launch_settings({"num_processes": 1, "use_cpu": True})
    plan = plan_launch(settings, Program(sys.executable, kind="executable"), os.environ)
    expected = said.format(machine="machine 0 of 1", place=f"{plan.host}:{plan.port}")
    assert message(CollectiveError, agent.run_plan, plan, lambda _: None) == expected
