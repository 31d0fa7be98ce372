"""`zeroaccel launch`: from flags, environment and launch file to a `LaunchPlan`, and to its exit code.

The command merges its sources into `LaunchSettings` and derives a `LaunchPlan`; a dry run prints the plan, otherwise
`agent` runs it and `failures` explains errors. No other module of the launcher reads its environment.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from zeroaccel.compat.finder import inherited_environment, real_location
from zeroaccel.config.launch.launch_file import find_launch_file, read_launch_file
from zeroaccel.config.launch.launch_foreign import translate_fsdp
from zeroaccel.config.launch.launch_json import check_json
from zeroaccel.config.launch.launch_settings import LaunchSettings, launch_settings, wrong_settings
from zeroaccel.config.launch.launch_sources import ExplicitSettings, check_variables, gather, launched_environment
from zeroaccel.config.schema import Config
from zeroaccel.errors import ConfigError, Preempted
from zeroaccel.offload.offload_folder import examine_folder

from ..grouped_help import CONTEXT
from ..machine import gib, local_disks
from .cluster_env import cluster_environment
from .failures import exit_code, explain_failure, first_failure, preemption
from .foreign_flags import ForeignFlags, foreign_flag_options, resolve_devices
from .launch_flags import HEADINGS, LaunchCommand, setting_flags, settings_from_flags
from .launch_plan import LaunchPlan, Program, ProgramKind, local_rank_option, plan_launch
from .ssh import MultiNodeJob, describe_node_jobs, is_only_this_machine, plan_node_jobs, ssh_words


@click.command(
    cls=LaunchCommand,
    headings=HEADINGS,
    context_settings={**CONTEXT, "allow_interspersed_args": False},  # words after SCRIPT belong to it
)
@setting_flags
@foreign_flag_options
@click.option("--config_file", metavar="PATH", help="The launch file. [default: see above]")
@click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, like python -m.")
@click.option("--no_python", is_flag=True, help="Run SCRIPT as a program, without Python.")
@click.option("--dry_run", is_flag=True, help="Print each process's environment and command, and start nothing.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    script: str,
    script_args: tuple[str, ...],
    config_file: str | None,
    module: bool,
    no_python: bool,
    dry_run: bool,
    **typed: Any,
) -> int:
    """Run SCRIPT with its arguments in several processes that train together.

    Options may be spelled with - or _. Each can also be set in the environment, as ZEROACCEL_ and its name in capitals,
    and in a launch file, which `zeroaccel config` creates. Flags override the environment, and the environment
    overrides the file. The file is the one of --config_file, else of ZEROACCEL_CONFIG, else zeroaccel.yaml in the
    project, else in ~/.config/zeroaccel.

    The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process. Unless you set it,
    OMP_NUM_THREADS is the number of the machine's cores divided by its processes.

    Exits with the code of the process that failed first, with 128 + n after signal n, and with 2 if nothing started.

    \b
    Examples:
      zeroaccel launch --num_processes 2 train.py
      zeroaccel launch --num_processes 8 --zero_stage 3 --mixed_precision bf16 train.py --lr 1e-4
      zeroaccel launch --hostfile hosts train.py
      zeroaccel launch --dry_run train.py
    """
    if module and no_python:
        raise click.UsageError("--module and --no_python exclude each other.", click.get_current_context())
    # Takes the flags of other launchers first; only zeroaccel's own settings remain in `typed`.
    others = ForeignFlags.take_from(typed)
    flags = others.above(settings_from_flags(typed))
    check_variables(os.environ)  # otherwise a misspelt variable would have no effect

    # Merge the sources, then compare with the JSON config, so that a contradiction is found before any rank starts.
    source = find_launch_file(config_file, os.environ, Path.cwd())
    explicit = resolve_devices(_gathered(flags, others, source), others).effective()
    config = check_json(explicit)
    explicit = _with_folders(explicit, config)
    settings = explicit.settings()
    if not settings.starts_hosts:  # else the folders are on other machines, and each `node` checks its own
        _check_folders(explicit, config)
    kind: ProgramKind = "module" if module else "executable" if no_python else "script"
    program = Program(
        script,
        script_args,
        kind,
        _local_rank_option(script, script_args, kind, others.pass_local_rank),
        # Variables that ranks and `Accelerator` read, with the sources of settings, and those for `import deepspeed`.
        launched_environment(settings, explicit.sources) | _facade(settings.engine, explicit.where("engine")),
        _bf16_by(explicit, config),
    )
    for note in (*explicit.notes, *_script_notes(program)):
        _log(f"note: {note}")
    if source is not None:
        _log(f"settings from {source[0]} ({source[1]})")
    if settings.starts_hosts:
        return _launch_hosts(explicit, program, dry_run=dry_run)
    return _launch_here(settings, program, dry_run=dry_run)


def _gathered(flags: ExplicitSettings, others: ForeignFlags, source: tuple[Path, str] | None) -> ExplicitSettings:
    """Merges all settings, from flags, environment, scheduler and file."""
    # The scheduler's facts about this machine override a file that all machines may share.
    above = gather(flags, os.environ, cluster_environment(os.environ))
    if source is not None:
        over = above
        if others.is_fsdp:
            over = ExplicitSettings({"distributed_type": "FSDP"}).under(above)
        file: ExplicitSettings = read_launch_file(*source, over=over, fsdp_flags=others.fsdp)
    elif others.is_fsdp or others.fsdp:
        file = _of_fsdp_flags(above, others)
    else:
        file = ExplicitSettings()
    return gather(flags, os.environ, file.under(cluster_environment(os.environ)))


def _of_fsdp_flags(explicit: ExplicitSettings, others: ForeignFlags) -> ExplicitSettings:
    """Translates FSDP's flags if there is no launch file."""
    if not others.is_fsdp:
        names = ", ".join(f"--{name}" for name in others.fsdp)
        return ExplicitSettings(notes=(f"{names}: no effect without --use_fsdp",))
    machines = explicit.values.get("num_machines", 1)
    translation = translate_fsdp(others.fsdp, machines if isinstance(machines, int) else 1)
    if translation.problems:
        raise wrong_settings(translation.problems, lambda key: f"--{key}")
    sources = {name: f"--{key or 'use_fsdp'}" for name, key in translation.said_by.items()}
    notes = ["--use_fsdp: FSDP -> DEEPSPEED, whose stages shard the same way"]
    notes += [f"--{key}: {text}" for key, text in translation.notes]
    return ExplicitSettings(
        {**translation.values, "distributed_type": "DEEPSPEED"},
        {**sources, "distributed_type": "--use_fsdp"},
        tuple(notes),
    )


