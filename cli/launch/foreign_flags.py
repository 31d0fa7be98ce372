"""Flags of other launchers that `zeroaccel launch` accepts: `deepspeed`'s, torchrun's and accelerate's. Data only.

Flags that are other names of one setting stand in its row of `setting_table`. The others here become several settings,
have no effect, which a note says, or are refused; `typed_settings` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from zeroaccel.config.launch.foreign_names import FSDP_KEYS, OTHER_AXES
from zeroaccel.config.launch.setting_table import SETTINGS

_Command = TypeVar("_Command", bound=Callable[..., Any])

SAME = {flag: name for name, row in SETTINGS.items() for flag in row.same}
"""Flag of another launcher -> the setting with the same value."""
SWITCHES = {flag: (name, value) for name, row in SETTINGS.items() for flag, value in row.means.items()}
"""Switch of another launcher -> the setting, and the value that it means."""

# Flags of other launchers that have no effect here: name -> reason.
IDLE_SWITCHES: Mapping[str, str] = {
    "quiet": "the launcher reports the failing process once, without a second traceback",
    "downcast_bf16": "it is a setting of TPUs",
    "ipex": "that library is not used",
    "use_xpu": "the accelerators of this machine are used",
    "force_multi": "the launcher uses ssh whenever a hostfile names other machines",
    "no_ssh_check": "the launcher reports an unreachable machine when the job starts",
    "save_pid": "the job ends with this process, so no file is needed",
    "detect_nvlink_pairs": "devices keep CUDA's order",
    "use_env": "LOCAL_RANK is always in the environment",
    "use_parallelism_config": "the sizes alone define the mesh",
    "use_tp": "--tp_size alone sets the ranks that share each layer",
    "no_tpu_cluster": "it is a setting of TPUs",
    "tpu_cluster": "it is a setting of TPUs",
    "tpu_use_sudo": "it is a setting of TPUs",
    "standalone": "one machine with a free port is the default",
    "run_path": "the launcher runs a script by its path",
}
IDLE_VALUES: Mapping[str, str] = {
    "main_training_function": "it is a setting of TPUs; the launcher runs scripts unchanged",
    "bind_core_list": "--enable_cpu_affinity divides all cores",
    "log_level": "--debug shows everything",
    "rdzv_id": "the rendezvous endpoint is sufficient",
    "start_method": "every process is a separate program",
    "local_addr": "the launcher finds the address towards machine 0",
    "local_ranks_filter": "the terminal shows every rank; --redirects and --log_dir select",
}
# Sizes of accelerate's mesh that must be 1.
AXES = {f"parallelism_config_{name}": name for name in OTHER_AXES}

REFUSED_VALUES: Mapping[str, tuple[str, str]] = {
    "autotuning": (
        "zeroaccel has no autotuner",
        "`zeroaccel config --model NAME` shows what fits this machine",
    ),
    "ssh_port": ("a variable sets the port of ssh", 'ZEROACCEL_SSH="ssh -p PORT"'),
    "venv_script": ("every machine runs the same interpreter", "start zeroaccel from that environment"),
}

_MACHINES_COME_AND_GO = "use --num_machines MIN:MAX"
ELASTIC_HINTS: Mapping[str, str] = {
    "nproc": "use --nproc_per_node N",
    "n_procs": "use --nproc_per_node N",
    "enable_elastic_training": _MACHINES_COME_AND_GO,
    "elastic_training": _MACHINES_COME_AND_GO,
    "min_elastic_nodes": _MACHINES_COME_AND_GO,
    "max_elastic_nodes": _MACHINES_COME_AND_GO,
    "spares": f"{_MACHINES_COME_AND_GO}, and start the command on one more machine, which waits for a loss",
}
"""Flags of elastic DeepSpeed and of other launchers that do not exist here -> the flag to use instead."""

# Flags that help shows, besides those that are other names of a setting.
_SHOWN: Mapping[str, dict[str, Any]] = {
    "num_gpus": {"metavar": "N", "help": "Number of processes on each machine."},
    **{
        flag: {"metavar": row.placeholder, "help": f"The same as {row.flag_name}{more}."}
        for row in SETTINGS.values()
        for flag, more in row.same.items()
    },
    "no_ssh": {"is_flag": True, "help": "Use no ssh: you run the command on each machine of the hostfile."},
    "launcher": {"metavar": "pdsh|ssh", "help": "How the machines of a hostfile are reached; both values mean ssh."},
    "bind_cores_to_rank": {"is_flag": True, "help": "The same as --enable_cpu_affinity."},
    "enable_each_rank_log": {"metavar": "FOLDER", "help": "The same as --log_dir FOLDER --redirects 3."},
    "pass_local_rank": {
        "default": None,
        "help": "Pass --local_rank=N to the script. [default: if its argparse, click or fire declares it]",
    },
}
_OF_TORCHRUN = ("nproc_per_node", "nnodes", "rdzv_endpoint")
_HIDDEN = ("launcher_args", "fsdp", *_OF_TORCHRUN, *FSDP_KEYS, *IDLE_VALUES, *REFUSED_VALUES, *AXES)
OPTIONS: Mapping[str, dict[str, Any]] = {
    **{name: {"is_flag": True, "hidden": True} for name in ("use_fsdp", *SWITCHES, *IDLE_SWITCHES)},
    **{name: {"hidden": True} for name in _HIDDEN},
    **_SHOWN,
}
"""Flag -> the arguments of its click option."""
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_gpus": ("--num_gpus", "--num_accelerators"),
    "quiet": ("-q", "--quiet"),
    "pass_local_rank": ("--pass_local_rank/--no_local_rank",),
}


def foreign_flag_options(command: _Command) -> _Command:
    """Gives the launch these flags. All of them are optional; absent flags are None or false."""
    for name in reversed(tuple(OPTIONS)):
        command = click.option(*_SPELLINGS.get(name, (f"--{name}",)), name, **OPTIONS[name])(command)
    return command
