"""Building blocks of config sections: the base model, the value types, and the marks for older names of keys.

The schema modules declare sections with them; `normalize` reads the older names, and `diagnostics` turns errors of the
value types into sentences. No key of the config is named here. The value types check values and never repair them; they
only unify integers written as floats (5e8), flags written as 0 and 1, and the names of a dtype. `normalize` first
unquotes numbers and flags (`out_of_quotes`) at every key that expects them.
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
"""Placeholder for a value that the engine fills in once it knows the model, the loaders and the world size."""


@dataclass(frozen=True)
class AlsoSpelled:
    """Marks a field that has another valid name; a deprecated name causes a note."""

    name: str
    deprecated: bool = False


@dataclass(frozen=True)
class Retired:
    """A boolean key of older releases, with the sibling section that replaced it.

    True means that section with the values `when_true`, false means no such section.
    """

    becomes: str
    when_true: Mapping[str, object]


def _for_editors(schema: dict[str, Any], section: type[ConfigSection]) -> None:
    """Completes the JSON Schema of one section: adds "auto" as a value and the other spellings as keys."""
    properties = schema.get("properties", {})
    for name, field in section.model_fields.items():
        if nested_section(field) is None and not takes_auto(field):
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
    value = {key: entry for key, entry in schema.items() if key not in about}
    choices = value["anyOf"] if set(value) == {"anyOf"} else [value]
    return {"anyOf": [*choices, {"const": AUTO}], **about}


class ConfigSection(BaseModel):
    """Base of all sections: immutable, without unknown keys; attribute docstrings are the descriptions for editors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        json_schema_extra=_for_editors,
    )

    retired: ClassVar[Mapping[str, Retired]] = {}
    """Keys of older releases that `normalize` translates into a section rather than renames."""

    from_flag: ClassVar[Mapping[bool, Mapping[str, object]]] = {}
    """Meaning of a plain true or false in place of the section, if that is a known older form."""

    is_open: ClassVar[bool] = False
    """True if DeepSpeed ignores unknown keys in this section."""

    is_read: ClassVar[bool] = True
    """True if any key of this section takes effect; otherwise a misspelt key does no harm."""

    unread: ClassVar[str] = ""
    """Keys of the format that zeroaccel does not read, separated by spaces; see `UnreadSection`."""

    inner: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Field with free keys -> names of keys that belong into it."""


class UnreadSection(ConfigSection):
    """A refused section or one without effect (see `support`); zeroaccel reads its switch at most.

    `unread` lists its other keys: `normalize` reports misspelt ones, and values stay unchecked.
    """

    model_config = ConfigDict(extra="allow")  # `normalize` has already rejected unknown keys

    is_read = False


def nested_section(field: FieldInfo) -> type[ConfigSection] | None:
    """Returns the section class of a field, also of an optional one; None if the field holds no section."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and get_origin(candidate) is None and issubclass(candidate, ConfigSection):
            return candidate
    return None


def takes_auto(field: FieldInfo) -> bool:
    """Returns True if "auto" is an ordinary value of a field, and not a gap that facts about the job fill."""
    return AUTO in (field.default, *leaves(field.annotation))


def spellings(field: FieldInfo) -> list[AlsoSpelled]:
    """Returns the other valid names of a field."""
    return [mark for mark in field.metadata if isinstance(mark, AlsoSpelled)]


def keys_of(
    section: type[ConfigSection], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo | None]]:
    """Yields path and field of every key of a section and its subsections, in order; None for a key without field."""
    for name, field in section.model_fields.items():
        yield (*above, name), field
        if (nested := nested_section(field)) is not None:
            yield from keys_of(nested, (*above, name))
    for name in section.unread.split():
        yield (*above, name), None


def field_paths(section: type[ConfigSection]) -> Iterator[tuple[str, ...]]:
    """Returns the paths of all fields of a section and its subsections."""
    return (path for path, field in keys_of(section) if field is not None)


def wrong(expected: str, fix: str = "") -> PydanticCustomError:
    """Builds the error of a value type from the expected value, as a noun phrase, and the remedy."""
    return PydanticCustomError("wrong", "expected {expected}", {"expected": expected, "fix": fix})


def as_text(value: object) -> str:
    """Formats a value as on a command line, in a variable or in a file: true, 3, cpu, A,B."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def as_integer(value: object) -> int | None:
    """Converts a whole number such as 1e3 to an integer; returns None for other numbers, booleans and text.

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
    """Returns a validator that rejects values for which `holds` is false."""

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


def _nbytes(value: object) -> int:
    size = (
        re.fullmatch(r"(\d{1,12}(?:\.\d+)?)\s*([kmgt]?)(i?)b", value.strip().lower())
        if isinstance(value, str)
        else None
    )
    if size is not None:
        return int(float(size[1]) * (1024 if size[3] else 1000) ** " kmgt".index(size[2] or " "))
    if (number := as_integer(value)) is not None and number >= 0:
        return number
    raise wrong('a number of bytes of at least 0, or a size such as "4GB" or "512MiB"')


def _nbytes_or_auto(value: object) -> object:
    return AUTO if lowered(value) == AUTO else _nbytes(value)


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
    # A dict built in Python may hold torch dtypes; str() gives their names without an import of torch.
    name = _DTYPES.get(str(value).lower().removeprefix("torch."))
    if name is None:
        raise wrong('"fp32", "fp16" or "bf16"')
    return name


def _maybe_dtype(value: object) -> str | None:
    return None if value is None or value == "none" else _dtype(value)


def lowered(value: object) -> object:
    """Converts a string to lower case, for words that are valid in any case; returns other values unchanged."""
    return value.lower() if isinstance(value, str) else value


def out_of_quotes(annotation: Any, value: object) -> Any:
    """Converts a string to a number or flag if the type expects one and the text is one; else returns it unchanged.

    DeepSpeed's pydantic models accept the same texts, except 5e8 for an integer. For the type `Any`, as of an
    optimizer's arguments, it converts numbers, "true" and "false", in lists too.

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
    """Yields the types that an annotation allows, without their arguments, and the values of its literals."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from get_args(annotation)
    elif origin in (Annotated, Union, UnionType):
        parts = get_args(annotation)[:1] if origin is Annotated else get_args(annotation)
        for nested in parts:
            yield from leaves(nested)
    else:
        yield origin or annotation


def types_of(annotation: Any) -> tuple[type, ...]:
    """Returns the types that a value may have, without duplicates."""
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
Nbytes = Annotated[int, BeforeValidator(_nbytes)]
NbytesOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_nbytes_or_auto)]
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
