"""Updates of masters on a thread of their own, beside forward and backward; the new weights wait until they are wanted.

What computes goes on reading the old weights, so the new ones are written to memory of their own and installed by
whoever asks (`weight_update.py` decides when updates begin and when they are installed). One thread, so that the
order of updates is that in which they were added.

Hyperparameters are copied when a batch of updates begins: a scheduler may go on meanwhile.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroaccel.zero.grad_reducer import GradientBuffer
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer, followers
from zeroaccel.zero.storage.masters import MasterStorage

__all__ = ["AsyncStep"]


@dataclass(frozen=True)
class _Job:
    """`weights`: what the update writes, in the parameters' dtype; None where the masters do as well."""

    weights: FlatTensor | None
    done: Future[float]


class AsyncStep:
    """Life of a step's updates: 1. `begin`, 2. `add` per buffer, in the order that was announced, 3. `install` of each.

    Every buffer whose masters are in memory must have them apart from its parameters.

    Attributes:
        pending: whether updates have been added that are not installed yet.
    """

    def __init__(self, shard: ShardedOptimizer) -> None:
        self._shard = shard
        self._jobs: dict[int, _Job] = {}
        self._order: tuple[FlatBuffer, ...] = ()
        self._following: Mapping[int, MasterStorage] = {}
        self._groups: list[dict[str, Any]] = []
        self._grad_scale = 1.0
        self._thread: ThreadPoolExecutor | None = None
        self._failed: Exception | None = None

    @property
    def pending(self) -> bool:
        return bool(self._jobs)

    def begin(self, order: Sequence[FlatBuffer], grad_scale: float) -> None:
        """Announces the updates of a step.

        Args:
            order: of the buffers that will be added.
            grad_scale: multiplied into the gradients.
        """
        assert not self._jobs, "updates begin while others are pending"
        self._order, self._following = tuple(order), followers(order)
        self._groups = _hyperparameters(self._shard.optimizer.param_groups)
        self._grad_scale = grad_scale
        self._failed = None

    def add(self, held: GradientBuffer) -> None:
        """Starts the update of a buffer, whose gradient nobody changes any more."""
        assert held.shard is not None, f"{held.name} is updated without a gradient"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "zeroaccel-update")
        weights = self._shard.stage_aside(held.buffer)
        done = self._thread.submit(self._update, held.buffer, held.shard, weights)
        self._jobs[id(held.buffer)] = _Job(weights, done)

    def has(self, buffer: FlatBuffer) -> bool:
        """Whether an update of it is pending."""
        return id(buffer) in self._jobs

    def install(self, buffer: FlatBuffer) -> None:
        """Waits for the update of a buffer and puts the new weights into its shard.

        Raises:
            OffloadError: a tier failed.
        """
        job = self._jobs.pop(id(buffer))
        begun = time.perf_counter()
        try:
            seconds = job.done.result()
        finally:
            waited = time.perf_counter() - begun
        self._shard.update_seconds += seconds
        self._shard.hidden_seconds += seconds - waited  # over a step: what nobody waited for
        self._shard.install(buffer, job.weights)

    def wait(self) -> None:
        """Returns when the thread has nothing to do; failures stay where they are."""
        for job in self._jobs.values():
            job.done.exception()
        if not self._jobs:
            self._release()

    def drop(self) -> None:
        """Forgets what is pending, once it is done."""
        self.wait()
        self._jobs.clear()
        self._release()

    def _release(self) -> None:
        for buffer in self._order:
            buffer.masters.release()

    def changed_settings(self) -> str | None:
        """The first hyperparameter that is another than when the updates began, for people; None if there is none."""
        now = _hyperparameters(self._shard.optimizer.param_groups)
        for index, (before, after) in enumerate(zip(self._groups, now, strict=True)):
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    return f"{name} of param group {index} from {before.get(name)} to {after.get(name)}"
        return None

    def close(self) -> None:
        """Ends the thread."""
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _update(self, buffer: FlatBuffer, grad: Tensor, weights: FlatTensor | None) -> float:
        """Seconds that it took."""
        if self._failed is not None:
            raise self._failed
        begun = time.perf_counter()
        following = self._following.get(id(buffer))
        try:
            self._shard.update(buffer, FlatTensor(buffer.own, grad), self._grad_scale, following, weights, self._groups)
        except Exception as error:
            self._failed = error
            raise
        return time.perf_counter() - begun


def _hyperparameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else copy.copy(value)

    return [{name: plain(value) for name, value in group.items() if name != "params"} for group in groups]
