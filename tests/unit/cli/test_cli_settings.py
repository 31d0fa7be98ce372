"""The settings of a launch: checked alone and against each other, and reported by the name that the user typed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.refusals import refused
from zeroaccel.config.launch.launch_settings import LaunchSettings, launch_settings
from zeroaccel.errors import ConfigError

MACHINES: dict[str, Any] = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "10.0.0.1"}


def test_every_setting_is_optional() -> None:
    assert launch_settings({}) == LaunchSettings()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_processes": 0}, "--num_processes: expected a number above 0, got 0"),
        ({"num_processes": "2"}, "--num_processes: expected a whole number, got '2'"),
        ({"num_procs": 2}, "--num_procs: no such setting; did you mean num_processes?"),
        ({"max_restarts": -1}, "--max_restarts: expected a number of at least 0, got -1"),
        ({"monitor_interval": float("nan")}, "--monitor_interval: expected a finite number"),
        ({"main_process_port": 65536}, "--main_process_port: expected a port, 0 to 65535, got 65536"),
        ({"timeout": -0.5}, "--timeout: expected a number of at least 0, got -0.5"),
        ({"tee": 4}, "--tee: expected 0 (none)"),
        ({"tee": {0: 3, -1: 1}}, "--tee: expected 0 (none)"),
        ({"redirects": 3}, "--redirects: the output would be lost"),
        ({"rdzv_conf": {"join_timeout": 0}}, "--rdzv_conf: expected settings with whole numbers above 0"),
        ({"rdzv_conf": {"timeout": 9}}, "--rdzv_conf: expected settings of the c10d rendezvous"),
        (
            {"rdzv_conf": {"join_timeout": 9}, "rdzv_backend": "static", "main_process_port": 9},
            "the static rendezvous (timeout), got 'join_",
        ),
        ({"machine_rank": 1}, "--machine_rank: expected 0 on one machine, got 1"),
        (MACHINES | {"machine_rank": 2}, "--machine_rank: expected the number of this machine, 0 to 1, got 2"),
        (
            MACHINES | {"machine_rank": None},
            "--machine_rank: expected the number of this machine, 0 to 1; or set hostf",
        ),
        (MACHINES | {"main_process_ip": None}, "--main_process_ip: expected the address of machine 0"),
        (MACHINES | {"main_process_port": 0}, "--main_process_port: expected a port that all machines know"),
        (MACHINES | {"num_processes": 5}, "a multiple of num_machines (2), got 5; it is the total number of proc"),
        (MACHINES | {"num_processes": 1}, "machines: set 2"),
        ({"zero_stage": 7}, "--zero_stage: expected 0, 1, 2 or 3, got 7"),
        ({"offload_param_device": "gpu"}, "--offload_param_device: expected 'none', 'cpu' or 'nvme', got 'gpu'"),
        (
            {"offload_optimizer_device": "nvme"},
            "--offload_optimizer_nvme_path: missing, and offload_optimizer_device is",
        ),
        ({"distributed_type": "MULTI_GPU", "zero_stage": 2}, "MULTI_GPU does not use ZeRO; set distributed_type to"),
        (
            {"distributed_type": "FSDP"},
            "--distributed_type: expected DEEPSPEED, MULTI_GPU, MULTI_CPU or NO, got 'FSDP'",
        ),
        ({"mixed_precision": "fp8"}, "--mixed_precision: expected 'no', 'fp16' or 'bf16', got 'fp8'"),
        ({"gpu_ids": "0,0"}, "--gpu_ids: expected each device once, got '0,0'"),
        ({"gpu_ids": "first"}, '--gpu_ids: expected "all", or device numbers such as 0,2'),
        ({"multinode_launcher": "slurm"}, "leave it out, and start `zeroaccel launch` under mpirun or srun"),
        (
            {"exclusion_filter": "a"},
            "--exclusion_filter: it filters a hostfile, and hostfile is not set; set hostfile",
        ),
    ],
)
def test_a_wrong_setting_is_refused_under_its_own_name(values: dict[str, Any], words: str) -> None:
    with refused(ConfigError, words, lines=1):
        launch_settings(values, lambda name: f"--{name}")


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="3 settings are wrong") as caught:
        launch_settings({"num_machines": 2, "redirects": 1})
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "machine_rank",
        "main_process_ip",
        "redirects",
    ]


@pytest.mark.parametrize(
    ("values", "rendezvous"),
    [
        ({}, "c10d"),
        ({"rdzv_backend": "static"}, "c10d"),  # as every file of accelerate has it; no port is set
        ({"main_process_port": 0}, "c10d"),
        ({"main_process_port": 4711}, "static"),
        ({"main_process_port": 4711, "rdzv_backend": "c10d"}, "c10d"),
        (MACHINES, "static"),
        (MACHINES | {"rdzv_backend": "c10d"}, "c10d"),
    ],
)
def test_the_rendezvous_follows_from_port_and_machines(values: dict[str, Any], rendezvous: str) -> None:
    assert launch_settings(values).rendezvous == rendezvous


def test_every_setting_has_a_description() -> None:
    assert [name for name, field in LaunchSettings.model_fields.items() if not field.description] == []
