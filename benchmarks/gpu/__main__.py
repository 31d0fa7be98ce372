"""Runs the GPU benchmarks part by part, and writes their figures beside the predictions of the stream model.

    python benchmarks/gpu [PART ...] [--size small|large] [--limit SECONDS] [--out FOLDER] [--kept]

Each part runs in a separate process with a time limit, so that a part that fails or hangs does not stop the others.
FOLDER gets each figure as JSON immediately, and `gpu-DATE.md` with the table of all. `--kept` keeps the predictions and
figures of an earlier run in FOLDER, so that predictions can come from another machine, and parts can run one at a time.
Without a CUDA device the program makes the predictions and skips the parts by name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from figures import Figure, table  # noqa: E402
from parts import PARTS, Run  # noqa: E402
from predictions import predict  # noqa: E402

__all__: list[str] = []

LIMIT_SECONDS = 600.0


def main() -> int:
    arguments = _arguments()
    if arguments.only:
        return _run_here(arguments)
    folder = Path(arguments.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"benchmarks/gpu: --out {folder}: expected a folder that can be written ({error.strerror})", file=sys.stderr
        )
        return 2
    predictions = _predictions(arguments, folder)
    why = _no_gpu()
    asked = arguments.parts or list(PARTS)
    failed = False
    for name in asked:
        print(f"--- {name}", flush=True)
        if why is None:
            figures, outcome = _run_apart(name, arguments, folder)
        else:
            figures = [Figure(key, None, "", value) for key, value in predictions.items() if _belongs(key, name)]
            outcome = f"skipped: {why}"
        failed |= outcome.startswith("failed")
        section = [f"## {name}", "", (PARTS[name].__doc__ or "").strip(), "", outcome, ""]
        (folder / f"{name}.md").write_text("\n".join([*section, *(table(figures) if figures else []), ""]))
        print("\n".join([outcome, *table(figures)]) if figures else outcome, flush=True)
    head = f"# On a GPU, {datetime.date.today()}\n\nSize of the models: {arguments.size}.\n"
    sections = [folder / f"{name}.md" for name in PARTS if name in asked or arguments.kept]
    report = folder / f"gpu-{datetime.date.today()}.md"
    report.write_text("\n".join([head, *(file.read_text() for file in sections if file.exists())]))
    print(f"written: {report}")
    return 1 if failed else 0


def _predictions(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Returns predictions of the stream model, or those of an earlier run; none with --no-predictions."""
    file = folder / "predictions.json"
    begun = time.monotonic()
    if arguments.kept and file.exists():
        kept: dict[str, float] = json.loads(file.read_text())
        return kept
    predictions = {} if arguments.no_predictions else predict(arguments.size)
    file.write_text(json.dumps(predictions, indent=1))
    print(f"{len(predictions)} predictions by the stream model ({time.monotonic() - begun:.0f} s)", flush=True)
    return predictions


_QUANTITIES = {"waits": "waits", "overlap": "ms", "memory": "peak GiB"}
"""Part -> the quantity of a plan that it measures."""


def _belongs(prediction: str, part: str) -> bool:
    plan, _, quantity = prediction.partition("/")
    return plan == part or (plan != "kernels" and quantity == _QUANTITIES.get(part))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; all by default")
    parser.add_argument("--size", choices=("small", "large"), default="large", help="size of models (default large)")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for a part (default 600)")
    parser.add_argument("--out", default="build/gpu", help="folder for the figures (default build/gpu)")
    parser.add_argument("--no-predictions", action="store_true", help="measure only")
    parser.add_argument("--kept", action="store_true", help="keep the figures of earlier runs in the report")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # for the process of one part
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return arguments


def _no_gpu() -> str | None:
    import torch

    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _run_apart(name: str, arguments: argparse.Namespace, folder: Path) -> tuple[list[Figure], str]:
    """Runs a part in a separate process; returns its figures and how it ended."""
    command = [sys.executable, str(HERE), "--only", name, "--size", arguments.size]
    command += ["--limit", str(arguments.limit), "--out", str(folder)]
    begun = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=arguments.limit).returncode
            outcome = f"{time.monotonic() - begun:.0f} s" if code == 0 else f"failed with exit status {code}"
        except subprocess.TimeoutExpired:
            outcome = f"failed: more than {arguments.limit:.0f} s"
    if outcome.startswith("failed"):
        outcome += f"; the end of its log: {(folder / f'{name}.log').read_text()[-1500:]}"
    file = folder / f"{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Figure(**json.loads(line)) for line in lines], outcome


def _run_here(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.out)
    predictions = json.loads((folder / "predictions.json").read_text())
    with (folder / f"{arguments.only}.jsonl").open("w") as file:

        def report(figure: Figure) -> None:
            print(figure, flush=True)
            file.write(json.dumps(figure.as_json()) + "\n")
            file.flush()

        try:
            PARTS[arguments.only](Run(arguments.size, arguments.limit, report, predictions))
        except Exception:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
