"""`zeroaccel launch` from outside: the output of a job, its end, and that no process keeps running."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import time_limits
from tests.e2e.hosts import alive, files_of, write_script
from tests.support.environment import free_port
from tests.support.job import JobResult, RunningJob, run_command, running_command
from zeroaccel.errors import Preempted

LAUNCH = (sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", "2", "--cpu")


def _launch(*arguments: object, **environment: str) -> JobResult:
    return run_command([*LAUNCH, *arguments], timeout=60.0, env=environment)


def test_ranks_meet_and_get_what_the_dry_run_shows(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import json, os, sys\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(total)\n"
        "facts = {'environment': dict(os.environ), 'argv': sys.argv}\n"
        "facts |= {'total': total.item(), 'threads': torch.get_num_threads()}\n"
        "facts['cores'] = ','.join(map(str, sorted(os.sched_getaffinity(0))))\n"
        "open(f'{__file__}.{dist.get_rank()}.json', 'w').write(json.dumps(facts))\n"
        "dist.destroy_process_group()\n",
    )
    # The agent expands macros of its own; the script's arguments must pass through unchanged.
    cores = len(psutil.Process().cpu_affinity() or [0])
    flags = ["--main-process-port", free_port(), "--timeout", "30", "--zero_stage", "3"]
    flags += ["--enable_cpu_affinity"] if cores > 1 else []
    arguments = [script, "$$", "${local_rank}", "a 'b'", "--debug"]
    words = [*flags, *arguments]
    result = _launch(*words)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert result.stderr.startswith("zeroaccel: 2 processes on cpu, ")
    assert result.stderr.count("\n") == 1
    shown = [line for line in _launch("--dry-run", *words).stdout.splitlines() if not line.startswith("#")]
    for rank in range(2):
        facts = json.loads(Path(f"{script}.{rank}.json").read_text())
        assert facts["total"] == 3.0
        assert facts["argv"] == [str(word) for word in arguments]
        assert 1 <= facts["threads"] <= max(1, cores // 2)
        promised = dict(word.split("=", 1) for word in shlex.split(shown[rank].split(sys.executable)[0]))
        assert promised["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
        assert promised.get("ZEROACCEL_CPU_CORES", facts["cores"]) == facts["cores"]
        assert promised["ZEROACCEL_COMPAT"] == "1"
        assert len(promised) == 16 + (cores > 1)
        assert {name: facts["environment"][name] for name in promised} == promised | {"CUDA_VISIBLE_DEVICES": ""}


def test_the_first_failure_is_reported_last_and_once(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('batch 7 has no labels')\n"
        "dist.all_reduce(torch.ones(1))\n",
    )
    result = _launch("--tee", "2", "--log_dir", tmp_path / "logs", script)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.count("ValueError: batch 7 has no labels") == 1
    assert "ChildFailedError" not in result.stderr
    last = result.stderr.splitlines()[-7:]
    assert last[0].startswith("zeroaccel: rank 1 (host ")
    assert last[0].endswith(", exit code 1) failed first:")
    assert last[1:] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
        "    raise ValueError('batch 7 has no labels')",
        "ValueError: batch 7 has no labels",
        last[5],
        f"zeroaccel: output and reports are in {tmp_path / 'logs'}",
    ]
    assert last[5] in ("rank 0: lost its connection", "rank 0: stopped by the launcher")
    (log,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert log.read_text().endswith("ValueError: batch 7 has no labels\n")


def test_an_error_of_all_ranks_is_one_line(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, time\nfrom zeroaccel.errors import ConfigError\n"
        "time.sleep(0.3 * int(os.environ['RANK']))\n"
        "raise ConfigError('zero_optimization.stage', expected='0 to 3', got=4)\n",
    )
    result = _launch(script)
    assert result.returncode == 2
    assert result.stderr.splitlines()[1:] == [
        "zeroaccel: on all 2 ranks: ConfigError: zero_optimization.stage: expected 0 to 3, got 4"
    ]


def test_sys_exit_of_one_rank_ends_the_job_with_its_code(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import os, sys, time\nif os.environ['RANK'] == '0':\n    sys.exit(3)\ntime.sleep(600)\n"
    )
    result = _launch(script)
    assert result.returncode == 3
    assert f"exit code 3) failed first: sys.exit(3) at {script}:3 in <module>" in result.stderr
    assert result.stderr.endswith("rank 1: stopped by the launcher\n")


def test_a_job_is_started_again_and_says_why(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os\n"
        "print(f\"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}\", flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    raise OSError('disk full')\n",
    )
    result = _launch("--max_restarts", 1, "--redirects", "0:1", "--log_dir", tmp_path / "logs", script)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "0.1\n1.1\n"
    assert [path.read_text() for path in sorted((tmp_path / "logs").glob("*/*/0/stdout.log"))] == ["0.0\n", "1.0\n"]
    assert result.stderr.endswith(" failed first: OSError: disk full; starting again (1 of at most 1)\n")


def test_a_program_that_is_not_python_and_is_killed() -> None:
    result = _launch("--no-python", "sh", "-c", "if [ $RANK = 1 ]; then kill -KILL $$; fi; exec sleep 600")
    assert result.returncode == 128 + signal.SIGKILL
    assert (
        "SIGKILL) failed first: killed from outside, most often by the system because memory ran out" in result.stderr
    )


@contextmanager
def _running(
    words: Sequence[Any], names: list[str], *flags: str, fresh: bool = False
) -> Iterator[tuple[RunningJob, list[psutil.Process]]]:
    """Yields a launched job, once it has written a process id to each of the named files, and these processes."""
    with running_command([*LAUNCH, *flags, *words], cwd=words[0].parent, fresh=fresh) as job:
        yield job, [psutil.Process(pid) for pid in files_of(words[0].parent, names)]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(
            signal.SIGKILL,
            id="SIGKILL",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs a signal on the parent's death"),
        ),
    ],
)
def test_a_signal_to_the_launcher_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    # Rank 0 has a child in a session of its own, which only the launcher's mark identifies.
    script = write_script(
        tmp_path,
        "import os, signal, subprocess, sys, time\n"
        "rank = os.environ['RANK']\n"
        "if rank == '1' and sys.argv[1:]:\n"
        "    signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "if rank == '0':\n"
        "    sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    child = subprocess.Popen(sleep, start_new_session=True, stderr=subprocess.DEVNULL)\n"
        "    open('child', 'w').write(f'{child.pid}\\n')\n"
        "open(rank, 'w').write(f'{os.getpid()}\\n')\n"
        "time.sleep(600)\n",
    )
    is_killed = number == signal.SIGKILL  # then rank 1 ignores the signal on the launcher's death
    words, flags = ([script, "on"], ["--shutdown_timeout", "1"]) if is_killed else ([script], [])
    with _running(words, ["0", "1", "child"], *flags, fresh=is_killed) as (job, processes):
        job.send_signal(number)
        result = job.wait()
        if is_killed:
            psutil.wait_procs(processes, timeout=time_limits.seconds(10))
        else:
            assert result.returncode == 128 + number
            assert result.stderr.splitlines()[1:] == [
                f"zeroaccel: {number.name}: stopping the processes within 30 s; a second signal kills them",
                f"zeroaccel: stopped by {number.name}; all processes of this machine have ended",
            ]
        assert alive([process.pid for process in processes], 0.0) == []


NEEDS_SECONDS = """
import os, signal, sys, time
def end(*_):
    time.sleep(float(sys.argv[1]))
    open('saved' + os.environ['RANK'], 'w').close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(os.environ['RANK'], 'w').write(f'{os.getpid()}\\n')
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("flags", "seconds", "saved"),
    [
        pytest.param(["--shutdown_timeout", "1"], "6", [], id="a limit of 1 s kills"),
        pytest.param(["--shutdown_timeout", "20"], "1.5", ["saved0", "saved1"], id="a limit of 20 s waits"),
        pytest.param([], "12", ["saved0", "saved1"], id="the default waits", marks=pytest.mark.slow),
    ],
)
def test_ranks_have_the_shutdown_timeout_after_sigterm(
    tmp_path: Path, flags: list[str], seconds: str, saved: list[str]
) -> None:
    script = write_script(tmp_path, NEEDS_SECONDS.replace("sys.argv[1]", seconds))
    with _running([script], ["0", "1"], *flags) as (job, _):
        job.send_signal(signal.SIGTERM)
        result = job.wait()
    assert result.returncode == 128 + signal.SIGTERM
    assert sorted(path.name for path in tmp_path.glob("saved*")) == saved
    killed = "zeroaccel: not all processes ended within 1 s and were killed; --shutdown_timeout sets this limit"
    assert (killed in result.stderr.splitlines()) == (not saved)


