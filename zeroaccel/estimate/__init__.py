"""Estimates memory and traffic of a training run before it starts: per rank, on device, host and disk, for every plan.

Exact for the memory of tensors, because `simulate` runs the engine itself on tensors without data. Requires no process
group, accelerator or weights. Imports torch.

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
    smaller_that_fits,
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
    "smaller_that_fits",
    "subject",
    "traffic_table",
]
