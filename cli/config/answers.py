"""Answers: read from text, checked against the table, and completed by defaults in the order of the questions.

The one way in for what flags, `--answers`, `--set`, `--yes` and the wizard say: each answer passes `parse` and `accept`
here, so that a file made without a terminal is the file the wizard would have made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroaccel.errors import ConfigError, compose

from .json_facts import json_facts
from .questions import AUTO, QUESTIONS, Question, Situation

if TYPE_CHECKING:
    from ..machine import Machine

__all__ = ["Settled", "Wrong", "accept", "as_text", "parse", "settle", "with_answer"]

_YES, _NO = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")
_FORMS = {
    "yes_no": "yes or no",
    "count": "a whole number",
    "number": "a number",
    "text": "text",
    "names": "names separated by commas",
    "file": "a path",
    "folder": "a path",
}


class Wrong(Exception):
    """An answer that cannot be taken.

    Args:
        words: what is wrong with it, without saying which answer it is.
        fix: what to do.
    """

    def __init__(self, words: str, fix: str = "") -> None:
        self.words, self.fix = words, fix
        super().__init__(compose(words, fix=fix))


@dataclass(frozen=True)
class Settled:
    """All answers that apply, and the questions that still need one."""

    situation: Situation
    missing: tuple[Question, ...]

    @property
    def answers(self) -> Mapping[str, Any]:
        return self.situation.answers


def parse(question: Question, text: str) -> Any:
    """The value behind a text.

    Raises:
        Wrong: it has not the form of an answer to this question.
    """
    text = text.strip()
    lowered = text.lower()
    if question.takes_auto and lowered == AUTO:
        return AUTO
    if question.kind == "choice":
        values = {str(choice.value).lower(): choice.value for choice in question.choices}
        if lowered not in values:
            raise Wrong(f"expected {_listed(list(values))}, got {text!r}")
        return values[lowered]
    try:
        if question.kind == "yes_no" and lowered in (*_YES, *_NO):
            return lowered in _YES
        if question.kind == "count":
            return int(text)
        if question.kind == "number":
            return float(text)
        if question.kind in ("text", "names", "file", "folder") and text:
            return text
    except ValueError:
        pass
    expected = _FORMS[question.kind] + (f', or "{AUTO}"' if question.takes_auto else "")
    raise Wrong(f"expected {expected}, got {text!r}")


def accept(question: Question, value: Any, situation: Situation) -> None:
    """Checks an answer of the right form.

    Raises:
        Wrong: it cannot be chosen here, is out of range, or names something that is not there.
    """
    if question.kind == "choice":
        reason = next(choice for choice in question.choices if choice.value == value).impossible(situation)
        if reason:
            raise Wrong(f"{value}: {reason}", "choose another")
    if question.kind in ("count", "number") and value != AUTO and not value >= question.least:
        raise Wrong(f"expected a number of at least {question.least:g}, got {value:g}")
    problem, fix = question.check(value, situation)
    if problem:
        raise Wrong(problem, fix)


def with_answer(situation: Situation, question: Question, value: Any) -> Situation:
    """The situation after an answer; a JSON config is read when it is named.

    Raises:
        ConfigError: the JSON config is wrong.
    """
    json = json_facts(value) if question.key == "deepspeed_config_file" else situation.json
    answers = {**situation.answers, question.key: value}
    return Situation(answers, situation.machine, json, situation.needs)


def settle(
    given: Mapping[str, Any],
    machine: Machine,
    *,
    sources: Mapping[str, str] | None = None,
    former: Mapping[str, Any] | None = None,
    needs: Mapping[str, int] | None = None,
    with_defaults: bool = True,
    questions: Sequence[Question] = QUESTIONS,
) -> Settled:
    """Goes through the table in order, taking the answer that is given, else the former one, else the default.

    Args:
        given: setting -> answer; each has to apply.
        sources: setting -> where its answer was given, for messages; its flag where nothing is said.
        former: answers of an earlier file; those that no longer apply are dropped.
        needs: as in `Situation`.
        questions: the table, or its first part.

    Raises:
        ConfigError: an answer cannot be taken, or does not apply.
    """
    situation = Situation({}, machine, None, needs or {})
    missing: list[Question] = []
    for question in questions:
        key = question.key
        where = (sources or {}).get(key, question.flag)
        if not question.applies(situation):
            if key in given:
                raise ConfigError(f"{where}: it does not apply: {question.why_not(situation)}", fix="leave it out")
            continue
        if key in given:
            try:
                accept(question, given[key], situation)
            except Wrong as wrong:
                raise ConfigError(f"{where}: {wrong.words}", fix=wrong.fix) from None
            situation = with_answer(situation, question, given[key])
        elif former is not None and key in former and _is_fine(question, former[key], situation):
            situation = with_answer(situation, question, former[key])
        elif question.gate:
            continue
        elif with_defaults and (value := question.default(situation)) is not None:
            situation = with_answer(situation, question, value)
        else:
            missing.append(question)
    return Settled(situation, tuple(missing))


def as_text(value: Any) -> str:
    """An answer as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_fine(question: Question, value: Any, situation: Situation) -> bool:
    try:
        accept(question, value, situation)
    except Wrong:
        return False
    return True


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