PREEMPTED = """
import os, sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from zeroaccel import Accelerator, ProjectConfiguration, ZeroPlugin, set_seed

project = ProjectConfiguration('run', automatic_checkpoint_naming=True, save_on_preemption=True)
accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=2), project_config=project)
set_seed(0)
model = torch.nn.Linear(4, 1)
loader = DataLoader(torch.randn(4000, 4), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
if Path('run').exists():
    accelerator.load_state()
    os.write(1, f'{accelerator.process_index} {model.global_steps}\\n'.encode())  # one write, as two ranks print
    sys.exit()
for (step, x) in enumerate(loader):
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        Path(os.environ['RANK']).write_text(f'{os.getpid()}\\n')
"""


@pytest.mark.parametrize(
    ("number", "to_launcher"),
    [
        pytest.param(signal.SIGTERM, True, id="SIGTERM"),
        pytest.param(signal.SIGUSR1, True, id="SIGUSR1"),
        pytest.param(signal.SIGTERM, False, id="one rank", marks=pytest.mark.slow),
    ],
)
def test_a_preempted_job_is_saved_and_says_so(tmp_path: Path, number: signal.Signals, to_launcher: bool) -> None:
    script = write_script(tmp_path, PREEMPTED)
    with _running([script], ["0", "1"]) as (job, processes):
        job.send_signal(number) if to_launcher else processes[1].send_signal(number)
        result = job.wait()
    assert result.returncode == Preempted.exit_code
    saved = tmp_path / "run" / "checkpoints" / "checkpoint_0"
    last = f"zeroaccel: preempted: saved state {saved}; run the same command again to continue"
    assert result.stderr.splitlines()[-1] == last
    again = run_command([*LAUNCH, script], timeout=60.0, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    (steps,) = {line.split()[1] for line in again.stdout.splitlines()}
    assert int(steps) > 3


@pytest.mark.slow
def test_a_trainer_that_is_preempted_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.TrainingArguments, "enable_jit_checkpoint"):
        pytest.skip("this transformers has no enable_jit_checkpoint")
    program = Path(__file__).with_name("preempted_trainer.py")
    command = [*LAUNCH[:-1], "--engine", "zeroaccel", program, tmp_path, "3", "2", "0"]
    result = run_command(command, timeout=100.0)
    assert result.returncode == 0, result.stderr[-3000:]
    outcome = json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"stage"')))
    assert outcome["wrong"] == 0
    assert outcome["preemptions"] >= 2
    last = run_command([*command[:-2], "0", "0"], timeout=100.0)
    assert last.returncode == Preempted.exit_code, last.stderr[-3000:]
    assert last.stderr.splitlines()[-1].startswith(
        "zeroaccel: preempted: Trainer saved a checkpoint; run the same command"
    )
