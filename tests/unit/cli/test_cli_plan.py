"""Launch plans: the number of processes and threads, and the mistakes found before any process starts."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import message
from zeroaccel.cli.launch import launch_plan as plan_module
from zeroaccel.cli.launch.agent import prefixed_streams
from zeroaccel.cli.launch.launch_plan import LaunchPlan, Program, plan_launch
from zeroaccel.cli.machine import Device, node_cores, port_trouble
from zeroaccel.comm.environment import usable_cores
from zeroaccel.config.launch.launch_settings import launch_settings
from zeroaccel.errors import ConfigError

PATH = {"PATH": "/usr/bin:/bin"}
GPU = Device("A100", 2**36, has_bf16=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with 8 cores and no accelerator, in a folder with one script."""
    monkeypatch.setattr(plan_module, "usable_cores", lambda: 8)
    monkeypatch.setattr(plan_module, "devices", lambda: ())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return monkeypatch


def _plan(values: Mapping[str, Any], environ: Mapping[str, str] = PATH, program: Program | None = None) -> LaunchPlan:
    return plan_launch(launch_settings(values), program or Program("train.py"), environ)


def _refusal(values: Mapping[str, Any], program: Program | None = None) -> str:
    return message(ConfigError, _plan, values, program=program)


@pytest.mark.parametrize(
    ("devices", "values", "num_local", "device", "said"),
    [
        (0, {}, 1, "cpu", "1 process on cpu (no accelerator here; --num_processes N to choose)"),
        (4, {}, 4, "cuda", "4 processes on cuda (one per accelerator; --num_processes N to choose)"),
        (4, {"num_processes": 2}, 2, "cuda", "2 processes on cuda, 4 threads each"),
        (4, {"use_cpu": True}, 1, "cpu", "1 process on cpu"),
        (0, {"num_processes": 3}, 3, "cpu", "3 processes on cpu, 2 threads each"),
    ],
)
def test_the_number_of_processes(
    machine: pytest.MonkeyPatch, devices: int, values: dict[str, Any], num_local: int, device: str, said: str
) -> None:
    machine.setattr(plan_module, "devices", lambda: (GPU,) * devices)
    plan = _plan(values)
    assert (plan.num_local, plan.device, plan.warnings) == (num_local, device, ())
    assert plan.headline.startswith(said)


