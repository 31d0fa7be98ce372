"""`zeroaccel trace`: runs a script for a few steps, and shows where their time went.

The environment asks `zeroaccel.zero.step_trace` in the ranks to record. This module starts the job, makes the page from
the recorded file, and explains why a file is missing.

The page's drawing has a row per unit; the tables have the same numbers as means over the recorded steps. The page's
script redraws the figure for another rank, step or magnification from the spans in the page.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from zeroaccel.errors import UsageError
from zeroaccel.telemetry.trace_file import SHARES, Span, StepTraceFile, innermost, read_trace, unit_of

from .pages.frame import COLOURS, MOST_NBYTES, Table, escaped, figure, legend, page, write_page
from .verify import run_ordered

_VARIABLE = "ZEROACCEL_TRACE"  # the same as in `zeroaccel.zero.step_trace`, which imports torch
_FILE, _PAGE = "trace.json", "trace.html"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Optimizer steps to record.")
@click.option(
    "--warmup", type=click.IntRange(0), default=3, show_default=True, help="First steps to skip before recording."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("zeroaccel-trace"),
    show_default=True,
    metavar="FOLDER",
    help="Folder for trace.json and trace.html.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, required=True)
def trace(steps: int, warmup: int, out: Path, arguments: tuple[str, ...]) -> int:
    """Run a script for a few steps, record them, and draw each rank's time.

    ARGUMENTS are those of `zeroaccel launch`: its flags, the script, and the script's arguments. The command records
    the first training engine that the script creates. After the steps, the script ends with success at the end of
    engine.step(). Recording does not change the computation.

    FOLDER receives trace.html, a page, and trace.json for Perfetto and Chrome. If ARGUMENTS is a trace.json, written by
    this command or by engine.record_trace(), the command only makes its page beside it.

    \b
    Examples:
      zeroaccel trace --num_processes 2 train.py
      zeroaccel trace --steps 5 -o before --num_processes 8 --zero_stage 3 train.py --lr 1e-4
      zeroaccel trace runs/trace.json
    """
    if len(arguments) == 1 and arguments[0].endswith(".json"):
        path = Path(arguments[0])
        _show(read_trace(path), path.with_suffix(".html"))
        return 0
    with _folder_for_results(out), tempfile.TemporaryDirectory(prefix="zeroaccel-trace-") as folder:
        progress, written = Path(folder, "steps"), out / _FILE
        order = {"path": str(written.resolve()), "warmup": warmup, "steps": steps, "progress": str(progress)}
        code = run_ordered(arguments, {_VARIABLE: json.dumps(order)})
        if code:
            return code
        done = int(progress.read_text()) if progress.exists() else None
    if done is None:
        raise UsageError(
            "trace: the script created no training engine",
            fix="it must call zeroaccel.initialize or Accelerator.prepare with an optimizer",
        )
    if done < warmup + steps:
        before = done - steps if done > steps else min(warmup, done - 1)
        raise UsageError(
            f"trace: the script ended after {done} optimizer steps",
            expected=f"{warmup} to warm up and {steps} to record",
            fix=f"pass --warmup {before} --steps {done - before}" if done else "train for longer",
        )
    recorded = read_trace(written)
    _show(recorded, out / _PAGE)
    click.echo(f"{written}: the same for Perfetto and Chrome")
    return 0


@contextmanager
def _folder_for_results(folder: Path) -> Iterator[None]:
    """Creates the folder before the job, and checks that it is writable. Removes a new folder that stays empty."""
    probe, is_new = folder / f".{os.getpid()}.partial", not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}", fix="name a writable folder") from None
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()


def _show(recorded: StepTraceFile, page: Path) -> None:
    """Writes the page, and prints the times per rank and the largest waits."""
    write_page(page, trace_page(recorded), "--out")
    ranks, steps = len(recorded.ranks), recorded.num_steps
    begin, end = recorded.ranks[0].steps[0][0], recorded.ranks[0].steps[-1][1]
    mean = (end - begin) / 1e6 / steps
    click.echo(f"{steps} step{'s' if steps > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}, {mean:.2f} ms each")
    for rank in range(min(ranks, 8)):
        split = recorded.mean_split(rank)
        shares = ", ".join(f"{share} {seconds * 1e3:.2f}" for share, seconds in split.items() if seconds >= 5e-6)
        click.echo(f"  rank {rank}, ms: {shares}")
    waits = recorded.largest_waits()
    click.echo("largest waits:" if waits else "no rank waited for another")
    for number, wait in enumerate(waits, start=1):
        click.echo(f"  {number}. {wait}")
    click.echo(f"{page}: page written")


_LEFT, _WIDTH, _ROW, _TOP = 200, 800, 18, 24
_MOST_UNITS = 80
_MOST_DATA_NBYTES = MOST_NBYTES * 6 // 10
_MOST_NAMES = 120

# Colour of each kind, in the order of the legend. The first five are drawn high, the three in flight low.
_KINDS = {
    "compute": COLOURS[0],
    "wait, nothing computed": COLOURS[1],
    "sum of gradients": COLOURS[2],
    "update": COLOURS[3],
    "wait for a tier": COLOURS[4],
    "gather in flight": COLOURS[5],
    "reduction in flight": COLOURS[6],
    "copy in flight": COLOURS[7],
}
_NAMES = list(_KINDS)
_OF_MAIN = {"compute": 0, "wait": 1, "sum": 2, "update": 3, "copy": 4}
_ALL_UNITS, _WAITS = "all units", "waits"

Bar = tuple[int, int, int, int, int]  # row, kind, begin and length in microseconds, number of its name


def trace_page(trace: StepTraceFile) -> str:
    """Returns the page of a trace as HTML."""
    ranks = range(len(trace.ranks))
    lengths = [end - begin for begin, end in trace.ranks[0].steps]
    shown = lengths.index(sorted(lengths)[(len(lengths) - 1) // 2])
    rows = [_WAITS, *trace.facts.units[:_MOST_UNITS], _ALL_UNITS]
    names: dict[str, int] = {}
    drawn = _bars(trace, rows, 0, shown, names)
    order = [(rank, shown) for rank in ranks]
    order += [(rank, step) for step in range(trace.num_steps) if step != shown for rank in ranks]
    data: dict[str, object] = {}
    nbytes = 0
    for rank, step in order:
        bars = _bars(trace, rows, rank, step, names)
        length = trace.ranks[rank].steps[step][1] - trace.ranks[rank].steps[step][0]
        nbytes += len(json.dumps(bars, separators=(",", ":")))
        if nbytes > _MOST_DATA_NBYTES:
            break
        data[f"{rank}/{step}"] = {"length": length // 1000, "bars": bars}
    facts = trace.facts
    body = [
        "<h2>Largest waits</h2>",
        _waits(trace),
        "<h2>A step over time</h2>",
        _controls(trace, data, shown),
        legend(_KINDS),
        _drawing(drawn, rows, trace.ranks[0].steps[shown], list(names)),
        _notes(trace, rows, data, len(order)),
        "<h2>Where a step's time goes</h2>",
        _split(trace),
        "<h2>Units</h2>",
        _units(trace),
    ]
    settings = {
        "spans": data,
        "names": list(names),
        "rows": rows,
        "colours": list(_KINDS.values()),
        "kinds": _NAMES,
        "left": _LEFT,
        "width": _WIDTH,
        "row": _ROW,
        "top": _TOP,
    }
    steps = f"steps {facts.first_step} to {facts.first_step + trace.num_steps - 1}"
    title = f"Trace of {len(trace.ranks)} rank{'s' if len(trace.ranks) > 1 else ''}, {steps}"
    return page(title, body, about=f"Engine: {facts.engine}.", data=settings, script=_SCRIPT)


def _bars(trace: StepTraceFile, rows: Sequence[str], rank: int, step: int, names: dict[str, int]) -> list[Bar]:
    """Returns the bars of a rank's step, without those shorter than a microsecond."""
    start, _ = trace.ranks[rank].steps[step]
    row_of = {name: number for number, name in enumerate(rows)}
    last = len(rows) - 1
    bars: list[Bar] = []

    def add(row: int, kind: int, span: Span, name: str) -> None:
        begin, length = (span.begin - start) // 1000, (span.end - span.begin) // 1000
        if length > 0:
            bars.append((row, kind, begin, length, names.setdefault(name, len(names))))

    spans = trace.in_step(rank, step)
    for span in innermost(span for span in spans if span.lane == "main"):
        if span.kind in _OF_MAIN and span.kind != "wait":
            row = row_of.get(unit_of(span, trace.facts.units) or "", last)
            add(row, _OF_MAIN[span.kind], span, f"{span.name} {span.detail}")
    for span in trace.exposed(rank, step):
        name = f"{span.detail.split('/')[1]} {span.name}"
        add(0, 1, span, name)
        add(row_of.get(unit_of(span, trace.facts.units) or "", last), 1, span, name)
    for span in spans:
        row = row_of.get(unit_of(span, trace.facts.units) or "", last)
        if span.kind == "flight" and not span.detail.startswith("control"):
            add(row, 5 if span.detail.startswith("gather") else 6, span, f"{span.name} in flight")
        elif span.kind in ("copy", "update") and span.lane != "main":
            add(row, 7 if span.kind == "copy" else 3, span, f"{span.name}, {span.lane}")
    return bars