def _local_rank_option(script: str, arguments: tuple[str, ...], kind: ProgramKind, requested: bool | None) -> str:
    """Returns the option that passes the local rank to the script, by default the one that it declares; or ""."""
    if requested is False or any(word.partition("=")[0] in ("--local_rank", "--local-rank") for word in arguments):
        return ""
    if kind == "executable":
        if requested:
            text = "--pass_local_rank: --no_python starts a program with its own arguments only"
            raise ConfigError(text, fix="read LOCAL_RANK from its environment")
        return ""
    path = Path(script)
    if kind == "module":
        place = Path(*script.split("."))
        path = next((one for one in (place.with_suffix(".py"), place / "__main__.py") if one.is_file()), place)
    return (local_rank_option(path) or ("--local_rank" if requested else "")) if path.is_file() or requested else ""


_PROCESS_FLAGS = re.compile(
    r"--(num[_-]processes|nproc[_-]per[_-]node|num[_-]machines|nnodes|(machine|node)[_-]rank|main[_-]process[_-](ip|port)"
    r"|hostfile|zero[_-]stage|max[_-]restarts)(=.*)?"
)
"""Flags of launchers that hardly any script has."""


def _script_notes(program: Program) -> Iterator[str]:
    if late := [word for word in program.arguments if _PROCESS_FLAGS.fullmatch(word)]:
        words = f"{', '.join(late)} after {program.name} {'goes' if len(late) == 1 else 'go'} to the script"
        yield f"{words}; the launcher's own flags come before {program.name}"
    if any(word.partition("=")[0] == "--fsdp" for word in program.arguments):
        fix = "pass --deepspeed ds_config.json instead; stage 3 is full_shard, stage 2 is shard_grad_op"
        yield f"{program.name} --fsdp: Trainer uses torch's FSDP for this argument, not zeroaccel; {fix}"


def _launch_here(settings: LaunchSettings, program: Program, *, dry_run: bool) -> int:
    plan = plan_launch(settings, program, os.environ, is_dry=dry_run)
    for line in (*plan.warnings, *(() if dry_run else (plan.headline,))):
        _log(line)
    if dry_run:
        click.echo(plan.describe())
        return 0
    return _run(plan)


