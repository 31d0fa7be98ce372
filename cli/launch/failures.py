"""Explains how a job failed: the rank that failed first, its error, the state of the others, and the exit code.

Pure: `agent` collects a `RankEnd` per failed rank of this machine, `launch_job` prints `explain_failure`. The rank
that failed first is seldom the one that printed last: the others lose their connection to it and print long errors.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from zeroaccel.errors import Preempted

ReportKind = Literal["exception", "on_purpose", "exit", "interrupt"]

_NEVER_A_CONSEQUENCE = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
AFTER_FAILURE_SECONDS = 6
"""Time from SIGTERM to SIGKILL for the other processes after one has failed; less with a shorter --shutdown_timeout.

A job whose ranks have diverged ends within 15 s after the limit, of which up to 8 s have already passed.
"""

_PATIENCE_SECONDS = AFTER_FAILURE_SECONDS - 2.0  # times have a resolution of one second

# Messages of gloo, NCCL and the rendezvous store about a lost process, in exceptions of torch.distributed.
_CONNECTION_ERRORS = re.compile(r"^([\w.]*\.)?(RuntimeError|Dist\w*Error)\b")
_CONNECTION_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|remote process exited"
    r"|closed by peer|caused pair closure|communicator was aborted|failed to (recv|send)"
    r"|(recv|send)(Value|Bytes) failed|failed to connect|wait timeout after",
    re.IGNORECASE,
)
# zeroaccel's errors name the rank that failed; that rank has its own report, unless all ranks have this one.
_COLLECTIVE_ERRORS = re.compile(r"^Collective\w*Error\b")


@dataclass(frozen=True)
class Report:
    """The report of a rank on its own end.

    Attributes:
        kind: an uncaught exception, one of `zeroaccel.errors`, a `sys.exit`, or Ctrl-C.
        headline: the exception without its traceback, or the place and the code of `sys.exit`.
        traceback: the full traceback, without a final newline; empty for `sys.exit`.
        exit_code: exit code with which the process was about to exit.
        time: seconds since the epoch.
        printed: true if the message is already on the terminal.
        pid: process id; 0 if unknown.
    """

    kind: ReportKind
    headline: str
    traceback: str
    exit_code: int
    time: float
    printed: bool = False
    pid: int = 0


@dataclass(frozen=True)
class RankEnd:
    """The end of a process that did not succeed.

    Attributes:
        status: its exit code, negative for a signal.
        noticed: time at which the launcher noticed, in whole seconds since the epoch.
        report: its own report, if it could write one.
        fault: the Python stack that a crash in native code left.
    """

    rank: int
    local_rank: int
    pid: int
    status: int
    noticed: float
    report: Report | None = None
    fault: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code, negative for a signal; that of the report if the launcher's signal came while it was exiting."""
        return self.report.exit_code if self.report is not None and self.status < 0 else self.status


def read_report(data: Mapping[str, Any]) -> Report:
    """Reads a report that `runner` or torch's own `record` has written."""
    if "zeroaccel" in data:
        return Report(**{**data["zeroaccel"], "traceback": data["zeroaccel"]["traceback"].rstrip()})
    message = data["message"]
    if isinstance(message, str):
        return Report("exception", message, message, 1, float(data.get("timestamp", 0)))
    extra = message["extraInfo"]
    return Report("exception", message["message"], extra["py_callstack"].rstrip(), 1, float(extra["timestamp"]))


def first_failure(ends: Sequence[RankEnd]) -> RankEnd:
    """Returns the end that explains the others: the earliest of the kind that is most likely a cause."""
    start = min(end.noticed for end in ends)

    def order(end: RankEnd) -> tuple[int, float, int]:
        time = end.report.time if end.report else end.noticed
        if _stopped_by_launcher(end, start):
            return 3, time, end.rank
        if _is_consequence(end):
            return 2, time, end.rank
        return (0 if -end.exit_code in _NEVER_A_CONSEQUENCE else 1), time, end.rank

    return min(ends, key=order)


def exit_code(end: RankEnd) -> int:
    """Returns the launcher's exit code for this end: the same, or 128 + n for signal n as in a shell."""
    return end.exit_code if end.exit_code > 0 else 128 - end.exit_code


def preemption(ends: Sequence[RankEnd], num_ranks: int) -> str:
    """Returns a line about the state that a preempted run has saved; "" unless all ranks were preempted."""
    reports = [end.report for end in ends if end.report is not None and exit_code(end) == Preempted.exit_code]
    return reports[0].headline if reports and len(reports) == num_ranks else ""


