"""Ranks as threads of one process, whose messages are counted, for the control plane of thousands of ranks.

`run(world_size, call)` gives each thread a `Collectives` over a group that exists in memory. Its messages match by
sender and tag, in the order of sending, as in gloo.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hangs.flight_recorder import FlightRecorder
from zeroaccel.comm.topology import Topology
from zeroaccel.comm.transport import P2PTransport

T = TypeVar("T")
_STACK_NBYTES = 1 << 20
_PATIENCE = 60  # seconds after which a rank whose peer has failed raises


@dataclass
class Sent:
    """Messages and bytes that one rank sent, and the processor time that it used."""

    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    targets: Counter[int] = field(default_factory=Counter)


class _Work:
    def __init__(self, finish: Callable[[], object] = lambda: None) -> None:
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._finish()
        return True

    def is_completed(self) -> bool:
        return True


class _Group:
    """One rank's end of the group; replaces a process group and its backend."""

    def __init__(self, rank: int, size: int, boxes: Any, sent: Sent) -> None:
        self._rank, self._size, self._boxes, self._sent = rank, size, boxes, sent

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> _Group:
        return self

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        self._sent.messages += 1
        self._sent.nbytes += tensors[0].nbytes
        self._sent.targets[peer] += 1
        self._boxes[self._rank, peer, tag].put(tensors[0].clone())
        return _Work()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        box = self._boxes[peer, self._rank, tag]
        return _Work(lambda: tensors[0].copy_(box.get(timeout=_PATIENCE).view_as(tensors[0])))


class _Boxes(defaultdict[tuple[int, int, int], "SimpleQueue[Tensor]"]):
    """Queues of messages; the first access to a key creates its queue."""

    def __init__(self) -> None:
        super().__init__(SimpleQueue)
        self._lock = threading.Lock()

    def __missing__(self, key: tuple[int, int, int]) -> SimpleQueue[Tensor]:
        with self._lock:
            return self[key] if key in self else super().__missing__(key)


def run(
    world_size: int,
    call: Callable[[Collectives], T],
    *,
    per_node: int = 8,
    records_sizes: bool = True,
    stack_nbytes: int = _STACK_NBYTES,
) -> list[tuple[T, Sent]]:
    """Runs `call` on each rank; returns its results and counts. Raises the exception of a rank.

    Args:
        records_sizes: False if the ranks' parts of a call differ in size.
        stack_nbytes: stack of each thread; models need more than the control plane.
    """
    boxes = _Boxes()
    results: list[Any] = [None] * world_size
    nodes = tuple(tuple(range(first, min(first + per_node, world_size))) for first in range(0, world_size, per_node))

    def serve(rank: int) -> None:
        sent = Sent()
        group = cast(Any, _Group(rank, world_size, boxes, sent))
        topology = Topology(
            *(rank, world_size, rank % per_node, per_node, torch.device("cpu"), "simulated", group, group, group),
            FlightRecorder(),
            None,
            nodes,
            transports=lambda over, device, meter: P2PTransport(over, meter),
        )
        try:
            begin = time.thread_time()
            results[rank] = call(Collectives(topology, records_sizes=records_sizes)), sent
            sent.seconds = time.thread_time() - begin
        except BaseException as error:
            results[rank] = error

    before = threading.stack_size(stack_nbytes)
    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, Empty)):  # the cause before those that wait for it
        raise error
    return results
