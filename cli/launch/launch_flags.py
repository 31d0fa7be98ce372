"""The flags of `zeroaccel launch`: one per setting, in the groups of help, with accelerate's names.

The flags are made from `setting_table` and the types and docstrings of the settings, so that flag, variable and file
cannot differ. Converts parsed flags into `ExplicitSettings`; the command itself is in `launch_command`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from zeroaccel.config.diagnostics import closest
from zeroaccel.config.launch.launch_settings import LaunchSettings
from zeroaccel.config.launch.launch_sources import ExplicitSettings, from_text, kind_of, other_names
from zeroaccel.config.launch.setting_table import SETTINGS
from zeroaccel.config.section import leaves

from ..grouped_help import GroupedOptions
from .foreign_flags import ELASTIC_HINTS

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ENGINES = {"use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU"}

GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name, setting in SETTINGS.items() if setting.group == group)
    for group in dict.fromkeys(setting.group for setting in SETTINGS.values())
}
"""Heading in help -> its settings."""

_KIND_METAVARS = {"switch": "true|false", "count": "N"}

_FP8 = "8-bit training is not available; use --mixed_precision bf16"
_REFUSED_BEGINNINGS: Mapping[str, str] = {
    "fp8_": _FP8,
    "megatron_lm_": "this is a setting of Megatron-LM, which is another engine",
    "use_megatron_lm": "Megatron-LM is another engine",
    "tpu": "there is no support for TPUs",
    "no_tpu": "there is no support for TPUs",
    "mpirun_": "the launcher does not call mpirun; run `mpirun -n N zeroaccel launch ...` instead",
    "aws_": "there is no support for SageMaker",
    "zero_nvme_path": "use --offload_optimizer_nvme_path or --offload_param_nvme_path",
}


HEADINGS: Mapping[str, str] = {
    **{group: names[0] for group, names in GROUPS.items()},
    "Flags of the deepspeed command": "num_gpus",
    "This command": "config_file",
}


class LaunchCommand(GroupedOptions):
    """The launch command; for options of other launchers that do not exist, it explains why."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            for beginning, reason in _REFUSED_BEGINNINGS.items():
                if name.startswith(beginning):
                    raise click.UsageError(f"{error.option_name}: {reason}", ctx) from None
            if hint := ELASTIC_HINTS.get(name):
                raise click.UsageError(f"No such option {error.option_name}; {hint}", ctx) from None
            meant = closest(name, [option.lstrip("-") for param in self.params for option in param.opts])
            fix = f"; did you mean --{meant}?" if meant else ""
            raise click.UsageError(f"No such option {error.option_name}{fix}", ctx) from None

    def stored_help(self) -> str:
        """Returns the content of `launch_help.json`: the help before it is wrapped. It is the same on every Python."""
        ctx = click.Context(self, info_name="zeroaccel launch", **self.context_settings)
        parts = {
            "usage": self.collect_usage_pieces(ctx),
            "help": inspect.cleandoc(self.help or ""),
            "sections": self.sections(ctx),
        }
        return json.dumps(parts, indent=1) + "\n"


def flag(setting: str) -> str:
    """Returns the flag of a setting."""
    return SETTINGS[setting].flag or f"--{setting}"


def setting_flags(command: _Command) -> _Command:
    """Gives a command the flag of every setting. A flag that is absent is None, whatever the setting's default."""
    for name in reversed(list(SETTINGS)):
        command = _option(name)(command)
    for engine in _ENGINES:
        command = click.option(f"--{engine}", engine, is_flag=True, hidden=True)(command)
    return command


def settings_from_flags(typed: Mapping[str, Any]) -> ExplicitSettings:
    """Returns the settings that were typed.

    Args:
        typed: parameter -> click's value; None or false for flags that were not typed.

    Raises:
        ConfigError: a value does not have the form of its setting.
    """
    typed = {name: value for name, value in typed.items() if value is not None}
    for name, fewest in (("num_machines", "min_machines"), ("num_processes", "min_processes")):
        least, colon, most = str(typed.get(name, "")).partition(":")
        if colon:  # like torchrun's --nnodes
            typed |= {name: most, fewest: least}
    values = {
        name: value if isinstance(value, bool) else from_text(name, value, flag)
        for name, value in typed.items()
        if name not in _ENGINES
    }
    sources = {name: flag(name) for name in values}
    for engine, kind in _ENGINES.items():
        if typed.get(engine):
            if values.get("distributed_type", kind) != kind:
                raise click.UsageError(f"--{engine}: {sources['distributed_type']} asks for another type")
            values["distributed_type"], sources["distributed_type"] = kind, f"--{engine}"
    return ExplicitSettings(values, sources)


def _option(name: str) -> Callable[[_Command], _Command]:
    about = LaunchSettings.model_fields[name].description
    spelled = [flag(name), *(f"--{other}" for other in other_names(name)), *filter(None, [SETTINGS[name].short])]
    if kind_of(name) == "switch" and not SETTINGS[name].takes_value:
        bare = spelled[0].lstrip("-")
        return click.option(f"--{bare}/--no_{bare}", name, is_flag=True, default=None, help=about)
    return click.option(*spelled, name, default=None, metavar=_metavar(name), help=about)


def _metavar(name: str) -> str:
    if choices := choices_of(name):
        return "|".join(choices)
    if SETTINGS[name].metavar:
        return SETTINGS[name].metavar
    return "PATH" if name.endswith(("_path", "_file", "file")) else _KIND_METAVARS.get(kind_of(name), "TEXT")


def choices_of(setting: str) -> list[str]:
    """Returns the values that a setting may have, or nothing if any value of its type is allowed."""
    return [str(leaf) for leaf in leaves(LaunchSettings.model_fields[setting].annotation) if not isinstance(leaf, type)]
