"""The type of a row of `setting_table`: a setting of a launch, its names everywhere, its question, and who reads it.

Both modules import nothing, so that help appears at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "switch", "count", "port", "number", "text", "word", "file", "folder", "choice", "names", "devices", "streams",
    "pairs",
]  # fmt: skip
"""Kinds of values. A word is a text in lower case; "names" are class names, "devices" the numbers of accelerators."""


@dataclass(frozen=True)
class Choice:
    """One possible answer: its value, its meaning in a few words, and the name of the reason that rules it out."""

    value: Any
    about: str = ""
    unless: str = ""


@dataclass(frozen=True)
class Ask:
    """The question of `zeroaccel config` about a setting; `zeroaccel.cli.config.questions` has the functions by name.

    Attributes:
        words: the question.
        when: names of the conditions under which it is asked.
        default: the default answer; with a gate, it is only proposed.
        computed: name of the function that computes the default answer.
        gate: a question that is asked first; its default "no" leaves the setting out.
        choices: the answers, the first of which is the default; by default those of the setting.
        check: name of the function that checks an answer.
        takes_auto: True if "auto" leaves the value to the script.
    """

    words: str
    when: str = ""
    default: Any = None
    computed: str = ""
    gate: str = ""
    choices: tuple[Choice, ...] = ()
    check: str = ""
    takes_auto: bool = False


@dataclass(frozen=True)
class Setting:
    """One setting of a launch.

    Attributes:
        name: its name in code, and by default as a flag and as a key of the launch file.
        kind: kind of its value.
        group: heading of its flag in help; "" for one that follows from others and has neither flag nor key.
        about: its help, with the default in brackets if that is not the value of `default`.
        default: the value without which a launch does not set it.
        from_zero: True if a number may be 0.
        choices: the possible values, which may be written in any case.
        synonyms: other words for some of the values.
        refused: word that other launchers take -> the remedy.
        expected: the valid values in messages; by default the choices.
        metavar: placeholder for the value in help; by default derived from the kind.
        flag: its flag, if that is not "--" and the name.
        short: its flag in the `deepspeed` command or in torchrun.
        spelled: further names as a flag and as a key of the launch file.
        takes_value: True for a switch whose flag takes true or false, as in accelerate.
        same: flag of another launcher with the same value -> what its help adds.
        means: switch of another launcher -> the value that it gives to this setting.
        section: section of the launch file with its key; "" for the file itself.
        variables: further variables that the launcher reads, after ZEROACCEL_ and the name.
        rank_variable: variable that passes it to ranks and to scripts for accelerate.
        json_path: dotted path of the same setting in the JSON config, in the schema's names.
        fact: name of the fact that it gives to the config (`config.auto_values.Facts`), by default its own name.
        unresolved: value in place of an "auto" of the JSON config that nothing sets.
        reader: who reads it; by default the launcher, or the ranks if there is a variable for them.
        ask: the question about it.
        question: name of the question, if that is not the setting's.
    """

    name: str
    kind: Kind
    group: str
    about: str
    default: Any = None
    from_zero: bool = False
    choices: tuple[Any, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    expected: str = ""
    metavar: str = ""
    flag: str = ""
    short: str = ""
    spelled: tuple[str, ...] = ()
    takes_value: bool = False
    same: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, Any] = field(default_factory=dict)
    section: str = ""
    variables: tuple[str, ...] = ()
    rank_variable: str = ""
    json_path: str = ""
    fact: str = ""
    unresolved: Any = None
    reader: str = ""
    ask: Ask | None = None
    question: str = ""

    @property
    def flag_name(self) -> str:
        """The flag of `zeroaccel launch`."""
        return self.flag or f"--{self.name}"

    @property
    def key(self) -> tuple[str, ...]:
        """The keys of the launch file, as accelerate spells them."""
        spelled = (name for name in self.spelled if name.startswith(("deepspeed_", "parallelism_config_")))
        return (self.section, next(spelled, self.name)) if self.section else (self.name,)

    @property
    def read_variables(self) -> tuple[str, ...]:
        """The environment variables that the launcher reads, in order of precedence."""
        # Not the variable of `debug`: in accelerate it enables checks of collectives, here full tracebacks.
        received = (self.rank_variable,) if self.rank_variable and self.name != "debug" else ()
        return (f"ZEROACCEL_{self.name.upper()}", *self.variables, *received)

    @property
    def fact_name(self) -> str:
        """The name of its fact; "" if the config takes it from elsewhere. It is then no argument of `ZeroPlugin`."""
        return self.fact or (self.name if self.json_path and self.kind != "names" else "")

    @property
    def read_by(self) -> str:
        """Who reads it, in words."""
        return self.reader or ("the ranks" if self.rank_variable else "the launcher")

    @property
    def default_words(self) -> str:
        """The default in words; "" if it is the value of `default`."""
        return self.about.partition(" [default: ")[2].rstrip("]")

    @property
    def placeholder(self) -> str:
        """The placeholder for its value in help."""
        if self.choices:
            return "|".join(map(str, self.choices))
        words = {"switch": "true|false", "count": "N", "file": "PATH", "folder": "PATH"}
        return self.metavar or words.get(self.kind, "TEXT")
