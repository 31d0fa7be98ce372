"""`zeroaccel config` itself: a flag for each question, and the table of sub-commands, which are imported when used.

The module parses flags, `--answers` and `--set` into answers with their sources. It reads the environment for all
sub-commands: to find out if questions can be asked, and where the user's files are. It imports neither torch nor
pydantic before a command runs, so that help appears at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zeroaccel.errors import ConfigError

from ..main import LazyCommands
from .questions import FORMS, QUESTIONS, Question

if TYPE_CHECKING:
    from .config_file import ConfigRequest


@dataclass(frozen=True)
class TypedFlags:
    """The flags of `question_flags` as they were typed.

    Attributes:
        answers: setting -> text, None for flags that were not typed.
        answers_file: path given to `--answers`.
        sets: KEY=VALUE of each `--set`.
        config_file: path given to `--config_file`.
    """

    answers: Mapping[str, str | None]
    answers_file: str | None
    sets: tuple[str, ...]
    config_file: str | None
    yes: bool
    no_input: bool
    dry_run: bool

    def request(self, path: Path, *, no_asking: str, **more: Any) -> ConfigRequest:
        """Returns the request that the flags make.

        Args:
            more: further fields of the request.

        Raises:
            ConfigError: a file cannot be read, or a value is not an answer to its question.
        """
        from .config_file import ConfigRequest

        answers, sources, extras = _gathered(self.answers, self.answers_file, self.sets)
        said = {"yes": self.yes, "dry_run": self.dry_run, **more}
        return ConfigRequest(path, answers, sources, extras, no_asking=no_asking, **said)


def question_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each question, `--answers`, `--set`, and the flags for reading and writing.

    The command receives all of them as one argument, `typed`.
    """

    @functools.wraps(command)
    def with_typed(*args: Any, answers: str | None, sets: tuple[str, ...], **params: Any) -> None:
        texts = {question.key: params.pop(question.key) for question in QUESTIONS}
        others = {name: params.pop(name) for name in ("config_file", "yes", "no_input", "dry_run")}
        command(*args, typed=TypedFlags(texts, answers, sets, **others), **params)

    wrapped: Callable[..., None] = with_typed
    options = [
        *(click.option(each.flag, each.key, metavar=_metavar(each), help=each.ask.words) for each in QUESTIONS),
        click.option("--answers", metavar="FILE", help="YAML file of answers; its keys are names of flags."),
        click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Set any key of the file, as in a.b=c."),
        click.option("--config_file", metavar="PATH", help="The file to write. [default: zeroaccel.yaml]"),
        click.option(
            "-y", "--yes", is_flag=True, help="Use the defaults for settings that are not given; ask no question."
        ),
        click.option("--no_input", is_flag=True, help="Ask no question; fail if flags are missing, and list them."),
        click.option("--dry_run", is_flag=True, help="Print the file instead of writing it."),
    ]
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def _gathered(
    typed: Mapping[str, str | None], answers_file: str | None, sets: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str], dict[tuple[str, ...], Any]]:
    """Returns all answers, sources and extras; flags override `--set`, which overrides `--answers`."""
    texts: dict[str, tuple[str, str]] = {}
    extras: dict[tuple[str, ...], Any] = {}
    for key, text, source in _in_file(answers_file):
        texts[key] = text, source
    for word in sets:
        path, text = _path_and_text(word)
        question = next((each for each in QUESTIONS if path in ((each.key,), each.is_setting and each.row.key)), None)
        if question is None:
            extras[path] = _extra(path, text, word)
        else:
            texts[question.key] = text, f"--set {'.'.join(path)}"
    for question in QUESTIONS:
        if (typed_text := typed.get(question.key)) is not None:
            texts[question.key] = typed_text, question.flag
    return *_parsed(texts), extras


