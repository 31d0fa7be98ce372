"""Config dicts as accelerate, transformers and TRL hand them over, turned into what the config checks take.

They add keys of their own making, which nobody wrote and the checks would rightly refuse of a person. Only those are
taken care of here: everything else goes to the checks as it is. Pure.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["from_library"]

_SECTIONS = ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16")


def from_library(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` that says the same in the words of the format.

    A dotted key at the top, such as "zero_optimization.reduce_bucket_size" from TRL, is the value of that key within
    its section; `steps_per_print: inf` from accelerate is never. Of a section "fp16" and one "bf16" of which neither
    says anything but `enabled: false`, none is left.
    """
    tree = copy.deepcopy(dict(config))
    for key in [key for key in tree if "." in key and key.partition(".")[0] in _SECTIONS]:
        value = tree.pop(key)
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if node.get(last, "auto") == "auto":
            node[last] = int(value) if isinstance(value, float) else value  # sizes, computed as 0.9 * hidden ** 2
    if tree.get("steps_per_print") == math.inf:
        del tree["steps_per_print"]
    return tree
