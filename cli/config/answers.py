"""Parses answers, checks them against the table of questions, completes them by defaults, and asks for them.

Flags, `--answers`, `--set`, `--yes` and the questionnaire all use this module: each answer passes `parse` and `accept`,
so a file made without a terminal is the file that the questionnaire would make. `Walk` asks the questions that apply,
one after the other, through an `Asker` (arrow keys, or a test); the user can go back at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from zeroaccel.config.launch.resolution import json_facts
from zeroaccel.config.launch.setting_table import MESH_SIZES
from zeroaccel.config.section import FLAG_WORDS, as_text
from zeroaccel.errors import ConfigError, compose

from .questions import AUTO, FORMS, PLANNED, QUESTIONS, Question, WizardState

if TYPE_CHECKING:
    from ..machine import Machine


class InvalidAnswer(Exception):
    """An answer that is not valid.

    Args:
        words: the mistake, without the name of the question.
        fix: the remedy.
    """

    def __init__(self, words: str, fix: str = "") -> None:
        self.words, self.fix = words, fix
        super().__init__(compose(words, fix=fix))


@dataclass(frozen=True)
class Answers:
    """All answers that apply, and the questions that still need an answer."""

    state: WizardState
    missing: tuple[Question, ...]

    @property
    def answers(self) -> Mapping[str, Any]:
        return self.state.answers


def parse(question: Question, text: str) -> Any:
    """Returns the value of an answer that was typed.

    Raises:
        InvalidAnswer: the text does not have the form of an answer to this question.
    """
    text = text.strip()
    lowered = text.lower()
    if question.ask.takes_auto and lowered == AUTO:
        return AUTO
    if question.kind == "choice":
        values = {str(choice.value).lower(): choice.value for choice in question.choices}
        if lowered not in values:
            raise InvalidAnswer(f"expected {either(list(values))}, got {text!r}")
        return values[lowered]
    try:
        if question.kind == "yes_no" and lowered in FLAG_WORDS:
            return FLAG_WORDS[lowered]
        if question.kind == "count":
            return int(text)
        if question.kind == "number":
            return float(text)
        if question.kind in ("text", "names", "file", "folder"):
            if text:
                return text
            raise InvalidAnswer(f"expected {FORMS[question.kind][1]}, got an empty answer to {question.ask.words!r}")
    except ValueError:
        pass
    expected = FORMS[question.kind][1] + (f', or "{AUTO}"' if question.ask.takes_auto else "")
    raise InvalidAnswer(f"expected {expected}, got {text!r}")


def accept(question: Question, value: Any, state: WizardState) -> None:
    """Checks an answer of the right form.

    Raises:
        InvalidAnswer: it cannot be chosen in this state, is out of range, or names a file that does not exist.
    """
    if question.kind == "choice":
        choice = next(choice for choice in question.choices if choice.value == value)
        if reason := question.impossible(choice, state):
            raise InvalidAnswer(f"{value}: {reason}", "choose another")
    least = 0 if question.kind == "number" or question.row.from_zero else 1
    if question.kind in ("count", "number") and value != AUTO and not value >= least:
        raise InvalidAnswer(f"expected a number of at least {least}, got {value:g}")
    problem, fix = question.check(value, state)
    if problem:
        raise InvalidAnswer(problem, fix)


def with_answer(state: WizardState, question: Question, value: Any) -> WizardState:
    """Returns the state after an answer. A JSON config is read when an answer names it.

    Raises:
        ConfigError: the JSON config is wrong.
    """
    json = json_facts(value) if question.key == "deepspeed_config_file" else state.json
    answers = {**state.answers, question.key: value}
    return WizardState(answers, state.machine, json, state.needs)


def complete(
    explicit: Mapping[str, Any],
    machine: Machine,
    *,
    sources: Mapping[str, str] | None = None,
    former: Mapping[str, Any] | None = None,
    needs: Mapping[str, int] | None = None,
    with_defaults: bool = True,
    questions: Sequence[Question] = QUESTIONS,
) -> Answers:
    """Goes through the table in order and takes the explicit answer, else the former one, else the default.

    Args:
        explicit: setting -> answer; each must apply.
        sources: setting -> source of its answer, for messages; by default its flag.
        former: answers of an earlier file; those that no longer apply are dropped.
        needs: as in `WizardState`.
        questions: the table, or its first part.

    Raises:
        ConfigError: an answer is not valid, or does not apply.
    """
    explicit = _with_mesh(explicit)
    former = None if former is None else _with_mesh(former)
    state = WizardState({}, machine, None, needs or {})
    missing: list[Question] = []
    for question in questions:
        key = question.key
        where = (sources or {}).get(key, question.flag)
        if otherwise := question.why_not(state):
            # An explicit answer must not be dropped silently; answers of a former file and defaults are.
            if key in explicit:
                raise ConfigError(f"{where}: it does not apply: {otherwise}", fix="leave it out")
            continue
        if key in explicit:
            try:
                accept(question, explicit[key], state)
            except InvalidAnswer as wrong:
                raise ConfigError(f"{where}: {wrong.words}", fix=wrong.fix) from None
            state = with_answer(state, question, explicit[key])
        elif former is not None and key in former and _is_fine(question, former[key], state):
            state = with_answer(state, question, former[key])
        elif question.ask.gate:  # optional: "no" is its default
            continue
        elif with_defaults and (value := question.default(state)) is not None:
            state = with_answer(state, question, value)
        else:
            missing.append(question)
    return Answers(state, tuple(missing))


def _with_mesh(answers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the answer to `use_parallelism_config` that sizes of a mesh imply."""
    if "use_parallelism_config" in answers or not any((answers.get(size) or 1) > 1 for size in MESH_SIZES):
        return answers
    return {**answers, "use_parallelism_config": True}


