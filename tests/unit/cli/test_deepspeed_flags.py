"""Flags of the `deepspeed` command: the processes of a dry run on a machine with 8 devices. No process starts."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import typed
from zeroaccel.cli import compat as deepspeed_command
from zeroaccel.cli.launch import launch_job as launch_module
from zeroaccel.cli.launch import launch_machine as machine_module
from zeroaccel.cli.launch import launch_plan as plan_module
from zeroaccel.cli.launch import ssh as ssh_module
from zeroaccel.cli.launch import typed_settings as typed_module
from zeroaccel.cli.machine import Device

DEVICES = (Device("A100", 2**36, has_bf16=True),) * 8
HOSTS = "".join(f"worker-{number} slots=4\n" for number in range(4))


@dataclass
class DryRun:
    """The output of a dry run: environment and command of each process, machines of a hostfile, and notes."""

    processes: list[dict[str, str]]
    commands: list[list[str]]
    hosts: list[str]
    notes: str


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with 8 devices and 16 cores that resolves every host name, in a folder with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_module.os, "environ", {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"})
    monkeypatch.setattr(launch_module, "_run", lambda *_: pytest.fail("the launch began"))
    for module in (plan_module, machine_module):
        monkeypatch.setattr(module, "devices", lambda: DEVICES)
    monkeypatch.setattr(plan_module, "usable_cores", lambda: 16)
    monkeypatch.setattr(plan_module, "neighbouring_cores", lambda: list(range(16)))
    monkeypatch.setattr(plan_module, "port_trouble", lambda _: "")
    monkeypatch.setattr(plan_module, "own_address_towards", lambda _: "127.0.0.1")
    for module in (plan_module, ssh_module):
        monkeypatch.setattr(module, "is_known_host", lambda _: True)
    (tmp_path / "train.py").write_text("import argparse\nparser = argparse.ArgumentParser()\n")
    (tmp_path / "hosts").write_text(HOSTS)
    return monkeypatch


def _dry_run(words: str) -> DryRun:
    said = typed(f"launch --dry_run {words}")
    run = DryRun([], [], [], said.err)
    for line in said.out.splitlines():
        if line.startswith("# on "):
            run.hosts.append(line.removeprefix("# on ").partition(",")[0])
        elif line and not line.startswith("#"):
            parts = shlex.split(line)
            start = parts.index(sys.executable)
            run.processes.append(dict(word.split("=", 1) for word in parts[:start]))
            run.commands.append(parts[start:])
    return run


@pytest.mark.parametrize(
    ("words", "num_processes", "visible"),
    [
        ("--include localhost:2,5", 2, "2,5"),
        ("-i localhost:0", 1, "0"),
        ("-e localhost:0,1,2", 5, "3,4,5,6,7"),
        ("--include localhost", 8, None),
        ("--include localhost:1 --cpu", 1, ""),
        ("--num_gpus -1", 8, None),
        ("--hostfile hosts -i worker-1:3", 1, "3"),
    ],
)
def test_filters_choose_devices(
    words: str, num_processes: int, visible: str | None, machine: pytest.MonkeyPatch
) -> None:
    run = _dry_run(f"{words} train.py")
    assert [process["LOCAL_RANK"] for process in run.processes] == [str(rank) for rank in range(num_processes)]
    assert {process.get("CUDA_VISIBLE_DEVICES") for process in run.processes} == {visible}


@pytest.mark.parametrize(
    ("words", "world_size", "first"),
    [
        ("--nproc_per_node=2", "2", {"RANK": "0"}),
        ("--nproc-per-node gpu", "8", {}),
        ("--nproc_per_node auto --standalone", "8", {"MASTER_ADDR": "127.0.0.1"}),
        ("--nproc_per_node cpu", "16", {"CUDA_VISIBLE_DEVICES": ""}),
        (
            "--nnodes 2 --node_rank 1 --nproc_per_node 4 --master_addr node1 --master_port 5",
            "8",
            {"RANK": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "5"},
        ),
        (
            "--nnodes 3 --nproc_per_node 2 --rdzv_id 9 --rdzv_backend c10d --rdzv_endpoint node1:5",
            "6",
            {"RANK": "<order of arrival>"},
        ),
        (
            "--nnodes 1:4 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint node1",
            "<at most 8>",
            {"LOCAL_WORLD_SIZE": "2"},
        ),
        ("--nnodes 2:2 --nproc_per_node 2 --rdzv_backend=c10d --rdzv_endpoint n:1", "4", {}),
        ("--num_nodes 4 --num_gpus 2", "2", {"RANK": "0"}),
    ],
)
def test_lines_of_torchrun_are_lines_of_this_launcher(
    words: str, world_size: str, first: dict[str, str], machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(typed_module, "usable_cores", lambda: 16)
    process = _dry_run(f"{words} train.py").processes[0]
    assert process["WORLD_SIZE"] == world_size
    assert {name: process[name] for name in first} == first


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            "--num_nodes 4",
            "--num_nodes 4: does nothing, as no hostfile and no --master_addr names another machine",
        ),
        (
            "--hostfile hosts --launcher OpenMPI",
            "--launcher openmpi: ssh starts the machines of the hostfile",
        ),
        ("--local_ranks_filter 0", "--local_ranks_filter: does nothing, the terminal shows every rank"),
        ("--start_method spawn", "--start_method: does nothing, every process is a separate program"),
    ],
)
def test_flags_without_effect_are_noted(words: str, note: str, machine: pytest.MonkeyPatch) -> None:
    assert f"note: {note}" in _dry_run(f"{words} train.py").notes


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--exclude localhost", "--exclusion_filter: expected to leave one of the 8 devices of this machine, got"),
        ("--include localhost:8", "--inclusion_filter: expected devices 0 to 7, got '8'"),
        ("--hostfile hosts --num_nodes 5", "--num_nodes: expected at most the 4 machines of hosts, got 5"),
        ("--hostfile hosts --num_gpus 5", "--num_gpus: expected at most 4, the slots of worker-0, got 5"),
        (
            "--hostfile hosts --num_gpus 2 -i worker-1",
            "--num_gpus: set together with --inclusion_filter",
        ),
    ],
)
def test_filters_that_choose_nothing(words: str, refusal: str, machine: pytest.MonkeyPatch) -> None:
    assert refusal in typed(f"launch --dry_run {words} train.py", code=2).err


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", True),
        ("--no_local_rank", False),
        ("--pass_local_rank", True),
        ("--module", True),
    ],
)
def test_the_local_rank_is_given_to_scripts_that_take_it(words: str, given: bool, machine: pytest.MonkeyPatch) -> None:
    Path("takes.py").write_text("parser.add_argument('--local_rank')\n")
    name = "takes" if "--module" in words else "takes.py"
    for script, expected in ((name, given), ("train.py", "--pass_local_rank" in words)):
        if script == "train.py" and "--module" in words:
            continue
        command = _dry_run(f"{words} {script}").commands[0]
        assert ("--local_rank_as=--local_rank" in command) == expected
    assert "--local_rank_as=--local_rank" not in _dry_run(f"{words} {name} --local_rank=4").commands[0]


@pytest.mark.parametrize(("hostfile", "machines"), [("hosts", 4), ("nowhere", 0)])
def test_the_deepspeed_command_finds_the_hostfile_that_deepspeed_looks_for(
    hostfile: str, machines: int, machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.setattr(deepspeed_command, "DEFAULT_HOSTFILE", Path(hostfile))
    with pytest.raises(SystemExit) as exit_:
        deepspeed_command.main(["--dry_run", "train.py"])
    said = capsys.readouterr()
    assert exit_.value.code == 0, said.err
    assert said.out.count("# on worker-") == machines
    assert "ZEROACCEL_COMPAT" in said.out
