"""Random generators of Python, NumPy and torch: seeding them, and copying rank 0's states to all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable

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
    """Seeds Python's, NumPy's and torch's generators, those of accelerators included.

    Args:
        seed: 0 or more.
        device_specific: add the rank, so that each rank draws other numbers. The order of data stays common.
        deterministic: refuse operations of torch that are not reproducible.

    Raises:
        UsageError: not a seed; or the process has not joined its job, so that it has no rank.

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
    """Copies rank 0's states of these generators to all ranks. (all ranks)

    Args:
        rng_types: some of "python", "numpy", "torch", "cuda" (this rank's device), "generator".
        generator: the generator that "generator" stands for.

    Raises:
        UsageError: another type, or "generator" without one.

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
    devices = ACCELERATOR.module
    cuda = "cuda" in kinds and devices.is_available()

    def states() -> dict[str, object]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": devices.get_rng_state() if cuda else None,
            "generator": generator.get_state() if generator is not None else None,
        }

    rank_0: dict[str, object] = from_rank_0(collectives, states, "states of random generators")
    if "python" in kinds:
        random.setstate(rank_0["python"])  # type: ignore[arg-type]
    if "numpy" in kinds:
        np.random.set_state(rank_0["numpy"])  # type: ignore[arg-type]
    if "torch" in kinds:
        torch.set_rng_state(rank_0["torch"])  # type: ignore[arg-type]
    if cuda:
        devices.set_rng_state(rank_0["cuda"])
    if "generator" in kinds and generator is not None:
        generator.set_state(rank_0["generator"])  # type: ignore[arg-type]
