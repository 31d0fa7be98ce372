"""Processes that the launcher watches besides torch's agent, and marked processes that it finds and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from tests import time_limits
from tests.support.environment import outside_any_job
from zeroaccel.cli.launch import orphans
from zeroaccel.cli.launch.agent import Places, RankAgent, RankFiles, StopSignals
from zeroaccel.cli.launch.failures import AFTER_FAILURE_SECONDS
from zeroaccel.cli.launch.launch_plan import Program, plan_launch
from zeroaccel.cli.launch.orphans import LAUNCH_ID, ProcessWatch, break_connections, end_orphans
from zeroaccel.config.launch.launch_settings import launch_settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@contextmanager
def _connection() -> Iterator[tuple[int, socket.socket]]:
    """Yields a port and a connection to it over which no data arrives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            yield port, client


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(orphans, "_OTHERS_SECONDS", 0.2)
    monkeypatch.setattr(orphans, "_BLIND_SECONDS", 0.2)


def test_breaking_connections_releases_a_thread_that_waits_for_an_answer() -> None:
    with _connection() as (port, client), _connection() as (_, other):
        received: list[bytes] = []
        thread = threading.Thread(target=lambda: received.append(client.recv(1)))
        thread.start()
        assert break_connections(port) == 1
        thread.join(time_limits.seconds(10.0))
        assert received == [b""]
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):  # the connection to the other port is intact
            other.recv(1)


@pytest.mark.usefixtures("quick")
def test_a_process_that_is_stopped_longer_than_the_limit_is_ended() -> None:
    said: list[str] = []
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(signal.SIGSTOP)
    try:
        with ProcessWatch(0.3, 1, 0.0, said.append):
            assert process.wait(time_limits.seconds(20.0)) == -signal.SIGTERM
    finally:
        process.kill()
    assert said[0].startswith(f"the process {process.pid} has been stopped (SIGSTOP) for ")
    assert "(the limit is 0.3 s); the launcher wakes and ends it" in said[0]


@pytest.mark.usefixtures("quick")
def test_an_end_that_goes_unnoticed_breaks_the_connection_to_the_store() -> None:
    said: list[str] = []
    with _connection() as (port, client):
        process = subprocess.Popen([sys.executable, "-c", ""])
        client.settimeout(time_limits.seconds(20.0))
        with ProcessWatch(600.0, port, 0.0, said.append):
            assert client.recv(1) == b""  # the agent's thread waits for the store in this way
        process.wait()
    assert said == [f"the rendezvous store at port {port} has not answered since a process ended"]


@pytest.mark.usefixtures("quick")
def test_a_process_end_that_the_agent_notices_has_no_effect() -> None:
    said: list[str] = []
    with _connection() as (port, client), ProcessWatch(600.0, port, 0.0, said.append):
        subprocess.run([sys.executable, "-c", ""], check=True)
        time.sleep(0.5)
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
    assert said == []


@pytest.mark.parametrize(
    ("values", "after_signal", "after_failure"),
    [
        ({}, 30.0, AFTER_FAILURE_SECONDS),  # torchrun's 30 s
        ({"shutdown_timeout": 120}, 120.0, AFTER_FAILURE_SECONDS),
        ({"shutdown_timeout": 2.5}, 2.5, 2.5),
    ],
)
def test_processes_have_the_shutdown_timeout_after_a_signal(
    tmp_path: Path, values: dict[str, Any], after_signal: float, after_failure: float
) -> None:
    waits: list[tuple[int, float]] = []
    settings = launch_settings({**values, "num_processes": 1, "use_cpu": True})
    plan = plan_launch(settings, Program(sys.executable, kind="executable"), os.environ)
    stop_signals = StopSignals(lambda: None, print, settings.shutdown_timeout, may_wait_in_native_code=False)
    spec = WorkerSpec(role="default", local_world_size=1, rdzv_handler=None, entrypoint="true")  # type: ignore[arg-type]
    files = RankFiles(tmp_path, settings, lambda _: {}, lambda: None, print, 0)
    agent = RankAgent(spec, files, Places(plan, print), stop_signals, settings, print)
    no_processes: Any = SimpleNamespace(pids=dict)

    def close(number: int, timeout: float) -> None:
        waits.append((number, timeout))

    with stop_signals:
        agent.close_in_time(no_processes, close, None, 30)  # the timeout that torch's agent always passes
        stop_signals.processes_exist()
        with pytest.raises(SignalException):
            signal.raise_signal(signal.SIGINT)
        agent.close_in_time(no_processes, close, signal.SIGINT, 30)
    assert waits == [(signal.SIGTERM, after_failure), (signal.SIGINT, after_signal)]


# Starts a marked child that ignores SIGTERM in a session of its own. The parent has no mark and stays alive, because
# some machines end every process whose parent has ended.
PARENT = f"""
import os, subprocess, sys
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
environment = os.environ | {{"{LAUNCH_ID}": sys.argv[1]}}
child = subprocess.Popen([sys.executable, "-c", stubborn], env=environment, start_new_session=True, stdout=-1)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.wait()
"""


@contextmanager
def _leftover(launch_id: str) -> Iterator[psutil.Process]:
    command = [sys.executable, "-c", PARENT, launch_id]
    with subprocess.Popen(command, env=outside_any_job(), stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout is not None
        yield psutil.Process(int(parent.stdout.readline()))
        end_orphans(launch_id, grace_seconds=0.1)


def test_leftovers_of_one_launch_are_ended_and_no_others() -> None:
    mine, another = uuid.uuid4().hex, uuid.uuid4().hex
    with _leftover(mine) as leftover, _leftover(another) as stranger:
        assert end_orphans(mine, grace_seconds=0.1) == 1
        assert not leftover.is_running() or leftover.status() == psutil.STATUS_ZOMBIE
        assert stranger.status() != psutil.STATUS_ZOMBIE
        assert end_orphans(mine, grace_seconds=0.1) == 0
