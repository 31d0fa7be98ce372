"""The job and a rank's cores as read from the environment, and one error for each contradiction in the variables."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.refusals import refused
from zeroaccel import logs
from zeroaccel.comm import environment
from zeroaccel.comm.environment import (
    core_set,
    fair_threads,
    launcher_owns_store,
    local_rank_and_size,
    omp_threads_chosen,
    rank_and_world_size,
    timeout_seconds,
    usable_cores,
)
from zeroaccel.errors import ConfigError

JOB = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
NAMES = (*JOB, *MPI, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "ZEROACCEL_COLLECTIVE_TIMEOUT")


@pytest.fixture(autouse=True)
def _outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (JOB, (1, 4)),
        ({}, (0, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1)),  # one process needs no address
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, (0, 1)),  # an address alone does not make a job
        *(({name: "2", "WORLD_SIZE": "1"}, (0, 1)) for name in MPI),
    ],
)
def test_a_job_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: tuple[int, int]
) -> None:
    assert local_rank_and_size() is None
    assert not launcher_owns_store()
    _set(monkeypatch, **variables)
    assert rank_and_world_size() == place


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        *(({name: "2"}, f"{name}=2 set, as by mpirun, but not RANK, .*set WORLD_SIZE=1") for name in MPI),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE=2 set, but not RANK, MASTER_ADDR, MASTER_PORT; .*unset RANK"),
        (JOB | {"RANK": "4"}, "RANK: expected 0 to 3 .*, got 4"),
        (JOB | {"RANK": "-1"}, "RANK: expected 0 to 3 .*, got -1"),
        (JOB | {"RANK": "one"}, "RANK: expected an integer, got 'one'"),
        (JOB | {"WORLD_SIZE": "4.0"}, "WORLD_SIZE: expected an integer, got '4.0'"),
        (JOB | {"MASTER_PORT": "http"}, "MASTER_PORT: expected an integer, got 'http'"),
    ],
)
def test_a_contradiction_is_named(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    _set(monkeypatch, **variables)
    with pytest.raises(ConfigError, match=message):
        rank_and_world_size()


@pytest.mark.parametrize("missing", JOB)
def test_each_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    others = {name: value for name, value in JOB.items() if name != missing}
    _set(monkeypatch, **others)
    said = [f"set, but not {missing};", "zeroaccel launch", *(f"{name}={value}" for name, value in others.items())]
    with refused(ConfigError, *said):
        rank_and_world_size()


def test_the_place_on_the_machine_needs_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, LOCAL_RANK="2")
    assert local_rank_and_size() is None
    _set(monkeypatch, LOCAL_WORLD_SIZE="8")
    assert local_rank_and_size() == (2, 8)


def test_the_limit_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout_seconds(None) == 600.0
    _set(monkeypatch, ZEROACCEL_COLLECTIVE_TIMEOUT="2.5")
    assert timeout_seconds(None) == 2.5
    assert timeout_seconds(7) == 7.0
    assert timeout_seconds(timedelta(minutes=1)) == 60.0
    assert timeout_seconds(0) == math.inf


@pytest.mark.parametrize("value", ["ten", "-1", "nan"])
def test_an_invalid_limit_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    _set(monkeypatch, ZEROACCEL_COLLECTIVE_TIMEOUT=value)
    with pytest.raises(ConfigError, match="ZEROACCEL_COLLECTIVE_TIMEOUT: expected a number of seconds"):
        timeout_seconds(None)
    with pytest.raises(ConfigError, match="timeout: expected"):
        timeout_seconds(-1)


ALL = frozenset(range(8))


@pytest.mark.parametrize(
    ("usable", "own", "local", "threads"),
    [
        (8, ALL, [ALL], 8),
        (8, ALL, [ALL] * 3, 2),
        (8, ALL, [ALL] * 9, 1),
        (4, frozenset(range(4)), [frozenset(range(4)), frozenset(range(4, 8))], 4),  # bound externally
        (3, ALL, [ALL] * 2, 1),  # a container's quota
    ],
)
def test_ranks_share_cores_fairly(usable: int, own: frozenset[int], local: list[frozenset[int]], threads: int) -> None:
    assert fair_threads(usable, own, local) == threads


def test_the_cores_of_this_process() -> None:
    assert 1 <= usable_cores() <= len(core_set())


@pytest.mark.parametrize(
    ("omp", "elastic", "launcher", "said"),
    [
        (None, False, b"", False),
        (None, True, b"OMP_NUM_THREADS=1", False),
        ("4", True, b"", True),  # torchrun would have set it to 1
        ("1", False, b"", True),
        ("1", True, b"PATH=/bin\0HOME=/", False),  # torchrun's default
        ("1", True, b"PATH=/bin\0OMP_NUM_THREADS=1\0", True),  # set for torchrun itself
        ("1", True, None, False),
    ],
)
def test_a_number_of_threads_set_by_the_user_is_recognized(
    omp: str | None,
    elastic: bool,
    launcher: bytes | None,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in (("OMP_NUM_THREADS", omp), ("TORCHELASTIC_RUN_ID", "none" if elastic else None)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if launcher is not None:
        (tmp_path / "environ").write_bytes(launcher)
    assert omp_threads_chosen(tmp_path / "environ") == said


def limits_after(world_size: int, soft: int, hard: int) -> list[str]:
    """Returns the soft limit on open files and the log, from a process that starts with these limits."""
    code = (
        "import logging, resource; from zeroaccel.comm.environment import allow_connections; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
        f"allow_connections({world_size}); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [done.stdout.strip(), done.stderr]


def test_the_limit_of_open_files_follows_the_number_of_ranks() -> None:
    assert limits_after(8, 1024, 4096) == ["1024", ""]
    assert limits_after(128, 1024, 4096) == ["1152", ""]
    limit, said = limits_after(1024, 1024, 4096)
    assert limit == "4096"
    assert "1024 ranks need about 5632 open files per process, but the hard limit is 4096" in said


def test_one_queue_for_all_streams_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_seen", set())
    for value, count in (("8", 0), ("1", 1), ("1", 1)):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
        environment.warn_of_one_queue()
        assert len(caplog.records) == count
    for part in ("CUDA_DEVICE_MAX_CONNECTIONS=1", "two NCCL communicators can deadlock", "unset it"):
        assert part in caplog.text
