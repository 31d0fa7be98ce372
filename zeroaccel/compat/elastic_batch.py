"""DeepSpeed's computation of a batch size that suits many numbers of ranks, which ms-swift calls.

Releases of DeepSpeed before 0.19.7 have it; the engine refuses the config section, since resuming on another number of
ranks needs none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zeroaccel.compat.assertions import asserting
from zeroaccel.errors import ConfigError


@asserting
def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Returns the batch size, the numbers of ranks that it suits, and for a number of ranks its largest micro-batch.

    The batch size is the one, among multiples of a micro-batch or of all, that suits most numbers of ranks.

    Args:
        ds_config: a config with a section `elasticity`.
        target_deepspeed_version: has no effect.
        world_size: number of ranks; 0 returns two values, unless `return_microbatch`.

    Raises:
        ConfigError: the section is missing, disabled or incomplete, or does not suit `world_size`.
    """
    section = ds_config.get("elasticity") or {}
    sizes: Any = section.get("micro_batch_sizes")
    most: int = section.get("max_train_batch_size") or 0
    valid = isinstance(sizes, list) and sizes and all(isinstance(size, int) and 0 < size <= most for size in sizes)
    if not section.get("enabled") or not valid:
        raise ConfigError(
            "elasticity",
            expected='"enabled": true, "max_train_batch_size", and "micro_batch_sizes" of at most this size',
            got=dict(section),
        )
    version = float(section.get("version", 0.2))
    machine = section.get("num_gpus_per_node", 1) if version >= 0.2 else 1
    per_machine = machine // section.get("model_parallel_size", 1)
    bounds = [max(1, section.get(key, default) // machine) for key, default in (("min_gpus", 1), ("max_gpus", 10_000))]
    larger = section.get("prefer_larger_batch", True)
    batch, counts = _most_suitable(sizes, most // per_machine, bounds[0], bounds[1], larger=larger)
    batch, counts = batch * per_machine, [count * per_machine for count in counts]
    if version >= 0.2 and world_size and world_size not in counts:
        multiples = [most // (size * world_size) * size * world_size for size in sizes]
        batch, counts = (max if larger else min)(multiples), [world_size]
    if not world_size and not return_microbatch:
        return batch, counts
    fitting = [size for size in sizes if world_size and batch and batch // world_size % size == 0]
    if world_size not in counts or not fitting:
        raise ConfigError(
            "elasticity", expected=f"one of {counts} ranks, which share the batch of {batch}", got=f"{world_size} ranks"
        )
    return batch, counts, max(fitting)


def _most_suitable(sizes: Sequence[int], most: int, least_ranks: int, most_ranks: int, *, larger: bool) -> Any:
    """Returns the batch size up to `most` that suits most numbers of ranks, and these."""
    bases = [base for base in (*sizes, math.lcm(*sizes)) if base <= most]
    found = []
    for batch in {base * _most_divisible(most // base) for base in bases}:
        shares = [batch // size for size in sizes if batch % size == 0]
        counts = {count for share in shares for count in range(1, share + 1) if share % count == 0}
        found.append((batch, sorted(count for count in counts if least_ranks <= count <= most_ranks)))
    return max(found, key=lambda each: (len(each[1]), each[0] if larger else -each[0]))


def _most_divisible(limit: int) -> int:
    """Returns the smallest number up to `limit` that has the most divisors: the largest highly composite number."""
    counts = [0] * (limit + 1)
    for divisor in range(1, limit + 1):
        for multiple in range(divisor, limit + 1, divisor):
            counts[multiple] += 1
    return counts.index(max(counts))
