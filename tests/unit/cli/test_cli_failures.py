"""The report of the rank that failed first: from the exit states of processes to a message and an exit code."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from zeroaccel.cli.launch.failures import RankEnd, Report, exit_code, explain_failure, first_failure, read_report

CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


def _end(
    rank: int, status: int = 1, headline: str = "", kind: Any = "exception", time: float = 100.0, **more: Any
) -> RankEnd:
    code = more.pop("code", status if status > 0 else 1)
    trace = f"Traceback (most recent call last):\n  File of rank {rank}\n{headline}" if kind != "exit" else ""
    report = Report(kind, headline, trace, code, time, more.pop("printed", False)) if headline else None
    return RankEnd(rank, rank, 1000 + rank, status, more.pop("noticed", 100.0), report, **more)


def _tell(*ends: RankEnd, ranks: int = 2, **options: Any) -> str:
    return explain_failure(ends, ranks=range(ranks), host="box", **options)


@pytest.mark.parametrize(
    ("ends", "first", "code"),
    [
        pytest.param([_end(0, time=100.2, headline="A"), _end(1, time=100.1, headline="B")], 1, 1, id="earlier"),
        pytest.param([_end(0, headline=CLOSED), _end(1, time=100.5, headline="ValueError: x")], 1, 1, id="lost"),
        pytest.param(
            [_end(0, 75, "CollectiveError: rank 1 left", "on_purpose"), _end(1, 3, "sys.exit(3)", "exit", 101.0)],
            1,
            3,
            id="waited",
        ),
        pytest.param([_end(0, -signal.SIGTERM), _end(1, 7, noticed=101.0)], 1, 7, id="stopped"),
        pytest.param([_end(0, headline="KeyError: 1"), _end(1, -signal.SIGKILL)], 1, 137, id="killed"),
        pytest.param(
            [_end(0, -signal.SIGKILL, noticed=131.0), _end(1, headline="KeyError: 1")], 1, 1, id="killed by launcher"
        ),
        pytest.param([_end(0, -signal.SIGTERM), _end(1, -signal.SIGTERM)], 0, 143, id="all terminated"),
        pytest.param([_end(0, headline=CLOSED), _end(1, -signal.SIGTERM)], 0, 1, id="lost to elsewhere"),
        pytest.param([_end(0, -signal.SIGTERM, "KeyError: 1", code=1)], 0, 1, id="signal on the way out"),
    ],
)
def test_the_rank_that_failed_first_is_found(ends: list[RankEnd], first: int, code: int) -> None:
    assert first_failure(ends).rank == first
    assert exit_code(first_failure(ends)) == code


def test_the_users_own_connection_error_is_no_consequence() -> None:
    own = _end(0, headline="ConnectionResetError: [Errno 104] Connection reset by peer", time=100.0)
    assert first_failure([own, _end(1, headline="ValueError: x", time=100.4)]).rank == 0


def test_a_traceback_is_reported_once_with_the_fate_of_the_others() -> None:
    told = _tell(
        _end(0, headline=CLOSED, time=100.4),
        _end(1, headline="ValueError: boom"),
        _end(2, -signal.SIGTERM),
        _end(3, -signal.SIGTERM),
        _end(4, headline="ValueError: boom"),
        ranks=6,
    )
    assert told.splitlines() == [
        "rank 1 (host box, pid 1001, exit code 1) failed first:",
        "Traceback (most recent call last):",
        "  File of rank 1",
        "ValueError: boom",
        "rank 0: lost its connection; ranks 2-3: stopped by the launcher; rank 4: failed in the same way; "
        "rank 5: had finished",
    ]


def test_an_error_raised_on_purpose_is_one_line_for_all_ranks() -> None:
    ends = [_end(rank, 2, "ConfigError: stage: got 4", "on_purpose") for rank in range(2)]
    assert _tell(*ends) == "on all 2 ranks: ConfigError: stage: got 4"
    assert _tell(*ends, several_machines=True) == "on all 2 ranks of this machine: ConfigError: stage: got 4"
    assert _tell(ends[1], _end(0, -signal.SIGTERM)).splitlines() == [
        "on rank 1: ConfigError: stage: got 4",
        "rank 0: stopped by the launcher",
    ]
    assert _tell(ends[0], ranks=1) == "on rank 0: ConfigError: stage: got 4"


def test_debug_shows_the_traceback_of_an_error_raised_on_purpose() -> None:
    ends = [_end(rank, 2, "ConfigError: stage: got 4", "on_purpose") for rank in range(2)]
    told = _tell(*ends, debug=True)
    assert told.startswith("rank 0 (host box, pid 1000, exit code 2) failed first:\nTraceback")
    assert told.endswith("\nrank 1: failed in the same way")


@pytest.mark.parametrize(
    ("importer", "code", "path", "is_told"),
    [
        (
            "/v/lib/python3.11/site-packages/torch/cuda/_utils.py",
            "from cuda.bindings import (",
            "/home/me/cuda.py",
            True,
        ),
        ("/usr/lib/python3.11/random.py", "import bisect", "/home/me/bisect/__init__.py", True),
        ("/home/me/train.py", "import cuda", "/home/me/cuda.py", False),
        ("/v/lib/python3.11/site-packages/torch/cuda/_utils.py", "call()", "/home/me/cuda.py", False),
        ("/v/lib/python3.11/site-packages/a.py", "import b", "/v/lib/python3.11/site-packages/b.py", False),
    ],
)
def test_a_file_in_the_place_of_a_package_is_named(importer: str, code: str, path: str, is_told: bool) -> None:
    trace = (
        f'Traceback (most recent call last):\n  File "/home/me/train.py", line 1, in <module>\n    import torch\n'
        f'  File "{importer}", line 9, in <module>\n    {code}\n  File "{path}", line 2, in <module>\n    x = 1\n'
        "AttributeError: partially initialized module 'torch' has no attribute 'zeros'"
    )
    end = RankEnd(0, 0, 1000, 1, 100, Report("exception", "AttributeError: x", trace, 1, 100.0))
    assert _tell(end, ranks=1).endswith("imports: rename the file") is is_told


def test_messages_printed_by_ranks_are_not_repeated() -> None:
    ends = [_end(rank, 75, "CollectiveError: a long\nstory", "on_purpose", printed=True) for rank in range(2)]
    assert _tell(*ends) == "on all 2 ranks: CollectiveError (exit code 75); the message is above"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (_end(1, 3, "sys.exit(3) at a.py:1 in f", "exit"), "exit code 3) failed first: sys.exit(3) at a.py:1 in f"),
        (_end(1, 9), "exit code 9) failed first: it left no traceback; its output is above"),
        (_end(1, -signal.SIGKILL), "SIGKILL) failed first: killed from outside, most often by the system"),
        (_end(1, -signal.SIGTERM), "SIGTERM) failed first: it received SIGTERM"),
        (_end(1, -signal.SIGSEGV, fault="Fatal: x\n  File"), "SIGSEGV) failed first:\nFatal: x\n  File"),
        (_end(1, -63), "signal 63) failed first: it received signal 63"),
    ],
)
def test_ends_without_a_traceback(end: RankEnd, words: str) -> None:
    assert _tell(end).splitlines()[0].startswith("rank 1 (host box, pid 1001, ")
    assert words in _tell(end)
    assert _tell(end).endswith("\nrank 0: had finished")


def test_a_message_to_sys_exit_is_reported_once() -> None:
    ends = [_end(rank, 1, "no data (sys.exit at a.py:3 in main)", "exit") for rank in range(2)]
    assert _tell(*ends) == "on all 2 ranks: no data (sys.exit at a.py:3 in main)"


def test_a_lost_connection_points_to_another_machine() -> None:
    told = _tell(_end(0, headline=CLOSED), ranks=1, several_machines=True)
    assert told.endswith("the cause is probably on another machine: see the message of its launcher")


def test_reports_of_torchs_own_recorder_are_read_too() -> None:
    trace = "Traceback (most recent call last):\nValueError: x\n"
    message = {"message": "ValueError: x", "extraInfo": {"py_callstack": trace, "timestamp": "7"}}
    report = read_report({"message": message})
    assert (report.headline, report.traceback, report.time) == ("ValueError: x", trace.rstrip(), 7.0)
    assert read_report({"message": "gone", "timestamp": 8}).headline == "gone"
