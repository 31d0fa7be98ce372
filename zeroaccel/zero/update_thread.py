"""`UpdateThread`: updates of masters beside forward and backward, with the new weights installed in between.

`weight_update.py` decides which updates run here, and has the loop over the sub-groups of a buffer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroaccel.errors import OffloadError, listed
from zeroaccel.ops.device_threads import executor
from zeroaccel.zero.grad_reducer import GradientBuffer
from zeroaccel.zero.layout import FlatTensor
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer, followers
from zeroaccel.zero.storage.masters import MasterStorage


@dataclass(frozen=True)
class _Job:
    """An update that has begun.

    Attributes:
        weights: memory for the new weights, in the parameters' dtype; None if the masters themselves serve.
        is_direct: the thread writes the weights where they belong.
    """

    weights: FlatTensor | None
    is_direct: bool
    done: Future[float]


class UpdateThread:
    """Updates masters on a separate thread, during forward and backward.

    Forward and backward may read the old weights, so the thread writes the new ones to separate memory until `install`.
    A single thread runs the updates in the order in which they were added. `begin` copies the hyperparameters, because
    a scheduler may change them during the updates.

    For each step: 1. `begin`, 2. `add` per buffer, in the announced order, 3. `install` of each.
    Unless it is updated directly or out of place, a buffer whose masters are in memory must have them apart from its
    parameters.

    Args:
        advance: `WeightUpdate.advance_masters`, which updates the masters of one buffer, or another such function.
    """

    def __init__(self, optimizer: ShardedOptimizer, advance: Callable[..., None], device: torch.device) -> None:
        self._optimizer = optimizer
        self._advance = advance
        self._device = device
        self._jobs: dict[int, _Job] = {}
        self._order: tuple[FlatBuffer, ...] = ()
        self._following: Mapping[int, MasterStorage] = {}
        self._groups: list[dict[str, Any]] = []
        self._grad_scale = 1.0
        self._thread: ThreadPoolExecutor | None = None
        self._failure: OffloadError | None = None

    @property
    def pending(self) -> bool:
        """True if updates have been added that are not installed yet."""
        return bool(self._jobs)

    def begin(self, order: Sequence[FlatBuffer], grad_scale: float) -> None:
        """Announces the updates of a step.

        Args:
            order: the buffers that will be added, in order.
            grad_scale: factor of the gradients.
        """
        assert not self._jobs, "updates begin while others are pending"
        # A copy of the settings: the program's scheduler steps while the thread still updates.
        self._order = tuple(order)
        self._following = followers([buffer for buffer in order if not buffer.masters.is_resident])
        self._groups = hyperparameters(self._optimizer.optimizer.param_groups)
        self._grad_scale = grad_scale
        self._failure = None

    def add(self, gradient: GradientBuffer, *, unread: bool = False) -> None:
        """Starts the update of a buffer, whose reduced gradient is final; that of a resident one runs in this thread.

        Args:
            unread: nothing reads its weights before `install`, so that those in host memory need no other memory.
        """
        assert gradient.shard is not None, f"{gradient.name} is updated without a gradient"
        if self._thread is None:
            self._thread = executor(1, "zeroaccel-update", self._device)
        buffer, writer = gradient.buffer, self._optimizer.writer
        is_direct = unread and writer.is_direct(buffer)
        weights = None if is_direct else writer.memory_aside(buffer)
        call = partial(self._run, buffer, gradient.shard, weights, is_direct=is_direct)
        done = _called(call) if buffer.masters.is_resident else self._thread.submit(call)
        self._jobs[id(buffer)] = _Job(weights, is_direct, done)

    def has(self, buffer: FlatBuffer) -> bool:
        """Returns True if an update of the buffer is not installed yet."""
        return id(buffer) in self._jobs

    def install(self, buffer: FlatBuffer, exchange: Callable[[], object] = list) -> None:
        """Waits for the update of a buffer and puts the new weights into its shard.

        Args:
            exchange: called in between, for an update out of place: makes the new masters the current ones.

        Raises:
            OffloadError: a tier failed, or the update itself.
        """
        # The wait is the part of the update that did not overlap with forward and backward.
        job = self._jobs.pop(id(buffer))
        begun = time.perf_counter()
        try:
            seconds = job.done.result()
        finally:
            waited = time.perf_counter() - begun
        self._optimizer.update_seconds += seconds
        self._optimizer.hidden_seconds += seconds - waited
        exchange()
        if not job.is_direct and not buffer.masters.aliases_weights:
            self._optimizer.writer.install(buffer, job.weights)

    def drop(self, keep: Collection[int] = ()) -> None:
        """Drops pending updates, except those of buffers with ids in `keep`, and waits for one that runs."""
        for key in [key for key in self._jobs if key not in keep]:
            done = self._jobs.pop(key).done
            if not done.cancel():
                done.exception()
        self._release()

    def close(self) -> None:
        """Drops pending updates and ends the thread."""
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _release(self) -> None:
        """Releases sub-groups that were prefetched for updates that will not run."""
        for buffer in self._order:
            buffer.masters.release()

    def _run(self, buffer: FlatBuffer, grad: Tensor, weights: FlatTensor | None, *, is_direct: bool) -> float:
        """Runs an update on the thread; returns its duration in seconds."""
        if self._failure is not None:  # the tier has failed: later updates would only mix more old and new
            raise self._failure
        begun = time.perf_counter()
        following = self._following.get(id(buffer))
        try:
            gradient = FlatTensor(buffer.own, grad)
            writer = self._optimizer.writer
            with writer.new_weights(buffer) if is_direct else nullcontext(weights) as out:
                self._advance(buffer, gradient, self._grad_scale, following, out, self._groups)
        except OffloadError as error:
            self._failure = error
            raise
        except Exception as error:
            names = listed([slot.fqn for slot in buffer.layout.slots], most=3)
            self._failure = OffloadError(
                f"the update of {names} on the host",
                expected="an update without an error",
                got=f"{type(error).__name__}: {error}",
                fix="resume from the last checkpoint",
            )
            raise self._failure from error
        return time.perf_counter() - begun


def _called(call: Callable[[], float]) -> Future[float]:
    done: Future[float] = Future()
    try:
        call()
        done.set_result(0.0)  # no part of it overlaps with other work of the host
    except OffloadError as error:
        done.set_exception(error)
    return done


def hyperparameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of the settings of param groups, which a program may change later."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else copy.copy(value)

    return [{name: plain(value) for name, value in group.items() if name != "params"} for group in groups]
