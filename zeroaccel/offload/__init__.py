"""Where model states live when not with the model: host memory and files.

Beside comm and ops, below zero: nothing here knows of ranks, stages, parameters or optimizers, only of keys and bytes.
`tier.py` says what a tier is, `nvme.py` is the one in files, over `file_io.py` (blocks and threads) and
`offload_folder.py` (whether a folder will do); `host_buffers.py` lends the memory that they read into.
"""
