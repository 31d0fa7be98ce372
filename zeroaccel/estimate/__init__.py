"""How much memory training takes, before anything is started: per rank, on device, host and disk, for every plan.

    from zeroaccel.estimate import Capacity, Workload, plan_table
    rows = plan_table("7b", Workload(ranks=8, sequence=4096), Capacity(device=80 * 2**30, host=1000 * 2**30))

Exact for what tensors take, since the engine itself is run on tensors without data (`simulate`). A face beside
`initialize`: it needs no process group, no accelerator and no weights. Importing it imports torch.
"""

from __future__ import annotations

from zeroaccel.estimate.plans import HEADROOM, PLANS, PlanRow, estimate, plan_table, verdict
from zeroaccel.estimate.subject import Subject, subject
from zeroaccel.estimate.traffic_table import TrafficRow, traffic_table
from zeroaccel.estimate.workload import Capacity, Estimate, MemoryByKind, Offload, OptimizerName, Precision, Workload

__all__ = [
    "HEADROOM",
    "PLANS",
    "Capacity",
    "Estimate",
    "MemoryByKind",
    "Offload",
    "OptimizerName",
    "PlanRow",
    "Precision",
    "Subject",
    "TrafficRow",
    "Workload",
    "estimate",
    "plan_table",
    "subject",
    "traffic_table",
    "verdict",
]
