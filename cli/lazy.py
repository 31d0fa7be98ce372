"""A group of commands that are imported one at a time, when used, so that help and mistakes are answered at once."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

__all__ = ["LazyCommand", "LazyCommands"]


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is, and what it is for.

    Attributes:
        module: full name of the module; in it the command is called as on the command line, with _ for -.
    """

    module: str
    about: str


class LazyCommands(click.Group):
    """The group. A name that it does not have is answered with the one that was probably meant.

    Args:
        table: name -> the command.
    """

    def __init__(self, *args: Any, table: Mapping[str, LazyCommand], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module = importlib.import_module(self._table[cmd_name].module)
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            meant = difflib.get_close_matches(name, self._table, n=1)
            ctx.fail(f"No such command '{name}'." + (f" Did you mean {meant[0]}?" if meant else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._table[name].about) for name in self.list_commands(ctx)])
