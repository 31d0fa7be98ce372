"""Ends without destroying its process groups, successfully or by an error; see `test_leaving_groups.py`."""

from __future__ import annotations

import sys
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist

from zeroaccel.comm import topology as topologies
from zeroaccel.comm.collectives import Collectives

topologies._outlives_the_program = lambda topology: True  # treats gloo's groups like NCCL's, which end with a warning
# Runs after the package's own exit handlers.
Finalize(None, lambda: print("left with groups" if dist.is_initialized() else "left without groups"), exitpriority=-1)
ranks = Collectives(topologies.init_process_group())
ranks.all_reduce(torch.ones(1), "sum", "a sum")
if sys.argv[1] == "failing":
    raise SystemError("a failure of the program")
