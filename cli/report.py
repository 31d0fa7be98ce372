"""`zeroaccel report`: a page of what a run's trackers wrote."""

from __future__ import annotations

from pathlib import Path

import click

from zeroaccel.errors import UsageError

from .pages.frame import check_page_path, write_page
from .pages.report_page import read_run, report_page

_FOLDER = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=_FOLDER)
@click.argument("other", type=_FOLDER, required=False)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help="The page. [default: report.html in RUN]"
)
def report(run: Path, other: Path | None, out: str | None) -> None:
    """Draw the metrics of RUN, or of two runs beside each other, as one HTML page.

    RUN is the folder that a jsonl_monitor or csv_monitor, or a tracker of such files, wrote into, or one above it.

    \b
    Examples:
      zeroaccel report runs/first
      zeroaccel report runs/first runs/second -o compared.html
    """
    if not run.is_dir():
        raise UsageError(str(run), expected="the folder of a run", got="nothing there")
    path = Path(out) if out is not None else run / "report.html"
    check_page_path(str(path), "--out")
    folders = [run] if other is None else [run, other]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise UsageError("report", expected="two different runs", got=f"{run} twice")
    write_page(
        path, report_page({name: read_run(folder) for name, folder in zip(names, folders, strict=True)}), "--out"
    )
    click.echo(f"{path}: page written")
