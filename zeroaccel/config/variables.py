"""The variables whose names begin with ZEROACCEL_: those that mean something, and what others were meant to be.

One that nobody reads is nearly always a misspelt one, and would be passed over in silence. Settings of a launch have
theirs from `launch_sources`; the others are in a table here. Pure: who reads the environment passes it in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zeroaccel.config.launch.launch_settings import LaunchSettings
from zeroaccel.config.launch.launch_sources import PREFIX, variables_of
from zeroaccel.config.problems import closest
from zeroaccel.errors import ConfigError, compose

__all__ = ["check_variables", "known_variables", "unknown_variable"]

_OTHERS: Mapping[str, str] = {
    "ZEROACCEL_COMPAT": "hands the facade for `import deepspeed` on to children",
    "ZEROACCEL_CONFIG": "the launch file",
    "ZEROACCEL_CPU_CORES": "the cores of a rank, from its launcher",
    "ZEROACCEL_LAUNCH_ID": "by which a launcher knows what its ranks have started",
    "ZEROACCEL_LAUNCH_SOURCES": "who said what a launcher tells its ranks",
    "ZEROACCEL_LOG_LEVEL": "how much a rank says",
    "ZEROACCEL_SSH": "the program that reaches other machines",
    "ZEROACCEL_VERIFY": "the order of `zeroaccel verify`",
}


def known_variables() -> frozenset[str]:
    """Every name that means something."""
    settings = (variable for name in LaunchSettings.model_fields for variable in variables_of(name))
    return frozenset(_OTHERS) | {variable for variable in settings if variable.startswith(PREFIX)}


def unknown_variable(name: str) -> str:
    """What is wrong with a name that begins so and means nothing, with the one that was probably meant."""
    meant = closest(name.removeprefix(PREFIX), (known.removeprefix(PREFIX) for known in known_variables()))
    fix = f"did you mean {PREFIX}{meant}?" if meant else f"names that begin with {PREFIX} are settings; unset it"
    return compose(f"{name}: no such setting", fix=fix)


def check_variables(names: Iterable[str]) -> None:
    """Looks for names that begin with ZEROACCEL_ and mean nothing.

    Args:
        names: of the variables that are set.

    Raises:
        ConfigError: there are some; all are named, each with the one that was probably meant.
    """
    known = known_variables()
    lines = [unknown_variable(name) for name in sorted(names) if name.startswith(PREFIX) and name not in known]
    if len(lines) == 1:
        raise ConfigError(f"environment {lines[0]}")
    if lines:
        raise ConfigError("\n  ".join([f"environment: {len(lines)} variables are wrong", *lines]))
