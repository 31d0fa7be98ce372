"""A script that ends without destroying its process groups, in order or failing; run by `test_leaving_groups.py`."""

from __future__ import annotations

import sys
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist

from zeroaccel.comm import topology as topologies
from zeroaccel.comm.collectives import Collectives

topologies._outlives_the_program = lambda topology: True  # gloo's groups do not, and nothing warns of them
# After all that the package does at the end.
Finalize(None, lambda: print("left with groups" if dist.is_initialized() else "left without groups"), exitpriority=-1)
ranks = Collectives(topologies.init_process_group())
ranks.all_reduce(torch.ones(1), "sum", "a sum")
if sys.argv[1] == "failing":
    raise SystemError("a failure of the program")
