"""The runner executes scripts as the interpreter would, adds --local_rank for those that take it, and reports ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import time_limits
from tests.support.environment import outside_any_job
from zeroaccel.cli.launch import runner
from zeroaccel.cli.launch.launch_plan import local_rank_option

FACTS = """
import json, pickle, sys, threading
class Local: pass
def facts():
    main = sys.modules["__main__"]
    return {
        "name": __name__, "file": __file__, "package": __package__, "cached": __cached__,
        "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__, "argv": sys.argv, "path": sys.path,
        "main": vars(main) is globals(), "pickle": type(pickle.loads(pickle.dumps(Local()))) is Local,
        "names": sorted(name for name in globals() if name.startswith("__")),
    }
import atexit
print(json.dumps(facts()))
atexit.register(lambda: print(vars(sys.modules["__main__"]) is globals(), pickle.dumps(Local()) == dump))
dump = pickle.dumps(Local())
"""


class Job:
    """One process under the runner, which writes its report into a folder, as under the elastic agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report_path = folder / "attempt" / "0" / "error.json"
        self.report_path.parent.mkdir(parents=True)

    def script(self, source: str) -> str:
        (self.folder / "script.py").write_text(source)
        return "script.py"

    def environment(self, world_size: int = 1) -> dict[str, str]:
        return outside_any_job() | {
            "TORCHELASTIC_ERROR_FILE": str(self.report_path),
            "LOCAL_WORLD_SIZE": str(world_size),
        }

    def run(self, source: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, runner.__file__, self.script(source)]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=time_limits.seconds(30),
        )

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.report_path.read_text())["zeroaccel"]
        return report


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def _output(folder: Path, *words: str) -> str:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=outside_any_job(), capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("words", [("sub/script.py", "a", "-b"), ("-m", "pkg.mod", "a"), ("-m", "pkg", "--", "-m")])
def test_a_program_finds_the_interpreter_as_it_expects_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    for path in ("sub/script.py", "pkg/mod.py", "pkg/__main__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(FACTS)
    (tmp_path / "pkg" / "__init__.py").touch()
    expected = _output(tmp_path, *words)
    assert expected.endswith("\nTrue True\n")
    assert _output(tmp_path, runner.__file__, *words) == expected


def test_an_exception_is_reported_and_not_printed(job: Job) -> None:
    done = job.run("def f():\n    raise ValueError('boom')\nf()\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    report = job.report
    assert (report["kind"], report["headline"], report.get("printed")) == ("exception", "ValueError: boom", None)
    trace = report["traceback"].splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1] == f'  File "{job.folder / "script.py"}", line 3, in <module>'
    assert trace[-1] == "ValueError: boom"
    # The fields that torch's elastic agent reads.
    message = json.loads(job.report_path.read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == report["traceback"]
    assert int(message["extraInfo"]["timestamp"]) == int(report["time"])


def test_a_syntax_error_has_no_frames_of_ours(job: Job) -> None:
    assert job.run("x = (\n").returncode == 1
    assert job.report["headline"].splitlines()[-1].startswith("SyntaxError: ")
    assert "runner.py" not in job.report["traceback"]


@pytest.mark.parametrize(
    ("error", "code"),
    [("ConfigError('a.b', expected='x')", 2), ("CollectiveError('lost')", 75), ("EngineStateError('late')", 1)],
)
def test_errors_raised_on_purpose_have_their_exit_codes(job: Job, error: str, code: int) -> None:
    done = job.run(f"from zeroaccel.errors import *\nraise {error}\n")
    assert (done.returncode, done.stderr) == (code, "")
    assert job.report["kind"] == "on_purpose"
    assert job.report["headline"].startswith(error.partition("(")[0] + ": ")


@pytest.mark.parametrize(
    ("statement", "code", "headline"),
    [
        ("sys.exit(3)", 3, "sys.exit(3) at {script}:2 in <module>"),
        ("sys.exit('no data')", 1, "no data (sys.exit at {script}:2 in <module>)"),
        ("import argparse; argparse.ArgumentParser().parse_args(['-x'])", 2, "sys.exit(2) at {script}:2 in <module>"),
    ],
)
def test_sys_exit_is_reported_with_its_place(job: Job, statement: str, code: int, headline: str) -> None:
    done = job.run(f"import sys\n{statement}\n")
    assert done.returncode == code
    assert "no data" not in done.stderr
    assert job.report["headline"] == headline.format(script=job.folder / "script.py")


@pytest.mark.parametrize("statement", ["pass", "raise SystemExit", "sys.exit(0)"])
def test_success_leaves_no_report(job: Job, statement: str) -> None:
    assert job.run(f"import sys\n{statement}\n").returncode == 0
    assert not job.report_path.exists()


def test_a_crash_leaves_the_python_stack(job: Job) -> None:
    done = job.run("import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()\n")
    assert done.returncode == -signal.SIGSEGV
    assert "line 3 in crash" in job.report_path.with_name(runner.FAULT_FILE).read_text()


def test_hooks_of_libraries_run_and_the_report_notes_printed_tracebacks(job: Job) -> None:
    chained = "import sys\nfound = sys.excepthook\ndef hook(*args):\n    print('chained')\n    found(*args)\n"
    done = job.run(f"{chained}sys.excepthook = hook\nraise ValueError('boom')\n")
    assert (done.stdout, done.stderr) == ("chained\n", "")
    assert "printed" not in job.report
    done = job.run("import sys\nsys.excepthook = lambda *args: print('mine')\nraise ValueError('boom')\n")
    assert done.stdout == "mine\n"
    assert job.report["printed"] is True


def test_a_hook_may_choose_the_exit_code(job: Job) -> None:
    assert job.run("import sys\nsys.excepthook = lambda *args: sys.exit(75)\nraise ValueError\n").returncode == 75


def test_a_handled_exception_is_printed_when_the_script_asks_for_it(job: Job) -> None:
    done = job.run("import sys\ntry: 1 / 0\nexcept ZeroDivisionError: sys.excepthook(*sys.exc_info())\n")
    assert done.returncode == 0
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_fork_of_the_process_prints_its_own_error(job: Job) -> None:
    done = job.run("import os\nif os.fork(): os.wait()\nelse: raise ValueError('in the fork')\n")
    assert done.returncode == 0
    assert done.stderr.endswith("ValueError: in the fork\n")
    assert not job.report_path.exists()


def test_a_failing_process_waits_briefly_for_other_failures(job: Job) -> None:
    process = subprocess.Popen(
        [sys.executable, runner.__file__, job.script("raise ValueError\n")],
        cwd=job.folder,
        env=job.environment(world_size=2),
    )
    limit = time_limits.Limit(20)
    while not job.report_path.exists() and not limit.is_over():
        time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    other = job.report_path.parent.parent / "1" / job.report_path.name
    other.parent.mkdir()
    other.touch()
    assert process.wait(time_limits.seconds(20)) == 1


def test_without_a_launcher_errors_are_printed_as_usual(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('boom')\n")
    command = [sys.executable, runner.__file__, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=outside_any_job(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: boom\n")


ARGPARSE = "import argparse\np = argparse.ArgumentParser()\np.add_argument({}, type=int, default=-1)\n"


@pytest.mark.parametrize(
    ("source", "option"),
    [
        (ARGPARSE.format("'--local_rank'"), "--local_rank"),
        (ARGPARSE.format("'--local-rank'"), "--local-rank"),
        (ARGPARSE.format("'-r', '--local_rank'"), "--local_rank"),
        (
            "import click\n@click.command()\n@click.option('--local_rank', type=int)\ndef main(local_rank): ...",
            "--local_rank",
        ),
        ("import fire\ndef train(lr: float = 1.0, local_rank: int = -1): ...\nfire.Fire(train)\n", "--local_rank"),
        ("import fire\ndef train(lr: float = 1.0): ...\nfire.Fire(train)\n", None),
        (ARGPARSE.format("'--rank'"), None),
        ("text = '--local_rank'\n# add_argument('--local_rank')\n", None),
        ("raise SystemExit('this must not run')\n", None),
        ("def broken(:\n", None),
        ("", None),
    ],
)
def test_the_local_rank_option_of_a_script_is_found(source: str, option: str | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert local_rank_option(script) == option


def test_modules_beside_the_script_are_read_too(tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "arguments.py").write_text("from . import more\nfrom .. import nothing\nimport torch\n")
    (package / "more.py").write_text(f"import project.arguments\n{ARGPARSE.format(repr('--local_rank'))}")
    (tmp_path / "train.py").write_text("import os\nfrom project.arguments import parse\n")
    assert local_rank_option(tmp_path / "train.py") == "--local_rank"
    (package / "more.py").write_bytes(b"\xff\xfe\x00")  # not a Python file
    assert local_rank_option(tmp_path / "train.py") is None
    assert local_rank_option(tmp_path / "absent.py") is None


@pytest.mark.parametrize("program", [("s.py",), ("-m", "s")])
def test_the_runner_puts_the_local_rank_before_the_arguments(program: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import json, sys\nprint(json.dumps(sys.argv))\n")
    done = subprocess.run(
        [sys.executable, runner.__file__, "--local_rank_as=--local-rank", *program, "a"],
        cwd=tmp_path,
        env=outside_any_job() | {"LOCAL_RANK": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)[1:] == ["--local-rank=3", "a"]
