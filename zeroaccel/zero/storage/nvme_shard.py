"""A sharded buffer's shard in a tier: brought for each gather, replaced as a whole after each step.

Made for shards that are not in memory between uses (`param_unit.py` asks); which buffers have one is `placement.py`'s
decision.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from zeroaccel.errors import OffloadError
from zeroaccel.offload.tier import Fetch, Tier, TierElements, TierRange

__all__ = ["NvmeShard"]


class NvmeShard:
    """The shard under `key` of `tier`. Life of a use: `prefetch` if it is known early, `bring`, `release`."""

    def __init__(self, tier: Tier, key: str, dtype: torch.dtype) -> None:
        self.tier = tier
        self.key = key
        self._dtype = dtype
        self._fetch: Fetch | None = None
        self._loan: Tensor | None = None

    def prefetch(self) -> None:
        """Starts to bring the shard, if that has not begun."""
        if self._fetch is None:
            self._fetch = self.tier.fetch(self.key)

    def bring(self) -> Tensor:
        """(S,) the shard in host memory, until `release`.

        Raises:
            OffloadError: it cannot be read back.
        """
        self.prefetch()
        fetch, self._fetch = self._fetch, None
        assert fetch is not None and self._loan is None, f"{self.key}: brought twice"
        self._loan = fetch.wait()
        return self._loan.view(self._dtype)

    def release(self) -> None:
        """The brought shard has been read. Also gives up a prefetch that nobody waited for."""
        if self._fetch is not None:
            fetch, self._fetch = self._fetch, None
            with contextlib.suppress(OffloadError):  # if it matters, the next fetch meets it too
                self.tier.release(fetch.wait())
        if self._loan is not None:
            loan, self._loan = self._loan, None
            self.tier.release(loan)

    def open(self) -> Tensor:
        """(S,) of anything: the shard to come, which somebody is to fill before `commit`."""
        assert self._loan is None, f"{self.key}: opened while it is in use"
        self._loan = self.tier.take(self.key)
        return self._loan.view(self._dtype)

    def commit(self) -> None:
        """Sends the filled shard to its tier."""
        assert self._loan is not None, f"{self.key}: committed before it was opened"
        loan, self._loan = self._loan, None
        self.tier.store(self.key, loan)

    def change(self, start: int, values: Tensor) -> None:
        """Replaces elements [start, start + len(values)) of the shard, and returns when they are stored.

        Raises:
            OffloadError: it cannot be read back or stored.
        """
        self.bring()[start : start + values.numel()].copy_(values)
        self.commit()
        self.tier.settle()

    def abandon(self) -> None:
        """Drops an opened shard; the tier keeps the old one."""
        if self._loan is not None:
            loan, self._loan = self._loan, None
            self.tier.release(loan)

    def stored(self, start: int, end: int) -> TierElements:
        """Elements [start, end) of the shard as they are in the tier."""
        held = TierRange(self.tier, self.key, start * self._dtype.itemsize, end - start, self._dtype)
        return TierElements((held,), self._dtype)
