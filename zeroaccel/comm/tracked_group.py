"""A process group for other libraries: counts its collectives and shows them to the watchdog.

DTensors communicate through torch's functional collectives, which look up a group by its name. A `TrackedGroup` has
that name and forwards each call to a group of `topology.py`, which does the arithmetic. Calls that it does not override
go to the backend untracked.

[Note: bytes of a sum] A backend does not report its algorithm for an all-reduce. The meter counts a reduce-scatter and
an all-gather between all pairs: for N elements, rounded up to a multiple of W, 2 N / W to each of the W - 1 others.
The total equals that of a ring, and is the minimum (Patarasuk and Yuan, 2009, section 3).

[Note: meeting before a sum] Gloo numbers the collectives of a group itself, so ranks at different layers would silently
add unrelated sums, or end the process if sizes differ. In host memory the ranks therefore meet before each call, with
empty messages whose tag encodes the history of the group's calls: ranks with different histories wait for each other,
which the watchdog sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroaccel.comm.collective_tracker import CollectiveTracker, DeviceWork, MessageWork
from zeroaccel.comm.hangs.flight_recorder import FlightRecorder, Kind
from zeroaccel.comm.transport import Meter, PendingTransfer

if TYPE_CHECKING:
    from zeroaccel.comm.hangs.watchdog import Watchdog


class TrackedGroup(dist.ProcessGroup):
    """Forwards collectives to another group of the same ranks. `topology.track` makes it and gives it its name.

    Letters: W ranks.

    Args:
        inner: group that communicates.
        control: group of the same ranks, for the messages of a meeting.
        ranks: the global ranks, in group order.
        flight_recorder: recorder of its calls, which ranks outside of the group do not issue.

    Attributes:
        ranks: the global ranks, in group order.
        label: the layer being computed, for messages; set by the code that computes it.
        meter: called for every message: (tag of the call, global rank of the receiver, bytes); None for no metering.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        control: dist.ProcessGroup,
        ranks: Sequence[int],
        flight_recorder: FlightRecorder,
        watchdog: Watchdog | None,
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.ranks = tuple(ranks)
        self.label = ""
        self.meter: Meter | None = None
        self.flight_recorder = flight_recorder
        self._inner: dist.ProcessGroup | None = inner
        self._control: dist.ProcessGroup | None = control
        self._tracker = CollectiveTracker(flight_recorder, watchdog)
        self._name = ""
        self._nothing = torch.empty(0, dtype=torch.uint8)
        for device in inner._device_types:
            self._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, inner._get_backend(device))
        # torch's flight recorder (2.15) reads the name of a group from its default backend.
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    # -- methods that torch expects of a group

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        """Ignores the description."""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name under which torch's functional collectives find the group."""
        return self._name

    def getBackendName(self) -> str:
        return "zeroaccel"

    def shutdown(self) -> None:
        """Drops its references to the other groups, which are shut down separately."""
        self._inner = self._control = None

    # -- collectives; torch calls them by these names, with options that the inner group understands

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        parts = [-(-tensor.numel() // self.size()) * tensor.itemsize for tensor in tensors]
        sent = parts * 2  # a reduce-scatter and an all-gather: see [Note: bytes of a sum]
        call = partial(dist.ProcessGroup.allreduce, self._target, tensors, options)
        return self._start("reduce", "all_reduce", "sum", tensors, sent, call)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> dist.Work:
        sent = [tensor.nbytes for tensor in inputs]
        call = partial(dist.ProcessGroup.allgather_into_tensor_coalesced, self._target, outputs, inputs)
        return self._start("gather", "all_gather", "gather", outputs, sent, call)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> dist.Work:
        sent = [tensor.nbytes for tensor in outputs]
        call = partial(dist.ProcessGroup.reduce_scatter_tensor_coalesced, self._target, outputs, inputs, options)
        return self._start("reduce", "reduce_scatter", "sum", inputs, sent, call)

    @property
    def _target(self) -> dist.ProcessGroup:
        assert self._inner is not None, "the group is shut down already"
        return self._inner

    def _start(
        self,
        kind: Kind,
        op: str,
        purpose: str,
        full: Sequence[Tensor],
        sent: Sequence[int],
        call: Callable[[], Any],
    ) -> dist.Work:
        """Issues one call. `full`: the tensors of all ranks together; `sent`: bytes of each message to another rank."""
        entry = self._tracker.issue(kind, op, f"{purpose} {self.label}".rstrip(), full[0])
        is_on_host = full[0].device.type == "cpu"
        if is_on_host:
            self._tracker.transfer(entry, self._meet)
        meter = self.meter
        if meter is not None:
            for rank in self.ranks:
                for nbytes in sent if rank != self.ranks[self.rank()] else ():
                    meter(entry.tag, rank, nbytes)
        pending = self._tracker.start(entry, lambda tag: [call()])
        if is_on_host:
            return _TrackedWork(MessageWork(self._tracker, entry, pending))
        return _TrackedWork(DeviceWork(self._tracker, entry, pending, full[0].device))

    def _meet(self, tag: int) -> list[PendingTransfer]:
        """Exchanges empty messages with the others under the call's tag: see [Note: meeting before a sum]."""
        group = self._control
        assert group is not None, "the group is shut down already"
        others = [place for place in range(self.size()) if place != self.rank()]
        received = [group.recv([self._nothing], place, tag) for place in others]
        return [*received, *(group.send([self._nothing], place, tag) for place in others)]


class _TrackedWork(dist.Work):
    """The work that torch waits for."""

    def __init__(self, work: MessageWork) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """Waits for the inner group's work; the watchdog's limit applies, not `timeout`.

        Raises:
            CollectiveError: the ranks have desynced, or one has ended.
        """
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()