def test_several_machines_share_the_processes(machine: pytest.MonkeyPatch) -> None:
    plan = _plan({"num_machines": 2, "machine_rank": 1, "main_process_ip": "127.0.0.1", "num_processes": 4})
    assert (plan.num_local, plan.world_size, plan.port) == (2, 4, 29500)
    assert plan.headline == "machine 1 of 2: 2 of 4 processes on cpu, 4 threads each"
    environment = plan.rank_environment(1)
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "29500")


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("2.13.0+cu130", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("2.9.1", {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("2.13.0+rocm7.0", {}, {}),
        ("2.13.0", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, {}),
        ("2.13.0", {"PYTORCH_ALLOC_CONF": ""}, {}),
    ],
)
def test_device_memory_grows_unless_the_user_says(
    machine: pytest.MonkeyPatch, version: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    machine.setattr(plan_module, "devices", lambda: (GPU,))
    machine.setattr("zeroaccel.cli.machine.version", lambda package: version)
    environment = _plan({}, {**PATH, **given}).environment
    assert {name: value for name, value in environment.items() if name.endswith("ALLOC_CONF")} == expected


def test_the_headline_names_expandable_segments_unless_a_flag_disables_them(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(plan_module, "devices", lambda: (GPU,))
    machine.setattr("zeroaccel.cli.machine.version", lambda package: "2.13.0+cu130")
    said = "PYTORCH_ALLOC_CONF=expandable_segments:True (--no_expandable_segments leaves it out)"
    assert _plan({}).headline.count(said) == 1
    plan = _plan({"expandable_segments": False})
    assert "expandable" not in plan.headline
    assert "PYTORCH_ALLOC_CONF" not in plan.environment


# -- cores and memory of the GPU's NUMA node, on a machine with two nodes


@pytest.fixture
def two_nodes(machine: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """8 cores and 4 GPUs, two GPUs per NUMA node; a fifth has no node, a sixth is not listed."""
    for index, (node, cores) in enumerate([(0, "0-2,6"), (0, "0-2,6"), (1, "3-5,7"), (1, "3-5,7"), (-1, "0-7")]):
        folder = tmp_path / "devices" / f"0000:{0x80 + index:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "local_cpulist").write_text(f"{cores}\n")
    gpus = tuple(replace(GPU, pci=f"0000:{0x80 + index:02x}:00.0") for index in range(6))
    machine.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    machine.setattr(plan_module, "node_cores", lambda pci: node_cores(pci, tmp_path / "devices"))
    machine.setattr(plan_module, "devices", lambda: gpus)
    return machine


@pytest.mark.parametrize(
    ("values", "environ", "cores"),
    [
        ({"num_processes": 4}, {}, ("0,1,2,6", "0,1,2,6", "3,4,5,7", "3,4,5,7")),
        ({"num_processes": 1}, {}, ("0,1,2,6",)),
        ({"gpu_ids": "3,0"}, {}, ("3,4,5,7", "0,1,2,6")),
        ({"num_processes": 4, "numa_affinity": False}, {}, ()),
        ({"num_processes": 4, "use_cpu": True}, {}, ()),
        ({"num_processes": 5}, {}, ()),  # the fifth GPU has no node
        ({"gpu_ids": "3,5"}, {}, ()),
        ({"gpu_ids": "3,0"}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ()),
        ({"gpu_ids": "GPU-1f"}, {}, ()),
        ({"num_processes": 4, "enable_cpu_affinity": True}, {}, ("0,1", "2,3", "4,5", "6,7")),
    ],
)
def test_processes_are_bound_to_the_node_of_their_gpu(
    two_nodes: pytest.MonkeyPatch, values: dict[str, Any], environ: dict[str, str], cores: tuple[str, ...]
) -> None:
    two_nodes.setattr(plan_module, "neighbouring_cores", lambda: list(range(8)))
    plan = _plan(values, {**PATH, **environ})
    assert plan.cores == cores
    said = "bound to the cores and memory of their GPUs' NUMA nodes (--no_numa_affinity turns this off)"
    assert plan.headline.count(said) == (bool(cores) and "enable_cpu_affinity" not in values)
    assert [plan.additions(rank).get("ZEROACCEL_CPU_CORES") for rank in range(len(cores))] == list(cores)


def test_a_program_that_is_no_python_is_not_bound_to_a_node(two_nodes: pytest.MonkeyPatch) -> None:
    plan = _plan({"num_processes": 2}, program=Program("sh", kind="executable"))
    assert plan.cores == ()
    assert "NUMA" not in plan.headline


def test_a_machine_of_one_node_binds_nothing(two_nodes: pytest.MonkeyPatch) -> None:
    two_nodes.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 6})
    assert _plan({"num_processes": 2}).cores == ()
    assert _plan({"gpu_ids": "2"}).cores == ()  # the process may not use the cores of its node


def test_cpu_jobs_have_no_allocator_setting(machine: pytest.MonkeyPatch) -> None:
    assert not any(name.endswith("ALLOC_CONF") for name in _plan({}).environment)


def test_more_processes_than_accelerators_is_a_warning(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(plan_module, "devices", lambda: (GPU,))
    assert "2 processes share 1 accelerator" in _plan({"num_processes": 2}).warnings[0]


@pytest.mark.parametrize(
    ("num_processes", "given", "expected", "said"),
    [
        (1, None, "8", "8 threads each"),
        (2, None, "4", "4 threads each"),
        (3, None, "2", "2 threads each"),
        (16, None, "1", "1 thread each"),
        (2, "4", None, "OMP_NUM_THREADS=4"),
        (2, "1", None, "OMP_NUM_THREADS=1 from the environment (8 cores / 2 processes would be 4)"),
    ],
)
def test_threads_are_cores_over_processes_unless_the_user_says(
    machine: pytest.MonkeyPatch, num_processes: int, given: str | None, expected: str | None, said: str
) -> None:
    environ = PATH if given is None else {**PATH, "OMP_NUM_THREADS": given}
    plan = _plan({"num_processes": num_processes}, environ)
    assert plan.environment.get("OMP_NUM_THREADS") == expected
    assert plan.headline.endswith(f"on cpu, {said}")


def test_only_requested_settings_are_added_to_the_environment(machine: pytest.MonkeyPatch) -> None:
    assert _plan({}).environment == {"OMP_NUM_THREADS": "8"}
    assert _plan({"use_cpu": True, "timeout": 30.0, "debug": True}).environment == {
        "OMP_NUM_THREADS": "8",
        "CUDA_VISIBLE_DEVICES": "",
        "ZEROACCEL_COLLECTIVE_TIMEOUT": "30",
        "ZEROACCEL_DEBUG": "1",
    }


def test_scripts_and_modules_run_under_the_runner_and_programs_do_not() -> None:
    runner = str(Path(plan_module.__file__).with_name("runner.py"))
    assert Program("a.py", ("-x",)).command() == (sys.executable, "-u", runner, "a.py", "-x")
    assert Program("a.b", kind="module").command() == (sys.executable, "-u", runner, "-m", "a.b")
    assert Program("echo", ("1",), "executable").command() == ("echo", "1")
    ranked = Program("a.py", ("-x",), local_rank_option="--local-rank")
    assert ranked.command() == (sys.executable, "-u", runner, "--local_rank_as=--local-rank", "a.py", "-x")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program("trian.py"), "trian.py: there is no such script in"),
        (Program("trian.py"), "did you mean train.py?"),
        (Program("nowhere/train.py"), "nowhere/train.py: there is no folder nowhere"),
        (Program("."), ".: expected a script, got a folder"),
        (Program("nosuchpackage.train", kind="module"), "there is no module 'nosuchpackage'"),
        (Program("train.py", kind="module"), ""),
        (Program("nosuchcommand", kind="executable"), "nosuchcommand: no such command"),
        (Program("./train.py", kind="executable"), "not executable"),
    ],
)
def test_a_program_that_is_not_there(machine: pytest.MonkeyPatch, program: Program, words: str) -> None:
    if not words:  # the folder has a module of this name; only the processes look up its submodules
        _plan({}, program=program)
    else:
        assert words in _refusal({}, program)


