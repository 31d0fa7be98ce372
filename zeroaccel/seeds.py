"""Random generators of Python, NumPy and torch: seeding, and copies of rank 0's states on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zeroaccel.comm.agree import from_rank_0
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.rank_device import ACCELERATOR
from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import UsageError

__all__ = ["set_seed", "synchronize_rng_states"]

_KINDS = ("python", "numpy", "torch", "cuda", "generator")


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds the generators of Python, NumPy and torch, including torch's device generators.

    Args:
        seed: an integer of 0 or more.
        device_specific: add the rank, so that each rank draws different numbers. The data order stays common.
        deterministic: make torch raise an error in operations that are not reproducible.

    Raises:
        UsageError: `seed` is out of range, or the process has no rank yet because it has not joined its job.

    Example:
        >>> import torch
        >>> from zeroaccel import set_seed
        >>> set_seed(42)
        >>> first = torch.rand(3)
        >>> set_seed(42)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UsageError("set_seed(seed)", expected="an integer from 0 to 2**63 - 1", got=seed)
    if device_specific:
        if not dist.is_initialized():
            raise UsageError(
                "set_seed(device_specific=True)",
                expected="a process that has joined its job",
                fix="make Accelerator() first",
            )
        seed += dist.get_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(
    rng_types: Iterable[str] = ("python", "numpy", "torch", "cuda"), generator: torch.Generator | None = None
) -> None:
    """Copies the states of rank 0's generators to all ranks. (all ranks)

    Args:
        rng_types: any of "python", "numpy", "torch", "cuda" (this rank's device), "generator".
        generator: the generator for the type "generator".

    Raises:
        UsageError: a type is unknown, or `generator` is missing for the type "generator".

    Example:
        >>> from zeroaccel.seeds import synchronize_rng_states
        >>> synchronize_rng_states(["python", "numpy", "torch"])
    """
    kinds = list(rng_types)
    for kind in kinds:
        if kind not in _KINDS:
            raise UsageError("synchronize_rng_states", expected=f"types among {', '.join(_KINDS)}", got=kind)
    if "generator" in kinds and generator is None:
        raise UsageError('synchronize_rng_states: "generator"', expected="a torch.Generator", got=None)
    collectives = Collectives(init_process_group())
    generators: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "python": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if (devices := ACCELERATOR.module).is_available():
        generators["cuda"] = devices.get_rng_state, devices.set_rng_state
    if generator is not None:
        generators["generator"] = generator.get_state, generator.set_state
    chosen = {kind: generators[kind] for kind in kinds if kind in generators}
    label = "states of random generators"
    rank_0 = from_rank_0(collectives, lambda: {kind: read() for kind, (read, _) in chosen.items()}, label)
    for kind, (_, write) in chosen.items():
        write(rank_0[kind])