def _with_folders(explicit: ExplicitSettings, config: Config | None) -> ExplicitSettings:
    """Chooses the local disk with the most room for each "nvme" without a folder, and logs it.

    With a hostfile it chooses nothing: the launcher does not know the disks of the other machines.
    """
    lacking = [f"{what}_nvme_path" for what, (path, _) in _on_nvme(explicit, config).items() if path is None]
    disks = () if "hostfile" in explicit.values or not lacking else local_disks()
    disk = max(disks, key=lambda one: one.free_nbytes, default=None)
    if disk is None:
        return explicit
    room = f"{disk.folder} ({disk.file_system}, {gib(disk.free_nbytes)} free)"
    _log(f"no --{' and no --'.join(lacking)}: files go to {room}, the local disk with the most room")
    return ExplicitSettings.of(dict.fromkeys(lacking, disk.folder), "the local disk with the most room").under(explicit)


def _bf16_by(explicit: ExplicitSettings, config: Config | None) -> str:
    """Returns the source that asks for bf16, a setting or the JSON config; "" if there is none."""
    if explicit.values.get("mixed_precision") == "bf16":
        return f"{explicit.where('mixed_precision')} bf16"
    if config is not None and "bf16.enabled" not in config.unresolved and config.bf16.enabled:
        return config.where("bf16.enabled")
    return ""


def _check_folders(explicit: ExplicitSettings, config: Config | None) -> None:
    """Checks the folders for "nvme" before the start; otherwise every process would fail once it has its model."""
    for what, (path, where) in _on_nvme(explicit, config).items():
        if path is None:
            raise ConfigError(f'{where}: missing, and {what}_device is "nvme"', fix="give a folder on a local disk")
        examine_folder(path, where)


def _on_nvme(explicit: ExplicitSettings, config: Config | None) -> dict[str, tuple[str | None, str]]:
    """Returns each offload to files -> its explicit folder, or None, and the address of that setting."""
    folders: dict[str, tuple[str | None, str]] = {}
    for what in ("offload_optimizer", "offload_param"):
        name = f"{what}_nvme_path"
        in_json = getattr(config.zero_optimization, what) if config is not None else None
        device = explicit.values.get(f"{what}_device") or (in_json.device if in_json is not None else "none")
        if str(device).lower() != "nvme":
            continue
        if name not in explicit.values and config is not None and in_json is not None and in_json.nvme_path is not None:
            folders[what] = in_json.nvme_path, config.where(f"zero_optimization.{what}.nvme_path")
        else:
            folders[what] = explicit.values.get(name), explicit.where(name)
    return folders


def _facade(engine: str | None, where: str) -> dict[str, str]:
    """Returns the variables that make `import deepspeed` import zeroaccel in ranks, unless the engine is DeepSpeed."""
    real = real_location()
    if engine == "deepspeed" and real is None:
        raise ConfigError(where, expected="an engine that is installed", got=engine, fix="pip install deepspeed")
    if engine == "deepspeed" or (engine is None and real is not None):
        return {}
    return inherited_environment(os.environ, shadow=real is not None)


def _launch_hosts(explicit: ExplicitSettings, program: Program, *, dry_run: bool) -> int:
    ssh = ssh_words(os.environ.get("ZEROACCEL_SSH", ""))
    jobs = plan_node_jobs(explicit, program, os.environ, ssh)
    if is_only_this_machine(jobs):
        return _launch_here(launch_settings(jobs[0].order["settings"]), program, dry_run=dry_run)
    python_path = os.environ.get("PYTHONPATH")
    if dry_run:
        click.echo(describe_node_jobs(jobs, ssh, python_path, os.environ))
        return 0
    num_local = len(jobs[0].ranks)
    _log(f"{len(jobs)} machines, {num_local} process{'es' if num_local > 1 else ''} each")
    settings = explicit.settings()
    return MultiNodeJob(_log, settings.shutdown_timeout, debug=settings.debug).run(jobs, ssh, python_path)


def _run(plan: LaunchPlan) -> int:
    from .agent import run_plan

    end = run_plan(plan, _log)
    if end.signal:
        _log(f"stopped by {signal.Signals(end.signal).name}; all processes of this machine have ended")
        return 128 + end.signal
    if not end.failures:
        return 0
    if saved := preemption(end.failures, plan.num_local):
        _log(f"preempted: {saved}; run the same command again to continue")
        return Preempted.exit_code
    settings = plan.settings
    first_rank = min(failure.rank - failure.local_rank for failure in end.failures)
    _log(
        explain_failure(
            end.failures,
            ranks=range(first_rank, first_rank + plan.num_local),
            host=socket.gethostname(),
            several_machines=settings.num_machines > 1,
            debug=settings.debug,
        )
    )
    if settings.log_dir is not None:
        _log(f"output and reports are in {settings.log_dir}")
    return exit_code(first_failure(end.failures))


def _log(message: str) -> None:
    """Prints a message to stderr; stdout belongs to the script."""
    click.echo(f"zeroaccel: {message}", err=True)
