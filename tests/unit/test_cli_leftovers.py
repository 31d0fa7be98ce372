"""What a job leaves running is found by its mark, in whatever session and under whatever parent it is."""

from __future__ import annotations

import subprocess
import sys
import uuid

import psutil

from tests.multi.environment import outside_any_job
from zeroaccel.cli.leftovers import LAUNCH_ID, end_leftovers

# Starts a child in a session of its own, which ignores SIGTERM, and leaves it behind.
PARENT = """
import subprocess, sys
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=-1, stderr=-3)
child.stdout.read(1)
print(child.pid)
"""


def _orphan(launch_id: str) -> psutil.Process:
    environment = outside_any_job() | {LAUNCH_ID: launch_id}
    done = subprocess.run([sys.executable, "-c", PARENT], env=environment, capture_output=True, text=True, check=True)
    return psutil.Process(int(done.stdout))


def test_orphans_of_one_launch_are_ended_and_no_others() -> None:
    mine, another = uuid.uuid4().hex, uuid.uuid4().hex
    orphan, stranger = _orphan(mine), _orphan(another)
    try:
        assert end_leftovers(mine, grace_seconds=0.1) == 1
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert stranger.status() != psutil.STATUS_ZOMBIE
        assert end_leftovers(mine, grace_seconds=0.1) == 0
    finally:
        assert end_leftovers(another, grace_seconds=0.1) == 1
