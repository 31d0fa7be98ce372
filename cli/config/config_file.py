"""Creates a launch file: converts answers to YAML and back, runs the questionnaire, and writes the file.

Shared by `config`, `config default` and `config update`, which start with different answers. The text is checked by
parsing it as a launch does. A file is replaced atomically, and its former content kept as a backup. Messages go to
stderr; a dry run prints the file to stdout.
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
from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.config.launch.resolution import check_json
from zeroaccel.config.launch.setting_table import MESH_SIZES, SETTINGS
from zeroaccel.config.section import as_text
from zeroaccel.config.yaml_text import parse_yaml
from zeroaccel.errors import ConfigError

from .answers import BACK, Answers, Quit, Walk, complete
from .memory_plan import Model, PlanTable, best_plan, memory_summary
from .questions import AUTO, PLANNED, QUESTIONS, by_key

if TYPE_CHECKING:
    from ..machine import Machine
    from .prompts import Prompts


def changes(path: Path, text: str) -> str:
    """Returns the difference between a file and its new text, line by line; "" if they are equal or no file exists."""
    if not path.is_file():
        return ""
    before = path.read_text(errors="replace").splitlines()
    return "\n".join(difflib.unified_diff(before, text.splitlines(), str(path), "new", lineterm="", n=2))


def write_file(path: Path, text: str) -> None:
    """Writes a file atomically, keeps a copy of an old one, and logs its path.

    Raises:
        ConfigError: the file cannot be written.
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
            copied = f" (the former content is in {backup})"
        write_durably(path.resolve(), text.encode(), mode=mode)  # the target of a link, not the link
        if before is not None:
            path.chmod(mode)  # whatever the umask
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}", fix="--config_file PATH") from None
    log(f"written: {path}{copied}")


_OF_A_MACHINE: Mapping[str, Any] = {"machine_rank": 0, "main_process_ip": "localhost"}
"""Settings that differ per machine -> a value for the checks of a file."""


def render(answers: Mapping[str, Any], extras: Mapping[tuple[str, ...], Any] | None = None) -> str:
    """Returns the text of the launch file.

    Args:
        answers: setting -> answer, of the questions that apply.
        extras: path of a key in the file -> value, for keys without a question.

    Raises:
        ConfigError: a path leads through a key that is not a section.
    """
    tree: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": _type(answers)}
    for question in QUESTIONS:
        value = answers.get(question.key, AUTO)
        if question.is_setting and value != AUTO and not (question.key in MESH_SIZES and value == 1):
            put(tree, question.row.key, answers[question.key])
    for path, value in (extras or {}).items():
        if not put(tree, path, value):
            raise ConfigError(
                f"--set {'.'.join(path)}: {'.'.join(path[:-1])} is not a section",
                fix="set a key of a section, or set this key itself",
            )
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    return text


