"""What every section of the config is made of: the base model, the value types, and the older names of keys.

The schema files declare sections with these pieces; `normalize` reads the older names, `diagnostics` turns what the
value types refuse into sentences. Nothing here knows a key of the config, and values are checked, never repaired. Only
integers written as floats (5e8), flags written as 0 and 1, and other names of one dtype are made uniform. `normalize`
takes numbers and flags out of their quotes first (`out_of_quotes`), at every key that expects one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

AUTO = "auto"
"""Stands for a value that is filled in once model, loaders and world size are known."""


@dataclass(frozen=True)
class AlsoSpelled:
    """Marks a field that may be written under another name; a deprecated one leaves a note."""

    name: str
    deprecated: bool = False


@dataclass(frozen=True)
class Retired:
    """A boolean key of older releases: the sibling section that replaced it, and what in there it stands for.

    False stands for the replacement being absent.
    """

    becomes: str
    when_true: Mapping[str, object]


def _for_editors(schema: dict[str, Any], section: type[ConfigSection]) -> None:
    """Completes the JSON Schema of one section: "auto" is a legal value, and the other spellings are legal keys."""
    properties = schema.get("properties", {})
    for name, field in section.model_fields.items():
        if nested_section(field) is None and field.default != AUTO:
            properties[name] = _or_auto(properties[name])
        for other in spellings(field):
            properties[other.name] = properties[name] | ({"deprecated": True} if other.deprecated else {})
    properties.update({name: {"title": name} for name in section.unread.split()})
    if section.unread:
        schema["additionalProperties"] = False
    for name, retired in section.retired.items():
        text = f"Older form of {retired.becomes}."
        properties[name] = {"type": "boolean", "deprecated": True, "description": text}


def _or_auto(schema: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    value = {key: part for key, part in schema.items() if key not in about}
    choices = value["anyOf"] if set(value) == {"anyOf"} else [value]
    return {"anyOf": [*choices, {"const": AUTO}], **about}


class ConfigSection(BaseModel):
    """Base of all sections: immutable, closed to unknown keys, described for editors by its attribute docstrings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        json_schema_extra=_for_editors,
    )

    retired: ClassVar[Mapping[str, Retired]] = {}
    """Keys of older releases that are translated rather than renamed."""

    from_flag: ClassVar[Mapping[bool, Mapping[str, object]]] = {}
    """What a bare true or false in place of the section stands for, where that is a known older form."""

    is_open: ClassVar[bool] = False
    """Whether DeepSpeed ignores keys of this section that it does not know."""

    is_read: ClassVar[bool] = True
    """Whether any key of this section takes effect here: where none does, a misspelt one does no harm."""

    unread: ClassVar[str] = ""
    """Keys of the format that nothing here reads, separated by spaces; see `UnreadSection`."""

    inner: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Field -> names of keys that belong into it, where its keys are free."""


class UnreadSection(ConfigSection):
    """A section that is refused or without effect (`support` says which), of which at most its switch is read.

    Its other keys are in `unread`: a misspelt one is still found, and any value is kept as it is, unchecked.
    """

    model_config = ConfigDict(extra="allow")  # unknown keys never get here: `normalize` finds them

    is_read = False


def nested_section(field: FieldInfo) -> type[ConfigSection] | None:
    """The section class of a field that holds a section, also when it may be None; else None."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and get_origin(candidate) is None and issubclass(candidate, ConfigSection):
            return candidate
    return None


def spellings(field: FieldInfo) -> list[AlsoSpelled]:
    """The other names under which the field may be written."""
    return [mark for mark in field.metadata if isinstance(mark, AlsoSpelled)]


def keys_of(
    section: type[ConfigSection], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo | None]]:
    """The path and field of every key of a section and of those within, a section before its own; None for no field."""
    for name, field in section.model_fields.items():
        yield (*above, name), field
        if (nested := nested_section(field)) is not None:
            yield from keys_of(nested, (*above, name))
    for name in section.unread.split():
        yield (*above, name), None


def field_paths(section: type[ConfigSection]) -> Iterator[tuple[str, ...]]:
    """The path of every field of a section and of the sections within."""
    return (path for path, field in keys_of(section) if field is not None)


def wrong(expected: str, fix: str = "") -> PydanticCustomError:
    """The error of a value type: what would have been right, as a noun phrase, and what to do."""
    return PydanticCustomError("wrong", "expected {expected}", {"expected": expected, "fix": fix})


def as_text(value: object) -> str:
    """A value as it is written on a command line, in a variable or in a file: true, 3, cpu, A,B."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def as_integer(value: object) -> int | None:
    """The integer that a number is, as 1e3 is one; None for other numbers, for true and false, and for text.

    Example:
        >>> as_integer(1e3), as_integer(1.5), as_integer(True), as_integer("3")
        (1000, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Integral):
        return int(value)
    return int(float(value)) if float(value).is_integer() else None