def _parsed(texts: Mapping[str, tuple[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    from .answers import InvalidAnswer, parse

    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.key in texts:
            text, source = texts[question.key]
            try:
                answers[question.key] = parse(question, text)
            except InvalidAnswer as wrong:
                raise ConfigError(f"{source}: {wrong.words}", fix=wrong.fix) from None
    return answers, {key: source for key, (_, source) in texts.items()}


def _in_file(path: str | None) -> list[tuple[str, str, str]]:
    """Returns (setting, text, place) of every answer in a file."""
    if path is None:
        return []
    from zeroaccel.config.diagnostics import hint
    from zeroaccel.config.launch.launch_file import text_of_file
    from zeroaccel.config.section import as_text
    from zeroaccel.config.yaml_text import parse_yaml

    parsed = parse_yaml(text_of_file(path, "--answers"), path)
    if not isinstance(parsed.value, dict):
        raise ConfigError(path, expected="answers as in `zero_stage: 3`", got=parsed.value)
    keys = [question.key for question in QUESTIONS]
    answers = []
    for key, value in parsed.value.items():
        place = parsed.places[(key,)]
        if key not in keys:
            raise ConfigError(f"{place}: {key}: no such question", fix=hint(str(key), keys))
        text = ",".join(map(str, value)) if isinstance(value, list) else as_text(value)
        answers.append((key, text, f"{place}: {key}"))
    return answers


def _path_and_text(word: str) -> tuple[tuple[str, ...], str]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError("--set", expected="KEY=VALUE, as in deepspeed_config.zero_stage=3", got=word)
    return tuple(key.split(".")), text


def _extra(path: tuple[str, ...], text: str, word: str) -> Any:
    """Returns the value of a key that no question is about, after checking that launch files have this key."""
    from zeroaccel.config.launch.launch_settings import LaunchFile
    from zeroaccel.config.normalize import NormalizedConfig
    from zeroaccel.config.yaml_text import parse_yaml

    value: Any = parse_yaml(text, f"--set {word}").value
    tree: Any = value
    for key in reversed(path):
        tree = {key: tree}
    for problem in NormalizedConfig(LaunchFile, tree).problems:
        raise ConfigError(f"--set {'.'.join(path)}: {problem.text}", fix=problem.fix)
    return value


def _metavar(question: Question) -> str:
    if question.kind == "choice":
        return "|".join(str(choice.value) for choice in question.choices)
    return FORMS[question.kind][0]


HEADINGS: Mapping[str, str] = {
    "Processes and machines": "use_cpu",
    "Precision, ZeRO and meshes": "use_deepspeed",
    "Compilation": "dynamo_backend",
    "This command": "answers",
}
"""Heading of `question_flags` in help -> its first flag."""

SUB_COMMANDS: Mapping[str, tuple[str, str]] = {
    "convert": ("zeroaccel.cli.config.convert", "Convert a file for accelerate or DeepSpeed into one for zeroaccel."),
    "default": ("zeroaccel.cli.config.file_commands", "Write a launch file for this machine without asking questions."),
    "explain": ("zeroaccel.cli.config.explain", "Explain a key: its meaning, its values, and where to set it."),
    "schema": ("zeroaccel.cli.config.explain", "Print the JSON Schema of a file, for editors."),
    "show": ("zeroaccel.cli.config.explain", "Print the launch file, or every setting with its source."),
    "template": ("zeroaccel.cli.config.file_commands", "List the templates, or print or write one."),
    "update": ("zeroaccel.cli.config.file_commands", "Change answers in a launch file."),
    "validate": ("zeroaccel.cli.config.convert", "Check launch files, JSON configs, hostfiles and job scripts."),
}


@click.group(
    cls=LazyCommands,
    table=SUB_COMMANDS,
    headings={"Model, to choose a stage and offload that fit": "model", **HEADINGS},
    invoke_without_command=True,
)
@click.option("--model", metavar="MODEL", help="Model to train, as in `zeroaccel estimate MODEL`.")
@click.option(
    "--sequence", type=click.IntRange(1), default=2048, metavar="N", help="Tokens per sample. [default: 2048]"
)
@click.option(
    "--batch", type=click.IntRange(1), default=1, metavar="N", help="Samples per process and micro-step. [default: 1]"
)
@click.option("--checkpointing", is_flag=True, help="The model recomputes activations in backward.")
@question_flags
@click.pass_context
def config(
    ctx: click.Context, /, model: str | None, sequence: int, batch: int, checkpointing: bool, typed: TypedFlags
) -> None:
    """Create a launch file by answering questions, or without questions by flags and --yes.

    Flags answer their questions. You can go back from every question; the file is written at the end.

    \b
    Examples:
      zeroaccel config
      zeroaccel config --yes --zero_stage 3 --num_processes 8
      zeroaccel config --yes --model 7b --sequence 4096
      zeroaccel config show --resolve
    """
    ctx.obj = os.environ
    # A flag before the sub-command's name belongs to this command and has no effect on the sub-command.
    if ctx.invoked_subcommand is not None:
        for param in ctx.command.params:
            if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{param.opts[-1]} must come after {ctx.invoked_subcommand}.", ctx)
        return
    from ..machine import look, measure_disk
    from ..progress import progress
    from .config_file import make_config_file, why_not_ask
    from .memory_plan import Model

    no_asking = why_not_ask(os.environ, yes=typed.yes, no_input=typed.no_input)
    planned = None if model is None else Model(model, sequence, batch, checkpointing)
    request = typed.request(Path(typed.config_file or "zeroaccel.yaml"), no_asking=no_asking, model=planned)
    with progress("examining this machine") as line:
        machine = look(os.environ)
        if not no_asking:  # measuring takes seconds, and only a user at the terminal sees the speeds
            disks = []
            for disk in machine.disks:
                line.doing = f"measuring the disk at {disk.folder}"
                disks.append(measure_disk(disk))
            machine = replace(machine, disks=tuple(disks))
    make_config_file(request, machine)
