"""The number of threads: which setting wins, and the default where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroaccel.comm.environment import core_set, fair_threads, omp_threads_chosen, usable_cores

ALL = frozenset(range(8))


@pytest.mark.parametrize(
    ("usable", "own", "local", "threads"),
    [
        (8, ALL, [ALL], 8),
        (8, ALL, [ALL] * 3, 2),
        (8, ALL, [ALL] * 9, 1),
        (4, frozenset(range(4)), [frozenset(range(4)), frozenset(range(4, 8))], 4),  # bound by another program
        (3, ALL, [ALL] * 2, 1),  # a container's quota
    ],
)
def test_a_fair_part(usable: int, own: frozenset[int], local: list[frozenset[int]], threads: int) -> None:
    assert fair_threads(usable, own, local) == threads


def test_the_cores_of_this_process() -> None:
    assert 1 <= usable_cores() <= len(core_set())


@pytest.mark.parametrize(
    ("omp", "elastic", "launcher", "said"),
    [
        (None, False, b"", False),
        (None, True, b"OMP_NUM_THREADS=1", False),
        ("4", True, b"", True),  # torchrun would have made it 1
        ("1", False, b"", True),
        ("1", True, b"PATH=/bin\0HOME=/", False),  # torchrun's default
        ("1", True, b"PATH=/bin\0OMP_NUM_THREADS=1\0", True),  # torchrun was given it
        ("1", True, None, False),
    ],
)
def test_who_said_how_many_threads(
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