def _drawing(bars: Iterable[Bar], rows: Sequence[str], step: tuple[int, int], names: Sequence[str]) -> str:
    length = max(1, (step[1] - step[0]) // 1000)
    height = _TOP + len(rows) * _ROW + 24
    parts = [
        '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="5" height="5" fill="{COLOURS[1]}"/><rect width="2" height="5" fill="#fff"/></pattern></defs>'
    ]
    for number, name in enumerate(rows):
        y = _TOP + number * _ROW
        shown = name if len(name) <= 27 else f"...{name[-24:]}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" class="end">{escaped(shown)}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y + _ROW}" y2="{y + _ROW}"/>')
    parts.append('<g id="bars">')
    for row, kind, begin, duration, label in bars:
        at, width = _LEFT + begin / length * _WIDTH, duration / length * _WIDTH
        if width < 0.15:
            continue
        y, tall = _TOP + row * _ROW + (1 if kind < 5 else 12), 10 if kind < 5 else 4
        fill = "url(#hatch)" if kind == 1 else _KINDS[_NAMES[kind]]
        said = f"<title>{escaped(names[label])}: {duration / 1000:.3f} ms</title>" if width > 4 else ""
        parts.append(f'<rect x="{at:.1f}" y="{y}" width="{width:.1f}" height="{tall}" fill="{fill}">{said}</rect>')
    parts.append("</g>")
    ticks = [
        f'<text class="middle" x="{_LEFT + tick / 4 * _WIDTH:.0f}" y="14">{length * tick / 4000:.2f} ms</text>'
        for tick in range(5)
    ]
    parts.append(f'<g id="ticks">{"".join(ticks)}</g>')
    return figure(
        "".join(parts), _LEFT + _WIDTH + 40, height, "A step by unit over time; the tables have the numbers", "timeline"
    )


