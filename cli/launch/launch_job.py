"""A launch from its command line to its exit code: settings, a `LaunchPlan`, and the processes.

`launch_command` declares the flags. A dry run prints the plan, otherwise `agent` runs it and `failures` explains
errors. No other module of the launcher reads its environment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from zeroaccel.compat.finder import inherited_environment, real_location
from zeroaccel.config.launch.launch_file import find_launch_file, read_launch_file
from zeroaccel.config.launch.launch_foreign import translate_fsdp
from zeroaccel.config.launch.launch_settings import LaunchSettings, launch_settings, wrong_settings
from zeroaccel.config.launch.launch_sources import ExplicitSettings, check_variables, launched_environment
from zeroaccel.config.launch.resolution import resolve
from zeroaccel.config.schema import Config
from zeroaccel.errors import ConfigError, Preempted

from ..verify import VARIABLE
from .failures import exit_code, explain_failure, first_failure, preemption
from .hostfile import cluster_environment
from .launch_machine import check_folders, settings_here
from .launch_plan import LaunchPlan, Program, ProgramKind, local_rank_option, plan_launch
from .ssh import MultiNodeJob, describe_node_jobs, is_only_this_machine, plan_node_jobs, ssh_words
from .typed_settings import TypedSettings


def run_launch(
    script: str,
    arguments: tuple[str, ...],
    kind: ProgramKind,
    config_file: str | None,
    params: dict[str, Any],
    *,
    dry_run: bool,
) -> int:
    """Runs a script as the command line says; returns the exit code.

    Args:
        params: click's parameters for the flags of settings.
    """
    typed = TypedSettings.of(params)
    check_variables(os.environ)  # otherwise a misspelt variable would have no effect
    found = find_launch_file(config_file, os.environ, Path.cwd())
    scheduler = cluster_environment(os.environ)  # facts about this machine, before a file that all machines share
    explicit, config = resolve(typed.settings, os.environ, scheduler, partial(_of_file, found, typed))
    explicit = settings_here(explicit, typed, config, _log)
    settings = ordered_settings(explicit.settings(), os.environ.get(VARIABLE))
    if not settings.starts_hosts:  # else the folders are on other machines, and each `node` checks its own
        check_folders(explicit, config)
    program = Program(
        script,
        arguments,
        kind,
        _local_rank_option(script, arguments, kind, typed.pass_local_rank),
        # Variables that ranks and `Accelerator` read, with the sources of settings, and those for `import deepspeed`.
        launched_environment(settings, explicit.sources) | _facade(settings.engine, explicit.where("engine")),
        _bf16_by(explicit, config),
    )
    for note in (*explicit.notes, *_script_notes(program)):
        _log(f"note: {note}")
    if found is not None:
        _log(f"settings from {found[0]} ({found[1]})")
    job = JobOnHosts(explicit, program) if settings.starts_hosts else JobHere(settings, program)
    return job.run(dry_run=dry_run)


def ordered_settings(settings: LaunchSettings, order: str | None) -> LaunchSettings:
    """Replaces settings for a run of `zeroaccel verify`, and tells it how many ranks share a sequence."""
    if not order:
        return settings
    known = json.loads(order)
    settings = settings.model_copy(update=known.get("launch", {}))
    Path(known["folder"]).with_suffix(".sp").write_text(str(settings.sp_size or 1))
    return settings


def _of_file(found: tuple[Path, str] | None, typed: TypedSettings, above: ExplicitSettings) -> ExplicitSettings:
    """Reads the launch file, or translates FSDP's flags if there is none."""
    if found is None:
        return _of_fsdp_flags(above, typed) if typed.is_fsdp or typed.fsdp else ExplicitSettings()
    over = ExplicitSettings({"distributed_type": "FSDP"}).under(above) if typed.is_fsdp else above
    return read_launch_file(*found, over=over, fsdp_flags=typed.fsdp)


def _of_fsdp_flags(explicit: ExplicitSettings, typed: TypedSettings) -> ExplicitSettings:
    """Translates FSDP's flags if there is no launch file."""
    if not typed.is_fsdp:
        names = ", ".join(f"--{name}" for name in typed.fsdp)
        return ExplicitSettings(notes=(f"{names}: no effect without --use_fsdp",))
    machines = explicit.values.get("num_machines", 1)
    translation = translate_fsdp(typed.fsdp, machines if isinstance(machines, int) else 1)
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
        path = next((file for file in (place.with_suffix(".py"), place / "__main__.py") if file.is_file()), place)
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


def _bf16_by(explicit: ExplicitSettings, config: Config | None) -> str:
    """Returns the source that asks for bf16, a setting or the JSON config; "" if there is none."""
    if explicit.values.get("mixed_precision") == "bf16":
        return f"{explicit.where('mixed_precision')} bf16"
    if config is not None and "bf16.enabled" not in config.unresolved and config.bf16.enabled:
        return config.where("bf16.enabled")
    return ""


def _facade(engine: str | None, where: str) -> dict[str, str]:
    """Returns the variables that make `import deepspeed` import zeroaccel in ranks, unless the engine is DeepSpeed."""
    real = real_location()
    if engine == "deepspeed" and real is None:
        raise ConfigError(where, expected="an engine that is installed", got=engine, fix="pip install deepspeed")
    if engine == "deepspeed" or (engine is None and real is not None):
        return {}
    return inherited_environment(os.environ, shadow=real is not None)


@dataclass(frozen=True)
class JobHere:
    """The processes of this machine."""

    settings: LaunchSettings
    program: Program

    def run(self, *, dry_run: bool) -> int:
        """Plans and runs the processes, or prints the plan; returns the exit code."""
        plan = plan_launch(self.settings, self.program, os.environ, is_dry=dry_run)
        for line in (*plan.warnings, *(() if dry_run else (plan.headline,))):
            _log(line)
        if dry_run:
            click.echo(plan.describe())
            return 0
        return _run(plan)


@dataclass(frozen=True)
class JobOnHosts:
    """The processes of all machines of a hostfile, which this launcher starts over ssh."""

    explicit: ExplicitSettings
    program: Program

    def run(self, *, dry_run: bool) -> int:
        """As for `JobHere`."""
        ssh = ssh_words(os.environ.get("ZEROACCEL_SSH", ""))
        jobs = plan_node_jobs(self.explicit, self.program, os.environ, ssh)
        if is_only_this_machine(jobs):
            return JobHere(launch_settings(jobs[0].order["settings"], self.explicit.where), self.program).run(
                dry_run=dry_run
            )
        python_path = os.environ.get("PYTHONPATH")
        if dry_run:
            click.echo(describe_node_jobs(jobs, ssh, python_path, os.environ))
            return 0
        num_local = len(jobs[0].ranks)
        _log(f"{len(jobs)} machines, {num_local} process{'es' if num_local > 1 else ''} each")
        settings = self.explicit.settings()
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
