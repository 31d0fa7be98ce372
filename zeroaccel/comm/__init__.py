"""Communication: process groups (`topology.py`), collectives (`collectives.py`), and what happens when they hang.

The only package that talks to torch.distributed. It knows nothing of modules, parameters or stages: those arrive as
flat tensors and labels.
"""
