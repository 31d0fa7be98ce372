"""Making a launch file: from what was given, by asking for the rest or without asking, to the file on the disk.

The same for `zeroaccel config`, `config default` and `config update`, which differ in what is given. Everything said on
the way goes to stderr; a dry run prints the file to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .answers import Settled, as_text, settle
from .plan import PLANNED, Model, Plan, ask_plan, best_plan, outlook
from .questions import by_key
from .render import checked, command_line, launch_line, render
from .walk import BACK, Quit, Walk
from .write import changes, write_file

if TYPE_CHECKING:
    from ..machine import Machine
    from .prompts import Prompts

__all__ = ["ConfigRequest", "make", "say", "show_file", "show_machine", "why_not_ask"]


@dataclass(frozen=True)
class ConfigRequest:
    """What is wanted.

    Attributes:
        path: where the file goes.
        given: setting -> answer, by flags and the like.
        sources: setting -> who said it, for messages.
        extras: path of a key of the file -> value, for keys that no question is about.
        former: answers of the file as it is, for an update.
        model: what will be trained, where a flag says it.
        no_asking: why nobody is asked; empty if somebody is.
    """

    path: Path
    given: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[tuple[str, ...], Any] = field(default_factory=dict)
    former: Mapping[str, Any] | None = None
    model: Model | None = None
    yes: bool = False
    dry_run: bool = False
    no_asking: str = ""


def why_not_ask(environ: Mapping[str, str], *, yes: bool, no_input: bool) -> str:
    """Why there is nobody to ask; empty if there is somebody.

    A prompt without a terminal would wait for ever, or take the first line of a pipe for an answer.
    """
    if yes:
        return "--yes is given"
    if no_input:
        return "--no_input is given"
    if environ.get("CI", "").lower() in ("1", "true", "yes"):
        return "CI is set"
    for stream, name in ((sys.stdin, "stdin"), (sys.stderr, "stderr")):
        if not stream.isatty():
            return f"{name} is no terminal"
    return "the terminal is a dumb one" if environ.get("TERM") == "dumb" else ""


def make(request: ConfigRequest, machine: Machine) -> None:
    """Makes the file.

    Raises:
        ConfigError: an answer is wrong, or the file cannot be written.
        click.UsageError: answers are missing, and there is nobody to ask.
        click.Abort: the person does not want it after all.
    """
    if request.no_asking:
        settled = _without_asking(request, machine)
        if request.model is not None:
            say(outlook(request.model, machine, settled.answers))
        _finish(request, settled.answers, _text(request, settled))
        return
    from .prompts import Prompts

    try:
        settled = _by_asking(request, machine, Prompts())
    except (Quit, KeyboardInterrupt, EOFError):
        say("nothing was written")
        raise click.Abort from None
    _finish(request, settled.answers, _text(request, settled))


def say(message: str = "") -> None:
    """To the person, on stderr."""
    click.echo(message, err=True)


def _without_asking(request: ConfigRequest, machine: Machine) -> Settled:
    former, needs = request.former, None
    if request.model is not None and not {*PLANNED, "deepspeed_config_file"} & set(request.given):
        plan = best_plan(request.model, machine, request.given)
        former, needs = {**(former or {}), **(plan.answers or {})}, plan.needs
    settled = settle(request.given, machine, sources=request.sources, former=former, needs=needs)
    if settled.missing:
        flags = ", ".join(question.flag for question in settled.missing)
        raise click.UsageError(f"{request.no_asking}, and there is no default for {flags}: give a value.")
    if request.yes or request.former is not None:
        return settled
    if open_keys := [key for key in settled.answers if key not in request.given]:
        flags = ", ".join(f"{by_key(key).flag} ({as_text(settled.answers[key])})" for key in open_keys)
        raise click.UsageError(
            f"{request.no_asking}, so nobody is asked: give {flags}, or --yes for what is in brackets."
        )
    return settled


def _by_asking(request: ConfigRequest, machine: Machine, prompts: Prompts) -> Settled:
    show_machine(machine)
    # An update is about a file that is there; what it trains was planned when it was made.
    has_plan = request.former is None or request.model is not None
    while True:
        plan = ask_plan(prompts, request.model, machine, request.given) if has_plan else Plan()
        walk = Walk(machine, request.given, request.former or {}, plan.needs, plan.answers)
        while walk.run(prompts, back=has_plan):
            settled = walk.settled()
            if _is_wanted(request, settled, plan, machine, prompts):
                return settled
            walk.back()


def _is_wanted(request: ConfigRequest, settled: Settled, plan: Plan, machine: Machine, prompts: Prompts) -> bool:
    """Shows what would be written; false to go back to the last question."""
    from .prompts import Option

    show_file(request.path, _text(request, settled))
    if plan.model is not None and (words := outlook(plan.model, machine, settled.answers)):
        say(words)
    words = "Print it?" if request.dry_run else f"Write {request.path}?"
    return prompts.choose(words, [Option("yes", True)], True, back=True) is not BACK


def _text(request: ConfigRequest, settled: Settled) -> str:
    text = render(settled.answers, request.extras)
    checked(text, str(request.path))
    return text


def _finish(request: ConfigRequest, answers: Mapping[str, Any], text: str) -> None:
    if request.dry_run:
        click.echo(text, nl=False)
        say(f"dry run: {request.path} is not written")
        return
    kept = write_file(request.path, text)
    say(f"written: {request.path}" + (f" (what was there is in {kept})" if kept else ""))
    say(f"start:   {launch_line(request.path, Path.cwd())}")
    say(f"again:   {command_line(answers, request.extras, request.path)}")


def show_machine(machine: Machine) -> None:
    """One panel with what is here."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for heading, content in machine.lines():
        table.add_row(heading, content)
    Console(stderr=True).print(Panel(table, title="this machine", title_align="left", expand=False))


def show_file(path: Path, text: str) -> None:
    """The file as it would be, and what changes where there is one."""
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(stderr=True)
    console.print(Syntax(text, "yaml", background_color="default"))
    if path.is_file():
        difference = changes(path, text)
        console.print(Syntax(difference, "diff", background_color="default") if difference else f"{path} says the same")
