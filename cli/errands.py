"""From a hostfile and the settings of a launch to what each machine is told to do.

Everything that can be found out from here is: the machines and what filters leave of them, their numbers of
processes, whether their names mean something. What only they can tell, `node` finds there. Starts nothing but
`ssh -G`, which reads ssh's configuration.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeroaccel.config.launch.launch_settings import LaunchSettings, launch_settings
from zeroaccel.config.launch.launch_sources import Given
from zeroaccel.errors import ConfigError

from .hostfile import Host, read_hostfile, select_hosts
from .network import is_known_host, is_own_host
from .plan import DEFAULT_PORT, Program, plan_launch
from .remote import Errand, remote_command

__all__ = ["HANDED_ON", "describe_errands", "is_only_this_machine", "plan_errands", "ssh_words"]

HANDED_ON = (
    "CUDA_LAUNCH", "FI_", "GLOO_", "HF_", "KMP_", "MKL_", "NCCL_", "NUMBA_", "OMP_", "PYTHONPATH", "PYTORCH_",
    "TORCH_", "TOKENIZERS_", "TRANSFORMERS_", "UCX_", "WANDB_", "XDG_", "ZEROACCEL_",
)  # fmt: skip
"""Beginnings of the variables that the other machines get as they are here."""

_OF_THIS_LAUNCHER = {"ZEROACCEL_SSH", "ZEROACCEL_CONFIG", "ZEROACCEL_HOSTFILE", "ZEROACCEL_LAUNCH_ID"}
_OF_THE_HOSTFILE = ("hostfile", "inclusion_filter", "exclusion_filter", "multinode_launcher")


def ssh_words(text: str) -> list[str]:
    """The program that reaches machines, from ZEROACCEL_SSH; the system's by default.

    Raises:
        ConfigError: quotes do not match.
    """
    try:
        return shlex.split(text) or ["ssh"]
    except ValueError as error:
        raise ConfigError(f"environment ZEROACCEL_SSH: {error}", got=text) from None


def plan_errands(
    given: Given,
    program: Program,
    told: Mapping[str, str],
    environ: Mapping[str, str],
    ssh: Sequence[str],
    bf16_by: str = "",
) -> list[Errand]:
    """One errand per machine of the hostfile.

    Args:
        given: all settings of the launch, `hostfile` among them.
        told: variables that tell the processes what the launch says about training.
        bf16_by: as for `plan_launch`.

    Raises:
        ConfigError: the hostfile or a filter is wrong, a machine is unknown, or counts do not fit.
    """
    settings = given.settings()
    assert settings.hostfile is not None, "a launch without a hostfile has no errands"
    hosts = select_hosts(read_hostfile(settings.hostfile), settings.inclusion_filter, settings.exclusion_filter)
    for host in hosts:
        _check_known(host, settings.hostfile, ssh)
    num_local = _processes_each(settings, hosts)
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith(HANDED_ON) and name not in _OF_THIS_LAUNCHER and name != "PYTHONPATH"
    }
    return [
        Errand(
            host.name,
            {
                "folder": str(Path.cwd()),
                "environment": variables,
                "settings": _settings_of(given, hosts, number, num_local),
                "program": asdict(program),
                "told": dict(told),
                "bf16_by": bf16_by,
            },
            range(number * num_local, (number + 1) * num_local),
        )
        for number, host in enumerate(hosts)
    ]


def describe_errands(
    errands: Sequence[Errand], ssh: Sequence[str], python_path: str | None, environ: Mapping[str, str]
) -> str:
    """The dry run: per machine how it is reached, and what it would start if it were like this one."""
    parts = []
    for errand in errands:
        order = errand.order
        program = Program(**{**order["program"], "arguments": tuple(order["program"]["arguments"])})
        settings = launch_settings({**order["settings"], "log_dir": None})
        plan = plan_launch(settings, program, {**environ, **order["environment"]}, order["told"], here=False)
        reached = shlex.join(remote_command(ssh, errand.host, python_path))
        parts.append(f"# on {errand.host}, by: {reached}\n{plan.describe()}")
    return "\n\n".join(parts)


def _processes_each(settings: LaunchSettings, hosts: Sequence[Host]) -> int:
    slots = len(hosts[0].slots)
    if settings.num_machines not in (1, len(hosts)):
        expected = f"the {len(hosts)} machines that the hostfile and its filters give"
        raise ConfigError("--num_machines", expected=expected, got=settings.num_machines, fix="leave it out")
    if settings.num_processes is None:
        return slots
    each, rest = divmod(settings.num_processes, len(hosts))
    if rest:
        expected = f"a multiple of the {len(hosts)} machines of the hostfile"
        raise ConfigError("--num_processes", expected=expected, got=settings.num_processes, fix="or leave it out")
    if each > slots:
        expected = f"at most {slots * len(hosts)}, as the hostfile has slots={slots}"
        raise ConfigError("--num_processes", expected=expected, got=settings.num_processes, fix="or leave it out")
    return each


def _settings_of(given: Given, hosts: Sequence[Host], number: int, num_local: int) -> dict[str, Any]:
    settings = {name: value for name, value in given.values.items() if name not in _OF_THE_HOSTFILE}
    host = hosts[number]
    settings["num_processes"] = num_local * len(hosts)
    settings["num_machines"] = len(hosts)
    if not settings.get("use_cpu") and not (host.all_slots and num_local == len(host.slots)):
        settings["gpu_ids"] = ",".join(map(str, host.slots[:num_local]))
    if len(hosts) == 1:
        settings.pop("machine_rank", None)
        return settings
    settings["machine_rank"] = number
    settings.setdefault("main_process_ip", hosts[0].address)
    settings.setdefault("main_process_port", DEFAULT_PORT)
    return settings


def _check_known(host: Host, hostfile: str, ssh: Sequence[str]) -> None:
    if is_known_host(host.address):
        return
    done = None
    if ssh[0] == "ssh":  # it may know the machine by a name of its own
        done = subprocess.run([*ssh, "-G", "--", host.name], capture_output=True, text=True, check=False)
        names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        if names and is_known_host(names[0]):
            return
    raise ConfigError(f"--hostfile {hostfile}: unknown host {host.address}", fix="check the name, or use its address")


def is_only_this_machine(errands: Sequence[Errand]) -> bool:
    """Whether ssh is of no use: there is one machine, and it is the one this runs on."""
    return len(errands) == 1 and is_own_host(errands[0].host.rpartition("@")[2])
