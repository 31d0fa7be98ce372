"""Orders from commands to the scripts that they run: `zeroaccel trace` and `zeroaccel verify`.

An order is an environment variable that only its command sets; without one this module does nothing. A run under
`zeroaccel verify` takes the first steps of a script and records every number bit for bit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from zeroaccel.comm.environment import command_order
from zeroaccel.config import Config
from zeroaccel.engine import EngineBase
from zeroaccel.telemetry.step_report import ReportedEngine, StepReport
from zeroaccel.zero.step_trace import record_if_asked

VARIABLE = "ZEROACCEL_VERIFY"
"""JSON: folder for the records, steps to take, keys of `zero_optimization` to replace."""

_engines = itertools.count()


@dataclass(frozen=True)
class Verification:
    """One run of a verified script.

    Attributes:
        zero: replacements for keys of the config's `zero_optimization` section in this run.
    """

    folder: Path
    steps: int
    zero: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def ordered(cls) -> Verification | None:
        """Returns the order in the environment, or None.

        Raises:
            ConfigError: `zeroaccel verify` did not write it.
        """

        def read(order: Any) -> Verification:
            return cls(Path(order["folder"]), int(order["steps"]), dict(order["zero"]))

        return command_order(VARIABLE, "verify", read)

    def record(self, engine: ReportedEngine, report: StepReport, rank: int, **facts: int) -> None:
        """Writes losses and gradient norm of each step of an engine to a file, and exits after the last step.

        Args:
            rank: number of this rank, which has its own file.
            facts: values to add to every record.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = open(self.folder / f"engine{next(_engines)}-rank{rank}.jsonl", "w")  # noqa: SIM115 - lives as long
        losses: list[str] = []
        left = self.steps

        def on_loss(loss: Tensor) -> None:
            losses.append(float(loss.detach()).hex())

        def on_step() -> None:
            nonlocal left
            norm = engine.get_global_grad_norm()
            record = {**facts, "losses": losses, "norm": None if norm is None else float(norm).hex()}
            print(json.dumps(record), file=file, flush=True)
            losses.clear()
            left -= 1
            if not left:
                raise SystemExit(0)

        report.loss_listener, report.step_listener = on_loss, on_step


def ordered_config(config: Config) -> Config:
    """Returns the config with the keys that an order replaces."""
    order = Verification.ordered()
    if order is None or not order.zero:
        return config
    return config.model_copy(update={"zero_optimization": config.zero_optimization.model_copy(update=dict(order.zero))})


def follow_orders(engine: EngineBase) -> None:
    """Records a new engine if an order requests it. (all ranks)"""
    if (order := Verification.ordered()) is not None:
        parts, plan = engine.traced_parts(), engine.settings.plan
        stage = sum((plan.optimizer, plan.grads, plan.params))
        accumulation = engine.settings.accumulation
        half = any(buffer.dtype.itemsize < 4 for unit in engine.units for buffer in unit.buffers)
        facts = {"stage": stage, "accumulation": accumulation, "half": half}
        order.record(engine, parts.report, parts.collectives.job.rank, **facts)
    record_if_asked(engine)