def _controls(trace: StepTraceFile, data: dict[str, object], shown: int) -> str:
    ranks = sorted({int(key.split("/")[0]) for key in data})
    steps = sorted({int(key.split("/")[1]) for key in data})
    of_ranks = "".join(f"<option>{rank}</option>" for rank in ranks)
    of_steps = "".join(
        f'<option value="{step}"{" selected" if step == shown else ""}>{trace.facts.first_step + step}</option>'
        for step in steps
    )
    return (
        '<form class="controls" id="controls" hidden aria-label="Rank, step and magnification">'
        f'<label>rank<select id="rank">{of_ranks}</select></label>'
        f'<label>step<select id="step">{of_steps}</select></label>'
        '<label>magnify<input type="range" id="zoom" min="1" max="20" value="1" aria-valuetext="1 times">'
        '<output for="zoom">1 times</output></label></form>'
    )


def _notes(trace: StepTraceFile, rows: Sequence[str], data: dict[str, object], total: int) -> str:
    facts, notes = trace.facts, []
    notes.append(
        "Hatched bars are exposed communication: the rank waits and computes nothing. Thin bars run during computation."
    )
    if len(trace.facts.units) > _MOST_UNITS:
        notes.append(f"{len(facts.units) - _MOST_UNITS} more units are in the row of all units and in the table.")
    if len(data) < total:
        notes.append(f"The page has {len(data)} of {total} pairs of a rank and a step; trace.json has all of them.")
    if not facts.separates_units:
        notes.append("The model is compiled, so its units have no separate spans: their compute is under other.")
    error = max(facts.clock_errors)
    if error:
        notes.append(f"The clocks of the machines are aligned to {error / 1e6:.3f} ms.")
    if facts.on_device:
        notes.append("Times are measured on the device's streams.")
    return "".join(f"<p>{escaped(note)}</p>" for note in notes)


