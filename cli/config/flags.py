"""The flags of the commands that make a launch file: one for each question of the table, and the same from files.

Gathers what flags, `--answers` and `--set` say into answers with their sources. Imports neither torch nor pydantic, so
that help is there at once; what needs them is imported when a command runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from zeroaccel.errors import ConfigError

from .questions import QUESTIONS, Question

__all__ = ["Said", "Typed", "question_flags"]

_METAVARS = {
    "yes_no": "yes|no",
    "count": "N",
    "number": "NUMBER",
    "file": "PATH",
    "folder": "FOLDER",
    "names": "NAME,...",
}


@dataclass(frozen=True)
class Said:
    """What was said before anybody is asked.

    Attributes:
        answers: setting -> answer.
        sources: setting -> who said it.
        extras: path of a key of the file -> value, for keys that no question is about.
    """

    answers: Mapping[str, Any]
    sources: Mapping[str, str]
    extras: Mapping[tuple[str, ...], Any]


@dataclass(frozen=True)
class Typed:
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

    def said(self) -> Said:
        """What they say.

        Raises:
            ConfigError: something cannot be read, or is no answer.
        """
        return _gathered(self.answers, self.answers_file, self.sets)


def question_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each question, `--answers`, `--set`, and what to do with the answers.

    The command is called with one argument for all of them, `typed`.
    """

    @functools.wraps(command)
    def with_typed(*args: Any, answers: str | None, sets: tuple[str, ...], **params: Any) -> None:
        texts = {question.key: params.pop(question.key) for question in QUESTIONS}
        others = {name: params.pop(name) for name in ("config_file", "yes", "no_input", "dry_run")}
        command(*args, typed=Typed(texts, answers, sets, **others), **params)

    wrapped: Callable[..., None] = with_typed
    options = [
        *(click.option(one.flag, one.key, metavar=_metavar(one), help=_about(one)) for one in QUESTIONS),
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


def _gathered(typed: Mapping[str, str | None], answers_file: str | None, sets: Sequence[str]) -> Said:
    """What was said by flags, before `--set`, before `--answers`."""
    texts: dict[str, tuple[str, str]] = {}
    extras: dict[tuple[str, ...], Any] = {}
    for key, text, source in _in_file(answers_file):
        texts[key] = text, source
    for word in sets:
        path, text = _path_and_text(word)
        question = next((one for one in QUESTIONS if path in (one.path, (one.key,))), None)
        if question is None:
            extras[path] = _extra(path, text, word)
        else:
            texts[question.key] = text, f"--set {'.'.join(path)}"
    for question in QUESTIONS:
        if (said := typed.get(question.key)) is not None:
            texts[question.key] = said, question.flag
    return Said(*_parsed(texts), extras)


def _parsed(texts: Mapping[str, tuple[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    from .answers import Wrong, parse

    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.key in texts:
            text, source = texts[question.key]
            try:
                answers[question.key] = parse(question, text)
            except Wrong as wrong:
                raise ConfigError(f"{source}: {wrong.words}", fix=wrong.fix) from None
    return answers, {key: source for key, (_, source) in texts.items()}


def _in_file(path: str | None) -> list[tuple[str, str, str]]:
    """(setting, text, place) of every answer in a file."""
    if path is None:
        return []
    from zeroaccel.config.launch.launch_file import text_of_file
    from zeroaccel.config.problems import closest
    from zeroaccel.config.yaml_text import parse_yaml

    from .answers import as_text

    parsed = parse_yaml(text_of_file(path, "--answers"), path)
    if not isinstance(parsed.value, dict):
        raise ConfigError(path, expected="answers as in `zero_stage: 3`", got=parsed.value)
    known = [question.key for question in QUESTIONS]
    found = []
    for key, value in parsed.value.items():
        place = parsed.places[(key,)]
        if key not in known:
            meant = closest(str(key), known)
            raise ConfigError(f"{place}: {key}: no such question", fix=f"did you mean {meant}?" if meant else "")
        text = ",".join(map(str, value)) if isinstance(value, list) else as_text(value)
        found.append((key, text, f"{place}: {key}"))
    return found


def _path_and_text(word: str) -> tuple[tuple[str, ...], str]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError("--set", expected="KEY=VALUE, as in deepspeed_config.zero_stage=3", got=word)
    return tuple(key.split(".")), text


def _extra(path: tuple[str, ...], text: str, word: str) -> Any:
    """The value of a key that no question is about; the key has to be one of a launch file."""
    from zeroaccel.config.launch.launch_schema import LaunchFile
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
    return _METAVARS.get(question.kind, "TEXT")


def _about(question: Question) -> str:
    return question.words