def explain_failure(
    ends: Sequence[RankEnd], *, ranks: range, host: str, several_machines: bool = False, debug: bool = False
) -> str:
    """Returns the explanation of a failed job on one machine, without a final newline.

    Args:
        ends: the ends of the processes of this machine that did not succeed, at least one.
        ranks: all ranks of this machine.
        debug: show tracebacks also for errors that were raised on purpose.
    """
    first = first_failure(ends)
    report = first.report
    named = [first.rank]
    alike = [end.rank for end in ends if _same_words(end, first)]
    is_plain = report is not None and (report.kind == "on_purpose" or (report.kind == "exit" and len(alike) > 1))
    if report is not None and is_plain and not (debug and report.traceback):
        named = alike
        message = report.headline
        if report.printed:
            message = f"{report.headline.partition(':')[0]} (exit code {exit_code(first)}); the message is above"
        lines = [f"on {_all_or_some(alike, ranks, several_machines)}: {message}"]
    else:
        lines = [f"{_describe_rank(first, host)} failed first{_cause(first)}"]
        lines += _shadowing(report.traceback) if report is not None else []
    if others := [rank for rank in ranks if rank not in named]:
        lines.append(_other_ranks(ends, first, others))
    if several_machines and _is_consequence(first):
        lines.append("the cause is probably on another machine: see the message of its launcher")
    return "\n".join(lines)


_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line \d+, in .*\n    (?P<code>.*)$', re.MULTILINE)
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|python3\.\d+)[/\\]")


def _shadowing(traceback: str) -> list[str]:
    """Returns a line about a user's file that another package has imported for one of the same name, or none.

    Python looks beside the script first, so torch gets a `cuda.py` there for `import cuda`.
    """
    frames = [(match["path"], match["code"]) for match in _FRAME.finditer(traceback)]
    for (importer, code), (path, _) in pairwise(frames):
        name = re.split(r"[/\\]", path.removesuffix("/__init__.py").removesuffix(".py"))[-1]
        is_import = re.match(rf"(from|import)\s+{re.escape(name)}\b", code) is not None
        if is_import and _INSTALLED.search(importer) and not _INSTALLED.search(path):
            return [f"{path} takes the place of the package {name!r} that {importer} imports: rename the file"]
    return []


def _describe_rank(end: RankEnd, host: str) -> str:
    how = f"exit code {end.exit_code}" if end.exit_code >= 0 else _signal_name(end.exit_code)
    return f"rank {end.rank} (host {host}, pid {end.pid}, {how})"


def _cause(end: RankEnd) -> str:
    """Returns the text after "failed first"."""
    if end.report is not None:
        return f":\n{end.report.traceback}" if end.report.traceback else f": {end.report.headline}"
    if end.fault:
        return f":\n{end.fault.rstrip()}"
    if end.exit_code == -signal.SIGKILL:
        return ": killed from outside, most often by the system because memory ran out"
    if end.exit_code < 0:
        return f": it received {_signal_name(end.exit_code)}"
    return ": it left no traceback; its output is above"


def _other_ranks(ends: Sequence[RankEnd], first: RankEnd, others: Iterable[int]) -> str:
    """Returns one line about the other processes of this machine; those without an end have succeeded."""
    start = min(end.noticed for end in ends)
    by_rank = {end.rank: _rank_outcome(end, first, start) for end in ends}
    groups: dict[str, list[int]] = {}
    for rank in others:
        groups.setdefault(by_rank.get(rank, "had finished"), []).append(rank)
    return "; ".join(f"{_named(who)}: {fate}" for fate, who in groups.items())


def _rank_outcome(end: RankEnd, first: RankEnd, start: float) -> str:
    if _same_words(end, first):
        return "failed in the same way"
    if _stopped_by_launcher(end, start):
        return "stopped by the launcher"
    if end.report is not None and _COLLECTIVE_ERRORS.match(end.report.headline):
        return "gave up waiting"
    if _is_consequence(end):
        return "lost its connection"
    if end.report is not None:
        line = end.report.headline.splitlines()[0] if end.report.headline else end.report.kind
        return line if len(line) <= 120 else f"{line[:117]}..."
    return f"exit code {end.exit_code}" if end.exit_code > 0 else _signal_name(end.exit_code)


def _same_words(end: RankEnd, first: RankEnd) -> bool:
    if end is first:
        return True
    if end.report is None or first.report is None:
        return False
    return (end.report.kind, end.report.headline) == (first.report.kind, first.report.headline)


def _stopped_by_launcher(end: RankEnd, start: float) -> bool:
    if end.report is not None:
        return False
    is_late = end.noticed - start > _PATIENCE_SECONDS
    return end.exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM) or (end.exit_code == -signal.SIGKILL and is_late)


def _is_consequence(end: RankEnd) -> bool:
    if end.report is None:
        return False
    headline = end.report.headline
    if _COLLECTIVE_ERRORS.match(headline):
        return True
    return bool(_CONNECTION_ERRORS.match(headline) and _CONNECTION_WORDS.search(headline))


def _all_or_some(alike: Sequence[int], ranks: range, several_machines: bool) -> str:
    if len(alike) == len(ranks) > 1:
        return f"all {len(ranks)} ranks" + (" of this machine" if several_machines else "")
    return _named(alike)


def _named(ranks: Iterable[int]) -> str:
    """Returns a text such as "rank 3" or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'' if spans == [[spans[0][0]] * 2] else 's'} {text}"


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
