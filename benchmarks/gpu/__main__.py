"""Runs a campaign on a GPU in two calls, and writes its figures beside the predictions of the stream model.

    python benchmarks/gpu [--call 1|2] [--size small|large] [--out FOLDER]
    python benchmarks/gpu PART ... [--limit SECONDS] [--kept]

Without names, the stages of the campaign (`campaign.py`) run: both calls, or one of them, which has a limit. Each stage
or part runs in a separate process with its own limit, so that one that fails or hangs costs no other. FOLDER gets four
files: `figures.jsonl`, each figure immediately; `gpu-DATE.md`, a page with the table of all, after each stage; `log`,
all output; and `predictions.json`. A later call skips the stages that this tree has completed in FOLDER on a device of
the same kind; a named part always runs.

Predictions are made with torch's build for CPUs; FOLDER may come from a machine that has it. Without a CUDA device,
stages and parts are skipped by name; with `--rehearse`, they run on the stream model, with the same build.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from figures import Figure, FigureFile, Section, table  # noqa: E402

if TYPE_CHECKING:
    from campaign import Call

__all__: list[str] = []

LIMIT_SECONDS = 600.0
_FIGURES = "figures.jsonl"
_LEAST_SECONDS = 15.0  # a stage that has less left is not started
_SOURCES = ("zeroaccel", "benchmarks/gpu", "tests/cuda_model")
_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "numpy", "numba", "transformers", "deepspeed", "triton")


def main() -> int:
    if {"--only", "--rehearse"} <= set(sys.argv):
        import tests.cuda_model.gpu_parts  # noqa: F401  # loads the model's library before anything imports torch
    arguments = _arguments()
    if arguments.only:
        return _run_here(arguments)
    if wrong := _unusable(arguments):
        print(f"benchmarks/gpu: {wrong}", file=sys.stderr)
        return 2
    folder = Path(arguments.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"benchmarks/gpu: --out {folder}: expected a folder that can be written ({error.strerror})", file=sys.stderr
        )
        return 2
    campaign = _Campaign(arguments, folder)
    if arguments.parts:
        for name in arguments.parts:
            campaign.run(name, arguments.limit)
    else:
        for number in (arguments.call,) if arguments.call else tuple(_calls()):
            campaign.call(number)
    print(f"written: {campaign.write()}")
    return 1 if campaign.failed else 0


class _Campaign:
    """Runs stages and parts, and writes the page.

    Attributes:
        failed: True if one of them failed.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._why = None if arguments.rehearse else _no_gpu()
        self._card = "the stream model" if arguments.rehearse else _card()
        self._tree = _tree()
        self._state = {"tree": self._tree, "size": arguments.size, "card": self._card}
        self._file = FigureFile(folder / _FIGURES)
        self._names: list[str] = []
        self._skipped: dict[str, Section] = {}  # not in the file, whose figures of a device they would replace
        self._predictions = self._predict()
        self.failed = False

    def call(self, number: int) -> None:
        """Runs the stages of a call until its limit."""
        call = _calls()[number]
        deadline = time.monotonic() + call.seconds
        later = sum(call.stages.values())
        print(f"=== call {number}: {len(call.stages)} stages in at most {call.seconds:.0f} s", flush=True)
        for name, seconds in call.stages.items():
            left = deadline - time.monotonic()
            later -= seconds
            if self._is_done(name):
                self._names.append(name)
                print(f"--- {name}: skipped: {self._folder} has its figures for this tree", flush=True)
            elif left < _LEAST_SECONDS:
                self.failed = True
                self._file.begin(name, self._state)
                self._note(name, f"failed: no time was left in call {number}")
            else:
                # This stage may use the time that earlier ones have saved: a limit cuts it in the middle.
                self.run(name, min(max(seconds, left - later), left))

    def run(self, name: str, seconds: float) -> None:
        """Runs one stage or part, and writes its section and the page."""
        print(f"--- {name}", flush=True)
        if self._why is None:
            self._file.begin(name, self._state)
            outcome = _run_apart(name, seconds, self._arguments, self._folder, self._predictions)
            self.failed |= outcome.startswith("failed")
            self._note(name, outcome)
        else:
            figures = [Figure(key, None, "", value) for key, value in self._predictions.items() if _belongs(key, name)]
            self._skipped[name] = Section(self._state, figures, f"skipped: {self._why}")
            self._show(name)

    def write(self) -> Path:
        """Writes the page of all sections; returns its path."""
        today = datetime.date.today()
        head = [
            f"# On a GPU, {today}",
            "",
            f"{self._card}, {_versions()}. Python {platform.python_version()}. Size of the models:"
            f" {self._arguments.size}. Tree {self._tree}. Predictions are those of the stream model.",
            *(["", "**A rehearsal: no figure is a measurement.**"] if self._arguments.rehearse else []),
            "",
        ]
        sections, lines = {**self._file.sections(), **self._skipped}, []
        for name, function in _parts().items():
            if name in sections and (name in self._names or self._arguments.kept or self._is_done(name)):
                section = sections[name]
                lines += [f"## {name}", "", (function.__doc__ or "").strip(), "", section.outcome, ""]
                lines += [*table(section.figures), ""] if section.figures else []
        page = self._folder / f"gpu-{today}.md"
        page.write_text("\n".join([*head, *lines]))
        return page

    def _note(self, name: str, outcome: str) -> None:
        self._file.end(name, outcome)
        self._show(name)

    def _show(self, name: str) -> None:
        self._names.append(name)
        section = {**self._file.sections(), **self._skipped}[name]
        print("\n".join([section.outcome, *(table(section.figures) if section.figures else [])]), flush=True)
        self.write()

    def _is_done(self, name: str) -> bool:
        """Returns True if the folder has all figures of a stage for this tree, size and card."""
        section = self._file.sections().get(name)
        return section is not None and section.state == self._state and not section.outcome.startswith("failed")

    def _predict(self) -> dict[str, float]:
        """Returns predictions of the stream model, or those in the folder; none with --no-predictions."""
        from predictions import predict, why_not

        file = self._folder / "predictions.json"
        state = {"tree": self._tree, "size": self._arguments.size}
        kept = json.loads(file.read_text()) if file.exists() else {}
        if self._arguments.kept and kept:
            return dict(_numbers(kept))
        if kept.get("of") == state:
            return dict(_numbers(kept))
        begun = time.monotonic()
        if self._arguments.no_predictions:
            return {}
        why_none = why_not()
        if self._why is None and not self._arguments.parts:
            why_none = f"{file} is missing or of other code; a call on a device has no time to make them"
        if why_none:
            print(f"no predictions: {why_none}", flush=True)
            return {}
        predictions = predict(self._arguments.size)
        file.write_text(json.dumps({"of": state, **predictions}, indent=1))
        print(f"{len(predictions)} predictions by the stream model ({time.monotonic() - begun:.0f} s)", flush=True)
        return predictions


