"""Memory and traffic of training, before anything is started: per rank, on device, host and disk, for every plan.

Exact for the memory of tensors, since the engine itself is run on tensors without data (`simulate`). Needs no process
group, no accelerator and no weights. Importing it imports torch.

Example:
    >>> from zeroaccel.estimate import Capacity, Workload, plan_table
    >>> machine = Capacity(device=80 * 2**30, host=1000 * 2**30)
    >>> rows = plan_table("1m", Workload(ranks=8, sequence=128), machine)
    >>> rows[0].recommended, rows[0].estimate.name
    (True, 'stage 1')
"""

from __future__ import annotations

from zeroaccel.estimate.closed_forms import ClosedForms
from zeroaccel.estimate.meshes import LinkBytes, MeshRow, link_bytes, mesh_row, mesh_table, needless_crossing
from zeroaccel.estimate.plans import (
    HEADROOM,
    PLANS,
    PlanRow,
    TrafficRow,
    check_capacity,
    estimate,
    plan_table,
    traffic_table,
)
from zeroaccel.estimate.subject import Subject, subject
from zeroaccel.estimate.workload import Capacity, Estimate, MemoryByKind, Offload, OptimizerName, Precision, Workload

__all__ = [
    "HEADROOM",
    "PLANS",
    "Capacity",
    "ClosedForms",
    "Estimate",
    "LinkBytes",
    "MemoryByKind",
    "MeshRow",
    "Offload",
    "OptimizerName",
    "PlanRow",
    "Precision",
    "Subject",
    "TrafficRow",
    "Workload",
    "check_capacity",
    "estimate",
    "link_bytes",
    "mesh_row",
    "mesh_table",
    "needless_crossing",
    "plan_table",
    "subject",
    "traffic_table",
]
