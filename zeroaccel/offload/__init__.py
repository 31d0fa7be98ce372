"""Tiers: storage for model states that are not on the device, in host memory and in files.

On the level of comm and ops, below zero: tiers store bytes under keys and do not depend on ranks, stages, parameters or
optimizers. `tier.py` defines a tier, `nvme.py` is the one in a file, over `file_io.py` (blocks and threads) and
`offload_folder.py` (checks of the folder); `host_buffers.py` provides the memory that files are read into.
`activation_store.py` stores the inputs of recomputed functions.
"""

from zeroaccel.offload.page_locked import copying_stream, free_nbytes, locked_nbytes, unlock_dropped

__all__ = ["copying_stream", "free_nbytes", "locked_nbytes", "unlock_dropped"]
