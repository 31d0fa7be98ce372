"""Communication: process groups (`topology.py`), collectives (`collectives.py`), and hang detection (`hangs/`).

Only this package uses torch.distributed. It does not depend on modules, parameters or stages: it receives flat tensors
and labels.
"""
