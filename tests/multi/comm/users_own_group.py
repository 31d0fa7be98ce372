"""A script, run by `test_comm_collectives.py`, that makes and destroys its process group itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import destroy, init_process_group

if __name__ == "__main__":
    dist.init_process_group("gloo")
    topology = init_process_group()
    total = torch.tensor(topology.local_rank)
    Collectives(topology).all_reduce(total, "sum", "local ranks")
    print(topology.local_rank, "of", f"{topology.local_world_size},", "sum", total.item())
    destroy()
    dist.barrier()
    dist.destroy_process_group()
