"""Questions on a terminal: arrow keys for choices, typing for the rest, back and quit at every question.

No other file imports questionary. Prompts go to stderr, since stdout is for data. `config_file.why_not_ask` has
checked before that there is a terminal.
"""

from __future__ import annotations

import shutil
import sys
import termios
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import questionary
from prompt_toolkit.completion import PathCompleter
from prompt_toolkit.input.typeahead import clear_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output

from zeroaccel.config.section import as_text

from ..progress import ProgressLine
from .answers import BACK, InvalidAnswer, Quit, accept, parse
from .questions import Question, WizardState

_QUIT: object = object()
_BACK_TEXT, _QUIT_TEXT = "<", ":q"


@dataclass(frozen=True)
class Option:
    """A line to choose.

    Attributes:
        impossible: the reason for which the line is disabled, in a few words; "" if it can be chosen.
        chosen: the text that stays on the terminal after the choice; by default the title.
    """

    title: str
    value: Any
    impossible: str = ""
    chosen: str = ""


class Prompts:
    """Asks the user at the terminal.

    Raises, from every method:
        Quit: the user quits.
        KeyboardInterrupt: Ctrl-C.
        EOFError: Ctrl-D.
    """

    def __init__(self) -> None:
        self._output: Output = create_output(stdout=sys.stderr)
        self._computed = 0

    def value(self, question: Question, proposal: Any, state: WizardState, *, back: bool) -> Any:
        if question.kind == "yes_no":
            return self.yes_no(question.ask.words, bool(proposal), back=back)
        if question.kind == "choice":
            options = [
                Option(_title(choice.value, choice.about), choice.value, question.impossible(choice, state))
                for choice in question.choices
            ]
            return self.choose(question.ask.words, options, proposal, back=back)
        return self._typed(question, proposal, state, back=back)

    def yes_no(self, words: str, proposal: bool, *, back: bool) -> Any:
        return self.choose(words, [Option("yes", True), Option("no", False)], proposal, back=back)

    def remark(self, words: str) -> None:
        """Prints a remark in lines of the terminal's width."""
        width = shutil.get_terminal_size().columns - 1
        for line in words.split("\n"):
            is_long = len(line) > width and not line.startswith((" ", "?"))
            click.echo(textwrap.fill(line, width, break_long_words=False) if is_long else line, err=True)

    def _ask(self, question: questionary.Question) -> Any:
        """Asks and returns the answer; discards keys that the user typed during a computation before the question."""
        if ProgressLine.ended != self._computed and sys.stdin.isatty():
            clear_typeahead(question.application.input)
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
        self._computed = ProgressLine.ended
        return question.unsafe_ask()

    def choose(
        self, words: str, options: Sequence[Option], proposal: Any, *, back: bool, heading: str = "", footing: str = ""
    ) -> Any:
        """Returns the value of one of `options`, chosen by arrow keys; BACK if `back` allows it.

        Args:
            heading, footing: lines above and below the options.
        """
        choices: list[Any] = [
            questionary.Choice(option.title, value=option, disabled=option.impossible or None) for option in options
        ]
        possible = (
            choice
            for choice, option in zip(choices, options, strict=True)
            if option.value == proposal and not option.impossible
        )
        start = next(possible, None)
        if heading:
            choices.insert(0, questionary.Separator(heading))
        choices.append(questionary.Separator(footing or " "))
        if back:
            choices.append(questionary.Choice("back", value=BACK))
        choices.append(questionary.Choice("quit without writing", value=_QUIT))
        is_table = any(option.chosen for option in options)
        question = questionary.select(
            words,
            choices,
            default=start,
            instruction="(arrow keys)",
            output=self._output,
            erase_when_done=is_table,
        )
        reply = self._ask(question)
        if reply is _QUIT:
            raise Quit
        if reply is BACK:
            return BACK
        if is_table:
            self.remark(f"? {words} {reply.chosen or reply.title}")
        return reply.value

    def _typed(self, question: Question, proposal: Any, state: WizardState, *, back: bool) -> Any:
        def check(text: str) -> str:
            try:
                accept(question, parse(question, text), state)
            except InvalidAnswer as wrong:
                return str(wrong)
            return ""

        proposed = "" if proposal is None else as_text(proposal)
        is_path = question.kind in ("file", "folder")
        reply = self.text(question.ask.words, proposed, check, back=back, is_path=is_path)
        return reply if reply is BACK else parse(question, reply)

    def text(self, words: str, proposal: str, check: Callable[[str], str], *, back: bool, is_path: bool = False) -> Any:
        """Returns a line of text; an empty line accepts the proposal, which is shown until the user types.

        Args:
            check: returns the mistake in a text, "" if it is valid.
        """

        def validate(text: str) -> bool | str:
            text = text.strip() or proposal
            if text == _QUIT_TEXT or (text == _BACK_TEXT and back):
                return True
            return check(text) or True

        keys = KeyBindings()

        @keys.add("enter")
        def accept_line(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if not buffer.text:
                buffer.insert_text(proposal)
            buffer.validate_and_handle()

        ways = f"{_BACK_TEXT} back, {_QUIT_TEXT} quit" if back else f"{_QUIT_TEXT} quit"
        question = questionary.text(
            f"{words} ({ways})",
            validate=validate,
            output=self._output,
            key_bindings=keys,
            placeholder=[("class:instruction", proposal)],
            completer=PathCompleter(expanduser=True) if is_path else None,
        )
        text: str = self._ask(question).strip()
        if text == _QUIT_TEXT:
            raise Quit
        return BACK if text == _BACK_TEXT else text


def _title(value: Any, about: str) -> str:
    return f"{as_text(value)} - {about}" if about else as_text(value)
