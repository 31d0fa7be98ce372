"""Runs test files of other projects, from where they lie, with `import deepspeed` answered by zeroaccel.

A suite's own module knows its files, what stands in for missing hardware, and the causes of what cannot pass;
`run_files` runs pytest on them, one process per file, and `markdown` writes what came out. Nothing of another project
is copied into this tree, and its files are not changed.
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
    """What one test did: its file, its name with its class, one of `STATUSES`, and the last line of the reason."""

    file: str
    test: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    text: str = field(default="", repr=False)
    """All that pytest wrote of a test that did not pass."""


@dataclass(frozen=True)
class Cause:
    """Why tests cannot pass here: those whose name and report match, and which of `STATUSES` this makes them."""

    reason: str
    test: str = ""
    """A regular expression, searched in `file::test`."""
    report: str = ""
    """A regular expression, searched in the reason and the report."""
    status: str = NOT_RUNNABLE

    def applies(self, outcome: Outcome) -> bool:
        """Whether the test did not pass and is one of those meant."""
        return (
            outcome.status != PASSED
            and re.search(self.test, f"{outcome.file}::{outcome.test}") is not None
            and re.search(self.report, f"{outcome.reason}\n{outcome.text}") is not None
        )


def facade_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's variables with those that make `deepspeed` zeroaccel's in every Python process, and `extra`.

    The repository and this folder are on PYTHONPATH, so that pytest's plugins can be named with `-p`, and the
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
    """Runs pytest on each file in a process of its own, in `source`, and gives the outcomes in the order of the files.

    Args:
        files: relative to `source`; what pytest takes after `::` may follow.
        environment: all variables of the process.
        plugins: modules for pytest's `-p`.
        options: further arguments of pytest's.
        limit_seconds: for one test; a file has it once for each of its tests that did not report.
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
    """The outcomes, with the first cause that applies instead of the report's last line."""
    result = []
    for outcome in outcomes:
        cause = next((cause for cause in causes if cause.applies(outcome)), None)
        result.append(outcome if cause is None else replace(outcome, status=cause.status, reason=cause.reason))
    return result


def markdown(title: str, command: str, outcomes: Sequence[Outcome], distributions: Sequence[str] = ()) -> str:
    """A table by file, and one of every test that did not pass with its reason; ends with a newline."""
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
    """Ends what a test left running: ranks whose launcher was cut."""
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
