"""Making a launch file: answers to YAML and back, the questionnaire or no questions, and the file on disk.

Shared by `config`, `config default` and `config update`, which differ in the answers they start with. The text is
checked by parsing it as a launch does. A file is replaced atomically, and its former content kept as a backup. Messages
go to stderr; a dry run prints the file to stdout.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from zeroaccel.checkpoint.atomic_write import write_durably
from zeroaccel.config.diagnostics import put
from zeroaccel.config.launch.launch_file import LaunchConfig, blanks, parse_launch_file
from zeroaccel.config.launch.launch_json import check_json
from zeroaccel.config.launch.launch_settings import file_path
from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.config.section import as_text
from zeroaccel.config.yaml_text import parse_yaml
from zeroaccel.errors import ConfigError

from .answers import BACK, Answers, Quit, Walk, complete
from .memory_plan import Model, PlanTable, best_plan, memory_summary
from .questions import AUTO, MESH_SIZES, PLANNED, QUESTIONS, by_key

if TYPE_CHECKING:
    from ..machine import Machine
    from .prompts import Prompts


def changes(path: Path, text: str) -> str:
    """The difference between a file and its new text, line by line; empty where there is none, or no file."""
    if not path.is_file():
        return ""
    before = path.read_text(errors="replace").splitlines()
    return "\n".join(difflib.unified_diff(before, text.splitlines(), str(path), "new", lineterm="", n=2))


def write_file(path: Path, text: str) -> None:
    """Writes a file, so that at any moment the old or the new one is there, and says so; of an old one a copy stays.

    Raises:
        ConfigError: it cannot be written.
    """
    copied = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", fix="name a file")
        before = path.read_bytes() if path.is_file() else None
        mode = 0o666 if before is None else path.stat().st_mode & 0o777
        if before is not None and before != text.encode():
            backup = path.with_name(f"{path.name}.bak")
            write_durably(backup, before, mode=mode)
            copied = f" (what was there is in {backup})"
        write_durably(path.resolve(), text.encode(), mode=mode)  # the file a link leads to, not the link
        if before is not None:
            path.chmod(mode)  # whatever the umask
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}", fix="--config_file PATH") from None
    log(f"written: {path}{copied}")


_OF_A_MACHINE: Mapping[str, Any] = {"machine_rank": 0, "main_process_ip": "localhost"}
"""Settings that differ per machine, and what stands for them while a file is checked."""


def render(answers: Mapping[str, Any], extras: Mapping[tuple[str, ...], Any] | None = None) -> str:
    """The launch file.

    Args:
        answers: setting -> answer, of the questions that apply.
        extras: path of a key in the file -> value, for keys that no question is about.

    Raises:
        ConfigError: a path leads through a value.
    """
    tree: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": _type(answers)}
    for question in QUESTIONS:
        value = answers.get(question.key, AUTO)
        if question.is_setting and value != AUTO and not (question.key in MESH_SIZES and value == 1):
            put(tree, file_path(question.key), answers[question.key])
    for path, value in (extras or {}).items():
        if not put(tree, path, value):
            raise ConfigError(
                f"--set {'.'.join(path)}: {'.'.join(path[:-1])} is no section",
                fix="set a key of a section, or that key",
            )
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    return text


def checked(text: str, name: str) -> ExplicitSettings:
    """The settings behind a text, checked against each other and against their JSON config, and notes on them.

    Settings that differ per machine may be flags of the launch: where they are missing, that is a note.

    Raises:
        ConfigError: something in it is wrong; all of it is listed.
    """
    tree = parse_yaml(text, name).value
    empty = blanks(tree) if isinstance(tree, dict) else ()
    machines = {"num_machines": 2} if "num_machines" in empty else {}
    over = ExplicitSettings({**dict.fromkeys(empty), **machines}, dict.fromkeys(empty, "to be filled in"))
    settings = parse_launch_file(text, name, over=over).under(ExplicitSettings(machines)).effective()
    lacking = list(empty)
    starts_hosts = (
        settings.values.get("hostfile") is not None and settings.values.get("multinode_launcher") != "standard"
    )
    if settings.values.get("num_machines", 1) != 1 and not starts_hosts:
        needed = [
            key for key in _OF_A_MACHINE if key != "machine_rank" or settings.values.get("rdzv_backend") != "c10d"
        ]
        lacking += [key for key in needed if key not in settings.values and key not in lacking]
    filled = {key: value for key, value in _OF_A_MACHINE.items() if key in lacking}
    settings.under(ExplicitSettings(filled)).settings()
    check_json(settings)
    if not lacking:
        return settings
    note = f"{name}: to be completed by {' and '.join(f'--{key}' for key in lacking)} of `zeroaccel launch`"
    return settings.without([], note)


def answers_of(file: LaunchConfig) -> tuple[dict[str, Any], dict[tuple[str, ...], Any]]:
    """The answers that would make a file, and the keys of it that no question is about."""
    values = dict(file.values)
    answers: dict[str, Any] = {}
    if (kind := values.pop("distributed_type", None)) is not None:
        answers["use_deepspeed"] = kind == "DEEPSPEED"
    if "num_processes" in values and any((values.get(size) or 1) > 1 for size in MESH_SIZES):
        answers["use_parallelism_config"] = True
        answers |= {size: values.get(size) or 1 for size in MESH_SIZES}
    if values.get("dynamo_backend") == "no":
        del values["dynamo_backend"]
    for question in QUESTIONS:
        if question.is_setting and question.key in values:
            value = values.pop(question.key)
            answers[question.key] = ",".join(value) if isinstance(value, tuple) else value
    return answers, {file_path(key): value for key, value in values.items()}


def command_line(answers: Mapping[str, Any], extras: Mapping[tuple[str, ...], Any], path: Path) -> str:
    """The command that makes the same file without asking."""
    words = ["zeroaccel", "config", "--yes", "--config_file", str(path)]
    for question in QUESTIONS:
        if question.key in answers:
            words += [question.flag, as_text(answers[question.key])]
    for key, value in extras.items():
        words += ["--set", f"{'.'.join(key)}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}"]
    return shlex.join(words)


def launch_line(path: Path, folder: Path) -> str:
    """The command that starts a script with this file."""
    words = ["zeroaccel", "launch"]
    if path.resolve() != (folder / "zeroaccel.yaml").resolve():
        words += ["--config_file", str(path)]
    return f"{shlex.join(words)} train.py"


_MOST_LINES = 8


def start_lines(answers: Mapping[str, Any], command: str) -> list[str]:
    """The command that starts the job; with several machines, that of each.

    Args:
        command: without what differs per machine.
    """
    machines = answers.get("num_machines") or 1
    if machines == 1 or answers.get("multinode_launcher") == "ssh":
        return [command]
    words, script = command.rsplit(" ", 1)
    shown = [*range(min(machines, _MOST_LINES))]
    lines = [f"{words} --machine_rank {rank} {script}   # on machine {rank}" for rank in shown]
    if machines > _MOST_LINES:
        lines.append(f"... and so on, to --machine_rank {machines - 1}")
    return [f"with {answers.get('main_process_ip')} as machine 0, and this file on each:", *lines]


def last_lines(answers: Mapping[str, Any]) -> list[str]:
    """What the file trains with, after a caution about layers that reach across machines."""
    machines, processes, tp = (answers.get(key) or 1 for key in ("num_machines", "num_processes", "tp_size"))
    lines = []
    if machines > 1 and tp > processes // machines:
        lines.append(
            f"caution: tp_size {tp} shares layers across machines of {processes // machines} processes, which wait for "
            "the network in every layer; `zeroaccel estimate --meshes` compares"
        )
    stage = answers.get("zero_stage")
    if not answers.get("use_deepspeed"):
        sharding = "without ZeRO"
    elif stage is None:
        sharding = f"with ZeRO as {answers.get('deepspeed_config_file') or 'its defaults'} says"
    else:
        sharding = f"with ZeRO stage {stage}"
    return [*lines, f"trains:  {sharding}, {processes} process{'es' * (processes > 1)}"]


def _type(answers: Mapping[str, Any]) -> str:
    if answers.get("use_deepspeed"):
        return "DEEPSPEED"
    if answers.get("num_processes", 1) == 1:
        return "NO"
    return "MULTI_CPU" if answers.get("use_cpu") else "MULTI_GPU"


@dataclass(frozen=True)
class ConfigRequest:
    """What is wanted.

    Attributes:
        path: where the file goes.
        answers: setting -> answer, by flags and the like.
        sources: setting -> its source, for messages.
        extras: path of a key of the file -> value, for keys that no question is about.
        former: answers of the file as it is, for an update.
        model: what will be trained, where --model names it.
        no_asking: why no question is asked; empty if questions are.
    """

    path: Path
    answers: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[tuple[str, ...], Any] = field(default_factory=dict)
    former: Mapping[str, Any] | None = None
    model: Model | None = None
    yes: bool = False
    dry_run: bool = False
    no_asking: str = ""


def why_not_ask(environ: Mapping[str, str], *, yes: bool, no_input: bool) -> str:
    """Why no question can be asked; empty if there is a terminal to ask on.

    A prompt without a terminal would wait for ever, or take the first line of a pipe for an answer.
    """
    if yes:
        return "--yes is given"
    if no_input:
        return "--no_input is given"
    if environ.get("CI", "").lower() in ("1", "true", "yes"):
        return "CI is set"
    for stream, name in ((sys.stdin, "stdin"), (sys.stderr, "stderr")):
        if not stream.isatty():
            return f"{name} is no terminal"
    return "the terminal is a dumb one" if environ.get("TERM") == "dumb" else ""


def make_config_file(request: ConfigRequest, machine: Machine) -> None:
    """Makes the file.

    Raises:
        ConfigError: an answer is wrong, or the file cannot be written.
        click.UsageError: answers are missing, and no question can be asked.
        click.Abort: the user quits.
    """
    if request.no_asking:
        completed = _without_asking(request, machine)
        if request.model is not None and (
            words := memory_summary(request.model, machine, completed.answers, completed.state.json)
        ):
            log(words)
        _finish(request, completed.answers, _text(request, completed))
        return
    from .prompts import Prompts

    try:
        completed = _by_asking(request, machine, Prompts())
    except (Quit, KeyboardInterrupt, EOFError):
        log("nothing was written")
        raise click.Abort from None
    _finish(request, completed.answers, _text(request, completed))


def log(message: str = "") -> None:
    """To the terminal, on stderr: stdout is for data."""
    click.echo(message, err=True)


def _without_asking(request: ConfigRequest, machine: Machine) -> Answers:
    former, needs = request.former, None
    if request.model is not None and not {*PLANNED, "deepspeed_config_file"} & set(request.answers):
        known = complete(request.answers, machine, sources=request.sources, former=former).answers
        settled = {key: value for key, value in known.items() if key not in PLANNED}
        plan = best_plan(request.model, machine, {**settled, **request.answers})
        former, needs = {**(former or {}), **plan.answers}, plan.needs
        if plan.note:
            log(plan.note)
    completed = complete(request.answers, machine, sources=request.sources, former=former, needs=needs)
    if completed.missing:
        flags = ", ".join(question.flag for question in completed.missing)
        raise click.UsageError(f"{request.no_asking}, and there is no default for {flags}: give a value.")
    if request.yes or request.former is not None:
        return completed
    if open_keys := [key for key in completed.answers if key not in request.answers]:
        flags = ", ".join(f"{by_key(key).flag} ({as_text(completed.answers[key])})" for key in open_keys)
        raise click.UsageError(
            f"{request.no_asking}, so nobody is asked: give {flags}, or --yes for what is in brackets."
        )
    return completed


def _by_asking(request: ConfigRequest, machine: Machine, prompts: Prompts) -> Answers:
    show_machine(machine)
    # An update is about a file that is there; what it trains was planned when it was made.
    has_plan = request.former is None or request.model is not None
    planner = PlanTable(prompts, request.model, machine, request.answers) if has_plan else None
    walk = Walk(machine, request.answers, request.former or {}, planner=planner)
    while True:
        walk.run(prompts)
        completed = walk.result()
        if _is_wanted(request, completed, None if planner is None else planner.model, machine, prompts):
            return completed
        walk.back()


def _is_wanted(
    request: ConfigRequest, completed: Answers, model: Model | None, machine: Machine, prompts: Prompts
) -> bool:
    """Shows what would be written; false to go back to the last question."""
    from .prompts import Option

    show_file(request.path, _text(request, completed))
    if model is not None and (words := memory_summary(model, machine, completed.answers, completed.state.json)):
        log(words)
    words = "Print it?" if request.dry_run else f"Write {request.path}?"
    return prompts.choose(words, [Option("yes", True)], True, back=True) is not BACK


def _text(request: ConfigRequest, completed: Answers) -> str:
    text = render(completed.answers, request.extras)
    checked(text, str(request.path))
    return text


def _finish(request: ConfigRequest, answers: Mapping[str, Any], text: str) -> None:
    if request.dry_run:
        click.echo(text, nl=False)
        log(f"dry run: {request.path} is not written")
        return
    write_file(request.path, text)
    for line in start_lines(answers, launch_line(request.path, Path.cwd())):
        log(f"start:   {line}")
    log(f"again:   {command_line(answers, request.extras, request.path)}")
    for line in last_lines(answers):
        log(line)


def show_machine(machine: Machine) -> None:
    """One panel with what is here."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for heading, content in machine.lines():
        table.add_row(heading, content)
    Console(stderr=True).print(Panel(table, title="this machine", title_align="left", expand=False))


def show_file(path: Path, text: str) -> None:
    """The file as it would be, and what changes where there is one."""
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(stderr=True)
    console.print(Syntax(text, "yaml", background_color="default"))
    if path.is_file():
        difference = changes(path, text)
        console.print(Syntax(difference, "diff", background_color="default") if difference else f"{path} says the same")
