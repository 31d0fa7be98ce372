"""The walk through the questions: one after the other, back at any step, and only those that apply.

Asks through an `Asker`, so that it is the same with arrow keys and in tests. Back keeps what was answered, as the
proposal of the second time; answers that do not apply any more are left behind. Writes and prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from .answers import Settled, Wrong, accept, settle
from .questions import QUESTIONS, Question, Situation

if TYPE_CHECKING:
    from ..machine import Machine

__all__ = ["BACK", "Asker", "Quit", "Walk"]

BACK: Final = object()
"""The reply that wants to see the question before."""


class Quit(Exception):
    """The person wants to leave, and nothing is to be written."""


class Asker(Protocol):
    """Shows one question and returns its answer, checked, or BACK where that is allowed.

    Both raise Quit, or KeyboardInterrupt.
    """

    def value(self, question: Question, proposal: Any, situation: Situation, *, back: bool) -> Any: ...

    def yes_no(self, words: str, proposal: bool, *, back: bool) -> Any: ...


@dataclass(frozen=True)
class _Step:
    question: Question
    is_gate: bool


_STEPS = [_Step(question, gate) for question in QUESTIONS for gate in ((True, False) if question.gate else (False,))]


class Walk:
    """How far the questions have been answered.

    Args:
        given: answers by flags, which are not asked again.
        proposals: answers to propose, as those of an earlier file.
        needs: as in `Situation`.
        assumed: answers that are taken without asking wherever they apply, as those of a plan.
    """

    def __init__(
        self,
        machine: Machine,
        given: Mapping[str, Any],
        proposals: Mapping[str, Any],
        needs: Mapping[str, int] | None = None,
        assumed: Mapping[str, Any] | None = None,
    ) -> None:
        self._machine, self._given, self._needs = machine, given, needs
        self._assumed = {key: value for key, value in (assumed or {}).items() if key not in given}
        self._proposals = dict(proposals)
        self._answers: dict[str, Any] = {}  # of the steps behind us only: those that do not apply are never among them
        self._open_gates: set[str] = set()
        self._behind: list[int] = []
        self._index = 0

    def run(self, ask: Asker, *, back: bool = False) -> bool:
        """Asks every question that applies and is not answered yet.

        Args:
            back: whether one may go back from the first question.

        Returns:
            False if one did.

        Raises:
            ConfigError: an answer that was given by a flag does not apply after all.
        """
        while self._index < len(_STEPS):
            step = _STEPS[self._index]
            situation = self._situation(step)
            if situation is None:
                self._index += 1
                continue
            reply = self._put(ask, step, situation, back=back or bool(self._behind))
            if reply is not BACK:
                self._note(step, reply)
            elif not self.back():
                return False
        return True

    def back(self) -> bool:
        """Goes to the step before; false if there is none."""
        if not self._behind:
            return False
        self._index = self._behind.pop()
        self._answers.pop(_STEPS[self._index].question.key, None)
        return True

    def settled(self) -> Settled:
        """All answers."""
        return self._settle(len(QUESTIONS))

    def _settle(self, number: int) -> Settled:
        said = {**self._answers, **self._given}
        return settle(
            said,
            self._machine,
            former=self._assumed,
            needs=self._needs,
            with_defaults=False,
            questions=QUESTIONS[:number],
        )

    def _situation(self, step: _Step) -> Situation | None:
        """What is known when a step comes up, or None if it is not to be asked."""
        question = step.question
        is_open = step.is_gate or not question.gate or question.key in self._open_gates
        if question.key in self._given or not is_open:
            return None
        number = QUESTIONS.index(question)
        if question.key in self._assumed and question.key in self._settle(number + 1).answers:
            return None
        situation = self._settle(number).situation
        return situation if question.applies(situation) else None

    def _put(self, ask: Asker, step: _Step, situation: Situation, *, back: bool) -> Any:
        question = step.question
        proposal = self._proposals.get(question.key)
        if step.is_gate:
            return ask.yes_no(question.gate, proposal is not None, back=back)
        try:
            if proposal is not None:
                accept(question, proposal, situation)
        except Wrong:
            proposal = None
        proposal = question.default(situation) if proposal is None else proposal
        return ask.value(question, proposal, situation, back=back)

    def _note(self, step: _Step, reply: Any) -> None:
        key = step.question.key
        self._behind.append(self._index)
        self._index += 1
        if not step.is_gate:
            self._answers[key] = self._proposals[key] = reply
        elif reply:
            self._open_gates.add(key)
        else:
            self._open_gates.discard(key)
            self._proposals.pop(key, None)
