"""The environment's description of a job, and the one clear error for each contradiction in it."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

from zeroaccel.comm.environment import launcher_owns_store, local_rank_and_size, rank_and_world_size, timeout_seconds
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


def test_a_full_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, **JOB)
    assert rank_and_world_size() == (1, 4)


def test_no_environment_is_a_job_of_one() -> None:
    assert rank_and_world_size() == (0, 1)
    assert local_rank_and_size() is None
    assert not launcher_owns_store()


def test_one_process_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, WORLD_SIZE="1", RANK="0")
    assert rank_and_world_size() == (0, 1)


def test_an_address_alone_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, MASTER_ADDR="10.0.0.1", MASTER_PORT="1")
    assert rank_and_world_size() == (0, 1)


@pytest.mark.parametrize("name", MPI)
def test_ranks_of_mpirun_do_not_each_take_themselves_for_the_job(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _set(monkeypatch, **{name: "2"})
    with pytest.raises(ConfigError, match=rf"{name}=2 set, as by mpirun, but not RANK, .*set WORLD_SIZE=1"):
        rank_and_world_size()
    _set(monkeypatch, WORLD_SIZE="1")
    assert rank_and_world_size() == (0, 1)


@pytest.mark.parametrize("missing", list(JOB))
def test_each_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    given = {name: value for name, value in JOB.items() if name != missing}
    _set(monkeypatch, **given)
    with pytest.raises(ConfigError) as caught:
        rank_and_world_size()
    message = str(caught.value)
    assert f"set, but not {missing};" in message
    assert all(f"{name}={value}" in message for name, value in given.items())
    assert "zeroaccel launch" in message


def test_all_missing_variables_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, WORLD_SIZE="2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 set, but not RANK, MASTER_ADDR, MASTER_PORT; .*unset RANK"):
        rank_and_world_size()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "4", "RANK: expected 0 to 3 .*, got 4"),
        ("RANK", "-1", "RANK: expected 0 to 3 .*, got -1"),
        ("RANK", "one", "RANK: expected an integer, got 'one'"),
        ("WORLD_SIZE", "4.0", "WORLD_SIZE: expected an integer, got '4.0'"),
        ("MASTER_PORT", "http", "MASTER_PORT: expected an integer, got 'http'"),
    ],
)
def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    _set(monkeypatch, **(JOB | {name: value}))
    with pytest.raises(ConfigError, match=message):
        rank_and_world_size()


def test_the_place_on_the_machine_needs_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, LOCAL_RANK="2")
    assert local_rank_and_size() is None
    _set(monkeypatch, LOCAL_WORLD_SIZE="8")
    assert local_rank_and_size() == (2, 8)


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout_seconds(None) == 600.0
    _set(monkeypatch, ZEROACCEL_COLLECTIVE_TIMEOUT="2.5")
    assert timeout_seconds(None) == 2.5
    assert timeout_seconds(7) == 7.0
    assert timeout_seconds(timedelta(minutes=1)) == 60.0
    assert timeout_seconds(0) == math.inf


@pytest.mark.parametrize("value", ["ten", "-1", "nan"])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    _set(monkeypatch, ZEROACCEL_COLLECTIVE_TIMEOUT=value)
    with pytest.raises(ConfigError, match="ZEROACCEL_COLLECTIVE_TIMEOUT: expected a number of seconds"):
        timeout_seconds(None)
    with pytest.raises(ConfigError, match="timeout: expected"):
        timeout_seconds(-1)
