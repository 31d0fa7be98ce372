"""Makes errors of the facade AssertionErrors too: DeepSpeed raises AssertionErrors, which programs catch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from zeroaccel.errors import ConfigError, EngineStateError, UsageError, ZeroAccelError

_Call = TypeVar("_Call", bound=Callable[..., Any])

_AS_ASSERTION: dict[type, type] = {
    kind: type(kind.__name__, (kind, AssertionError), {"__module__": __name__, "__doc__": kind.__doc__})
    for kind in (ConfigError, UsageError, EngineStateError)
}


def asserting(call: _Call) -> _Call:
    """Decorates a call: any ConfigError, UsageError or EngineStateError that it raises is also an AssertionError.

    Example:
        >>> @asserting
        ... def check() -> None:
        ...     raise UsageError("a call", expected="a model")
        >>> try:
        ...     check()
        ... except AssertionError as error:
        ...     print(type(error).__name__, isinstance(error, UsageError), error)
        UsageError True a call: expected a model
    """

    @functools.wraps(call)
    def asserted(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except ZeroAccelError as error:
            if type(error) in _AS_ASSERTION:
                error.__class__ = _AS_ASSERTION[type(error)]
            raise

    return cast(_Call, asserted)
