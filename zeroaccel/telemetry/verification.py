"""Runs of `zeroaccel verify`: a few steps of a script, all numbers recorded, for the baseline without sharding.

The request is one environment variable, which only `verify` sets. `initialization` takes from here the config to use
and the report for the engine; for any other script both are as they would be without this module.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zeroaccel.comm.environment import command_order
from zeroaccel.config import Config, shard_plan
from zeroaccel.telemetry.step_report import ReportedEngine, StepReport

VARIABLE = "ZEROACCEL_VERIFY"
"""JSON: folder for the records, steps to take, whether this is the baseline."""

_engines = itertools.count()
# Switched off in a baseline; all other keys of the section stay.
_PLAIN: dict[str, Any] = {
    "offload_optimizer": None,
    "offload_param": None,
    "zero_hpz_partition_size": 1,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_weights": False,
}


@dataclass(frozen=True)
class Verification:
    """One run of a verified script."""

    folder: Path
    steps: int
    baseline: bool

    def config(self, settings: Config, accumulation: int) -> Config:
        """The config of this run: unchanged, or for a baseline the plainest that promises the same numbers.

        That is stage 0; but with several micro-steps per step sharded gradients are summed over ranks first, then over
        micro-steps, so that the baseline is the first stage with this order.
        """
        if not self.baseline:
            return settings
        zero = settings.zero_optimization
        stage = 2 if accumulation > 1 and shard_plan(settings).grads else 0
        return settings.model_copy(update={"zero_optimization": zero.model_copy(update={**_PLAIN, "stage": stage})})


def verification() -> Verification | None:
    """The request in the environment, or None.

    Raises:
        ConfigError: it is not one that `zeroaccel verify` writes.
    """

    def read(order: Any) -> Verification:
        return Verification(Path(order["folder"]), int(order["steps"]), bool(order["baseline"]))

    return command_order(VARIABLE, "verify", read)


class RecordingReport(StepReport):
    """Writes the losses and the gradient norm of every step to a file, bit for bit, and exits after the last step.

    Args:
        order: the request.
        rank: writes to a file of its own.
        stage: of the run.
    """

    def __init__(self, order: Verification, *, rank: int, stage: int, **report: Any) -> None:
        super().__init__(rank=rank, **report)
        self._left = order.steps
        self._recorded: list[str] = []
        order.folder.mkdir(parents=True, exist_ok=True)
        self._file = open(order.folder / f"engine{next(_engines)}-rank{rank}.jsonl", "w")  # noqa: SIM115 - lives as long
        self._stage = stage

    def loss(self, loss: Tensor) -> None:
        super().loss(loss)
        self._recorded.append(float(loss.detach()).hex())

    def step(self, engine: ReportedEngine) -> None:
        """Raises SystemExit after the last requested step."""
        super().step(engine)
        norm = engine.get_global_grad_norm()
        record = {"stage": self._stage, "losses": self._recorded, "norm": None if norm is None else float(norm).hex()}
        print(json.dumps(record), file=self._file, flush=True)
        self._recorded = []
        self._left -= 1
        if not self._left:
            raise SystemExit(0)
