"""`zeroaccel config` itself: a flag for each question, and the sub-commands by name, imported when used.

Parses flags, `--answers` and `--set` into answers with their sources. Reads the environment for all
sub-commands: whether there is a terminal to ask on, and where the user's files are. Imports neither torch nor pydantic
before a command runs, so that help is immediate.
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
        answers: setting -> text; None for what was not typed.
        answers_file: what `--answers` names.
        sets: the words of each `--set`.
        config_file: the file that is named, if one is.
    """

    answers: Mapping[str, str | None]
    answers_file: str | None
    sets: tuple[str, ...]
    config_file: str | None
    yes: bool
    no_input: bool
    dry_run: bool

    def request(self, path: Path, *, no_asking: str, **more: Any) -> ConfigRequest:
        """What they ask for.

        Args:
            more: fields of the request that no flag here is about.

        Raises:
            ConfigError: something cannot be read, or is no answer.
        """
        from .config_file import ConfigRequest

        answers, sources, extras = _gathered(self.answers, self.answers_file, self.sets)
        said = {"yes": self.yes, "dry_run": self.dry_run, **more}
        return ConfigRequest(path, answers, sources, extras, no_asking=no_asking, **said)


def question_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each question, `--answers`, `--set`, and what to do with the answers.

    The command is called with one argument for all of them, `typed`.
    """

    @functools.wraps(command)
    def with_typed(*args: Any, answers: str | None, sets: tuple[str, ...], **params: Any) -> None:
        texts = {question.key: params.pop(question.key) for question in QUESTIONS}
        others = {name: params.pop(name) for name in ("config_file", "yes", "no_input", "dry_run")}
        command(*args, typed=TypedFlags(texts, answers, sets, **others), **params)

    wrapped: Callable[..., None] = with_typed
    options = [
        *(click.option(one.flag, one.key, metavar=_metavar(one), help=one.words) for one in QUESTIONS),
        click.option("--answers", metavar="FILE", help="A YAML file of answers, by the names of the flags."),
        click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Any key of the file, as a.b=c."),
        click.option("--config_file", metavar="PATH", help="The file to write. [default: zeroaccel.yaml]"),
        click.option(
            "-y", "--yes", is_flag=True, help="Take the default of everything that is not given; ask nothing."
        ),
        click.option("--no_input", is_flag=True, help="Ask nothing; say which flags are missing."),
        click.option("--dry_run", is_flag=True, help="Print the file; write nothing."),
    ]
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def _gathered(
    typed: Mapping[str, str | None], answers_file: str | None, sets: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str], dict[tuple[str, ...], Any]]:
    """All answers, sources and extras: a flag counts more than `--set`, and that more than `--answers`."""
    from zeroaccel.config.launch.launch_settings import file_path

    texts: dict[str, tuple[str, str]] = {}
    extras: dict[tuple[str, ...], Any] = {}
    for key, text, source in _in_file(answers_file):
        texts[key] = text, source
    for word in sets:
        path, text = _path_and_text(word)
        question = next((one for one in QUESTIONS if path in ((one.key,), one.is_setting and file_path(one.key))), None)
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
    """(setting, text, place) of every answer in a file."""
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
    """The value of a key that no question is about; the key has to be one of a launch file."""
    from zeroaccel.config.launch.launch_settings import LaunchFile
    from zeroaccel.config.normalize import NormalizedConfig
    from zeroaccel.config.yaml_text import parse_yaml

    value: Any = parse_yaml(text, f"--set {word}").value
    tree: Any = value
    for part in reversed(path):
        tree = {part: tree}
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
    "convert": ("zeroaccel.cli.config.convert", "Make our files of accelerate's YAML or DeepSpeed's JSON."),
    "default": ("zeroaccel.cli.config.file_commands", "Write a launch file for this machine, without a question."),
    "explain": ("zeroaccel.cli.config.explain", "Say what a key means, what it may be, and where it can be given."),
    "schema": ("zeroaccel.cli.config.explain", "Print the JSON Schema of a file, for editors."),
    "show": ("zeroaccel.cli.config.explain", "Print the launch file, or every setting with who said it."),
    "template": ("zeroaccel.cli.config.file_commands", "Print or write a file to start from."),
    "update": ("zeroaccel.cli.config.file_commands", "Change answers of a launch file."),
    "validate": ("zeroaccel.cli.config.convert", "Check launch files, JSON configs, hostfiles and job scripts."),
}


@click.group(
    cls=LazyCommands,
    table=SUB_COMMANDS,
    headings={"The model, for a plan that fits": "model", **HEADINGS},
    invoke_without_command=True,
)
@click.option("--model", metavar="MODEL", help="What will be trained, as for `zeroaccel estimate`: plans what fits.")
@click.option(
    "--sequence", type=click.IntRange(1), default=2048, metavar="N", help="Its tokens per sample. [default: 2048]"
)
@click.option(
    "--batch", type=click.IntRange(1), default=1, metavar="N", help="Its samples per micro-step. [default: 1]"
)
@click.option("--checkpointing", is_flag=True, help="It recomputes activations.")
@question_flags
@click.pass_context
def config(
    ctx: click.Context, /, model: str | None, sequence: int, batch: int, checkpointing: bool, typed: TypedFlags
) -> None:
    """Make a launch file by answering questions, or without a question by flags.

    What a flag answers is not asked. Every step can be left backwards; nothing is written before the end.

    \b
    Examples:
      zeroaccel config
      zeroaccel config --yes --zero_stage 3 --num_processes 8
      zeroaccel config --yes --model 7b --sequence 4096
      zeroaccel config show --resolve
    """
    ctx.obj = os.environ
    # A flag before the sub-command's name would belong to this command, and have no effect on the sub-command.
    if ctx.invoked_subcommand is not None:
        for param in ctx.command.params:
            if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{param.opts[-1]} goes behind {ctx.invoked_subcommand}.", ctx)
        return
    from ..machine import look, measure_disk
    from ..progress import progress
    from .config_file import make_config_file, why_not_ask
    from .memory_plan import Model

    no_asking = why_not_ask(os.environ, yes=typed.yes, no_input=typed.no_input)
    planned = None if model is None else Model(model, sequence, batch, checkpointing)
    request = typed.request(Path(typed.config_file or "zeroaccel.yaml"), no_asking=no_asking, model=planned)
    with progress("looking at this machine") as line:
        machine = look(os.environ)
        if not no_asking:  # measuring takes seconds, and the speeds are for the user to see
            disks = []
            for disk in machine.disks:
                line.doing = f"measuring the disk of {disk.folder}"
                disks.append(measure_disk(disk))
            machine = replace(machine, disks=tuple(disks))
    make_config_file(request, machine)
