"""Runs test files of other projects in their own folders, with zeroaccel in place of `import deepspeed`.

Each suite's module lists its files, replacements for missing hardware, and the causes of failures that cannot be
avoided; `run_files` runs pytest on them, one process per file, and `markdown` formats the results. This tree contains
no copy of another project's files, and the files are not changed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent

PASSED, FAILED, DIFFERS = "passed", "failed", "differs by decision"
SKIPPED, NOT_RUNNABLE = "skipped by itself", "not runnable here"
STATUSES = (PASSED, FAILED, DIFFERS, SKIPPED, NOT_RUNNABLE)


@dataclass(frozen=True)
class Outcome:
    """Result of one test: its file, its name with its class, one of `STATUSES`, and the last line of the reason."""

    file: str
    test: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    text: str = field(default="", repr=False)
    """pytest's full report of a test that did not pass."""


@dataclass(frozen=True)
class Cause:
    """A reason why tests cannot pass here; it sets the status of tests whose name and report match."""

    reason: str
    test: str = ""
    """Regular expression, searched in `file::test`."""
    report: str = ""
    """Regular expression, searched in the reason and the report."""
    status: str = NOT_RUNNABLE

    def applies(self, outcome: Outcome) -> bool:
        """Returns True if the test did not pass and matches this cause."""
        return (
            outcome.status != PASSED
            and re.search(self.test, f"{outcome.file}::{outcome.test}") is not None
            and re.search(self.report, f"{outcome.reason}\n{outcome.text}") is not None
        )


def facade_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's variables, `extra`, and variables by which `import deepspeed` gets zeroaccel.

    The repository and this folder are on PYTHONPATH, so that pytest can load its plugins by name with `-p`, and the
    interpreter's folder is first on PATH, so that `accelerate` and `torchrun` are those of this environment.
    """
    sys.path.insert(0, str(REPOSITORY))
    from zeroaccel.compat.finder import inherited_environment

    paths = [str(REPOSITORY), str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}
    environment.update(inherited_environment(environment, shadow=True))
    environment.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    return environment


def run_files(
    files: Iterable[str],
    *,
    source: Path,
    environment: Mapping[str, str],
    plugins: Sequence[str] = (),
    options: Sequence[str] = (),
    limit_seconds: float = 600.0,
) -> list[Outcome]:
    """Runs pytest on each file in a process of its own, in `source`; returns the outcomes in the order of the files.

    Args:
        files: relative to `source`; each may end with a pytest node id after `::`.
        environment: all variables of the process.
        plugins: modules for pytest's `-p`.
        options: further arguments of pytest.
        limit_seconds: limit for one test.
    """
    outcomes: list[Outcome] = []
    for file in files:
        begun = time.monotonic()
        found = _run_file(file, source, environment, plugins, options, limit_seconds)
        counts = ", ".join(f"{sum(o.status == s for o in found)} {s}" for s in STATUSES)
        print(f"{file}: {counts}, {time.monotonic() - begun:.0f} s", flush=True)
        print(*(f"  {o.test}: {o.reason}" for o in found if o.status == FAILED), sep="\n", flush=True)
        outcomes += found
    return outcomes


def explained(outcomes: Iterable[Outcome], causes: Sequence[Cause]) -> list[Outcome]:
    """Returns the outcomes with the reason of the first cause that applies, instead of the report's last line."""
    result = []
    for outcome in outcomes:
        cause = next((cause for cause in causes if cause.applies(outcome)), None)
        result.append(outcome if cause is None else replace(outcome, status=cause.status, reason=cause.reason))
    return result


def markdown(title: str, command: str, outcomes: Sequence[Outcome], distributions: Sequence[str] = ()) -> str:
    """Formats a table by file, and one of all tests that did not pass, with reasons; ends with a newline."""
    present = ", ".join(f"{name} {_version(name)}" for name in ("zeroaccel", "torch", *distributions))
    lines = [f"## {title}", "", f"`{command}`; {present}, Python {sys.version.split()[0]}.", ""]
    lines += ["| file | " + " | ".join(STATUSES) + " |", "| --- |" + " ---: |" * len(STATUSES)]
    for file in dict.fromkeys(outcome.file for outcome in outcomes):
        lines.append(_row(file, [o for o in outcomes if o.file == file]))
    lines += [_row("all", outcomes), ""]
    rest = [outcome for outcome in outcomes if outcome.status != PASSED]
    if rest:
        lines += ["| test | is | reason |", "| --- | --- | --- |"]
        lines += [f"| `{o.test}` | {o.status} | {_cell(o.reason)} |" for o in rest]
        lines.append("")
    return "\n".join(lines)


def _run_file(
    file: str,
    source: Path,
    environment: Mapping[str, str],
    plugins: Sequence[str],
    options: Sequence[str],
    limit_seconds: float,
) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"--rootdir={source}"]
        command += [argument for plugin in plugins for argument in ("-p", plugin)]
        command += [f"--timeout={limit_seconds:g}", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        process = subprocess.Popen(
            [*command, *options, file],
            cwd=source,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate()
        finally:
            _end_group(process.pid)
        name = file.partition("::")[0]
        if not report.exists():
            return [Outcome(name, "(the whole file)", FAILED, _last_line(output), text=output)]
        return _read(report, name)


def _read(report: Path, file: str) -> list[Outcome]:
    outcomes = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}".removeprefix("::")
        status, message, text = PASSED, "", ""
        for tag, meaning in (("skipped", SKIPPED), ("error", FAILED), ("failure", FAILED)):
            if (node := case.find(tag)) is not None:
                status, message, text = meaning, node.get("message") or "", node.text or ""
        outcomes.append(Outcome(file, name, status, _first_line(message), float(case.get("time") or 0.0), text))
    return outcomes


def _end_group(leader: int) -> None:
    """Kills processes that a test left running, such as ranks whose launcher was killed."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    return f"| {name} | " + " | ".join(str(sum(o.status == s for o in outcomes)) for s in STATUSES) + " |"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed)"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:300]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _last_line(text: str) -> str:
    return _first_line("\n".join(reversed(text.splitlines())))
