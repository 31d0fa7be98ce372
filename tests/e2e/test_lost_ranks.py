"""Ranks that are killed under `zeroaccel launch`: the run continues from states in the machine's memory."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.fault_injection import namespaces_missing, network
from tests.e2e.hosts import run_machines
from tests.support.environment import free_port, outside_any_job
from tests.support.job import run_command, run_job, running_command
from tests.time_limits import Limit, seconds

LAUNCH = (sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", "2", "--cpu")

PROGRAM = Path(__file__).with_name("lost_ranks.py")


def _whole_run(tmp_path: Path) -> tuple[Path, Path]:
    """Returns the folder of an uninterrupted run of 12 steps, and an empty one for a run that loses a rank."""
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    lost.mkdir()
    plain = run_job(2, PROGRAM, [whole, 12, "off", 3], env={"TORCHELASTIC_RESTART_COUNT": "0"})
    assert plain.returncode == 0, plain.stderr
    return whole, lost


def test_a_killed_rank_is_started_again_from_memory(tmp_path: Path) -> None:
    whole, lost = _whole_run(tmp_path)
    words = ["--max_restarts", 1, "--timeout", 5, PROGRAM, lost, 12, 2, 3, "kill:5:1"]
    result = run_command([*LAUNCH, *words], timeout=150.0)
    assert result.returncode == 0, result.stderr
    assert len(re.findall("resuming from the memory of the machine, step [24];", result.stderr)) == 1
    assert [len(list(folder.glob("resumed.*"))) for folder in (whole, lost)] == [1, 2]
    assert (whole / "digest").read_text() == (lost / "digest").read_text()


def test_a_rank_that_is_lost_twice_is_left_out(tmp_path: Path) -> None:
    words = ["launch", "--cpu", "--num_processes", "2:3", "--max_restarts", 2, "--timeout", 5]
    faults = "kill:3:1,kill:4:1"  # the next attempts have no rank 2, and rank 1 is the one at the third place
    command = [sys.executable, "-m", "zeroaccel.cli", *words, PROGRAM, tmp_path, 8, 2, 3, faults]
    result = run_command(command, timeout=150.0)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("process 1 was lost twice in a row: continuing with 2 processes") == 1
    assert [(tmp_path / f"resumed.{attempt}").exists() for attempt in range(4)] == [True, True, True, False]
    assert (tmp_path / "digest").exists()


@pytest.mark.slow
def test_a_short_soak() -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "lost_ranks.py"
    result = run_command([sys.executable, program, "--minutes", 5, "--faults", 12, "--seed", 900], timeout=400.0)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 with other weights, 0 hung, 0 left something behind" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_one_side_of_a_cut_network_continues(tmp_path: Path, stage: int) -> None:
    if missing := namespaces_missing():
        pytest.skip(f"needs network namespaces: {missing}")
    words = ["-m", "zeroaccel.cli", "launch", "--num_processes", "2", "--cpu", "--num_machines", "1:2"]
    words += ["--max_restarts", "2", "--timeout", "2", "--main_process_port", free_port()]
    words += ["--rdzv_conf", "last_call_timeout=3"]
    script = [PROGRAM, tmp_path, 400, 2, stage, "cut:5:0+1"]
    environment = outside_any_job() | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    with network() as net, ExitStack() as stack:
        words += ["--main_process_ip", net.address("a"), "--machine_rank"]
        machines = []
        for number, name in enumerate("ab"):
            command = [str(word) for word in (sys.executable, *net.inside(name), *words, number, *script)]
            output = stack.enter_context(open(tmp_path / f"{name}.txt", "w"))
            machine = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=output)
            stack.callback(machine.kill)
            machines.append(machine)
        wait_for(tmp_path / "fault.0", 60)
        net.cut()
        cut = time.time()
        (tmp_path / "cut").touch()
        wait_for(tmp_path / "resumed.1", 90)
        when, step = (tmp_path / "resumed.1").read_text().split()
        net.mend()
        codes = [machine.wait(seconds(90)) for machine in machines]
    said = [(tmp_path / f"{name}.txt").read_text() for name in "ab"]
    assert step in "24"
    assert codes[0] == 0, said[0]
    assert codes[1] > 0, said[1]
    assert not (tmp_path / "resumed.2").exists(), said[0]
    assert (tmp_path / "digest").exists()
    print(f"{float(when) - cut:.1f} s from the cut to the next step; machine b ended with {codes[1]}")
    assert float(when) - cut < seconds(12.0)


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "stage", "faults"), [(1, 2, "5:1,7:0,9:1"), (2, 3, "5:1")])
def test_a_trainer_goes_on_from_memory_with_the_same_losses_evaluations_and_weights(
    tmp_path: Path, machines: int, stage: int, faults: str
) -> None:
    pytest.importorskip("transformers")
    program = Path(__file__).with_name("lost_trainer.py")
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    lost.mkdir()
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", 2, "--engine", "zeroaccel"]
    plain = run_command([*command, program, whole, stage, "off"], timeout=100.0)
    assert plain.returncode == 0, plain.stderr[-3000:]
    command += ["--max_restarts", 3, "--timeout", 20]
    if machines > 1:
        command += ["--num_machines", machines, "--main_process_ip", "127.0.0.1"]
        command += ["--main_process_port", free_port(), "--machine_rank"]
    words = [program, lost, stage, 2, faults]
    of_ranks = [[*command, *([rank] if machines > 1 else []), *words] for rank in range(machines)]
    ends = run_machines(of_ranks, tmp_path, 200)
    assert [end.returncode for end in ends] == [0] * machines, [end.stderr[-3000:] for end in ends]
    place = "the machine" if machines == 1 else "2 machines"
    resumed = re.findall(f"resuming from the memory of {place}, step ([0-9]+);", ends[0].stderr)
    assert len(resumed) == len(faults.split(","))
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (whole, lost))
    assert first.pop("begins") == ["0"]
    assert second.pop("begins") == ["0", *resumed]
    assert second == first


def wait_for(path: Path, most_seconds: float) -> None:
    limit = Limit(most_seconds)
    while not path.exists():
        assert not limit.is_over(), f"{path.name} did not come"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "steps"), [("kill:5:1", "[24]"), ("copy:3:1", "2"), ("copy:3:0", "2")])
def test_a_lost_rank_of_two_machines_starts_both_again_together(tmp_path: Path, fault: str, steps: str) -> None:
    command = [*LAUNCH, "--num_machines", "1:2", "--max_restarts", 2, "--timeout", 5]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port(), "--machine_rank"]
    whole, lost = _whole_run(tmp_path)
    words = [PROGRAM, lost, 12, 2, 3, fault]
    first, second = run_machines([[*command, rank, *words] for rank in (0, 1)], tmp_path, 90)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    found = f"resuming from the memory of 2 machines, step {steps}; there is no other"
    assert len(re.findall(found, first.stderr)) == 1, first.stderr
    assert (whole / "digest").read_text() == (lost / "digest").read_text()


def test_a_lost_machine_leaves_copies_and_the_other_one_goes_on(tmp_path: Path) -> None:
    command = [*LAUNCH, "--num_machines", "1:2", "--max_restarts", 1, "--timeout", 5]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    command += ["--rdzv_conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2", "--machine_rank"]
    words = [PROGRAM, tmp_path, 12, 2, 3, "machine:5:1"]
    first, second = run_machines([[*command, rank, *words] for rank in (0, 1)], tmp_path, 90)
    assert (first.returncode, second.returncode) == (0, -signal.SIGKILL), first.stderr
    assert len(re.findall("resuming from the memory of the machine, step [24]; there is no other", first.stderr)) == 1
    assert (tmp_path / "resumed.1").read_text().split()[1] in "24"
    assert (tmp_path / "digest").exists()


@pytest.mark.slow
def test_a_machine_that_waits_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    """The second of two machines is lost; a third machine waits, and the job refuses a fourth with another script."""
    command = [*LAUNCH, "--num_machines", "1:2", "--max_restarts", 1, "--timeout", 5]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port(), "--machine_rank"]
    lost, other = tmp_path / "lost", tmp_path / PROGRAM.name
    lost.mkdir()
    other.write_text("raise SystemExit\n")
    words = [lost, 12, 2, 3, "later:5:0+1"]

    def command_of(rank: int, program: Path = PROGRAM) -> list[str]:
        return [*map(str, [*command, rank, program, *words])]

    with ExitStack() as stack:
        first, second = (stack.enter_context(running_command(command_of(rank), cwd=tmp_path)) for rank in (0, 1))
        wait_for(lost / "fault.0", 60)
        third = stack.enter_context(running_command(command_of(2), cwd=tmp_path))
        refused = run_command(command_of(4, other), timeout=60.0)
        time.sleep(seconds(6.0))  # the third machine has asked for a place by then; a later question is answered, too
        (lost / "cut").touch()
        cut = time.time()
        ends = [machine.wait(90) for machine in (first, second, third)]
    codes = [end.returncode for end in ends]
    assert codes == [0, -signal.SIGKILL, 0], "\n".join(end.stderr for end in ends)
    said = "".join(end.stderr for end in ends)
    assert len(re.findall("resuming from the memory of 2 machines, step [24]; there is no other", said)) == 1, said
    assert refused.returncode == 2
    assert "the machines differ in" in refused.stderr
    assert (lost / "digest").exists()
    print(f"{float((lost / 'resumed.1').read_text().split()[0]) - cut:.1f} s from the loss to the next step")
