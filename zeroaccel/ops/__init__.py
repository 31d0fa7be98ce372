"""Arithmetic on flat shards: optimizer steps, the gradient norm, the sum over ranks.

Beside comm and below zero, and imports neither: nothing here knows of ranks, stages or tiers.
"""

from zeroaccel.ops.adagrad import Adagrad, CPUAdagrad
from zeroaccel.ops.adam import Adam, CPUAdam
from zeroaccel.ops.lamb import Lamb
from zeroaccel.ops.lion import CPULion, Lion
from zeroaccel.ops.muon import Muon
from zeroaccel.ops.norms import l2_norm
from zeroaccel.ops.reduce import sum_ranks
from zeroaccel.ops.sgd import CPUSGD, SGD
from zeroaccel.ops.shard_step import ShardStep

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
    "ShardStep",
    "l2_norm",
    "sum_ranks",
]