def _numbers(content: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    yield from ((key, value) for key, value in content.items() if isinstance(value, (int, float)))


_QUANTITIES = {"waits": "waits", "overlap": "ms", "memory": "peak GiB", "contenders": "ms"}
"""Part -> the quantity of a plan that it measures."""


def _belongs(prediction: str, part_name: str) -> bool:
    plan, _, quantity = prediction.partition("/")
    if plan == "kernels":
        return part_name in ("kernels", "more_kernels")
    return plan == part_name or quantity == _QUANTITIES.get(part_name)


def _parts() -> Mapping[str, Callable[..., None]]:
    from campaign import STAGES
    from parts import PARTS

    return {**STAGES, **PARTS}


def _calls() -> Mapping[int, Call]:
    from campaign import CALLS

    return CALLS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description=(__doc__ or "").split("\n", 1)[0])
    names = f"one of {', '.join(_parts())}; the campaign by default"
    parser.add_argument("parts", nargs="*", metavar="PART", help=names)
    parser.add_argument("--call", type=int, choices=tuple(_calls()), help="one call of the campaign")
    parser.add_argument("--size", choices=("small", "large"), default="large", help="size of models (default large)")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for a named part (default 600)")
    parser.add_argument("--out", default="build/gpu", help="folder for the figures (default build/gpu)")
    parser.add_argument("--no-predictions", action="store_true", help="measure only")
    parser.add_argument("--kept", action="store_true", help="keep predictions and figures of other trees in the page")
    parser.add_argument("--rehearse", action="store_true", help="run on the stream model instead of a device")
    # For the process of one part: its name, and the clock at its start, which all processes of a machine share.
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, default=time.monotonic(), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in _parts()]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(_parts())}")
    if arguments.parts and arguments.call:
        parser.error("--call runs a call of the campaign; leave it out to run named parts")
    return arguments


