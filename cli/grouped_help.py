"""Commands whose help lists the flags in groups, under headings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

CONTEXT = {
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
}
"""Click's settings for the spelling of options and for help. Commands inherit them from their group."""


class GroupedOptions(click.Command):
    """Lists its options under headings.

    Args:
        headings: heading -> its first option, in the order of the options' declarations.
    """

    def __init__(self, *args: Any, headings: Mapping[str, str] = MappingProxyType({}), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._begins = {name: heading for heading, name in headings.items()}

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Returns heading -> (flag, help) of each option, in order."""
        heading, sections = "Options", dict[str, list[tuple[str, str]]]()
        for param in self.get_params(ctx):
            heading = self._begins.get(str(param.name), heading)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(heading, []).append(record)
        return sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rows in self.sections(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(rows)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
