"""Arithmetic on flat shards: optimizer steps, the gradient norm, the sum over ranks.

A layer below `zero`, beside `comm`, which imports neither: this package does not depend on ranks, stages or tiers.
"""

from zeroaccel.ops.elementwise import CPUSGD, SGD, Adagrad, Adam, CPUAdagrad, CPUAdam, CPULion, Lion, RMSprop
from zeroaccel.ops.reductions import l2_norm, sum_ranks
from zeroaccel.ops.shard_step import ShardStep
from zeroaccel.ops.tensorwise import Lamb, Muon

__all__ = [
    "CPUSGD",
    "SGD",
    "Adagrad",
    "Adam",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "Lamb",
    "Lion",
    "Muon",
    "RMSprop",
    "ShardStep",
    "l2_norm",
    "sum_ranks",
]
