"""Cost of a run's reports: CPU time of their calls on rank 0, beside that of its steps.

    zeroaccel launch --cpu --num_processes 2 benchmarks/report_cost.py [--steps 60]

Trains the model of `examples/train_gpt.py` at stage 3 in bf16, with reports off, with a line every 10 steps, and with a
line and the events of every step in a file. CPU times, unlike those of a clock, do not grow with other programs.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import zeroaccel
from zeroaccel.telemetry.norm_spikes import SpikeWatch
from zeroaccel.telemetry.step_report import StepReport

_CALLS = {StepReport: ("begin", "end", "forward", "loss", "step"), SpikeWatch: ("step",)}


class Timed:
    """Adds up the CPU time of this thread in the calls of reports; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False
        for kind, names in _CALLS.items():
            for name in names:
                setattr(kind, name, self._wrapped(vars(kind)[name]))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, begun = True, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begun
                self._inside = False

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="measured steps [%(default)s]")
    steps = parser.parse_args().steps
    gpt = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_gpt.py"))["GPT"]
    timed = Timed()
    with tempfile.TemporaryDirectory() as folder:
        file = {"enabled": True, "output_path": folder, "job_name": "run"}
        for name, settings in (
            ("off", {}),
            ("a line every 10 steps", {"steps_per_print": 10}),
            ("a line and events every step", {"steps_per_print": 1, "jsonl_monitor": file}),
        ):
            torch.manual_seed(0)
            config = {
                "train_micro_batch_size_per_gpu": 8,
                "gradient_clipping": 1.0,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
                "zero_optimization": {"stage": 3},
                **settings,
            }
            engine, *_ = zeroaccel.initialize(gpt(320, 3, 5), config=config)
            rank = engine.collectives.rank
            for step in range(steps + 10):
                if step == 10:  # the first steps have the costs of the start
                    timed.seconds, begun = 0.0, time.process_time()
                ids = torch.randint(0, 255, (8, 129))
                loss = F.cross_entropy(engine(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                engine.backward(loss)
                engine.step()
            whole = time.process_time() - begun
            engine.destroy()
            if rank == 0:
                each, reports = 1e3 * whole / steps, 1e3 * timed.seconds / steps
                print(f"{name}: {each:.1f} ms a step, reports {reports:.3f} ({100 * reports / each:.2f} %)")


if __name__ == "__main__":
    main()
