"""The order of one loader's batches of indices: the same on all ranks, epoch after epoch, and again on request.

A sampler that draws from a generator of its own is given rank 0's state of it at the start of every epoch, and the
state is remembered, so that the epoch can be drawn again. A sampler of the user's that has no generator is drawn under
a seed that all ranks share. Deals nothing out (`batch_sharding.py`) and reads no data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from zeroaccel.checkpoint.plain_codec import random_state, restore_random_state

__all__ = ["Epoch", "Order", "undisturbed"]

Share = Callable[[Tensor, str], None]
"""Replaces a tensor by rank 0's; the text says what it is."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Epoch:
    """One epoch, ready to be drawn.

    Attributes:
        batches: lists of indices, or whatever the sampler gives.
        worker_seed: of the processes that read.
    """

    batches: Iterable[Any]
    worker_seed: int


class Order:
    """The epochs of one sampler.

    Args:
        sampler: a batch sampler or a sampler; one that draws with `generator` None gets a generator.
        seed: the same on all ranks.
        seedable: draw epoch e of a `RandomSampler` from the seed `seed + e` alone.
        share: how ranks get rank 0's state of a generator; None where there are no other ranks.
        reads_with: the generator that torch's loader seeds its workers from.
        stream: `sampler` is an iterable dataset, in an order of its own.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        seed: int,
        seedable: bool = False,
        share: Share | None = None,
        reads_with: torch.Generator | None = None,
        stream: bool = False,
    ) -> None:
        self._sampler = sampler
        self._chain = _chain(sampler)
        self._seed = seed
        self._stream = stream
        self._share = share
        self._owner = next((one for one in self._chain if hasattr(one, "generator")), None)
        self._seedable = seedable and isinstance(self._owner, RandomSampler)
        self._start: Tensor | None = None
        if self._owner is not None and self._owner.generator is None:
            self._owner.generator = torch.Generator().manual_seed(seed)
        self._reads_with = reads_with if self._owner is not None and reads_with is self._owner.generator else None

    def begin(self, number: int) -> Epoch:
        """Epoch `number`. (all ranks, where there is `share`)"""
        for one in self._chain:
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(number)
        seed = self._seed + number
        if self._owner is None:
            return Epoch(self._drawn(seed), seed)
        generator: torch.Generator = self._owner.generator
        if self._seedable:
            generator.manual_seed(seed)
        elif self._share is not None:
            state = generator.get_state()
            self._share(state, f"generator of epoch {number}")
            generator.set_state(state)
        self._start = generator.get_state()
        if self._reads_with is not None:  # torch's loader draws this from the same generator, before the order
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        return Epoch(self._sampler, seed)

    def state(self, *, started: bool) -> Tensor | None:
        """The generator's state from which the epoch that has begun, or else the next one, is drawn."""
        if self._owner is None or self._seedable:
            return None
        return self._start if started else self._owner.generator.get_state()

    def restore(self, state: Tensor | None) -> None:
        """The next epoch to begin is drawn from `state`."""
        if state is not None and self._owner is not None and not self._seedable:
            self._owner.generator.set_state(state)

    def _drawn(self, seed: int) -> Iterable[Any]:
        known = self._stream or all(type(one) in (BatchSampler, SequentialSampler) for one in self._chain)
        if known or not isinstance(self._sampler, Sized):
            return self._sampler  # type: ignore[no-any-return]
        with undisturbed():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            return list(self._sampler)  # type: ignore[call-overload, no-any-return]


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is drawn inside leaves the generators of Python, NumPy and torch (on the CPU) as they were."""
    state = random_state(_CPU)
    try:
        yield
    finally:
        restore_random_state(state, _CPU)


def _chain(sampler: Any) -> list[Any]:
    """A batch sampler, the sampler in it, and so on."""
    chain: list[Any] = []
    while sampler is not None and sampler not in chain:
        chain.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return chain
