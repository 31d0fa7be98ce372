"""Questions on a terminal: arrow keys for choices, typing for the rest, back and quit at every one.

The only file that knows questionary. Prompts go to stderr, since stdout is for data. Whether there is a terminal is
asked before by `making`; here it is taken for granted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import questionary
from prompt_toolkit.output import Output, create_output

from zeroaccel.config.section import as_text

from .answers import BACK, InvalidAnswer, Quit, accept, parse
from .questions import Question, WizardState

_QUIT: object = object()
_BACK_TEXT, _QUIT_TEXT = "<", ":q"


@dataclass(frozen=True)
class Option:
    """A line to choose. With `impossible`, why it cannot be chosen, it is shown and cannot."""

    title: str
    value: Any
    impossible: str = ""


class Prompts:
    """Asks the user at the terminal.

    Raises, from every method:
        Quit: the user quits.
        KeyboardInterrupt: Ctrl-C.
        EOFError: Ctrl-D.
    """

    def __init__(self) -> None:
        self._output: Output = create_output(stdout=sys.stderr)

    def value(self, question: Question, proposal: Any, state: WizardState, *, back: bool) -> Any:
        if question.kind == "yes_no":
            return self.yes_no(question.words, bool(proposal), back=back)
        if question.kind == "choice":
            options = [
                Option(_title(choice.value, choice.about), choice.value, choice.impossible(state))
                for choice in question.choices
            ]
            return self.choose(question.words, options, proposal, back=back)
        return self._typed(question, proposal, state, back=back)

    def yes_no(self, words: str, proposal: bool, *, back: bool) -> Any:
        return self.choose(words, [Option("yes", True), Option("no", False)], proposal, back=back)

    def choose(self, words: str, options: Sequence[Option], proposal: Any, *, back: bool) -> Any:
        """One of `options`, by arrow keys; BACK where `back` allows it."""
        choices: list[Any] = [
            questionary.Choice(one.title, value=one, disabled=one.impossible or None) for one in options
        ]
        possible = (
            choice for choice, one in zip(choices, options, strict=True) if one.value == proposal and not one.impossible
        )
        start = next(possible, None)
        choices.append(questionary.Separator())
        if back:
            choices.append(questionary.Choice("back", value=BACK))
        choices.append(questionary.Choice("quit, write nothing", value=_QUIT))
        reply = questionary.select(
            words, choices, default=start, instruction="(arrow keys)", output=self._output
        ).unsafe_ask()
        if reply is _QUIT:
            raise Quit
        return reply if reply is BACK else reply.value

    def text(self, words: str, proposal: str, check: Callable[[str], str], *, back: bool) -> Any:
        """A line of text, for which `check` returns what is wrong with it, or nothing."""
        return self._line(questionary.text, words, proposal, check, back=back)

    def _typed(self, question: Question, proposal: Any, state: WizardState, *, back: bool) -> Any:
        def check(text: str) -> str:
            try:
                accept(question, parse(question, text), state)
            except InvalidAnswer as wrong:
                return str(wrong)
            return ""

        prompt = questionary.path if question.kind in ("file", "folder") else questionary.text
        reply = self._line(prompt, question.words, "" if proposal is None else as_text(proposal), check, back=back)
        return reply if reply is BACK else parse(question, reply)

    def _line(
        self, prompt: Callable[..., questionary.Question], words: str, proposal: str, check: Any, *, back: bool
    ) -> Any:
        def validate(text: str) -> bool | str:
            text = text.strip()
            if text == _QUIT_TEXT or (text == _BACK_TEXT and back):
                return True
            return check(text) or True

        ways = f"{_BACK_TEXT} goes back, {_QUIT_TEXT} quits" if back else f"{_QUIT_TEXT} quits"
        question = prompt(f"{words} ({ways})", default=proposal, validate=validate, output=self._output)
        text: str = question.unsafe_ask().strip()
        if text == _QUIT_TEXT:
            raise Quit
        return BACK if text == _BACK_TEXT else text


def _title(value: Any, about: str) -> str:
    return f"{as_text(value)} - {about}" if about else as_text(value)
