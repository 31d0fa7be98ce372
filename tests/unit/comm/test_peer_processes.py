"""The processes of other ranks, observed from one rank; plain processes stand in for the ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import time_limits
from zeroaccel.comm.hangs.hang_report import ProcessStatus
from zeroaccel.comm.hangs.peer_processes import PeerProcesses, own_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

OBEYS = "import time"
REFUSES = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('woken', flush=True))"


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes; the second has a SIGTERM handler of its own."""
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"{source}; print(0, flush=True); time.sleep(600)"], stdout=pipe, text=True
        )
        for source in (OBEYS, REFUSES)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def _seen(peers: PeerProcesses, rank: int, state: str) -> ProcessStatus:
    limit = time_limits.Limit(10.0)
    while (status := peers.status(rank)).state != state and not limit.is_over():
        time.sleep(0.01)
    return status


def _peers(ranks: list[subprocess.Popen[str]], *, signals: bool = True) -> PeerProcesses:
    own = own_process()
    processes = {0: own} | {number: own._replace(pid=process.pid) for number, process in enumerate(ranks, 1)}
    processes[3] = own._replace(host="node9", machine="elsewhere")
    return PeerProcesses(0, processes, signals=signals)


def test_states_of_peer_processes(ranks: list[subprocess.Popen[str]]) -> None:
    peers = _peers(ranks)
    who = f"pid {ranks[0].pid}"
    assert peers.status(1) == ProcessStatus("running", who)
    assert peers.status(3) == ProcessStatus("unseen", "node9")
    assert not peers.any_stopped()
    ranks[0].send_signal(signal.SIGSTOP)
    assert _seen(peers, 1, "stopped") == ProcessStatus("stopped", who)
    assert peers.any_stopped()
    assert [peers.cannot_answer(rank) for rank in (1, 2, 3)] == [True, False, False]
    ranks[0].kill()
    assert _seen(peers, 1, "gone") == ProcessStatus("gone", who)


def test_stopped_ranks_are_woken_and_ended(ranks: list[subprocess.Popen[str]]) -> None:
    peers = _peers(ranks)
    for number, process in enumerate(ranks, 1):
        process.send_signal(signal.SIGSTOP)
        assert _seen(peers, number, "stopped").state == "stopped"
    assert not _peers(ranks, signals=False).wake_and_end()
    assert peers.wake_and_end()
    assert ranks[0].wait(time_limits.seconds(10.0)) == -signal.SIGTERM
    assert ranks[1].stdout is not None
    assert ranks[1].stdout.readline() == "woken\n"
    assert not peers.wake_and_end()