def _is_fine(question: Question, value: Any, state: WizardState) -> bool:
    try:
        accept(question, value, state)
    except InvalidAnswer:
        return False
    return True


def either(words: Sequence[str]) -> str:
    """Joins words as in "a, b or c"."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


BACK: Final = object()
"""The reply that goes back to the previous question."""


class Quit(Exception):
    """The user quits: nothing is written."""


class Asker(Protocol):
    """Shows one question and returns its checked answer, or BACK where `back` allows it.

    `value` and `yes_no` raise Quit or KeyboardInterrupt.
    """

    def value(self, question: Question, proposal: Any, state: WizardState, *, back: bool) -> Any: ...

    def yes_no(self, words: str, proposal: bool, *, back: bool) -> Any: ...

    def remark(self, words: str) -> None:
        """Prints a remark, without asking."""


@dataclass(frozen=True)
class PlanAnswers:
    """The answers that follow from a memory plan.

    Attributes:
        answers: setting -> answer; these questions are skipped.
        needs: as in `WizardState`.
        note: a remark on the plan.
    """

    answers: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


Planner = Callable[[WizardState, bool], Any]
"""(state, true if the user can go back) -> a `PlanAnswers`, None for no plan, or BACK."""


@dataclass(frozen=True)
class _Step:
    """A question, its gate, or the plan that comes before the question."""

    question: Question
    kind: Literal["plan", "gate", "value"]


def _steps() -> Iterator[_Step]:
    for question in QUESTIONS:
        if question.key == _FIRST_PLANNED:
            yield _Step(question, "plan")
        if question.ask.gate:
            yield _Step(question, "gate")
        yield _Step(question, "value")


_FIRST_PLANNED = "use_parallelism_config"
_STEPS = tuple(_steps())


class Walk:
    """Asks the questions in order, and goes back when the user wants to.

    Args:
        explicit: answers by flags; their questions are skipped.
        proposals: answers to propose, such as those of an earlier file.
        planner: asks for a memory plan once processes and precision are known, if ZeRO's stage is open. Its answers
            replace the questions about stage and offload wherever they apply.
    """

    def __init__(
        self,
        machine: Machine,
        explicit: Mapping[str, Any],
        proposals: Mapping[str, Any],
        planner: Planner | None = None,
    ) -> None:
        self._machine, self._given, self._planner = machine, _with_mesh(explicit), planner
        self._assume(PlanAnswers())
        self._proposals = dict(proposals)
        self._answers: dict[str, Any] = {}  # answers of the steps in `_behind` only, all of which apply
        self._open_gates: set[str] = set()
        self._behind: list[int] = []
        self._index = 0

    def run(self, ask: Asker, *, back: bool = False) -> bool:
        """Asks every question that applies and is not answered yet.

        Args:
            back: true if the user can go back from the first question.

        Returns:
            False if the user went back from the first question.

        Raises:
            ConfigError: the answer of a flag turns out not to apply.
        """
        while self._index < len(_STEPS):
            step = _STEPS[self._index]
            state = self._situation(step)
            if state is None:
                self._index += 1
                continue
            can_go_back = back or bool(self._behind)
            if step.kind == "plan":
                assert self._planner is not None, "a plan without a planner"
                reply = self._planner(state, can_go_back)
            else:
                reply = self._put(ask, step, state, back=can_go_back)
            if reply is not BACK:
                self._note(step, reply)
                if step.question.key == "deepspeed_config_file" and step.kind == "value":
                    ask.remark(self._decided_by_json(reply))
            elif not self.back():
                return False
        return True

    def back(self) -> bool:
        """Goes to the previous step. Returns False if there is none."""
        if not self._behind:
            return False
        self._index = self._behind.pop()
        step = _STEPS[self._index]
        if step.kind == "plan":
            self._assume(PlanAnswers())
        self._answers.pop(step.question.key, None)
        return True

    def _assume(self, plan: PlanAnswers) -> None:
        """Uses the answers of a plan from now on, except for those that flags give."""
        self._needs = plan.needs
        self._assumed = {key: value for key, value in plan.answers.items() if key not in self._given}

    def _decided_by_json(self, path: str) -> str:
        """Returns a remark on the settings that a JSON config decides."""
        decided = json_facts(path).decided
        words = ", ".join(f"{key} {as_text(value)}" for key, value in decided.items())
        return f"{path} decides {words or 'nothing asked here'}" + ("; these questions are skipped" if words else "")

    def result(self) -> Answers:
        """Returns all answers."""
        return self._settle(len(QUESTIONS))

    def _settle(self, number: int) -> Answers:
        answers = {**self._answers, **self._given}
        return complete(
            answers,
            self._machine,
            former=self._assumed,
            needs=self._needs,
            with_defaults=False,
            questions=QUESTIONS[:number],
        )

    def _situation(self, step: _Step) -> WizardState | None:
        """Returns the state for asking a step, or None if the step is skipped."""
        question = step.question
        if step.kind == "plan":
            if self._planner is None or set(PLANNED) & set(self._given):
                return None
            state = self._settle(QUESTIONS.index(question)).state
            return state if state.on_zero else None
        is_open = step.kind == "gate" or not question.ask.gate or question.key in self._open_gates
        if question.key in self._given or not is_open:
            return None
        number = QUESTIONS.index(question)
        if question.key in self._assumed and question.key in self._settle(number + 1).answers:
            return None
        state = self._settle(number).state
        return None if question.why_not(state) else state

    def _put(self, ask: Asker, step: _Step, state: WizardState, *, back: bool) -> Any:
        question = step.question
        proposal = self._proposals.get(question.key)
        if step.kind == "gate":
            return ask.yes_no(question.ask.gate, proposal is not None, back=back)
        try:
            if proposal is not None:
                accept(question, proposal, state)
        except InvalidAnswer:
            proposal = None
        proposal = question.default(state) if proposal is None else proposal
        return ask.value(question, proposal, state, back=back)

    def _note(self, step: _Step, reply: Any) -> None:
        key = step.question.key
        self._behind.append(self._index)
        self._index += 1
        if step.kind == "plan":
            if reply is not None:
                self._assume(reply)
            return
        if step.kind == "value":
            self._answers[key] = self._proposals[key] = reply
        elif reply:
            self._open_gates.add(key)
        else:
            self._open_gates.discard(key)
            self._proposals.pop(key, None)