def test_a_port_that_is_taken(machine: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = _refusal({"main_process_port": port})
        assert said.startswith(f"--main_process_port {port}: address already in use; choose another")
        # Only the first machine listens on this port.
        _plan({"main_process_port": port, "num_machines": 2, "machine_rank": 1, "main_process_ip": "127.0.0.1"})
    assert _plan({"main_process_port": port}).port == port
    assert port_trouble(port) == ""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_machines": 2, "machine_rank": 0, "main_process_ip": "host.invalid"}, "the name of a known host"),
        ({"enable_cpu_affinity": True, "num_processes": 4096}, "--enable_cpu_affinity: expected at most"),
        ({"log_dir": "train.py/logs"}, "train.py is a file"),
        ({"tee": {0: 3, 2: 1}, "num_processes": 2}, "--tee: expected local ranks 0 to 1, got 2"),
    ],
)
def test_plans_that_do_not_fit_this_machine_are_refused(
    machine: pytest.MonkeyPatch, values: dict[str, Any], words: str
) -> None:
    assert words in _refusal(values)


def test_devices_that_are_chosen_where_there_is_none_are_processes_on_the_cpu(machine: pytest.MonkeyPatch) -> None:
    plan = _plan({"gpu_ids": "0,2"})
    assert (plan.num_local, plan.device) == (2, "cpu")
    assert plan.warnings == ("--gpu_ids 0,2: 2 processes on the CPU, as there is no accelerator",)
    assert _plan({"gpu_ids": "0,", "num_processes": 3}).num_local == 3
    assert _plan({"gpu_ids": "0,2", "use_cpu": True}).num_local == 1


