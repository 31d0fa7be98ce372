"""What stage 3 sends between machines per step, under each arrangement of `docs/zeropp.md`, before anything is started.

The formulas are those of `config/traffic_formulas.py`, for the model as one unit that is gathered for forward and again
for backward in each micro-step; memory is the rest of this package's.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroaccel.config import CommPlan
from zeroaccel.config.traffic_formulas import step_traffic
from zeroaccel.estimate.workload import Workload

__all__ = ["TrafficRow", "traffic_table"]


@dataclass(frozen=True)
class TrafficRow:
    """Bytes that one rank sends per step.

    Attributes:
        name: "stage 3", or what is on beside it.
        inside, across: to ranks on its own machine, and on others.
    """

    name: str
    inside: int
    across: int


def traffic_table(numel: int, workload: Workload) -> list[TrafficRow]:
    """A row per arrangement; none where all ranks are on one machine.

    Args:
        numel: parameters of the model, all trained.
    """
    ranks, local = workload.ranks, workload.local_ranks
    if local == ranks:
        return []
    plans = {
        "stage 3": CommPlan(ranks, ranks, ranks),
        "hpZ": CommPlan(ranks, ranks, local if local > 1 else ranks),
        "qwZ + hpZ": CommPlan(ranks, ranks, local if local > 1 else ranks, quantized_weights=True),
        "qwZ + hpZ + qgZ": CommPlan(
            ranks, ranks, local if local > 1 else ranks, quantized_weights=True, quantized_gradients=True
        ),
        "replicas of one machine": CommPlan(ranks, local, local),
    }
    itemsize = 4 if workload.precision == "fp32" else 2
    rows = []
    for name, plan in plans.items():
        padded = -(-numel // (32 * ranks)) * 32 * ranks
        sent = step_traffic(plan, [padded], local, itemsize=itemsize, accumulation=workload.accumulation)
        rows.append(TrafficRow(name, round(sent.inside), round(sent.across)))
    return rows
