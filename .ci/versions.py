"""Runs the tests on every supported pair of a torch version and a set of Hugging Face libraries.

Each pair has a separate environment in build/versions, created on first use: torch first, then the tree. `make test`
runs the pinned torch with the newest libraries; the other rows are the limits of the supported range:

    python .ci/versions.py                                     # all rows, all tests except slow ones: hours
    python .ci/versions.py --quick --only newest               # one row, the tests that show changes of torch: minutes
    python .ci/versions.py --only oldest -- tests/unit         # one row, some tests
    python .ci/versions.py --markdown build/versions.md        # the table of benchmarks/results/versions-*.md

The exit code is 1 if a row's tests failed, and 2 if a row could not be tested (no interpreter, or no such package).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "versions"
SHOWN = ("torch", "transformers", "accelerate", "peft", "trl", "numpy")

# These tests call undocumented parts of torch and transformers, or failed with earlier releases.
QUICK = (
    *(f"tests/e2e/test_{name}.py" for name in ("doctor", "huggingface", "launchers", "train_gpt")),
    *(f"tests/multi/{name}" for name in ("estimate", "harness", "parallel", "setup")),
    *(f"tests/multi/comm/test_{name}.py" for name in ("first_uses", "mesh")),
    "tests/multi/accelerate/test_accelerator_compilation.py",
    "tests/multi/checkpoint/test_checkpoint_dcp.py",
    *(f"tests/multi/zero/test_{name}.py" for name in ("activation_checkpointing", "compiled_model", "engine_life")),
    *(f"tests/multi/zero/test_{name}.py" for name in ("parity", "promise", "quantized_libraries", "zero_init")),
    *(f"tests/unit/{name}" for name in ("checkpoint", "comm", "house", "ops", "zero")),
)

# The lower bounds of setup.cfg, with the TRL of that time that the tests support.
OLDEST = ("transformers==4.56.2", "accelerate==1.10.1", "peft==0.17.0", "trl==1.0.0", "huggingface_hub<1.0")
NEWEST = ("transformers", "accelerate", "peft", "trl")


@dataclass(frozen=True)
class Row:
    """One environment. `python` is its Python version, which its libraries bound (transformers 5 needs 3.11)."""

    name: str
    python: str
    torch: str
    libraries: tuple[str, ...]
    pinned: bool = False


def rows() -> tuple[Row, ...]:
    """Returns the oldest torch of setup.cfg, the pinned and the newest, each with the oldest and newest libraries."""
    pinned = (ROOT / "constraints.txt").read_text().split("torch==")[1].split()[0]
    return (
        Row("oldest", "3.10", "2.6.0", OLDEST),
        Row("oldest-torch", "3.11", "2.6.0", NEWEST),
        Row("oldest-libraries", "3.11", pinned, OLDEST),
        Row("pinned", "3.11", pinned, NEWEST, pinned=True),
        Row("newest-torch", "3.12", "2.15.0", OLDEST),
        Row("newest", "3.13", "2.15.0", NEWEST),
    )


class RowError(Exception):
    """Raised if a row cannot be tested here."""


def interpreter(version: str) -> str:
    """Returns a Python of this version from the path, or from pyenv.

    Raises:
        RowError: if none starts.
    """
    candidates = [shutil.which(f"python{version}")]
    candidates += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        said = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.startswith(f"Python {version}."):
            return candidate
    raise RowError(f"no Python {version} on this machine; install one, or leave the row out with --only")


def prepare(row: Row) -> Path:
    """Returns the interpreter of the row's environment; creates it if it is missing or its row has changed.

    Raises:
        RowError: if the packages cannot be installed.
    """
    folder = ENVIRONMENTS / row.name
    python, stamp = folder / "bin" / "python", folder / "row.json"
    wanted = json.dumps([row.python, row.torch, row.libraries, (ROOT / "setup.cfg").read_text()])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter(row.python), "-m", "venv", folder], check=True)
    pins = ["-c", str(ROOT / "constraints.txt")] if row.pinned else []
    # torch alone first, so that the second step keeps it.
    steps = [[f"torch=={row.torch}"], [f"torch=={row.torch}", "-e", f"{ROOT}[hf,test]", *row.libraries]]
    for step in steps:
        words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins, *step]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RowError(f"pip install {' '.join(step)}: {result.stderr.strip().splitlines()[-1]}")
    stamp.write_text(wanted)
    return python


def versions(python: Path) -> dict[str, str]:
    """Returns the package versions of the environment."""
    code = "import importlib.metadata as m, json, platform as p, sys; "
    code += "print(json.dumps([p.python_version(), *map(m.version, sys.argv[1:])]))"
    said = subprocess.run([python, "-c", code, *SHOWN], capture_output=True, text=True, check=True).stdout
    return dict(zip(("python", *SHOWN), json.loads(said), strict=True))


def run_tests(row: Row, python: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Runs pytest in the row's environment; returns its exit code and last line ("5188 passed, 311 skipped in ...")."""
    words = [str(python), "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    words += ["-m", "not slow", *arguments]
    # Tests start commands from the folder of their interpreter.
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    log = ENVIRONMENTS / f"{row.name}.log"
    with log.open("w") as out:
        code = subprocess.run(
            words, cwd=ROOT, env={**os.environ, "PATH": path}, stdout=out, stderr=out, check=False
        ).returncode
    lines = [line.strip("= ") for line in log.read_text().splitlines() if re.search(r" in [\d.]+s", line)]
    return code, lines[-1] if lines else f"no summary; see {log.relative_to(ROOT)}"


def table(lines: Sequence[tuple[Row, dict[str, str], str]], arguments: Sequence[str]) -> str:
    """Returns the results in Markdown."""
    head = ("row", "Python", *SHOWN, "result")
    text = [f"Of {date.today()}, `pytest -m 'not slow' {' '.join(arguments)}`:".replace(" `:", "`:"), ""]
    text += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row, there, result in lines:
        cells = [row.name, there.get("python", row.python), *(there.get(name, "-") for name in SHOWN), result]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in rows()]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="ROW", help=f"some of: {', '.join(names)}"
    )
    parser.add_argument("--quick", action="store_true", help="run the tests that show changes of torch, not all")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("tests", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    tests = [*(QUICK if arguments.quick else ()), *arguments.tests]
    lines: list[tuple[Row, dict[str, str], str]] = []
    worst = 0
    for row in rows():
        if row.name not in arguments.only:
            continue
        began, there = time.monotonic(), {}
        try:
            python = prepare(row)
            there = versions(python)
            code, result = run_tests(row, python, tests)
            worst = max(worst, 1 if code else 0)
        except RowError as error:
            result, worst = f"not tested: {error}", 2
        print(f"{row.name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
        lines.append((row, there, result))
    text = table(lines, ["--quick", *arguments.tests] if arguments.quick else arguments.tests)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(text)
    return worst


if __name__ == "__main__":
    sys.exit(main())