def _waits(trace: StepTraceFile) -> str:
    waits = trace.largest_waits()
    if not waits:
        return "<p>No rank waited for another.</p>"
    rows = [
        [
            f"{number}. {wait.label}",
            wait.operation,
            wait.phase,
            wait.rank,
            f"{wait.seconds * 1e3:.3f}",
            "-" if wait.last_rank is None else wait.last_rank,
            "-" if wait.last_rank is None else _ms(wait.late_seconds),
        ]
        for number, wait in enumerate(waits, start=1)
    ]
    headings = ["collective", "operation", "phase", "waiting rank", "ms per step", "last to come", "ms into it"]
    table = Table("The three largest waits of all ranks", headings, rows, texts=(0, 1, 2)).html()
    return table + (
        "<p>If a rank joins late, the cause is its work before the collective; if no rank is late, the transfer takes "
        "the time.</p>"
    )


def _split(trace: StepTraceFile) -> str:
    rows = []
    for rank in range(len(trace.ranks)):
        split = trace.mean_split(rank)
        rows.append([f"rank {rank}", *(_ms(split[share]) for share in SHARES), _ms(sum(split.values()))])
    return Table("Mean ms per step; each moment counts once", ["rank", *SHARES, "step"], rows).html()


def _units(trace: StepTraceFile) -> str:
    """Returns the table of times by unit, as means over ranks and steps."""
    columns = ("forward", "backward", "recompute", "wait", "sum", "update", "copy")
    totals: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(columns, 0))
    for rank in range(len(trace.ranks)):
        for step in range(trace.num_steps):
            main = [span for span in trace.in_step(rank, step) if span.lane == "main" and span.kind != "phase"]
            for span in (*(inner for inner in innermost(main) if inner.kind != "wait"), *trace.exposed(rank, step)):
                column = span.detail if span.kind == "compute" else span.kind
                unit = unit_of(span, trace.facts.units)
                totals[_ALL_UNITS if unit is None else unit][column] += span.end - span.begin
    count = len(trace.ranks) * trace.num_steps
    names = [unit for unit in trace.facts.units if unit in totals]
    rows = [
        [name, *(_ms(totals[name][column] / 1e9 / count) for column in columns)]
        for name in [*names[:_MOST_NAMES], *([_ALL_UNITS] if _ALL_UNITS in totals else [])]
    ]
    caption = "Mean ms per step by unit, over ranks and steps"
    caption += f"; {_MOST_NAMES} of {len(names)} units" if len(names) > _MOST_NAMES else ""
    headings = ["unit", "forward", "backward", "recompute", "exposed waits", "sums", "update", "waits for tiers"]
    return Table(caption, headings, rows).html()


def _ms(seconds: float) -> str:
    return "-" if seconds < 5e-7 else f"{seconds * 1e3:.3f}"


_SCRIPT = """
const at=id=>document.getElementById(id),controls=at('controls'),svg=at('timeline');
const escaped=t=>t.replace(/&/g,'&amp;').replace(/</g,'&lt;').replace(/"/g,'&quot;');
function show(){
  const one=data.spans[at('rank').value+'/'+at('step').value],zoom=Number(at('zoom').value);
  at('zoom').setAttribute('aria-valuetext',zoom+' times');controls.querySelector('output').textContent=zoom+' times';
  at('missing').textContent=one?'':'This step of this rank is only in trace.json.';
  const width=data.width*zoom,whole=data.left+width+40,scale=width/Math.max(1,one?one.length:1);
  const height=svg.viewBox.baseVal.height;
  svg.setAttribute('viewBox','0 0 '+whole+' '+height);svg.setAttribute('width',whole);
  svg.style.maxWidth=zoom>1?'none':'';
  svg.querySelectorAll('.axis').forEach(l=>l.setAttribute('x2',data.left+width));
  let bars='',ticks='';
  for(const [row,kind,begin,length,name] of one?one.bars:[]){
    if(length*scale<.15)continue;
    const y=data.top+row*data.row+(kind<5?1:12),fill=kind===1?'url(#hatch)':data.colours[kind];
    bars+='<rect x="'+(data.left+begin*scale).toFixed(1)+'" y="'+y+'" width="'+(length*scale).toFixed(1)+'" height="'
      +(kind<5?10:4)+'" fill="'+fill+'"><title>'+escaped(data.names[name])+': '+(length/1e3).toFixed(3)
      +' ms</title></rect>'}
  for(let part=0;part<=4*zoom;part++)ticks+='<text class="middle" x="'+(data.left+part*data.width/4)+'" y="14">'
    +((one?one.length:0)*part/4e3/zoom).toFixed(2)+' ms</text>';
  at('bars').innerHTML=bars;at('ticks').innerHTML=ticks;
}
controls.hidden=false;controls.insertAdjacentHTML('beforeend','<span id="missing" role="status"></span>');
controls.addEventListener('input',show);
"""
