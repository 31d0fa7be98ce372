"""Forks of the fork server: a program in a fork behaves as in a new interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.environment import outside_any_job
from tests.support.fork_server import needs_interpreter
from tests.support.job import JobResult, run_command, run_job

SCRIPT = """\
import atexit, os, random, sys, tempfile, threading, time

atexit.register(print, "exit handler", flush=True)
threading.Thread(target=lambda: (time.sleep(0.1), print("thread", flush=True))).start()
print(sys.argv, __name__, os.path.basename(__file__), sys.path[0] == os.path.dirname(__file__), sys.stdin.read() == "")
print(sorted(set(os.environ) & {"EXTRA", "RANK"}), os.getcwd() == sys.argv[1], len(os.listdir("/proc/self/task")))
sys.exit("the end")
"""


def _same(tmp_path: Path, words: list[object]) -> JobResult:
    """Runs a program in a fork and in a new interpreter; returns the result, which must be equal."""
    forked, new = (
        run_command([sys.executable, *words], cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}, fresh=fresh)
        for fresh in (False, True)
    )
    assert (forked.stdout, forked.stderr, forked.returncodes) == (new.stdout, new.stderr, new.returncodes)
    return forked


def test_a_script_sees_what_a_new_interpreter_shows_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    result = _same(tmp_path, ["script.py", tmp_path])
    assert result.stdout.splitlines()[-2:] == ["thread", "exit handler"]
    assert (result.stderr, result.returncode) == ("the end\n", 1)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise ValueError('of the program')", 1),
        ("import sys; sys.exit(75)", 75),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -2),
        ("import os; os._exit(3)", 3),
        ("import sys; sys.excepthook = lambda *_: print('by the hook'); 1 / 0", 1),
        ("import sys; sys.excepthook = lambda *_: sys.exit(75); 1 / 0", 75),
    ],
)
def test_programs_end_as_in_a_new_interpreter(tmp_path: Path, program: str, code: int) -> None:
    assert _same(tmp_path, ["-c", program]).returncode == code


def test_a_module_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "local_module.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:], sys.path[0])\n")
    assert _same(tmp_path, ["-m", "local_module", 5]).stdout == f"__main__ local_module ['5'] {tmp_path}\n"


def test_a_sitecustomize_on_the_path_runs_first(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('first')\n")
    result = run_command([sys.executable, "-c", "print('then')"], env={"PYTHONPATH": str(tmp_path)})
    assert result.stdout == "first\nthen\n"


def test_forks_have_random_states_and_threads_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint('torch' in sys.modules)\nimport random, numpy, torch\n"
        "print(torch.get_num_threads(), torch.rand(()).item(), random.random(), numpy.random.rand())\n"
    )
    first, second = (run_job(1, script, env={"OMP_NUM_THREADS": "2"}).stdout.splitlines() for _ in range(2))
    assert first[0] == second[0] == "True"
    (threads, drawn, *random_numbers), (_, drawn_again, *others) = first[1].split(), second[1].split()
    assert threads == "2"
    assert drawn == drawn_again  # torch starts from a constant seed
    assert not set(random_numbers) & set(others)
    assert run_job(1, script, fresh=True).stdout.startswith("False")


def test_a_child_process_is_a_fork_that_leaves_its_parent_as_it_is(tmp_path: Path) -> None:
    child = (
        "import os, sys, threading; print('torch' in sys.modules, os.getppid(), sys.argv, threading.active_count(),"
        " __name__, os.path.isdir(sys.argv[1]))"
    )
    (tmp_path / "script.py").write_text(
        "import atexit, os, subprocess, sys, tempfile, threading\n"
        "atexit.register(print, 'exit of the parent')\n"
        "thread = threading.Thread(target=threading.Event().wait, daemon=True)\n"
        "thread.start()\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        f"    words = [sys.executable, '-c', {child!r}, folder]\n"
        "    said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout\n"
        "    expected = f\"True {os.getpid()} ['-c', {folder!r}] 1 __main__ True\\n\"\n"
        "    print(said == expected or said, os.path.isdir(folder), flush=True)\n"
        "print(subprocess.run([sys.executable, '-c', 'import os; os.kill(os.getpid(), 9)']).returncode)\n"
        "print(subprocess.run([sys.executable, '-S', '-c', 'import sys; sys.exit(4)']).returncode)\n"
    )
    result = run_command([sys.executable, tmp_path / "script.py"])
    assert result.stdout.splitlines() == ["True True", "-9", "4", "exit of the parent"]


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (["-c", "pass"], {}, False),
        (["-u", "-m", "module"], {"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "a"}, False),
        (["-W", "error", "-c", "pass"], {}, True),
        (["absent.py"], {}, True),
        (["-c", "pass"], {"PYTHONHASHSEED": "1"}, True),
        (["-c", "pass"], {"LD_PRELOAD": "library.so"}, True),
        (["-c", "pass"], {"TORCH_LOGS": "all"}, True),
    ],
)
def test_settings_read_at_interpreter_start_need_a_new_interpreter(
    tmp_path: Path, words: list[str], variables: dict[str, str], expected: bool
) -> None:
    environment = outside_any_job()
    asked = needs_interpreter([sys.executable, *words], environment | variables, str(tmp_path), environment)
    assert asked == expected
