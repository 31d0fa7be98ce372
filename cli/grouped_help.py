"""Commands whose flags are listed in groups in their help, under headings of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click


class GroupedOptions(click.Command):
    """Lists its options under headings.

    Args:
        groups: heading -> names of parameters, in order; the rest comes last, under "This command".
    """

    def __init__(
        self, *args: Any, groups: Mapping[str, Sequence[str]] = MappingProxyType({}), **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None
        }
        for title, names in self._groups.items():
            rows = [records.pop(name) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)
        if records:
            with formatter.section("This command" if self._groups else "Options"):
                formatter.write_dl(list(records.values()))
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
