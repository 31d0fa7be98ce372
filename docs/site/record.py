"""Records runs for the pictures of the pages: `python docs/site/record.py demo|memory|estimate "2 cores of an EPYC"`.

The words name the machine. `demo` runs `make demo`'s script twice, for its metrics and for the trace of a step, in
minutes; `memory` and `estimate` compute on this machine, which does not matter to their numbers. Then
`python docs/site/pictures.py` draws. A test of the questionnaire compares the recorded terminal with its own
(tests/e2e/test_config_wizard.py).
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from drawing import RECORDED, ROOT

from zeroaccel.cli.pages.estimate_page import command
from zeroaccel.estimate import Capacity, Workload, subject

DEMO = ["launch", "--cpu", "--num_processes", "2", "examples/train_gpt.py"]
MODEL = "llama-3.1-8b"
WORKLOAD = Workload(ranks=8, sequence=2048, checkpointing=True)
CAPACITY = Capacity(device=80 * 10**9, host=500 * 10**9, disk=2 * 10**12)
_EVERY = 10  # steps of the demo per recorded one
_MOMENTS = 400


def demo(machine: str, steps: int = 500) -> None:
    """Records the metrics of the demo, and the trace of one of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        _run([*DEMO, "--steps", str(steps), "--report", folder])
        metrics = Path(folder, "metrics")
        lines = (metrics / "metrics.jsonl").read_text().splitlines()
        facts = json.loads((metrics / "run.json").read_text())
        recording = _facts("make demo", machine) | {
            "facts": facts,
            "lines": [*map(json.loads, [*lines[::_EVERY], lines[-1]])],
        }
        _write("demo", recording)
        _run(["trace", "--warmup", "10", "-o", folder, *DEMO[1:]])
        trace = json.loads(Path(folder, "trace.json").read_text())
        _write("trace", _facts("zeroaccel trace of the demo", machine) | {"trace": trace})


def memory(machine: str = "") -> None:
    """Records the memory of a simulated step: (phase, total, states, gradients, unsharded bytes of each unit)."""
    simulation: Any = importlib.import_module("zeroaccel.estimate.simulate")
    moments: list[list[Any]] = []
    names: list[str] = []

    class Recorder(simulation._PeakRecorder):  # type: ignore[misc, name-defined]
        def begin(self, engine: Any) -> None:
            super().begin(engine)
            names[:] = [unit.name for unit in engine.units]

        def record(self, operation: object, total: int, resizable: int) -> None:
            before = len(self.moments)
            super().record(operation, total, resizable)
            if len(self.moments) > before:
                one = self.moments[-1]
                unsharded = [sum(b.full.untyped_storage().nbytes() for b in unit.buffers) for unit in self.engine.units]
                states = one.params + one.optimizer - resizable
                moments.append([one.phase, total, states, one.gradients, unsharded])

    simulation._PeakRecorder = Recorder
    kind = simulation.StepKind(stage=3, on_cpu=False, offloads_params=False, pipeline_stage=0)
    simulation.short_traces(subject(MODEL), WORKLOAD, kind, lengths=(), every_operation=True)
    # The highest moment of each interval, so that no peak is lost.
    size = -(-len(moments) // _MOMENTS)
    runs = [moments[start : start + size] for start in range(0, len(moments), size)]
    highest = [max(run, key=lambda moment: moment[1]) for run in runs]
    _write(
        "memory",
        {
            "about": f"{MODEL} on 8 GPUs, one sequence of 2048 tokens each, bf16, recomputed activations",
            "units": names,
            "moments": highest,
        },
    )


def estimate(machine: str = "") -> None:
    """Records the page of an estimate."""
    page = ROOT / "docs" / "shown" / "estimate.html"
    _run([*command(MODEL, WORKLOAD, CAPACITY).split()[1:], "--html", str(page)])


def _facts(command: str, machine: str) -> dict[str, Any]:
    return {"command": command, "machine": machine, "date": f"{date.today():%Y-%m-%d}"}


def _run(words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "zeroaccel.cli", *words], cwd=ROOT, check=True)


def _write(name: str, content: object) -> None:
    text = json.dumps(content, separators=(",", ":"))
    (RECORDED / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    {"demo": demo, "memory": memory, "estimate": estimate}[sys.argv[1]](" ".join(sys.argv[2:]))
