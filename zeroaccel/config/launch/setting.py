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
    """The question of `zeroaccel config` about a setting; `cli.config.questions` has the functions by name."""

    words: str  # the question
    when: str = ""  # names of the conditions under which it is asked
    default: Any = None  # the default answer, which is only proposed if there is a gate
    computed: str = ""  # name of the function that computes the default answer
    gate: str = ""  # a question that is asked first; its default "no" leaves the setting out
    choices: tuple[Choice, ...] = ()  # the answers, the first is the default; else those of the setting
    check: str = ""  # name of the function that checks an answer
    takes_auto: bool = False  # "auto" leaves the value to the script


@dataclass(frozen=True)
class Setting:
    """One setting of a launch."""

    name: str  # in code, and by default as a flag and as a key of the launch file
    kind: Kind
    group: str  # heading of its flag in help; "" for a setting that has neither flag nor key
    about: str  # its help, with the default in brackets if `default` is not the whole truth

    # The value.
    default: Any = None  # a launch without the setting behaves as with this value
    from_zero: bool = False  # a number may be 0
    choices: tuple[Any, ...] = ()  # the possible values, which may be written in any case
    synonyms: Mapping[str, str] = field(default_factory=dict)  # other words for some of the values
    refused: Mapping[str, str] = field(default_factory=dict)  # word that other launchers take -> the remedy
    expected: str = ""  # the valid values in messages, by default the choices

    # Its names: as a flag, in other launchers, in the launch file, in the environment, in the JSON config.
    metavar: str = ""  # placeholder for the value in help, by default derived from the kind
    flag: str = ""  # its flag, if that is not "--" and the name
    short: str = ""  # its flag in the `deepspeed` command or in torchrun
    spelled: tuple[str, ...] = ()  # further names as a flag and as a key of the launch file
    takes_value: bool = False  # the flag of a switch takes true or false, as in accelerate
    same: Mapping[str, str] = field(default_factory=dict)  # other launcher's flag -> words that its help adds
    means: Mapping[str, Any] = field(default_factory=dict)  # other launcher's switch -> the value that it gives
    section: str = ""  # section of the launch file with its key
    variables: tuple[str, ...] = ()  # variables that the launcher reads after ZEROACCEL_ and the name
    rank_variable: str = ""  # variable that passes it to ranks and to scripts for accelerate
    json_path: str = ""  # dotted path of the same setting in the JSON config, in the schema's names
    fact: str = ""  # its name in `config.auto_values.Facts`, by default its own
    unresolved: Any = None  # value in place of an "auto" of the JSON config that nothing sets

    reader: str = ""  # the program that reads it, by default the launcher, or the ranks if they have a variable
    ask: Ask | None = None
    question: str = ""  # name of the question, if that is not the setting's

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
