"""Orphans of a job are found by its mark, in any session and under any parent."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.support.environment import outside_any_job
from zeroaccel.cli.launch.orphans import LAUNCH_ID, end_orphans

# Starts a marked child in a session of its own, which ignores SIGTERM. The parent has no mark and waits for a signal:
# some machines end every process whose parent is gone.
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