def checked(text: str, name: str) -> ExplicitSettings:
    """Returns the settings of a text, checked against each other and against their JSON config, with notes.

    Settings that differ per machine may be flags of the launch; if they are missing, a note lists them.

    Raises:
        ConfigError: the text has mistakes; the message lists all of them.
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
    note = f"{name}: complete it with {' and '.join(f'--{key}' for key in lacking)} of `zeroaccel launch`"
    return settings.under(ExplicitSettings(notes=(note,)))


def answers_of(file: LaunchConfig) -> tuple[dict[str, Any], dict[tuple[str, ...], Any]]:
    """Returns the answers that make this file, and the keys of the file that no question is about."""
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
    return answers, {SETTINGS[key].key: value for key, value in values.items()}


def command_line(answers: Mapping[str, Any], extras: Mapping[tuple[str, ...], Any], path: Path) -> str:
    """Returns the command that creates the same file without asking."""
    words = ["zeroaccel", "config", "--yes", "--config_file", str(path)]
    for question in QUESTIONS:
        if question.key in answers:
            words += [question.flag, as_text(answers[question.key])]
    for key, value in extras.items():
        words += ["--set", f"{'.'.join(key)}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}"]
    return shlex.join(words)


def launch_line(path: Path, folder: Path) -> str:
    """Returns the command that starts a script with this file."""
    words = ["zeroaccel", "launch"]
    if path.resolve() != (folder / "zeroaccel.yaml").resolve():
        words += ["--config_file", str(path)]
    return f"{shlex.join(words)} train.py"


_MOST_LINES = 8


def start_lines(answers: Mapping[str, Any], command: str) -> list[str]:
    """Returns the command that starts the job, or the command for each of several machines.

    Args:
        command: the part that is the same on all machines.
    """
    machines = answers.get("num_machines") or 1
    if machines == 1 or answers.get("multinode_launcher") == "ssh":
        return [command]
    words, script = command.rsplit(" ", 1)
    shown = [*range(min(machines, _MOST_LINES))]
    lines = [f"{words} --machine_rank {rank} {script}   # on machine {rank}" for rank in shown]
    if machines > _MOST_LINES:
        lines.append(f"... and so on, to --machine_rank {machines - 1}")
    return [f"with {answers.get('main_process_ip')} as machine 0, and this file on each machine:", *lines]


def last_lines(answers: Mapping[str, Any]) -> list[str]:
    """Returns a summary of the training, after a caution if tensor parallelism spans machines."""
    machines, processes, tp = (answers.get(key) or 1 for key in ("num_machines", "num_processes", "tp_size"))
    lines = []
    if machines > 1 and tp > processes // machines:
        lines.append(
            f"caution: tp_size {tp} divides layers across machines of {processes // machines} processes, so every "
            "layer waits for the network; compare meshes with `zeroaccel estimate --meshes`"
        )
    stage = answers.get("zero_stage")
    if not answers.get("use_deepspeed"):
        sharding = "without ZeRO"
    elif stage is None:
        sharding = f"with ZeRO as configured by {answers.get('deepspeed_config_file') or 'its defaults'}"
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
    """A request for a launch file.

    Attributes:
        path: path of the file.
        answers: setting -> answer, from flags, --set and --answers.
        sources: setting -> its source, for messages.
        extras: path of a key of the file -> value, for keys without a question.
        former: answers of the existing file, for an update.
        model: the model of --model.
        no_asking: the reason why no question is asked; "" if questions are asked.
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
    """Returns the reason why no question can be asked; "" if there is a terminal to ask on.

    A prompt without a terminal would wait forever, or read the first line of a pipe as an answer.
    """
    if yes:
        return "--yes is given"
    if no_input:
        return "--no_input is given"
    if environ.get("CI", "").lower() in ("1", "true", "yes"):
        return "CI is set"
    for stream, name in ((sys.stdin, "stdin"), (sys.stderr, "stderr")):
        if not stream.isatty():
            return f"{name} is not a terminal"
    return "TERM names a dumb terminal" if environ.get("TERM") == "dumb" else ""


def make_config_file(request: ConfigRequest, machine: Machine) -> None:
    """Creates the file.

    Raises:
        ConfigError: an answer is wrong, or writing the file fails.
        click.UsageError: answers are missing, and the command cannot ask questions.
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
    """Prints a message to stderr; stdout is for data."""
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
            f"{request.no_asking}, so no question can be asked: give {flags}, or --yes to use the values in brackets."
        )
    return completed


def _by_asking(request: ConfigRequest, machine: Machine, prompts: Prompts) -> Answers:
    show_machine(machine)
    # An update keeps the plan of the existing file unless --model asks for a new one.
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
    """Shows the file and asks for confirmation. Returns False to go back to the last question."""
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
    """Prints a panel that describes the machine."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for heading, content in machine.lines():
        table.add_row(heading, content)
    Console(stderr=True).print(Panel(table, title="this machine", title_align="left", expand=False))


def show_file(path: Path, text: str) -> None:
    """Prints the new file, and its changes if the file exists."""
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(stderr=True)
    console.print(Syntax(text, "yaml", background_color="default"))
    if path.is_file():
        difference = changes(path, text)
        console.print(Syntax(difference, "diff", background_color="default") if difference else f"{path} is the same")
