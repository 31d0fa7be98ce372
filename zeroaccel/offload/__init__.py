"""Tiers: where model states are stored when not on the device, in host memory and in files.

On the level of comm and ops, below zero: nothing here knows of ranks, stages, parameters or optimizers, only of keys
and bytes. `tier.py` defines a tier, `nvme.py` is the one in a file, over `file_io.py` (blocks and threads) and
`offload_folder.py` (which folder a file may lie in); `host_buffers.py` is the memory that files are read into.
`activation_store.py` stores the inputs of recomputed functions; `device_lane.py` is the GPU half of a hybrid step.
"""