def checked(holds: Callable[[Any], bool], expected: str) -> BeforeValidator:
    """Of a value type: refuses values for which `holds` is false."""

    def check(value: object) -> object:
        if holds(value):
            return value
        raise wrong(expected)

    return BeforeValidator(check)


def _integer(value: object) -> int:
    if (number := as_integer(value)) is not None:
        return number
    raise wrong("a whole number")


def _number(value: object) -> float:
    if not isinstance(value, bool) and isinstance(value, Real):
        number = float(value)
        if number - number == 0.0:  # false for infinities and NaN
            return number
    raise wrong("a finite number")


def _flag(value: object) -> bool:
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise wrong("true or false")


def _path_text(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise wrong("a path")


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise wrong("a list of strings")


_DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}


def _dtype(value: object) -> str:
    # str() also names torch's own dtypes, which a dict built in Python may hold, without importing torch here
    name = _DTYPES.get(str(value).lower().removeprefix("torch."))
    if name is None:
        raise wrong('"fp32", "fp16" or "bf16"')
    return name


def _maybe_dtype(value: object) -> str | None:
    return None if value is None or value == "none" else _dtype(value)


def lowered(value: object) -> object:
    """A string in lower case, for words that may be written in any case; anything else as it is."""
    return value.lower() if isinstance(value, str) else value


def out_of_quotes(annotation: Any, value: object) -> Any:
    """The number or flag in a string, where the type expects one and the text is exactly one; else the value as it is.

    DeepSpeed's pydantic models read the same texts, except 5e8 for an integer. A type that expects anything (`Any`, the
    arguments of an optimizer) reads numbers, "true" and "false", in lists too.

    Example:
        >>> [out_of_quotes(kind, text) for kind, text in ((Count, "500"), (Flag, "yes"), (Number, "1e-3"), (Text, "3"))]
        [500, True, 0.001, '3']
    """
    if annotation is Any and isinstance(value, (list, tuple)):
        return type(value)(out_of_quotes(Any, item) for item in value)
    if not isinstance(value, str) or not value.isascii():
        return value
    text = value.strip().lower()
    kinds = (int, float, bool) if annotation is Any else types_of(annotation)
    for kind in kinds:
        if kind in (int, float) and re.fullmatch(_NUMBER_TEXT, text):
            if kind is float:
                return float(text)
            if (number := int(text) if text.lstrip("+-").isdecimal() else as_integer(float(text))) is not None:
                return number
        elif kind is bool and text in (("true", "false") if annotation is Any else FLAG_WORDS):
            return FLAG_WORDS[text]
    return value


def leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation allows, without their arguments, and the values of its literals."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from get_args(annotation)
    elif origin in (Annotated, Union, UnionType):
        parts = get_args(annotation)[:1] if origin is Annotated else get_args(annotation)
        for part in parts:
            yield from leaves(part)
    else:
        yield origin or annotation


def types_of(annotation: Any) -> tuple[type, ...]:
    """The types that a value may have, each once."""
    return tuple(dict.fromkeys(leaf if isinstance(leaf, type) else type(leaf) for leaf in leaves(annotation)))


_NUMBER_TEXT = r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)(e[+-]?\d{1,3})?"
FLAG_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True),
    **dict.fromkeys(("false", "no", "off", "0", "f", "n"), False),
}

Integer = Annotated[int, BeforeValidator(_integer)]
Count = Annotated[int, Field(ge=0), BeforeValidator(_integer)]
PositiveCount = Annotated[int, Field(gt=0), BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number)]
NonNegativeNumber = Annotated[float, Field(ge=0), BeforeValidator(_number)]
PositiveNumber = Annotated[float, Field(gt=0), BeforeValidator(_number)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)]
OpenFraction = Annotated[float, Field(gt=0, lt=1), BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, checked(lambda value: isinstance(value, str), "a string")]
Name = Annotated[str, checked(lambda value: isinstance(value, str) and bool(value.strip()), "a non-empty string")]
PathText = Annotated[str, BeforeValidator(_path_text)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype)]
MaybeDtype = Annotated[Literal["fp32", "fp16", "bf16"] | None, BeforeValidator(_maybe_dtype)]
Arguments = Annotated[Mapping[str, Any], checked(lambda value: isinstance(value, Mapping), "an object")]
FreeSection = Annotated[
    dict[str, Any] | bool | None,
    checked(lambda value: value is None or isinstance(value, (bool, dict)), "an object"),
]