def test_a_plan_that_is_only_shown_may_name_hosts_that_are_not_known_yet(machine: pytest.MonkeyPatch) -> None:
    values = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "host.invalid", "num_processes": 4}
    plan = plan_launch(launch_settings(values), Program("train.py"), {}, is_dry=True)
    assert (plan.host, plan.num_local) == ("host.invalid", 2)
    assert (
        plan.warnings[0]
        == "--main_process_ip host.invalid: this machine does not know this host, so the launch would fail"
    )
    assert plan.rank_environment(1)["RANK"] == "3"
    module = plan_launch(launch_settings({}), Program("nosuchpackage.train", kind="module"), {}, is_dry=True)
    assert module.warnings == (
        "--module nosuchpackage.train: there is no module 'nosuchpackage' in this folder or among the installed ones",
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "node-7.invalid"])
def test_an_address_has_no_effect_on_a_single_machine(machine: pytest.MonkeyPatch, host: str) -> None:
    plan = _plan({"main_process_ip": host, "num_processes": 2})
    assert plan.host == "127.0.0.1"
    assert plan.warnings == (
        f"--main_process_ip {host}: does nothing on one machine; set --num_machines if there are more",
    )


def test_ranks_have_the_local_size_variable_of_the_deepspeed_command(machine: pytest.MonkeyPatch) -> None:
    assert [_plan({"num_processes": 3}).rank_environment(rank)["LOCAL_SIZE"] for rank in range(3)] == ["3"] * 3


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1)])
def test_the_quota_of_a_container_limits_the_cores(tmp_path: Path, quota: str, cores: int | None) -> None:
    without = usable_cores(tmp_path / "absent")
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == (without if cores is None else cores)
    assert without >= 1


def test_a_precision_that_an_accelerator_lacks(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(plan_module, "devices", lambda: (GPU, Device("V100", 2**34, has_bf16=False)))
    settings = {"mixed_precision": "bf16"}
    with pytest.raises(ConfigError, match=r"^--mixed_precision bf16: V100 has no bf16; use fp16$"):
        plan_launch(launch_settings(settings), Program("train.py", bf16_by="--mixed_precision bf16"), PATH)
    on_cpu = plan_launch(launch_settings(settings | {"use_cpu": True}), Program("train.py", bf16_by="--x"), PATH)
    assert on_cpu.device == "cpu"
    assert _plan({"mixed_precision": "fp16"}).device == "cuda"


def test_lines_of_other_ranks_begin_with_the_rank_on_a_terminal() -> None:
    def streams(values: dict[str, Any], *, out: bool, err: bool) -> Any:
        settings = launch_settings({"num_processes": 3, **values})
        return prefixed_streams(settings, 3, stdout_is_terminal=out, stderr_is_terminal=err)

    assert streams({}, out=True, err=True) == {1: 3, 2: 3}
    assert streams({}, out=False, err=True) == {1: 2, 2: 2}
    assert streams({}, out=False, err=False) == 0  # a pipe gets unchanged lines
    assert streams({"log_line_prefix": "all"}, out=False, err=False) == 3
    assert streams({"log_line_prefix": "none"}, out=True, err=True) == 0
    assert streams({"tee": {0: 1}}, out=True, err=True) == {0: 1}


def test_many_more_processes_than_cores_are_announced(machine: pytest.MonkeyPatch) -> None:
    assert _plan({"num_processes": 33}).warnings[0].startswith("33 processes share 8 cores: ")
    assert _plan({"num_processes": 32}).warnings == ()