def _unusable(arguments: argparse.Namespace) -> str | None:
    """Returns a reason for which every stage would fail, with a remedy; None if there is none."""
    from predictions import why_not

    if arguments.rehearse and (reason := why_not()):
        return f"--rehearse: {reason}: run it in an environment with that"
    try:
        import zeroaccel.config  # noqa: F401  # with packages that an environment of torch may lack
    except Exception as error:
        page = "'Without a network' in benchmarks/gpu.md says how to take packages along"
        return f"{sys.executable} cannot import zeroaccel.config: {type(error).__name__}: {error}; {page}"
    return None


def _no_gpu() -> str | None:
    import torch

    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _card() -> str:
    import torch

    return torch.cuda.get_device_name() if _no_gpu() is None else "no device"


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _tree() -> str:
    """Returns a digest of the measured code."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((HERE.parents[1] / folder).rglob("*")):
            if file.suffix in (".py", ".cu", ".cpp", ".h"):
                digest.update(f"{file.relative_to(HERE.parents[1])}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _run_apart(
    name: str, seconds: float, arguments: argparse.Namespace, folder: Path, predictions: Mapping[str, float]
) -> str:
    """Runs a part in a separate process, which gets the predictions as its input; returns how it ended."""
    command = [sys.executable, str(HERE), "--only", name, "--size", arguments.size]
    command += ["--limit", str(seconds), "--out", str(folder), *(["--rehearse"] if arguments.rehearse else [])]
    begun = time.monotonic()
    command += ["--begun", str(begun)]
    with (folder / "log").open("a") as log:
        start = log.tell()
        log.write(f"=== {name}\n")
        log.flush()
        try:
            done = subprocess.run(
                command, input=json.dumps(predictions), text=True, stdout=log, stderr=subprocess.STDOUT, timeout=seconds
            )
            code = done.returncode
            outcome = f"{time.monotonic() - begun:.0f} s" if code == 0 else f"failed with exit status {code}"
        except subprocess.TimeoutExpired:
            outcome = f"failed: more than {seconds:.0f} s"
    if outcome.startswith("failed"):
        written = (folder / "log").read_bytes()[start:].decode(errors="replace")
        outcome += f"; the end of its log: {written[-1500:]}"
    return outcome


def _run_here(arguments: argparse.Namespace) -> int:
    file = FigureFile(Path(arguments.out) / _FIGURES)

    def report(figure: Figure) -> None:
        print(figure, flush=True)
        file.add(arguments.only, figure)

    try:
        if arguments.rehearse:
            return _rehearse(arguments.only, report)
        from parts import Run

        seconds = arguments.limit - (time.monotonic() - arguments.begun)  # imports count
        _parts()[arguments.only](Run(arguments.size, seconds, report, json.load(sys.stdin)))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _rehearse(name: str, report: Callable[[Figure], None]) -> int:
    from tests.cuda_model.gpu_parts import run_part

    outcome = run_part(name, report)
    print(outcome["error"])
    return int(bool(outcome["error"]))


if __name__ == "__main__":
    sys.exit(main())
