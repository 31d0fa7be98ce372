"""A process group for code that is not ours: its collectives are counted, and the watchdog sees them.

What DTensors send goes through torch's functional collectives, which find a group by its name and call it. A
`TrackedGroup` has the name, and passes each call on to a group of `topology.py`: the arithmetic is that group's. What
it does not know goes to the backend, unseen.

[Note: bytes of a sum] A backend does not say which algorithm it takes for an all-reduce. It is counted as a
reduce-scatter and an all-gather between all pairs: of N elements, rounded up to a multiple of W, 2 N / W to each of the
W - 1 others, which in all is what the ring sends and the least there is (Patarasuk and Yuan, 2009, section 3).

[Note: meeting before a sum] Gloo numbers the collectives of a group by itself, so that ranks whose sums are of
different layers add them up without a word, or end the process where sizes differ. In host memory the ranks therefore
meet before each call, by messages without content whose tag is the history of the group's calls: ranks with other
histories wait for each other, which the watchdog sees.
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
    """Passes collectives on to another group of the same ranks. Made by `topology.track`, which gives it its name.

    Letters: W ranks.

    Args:
        inner: what communicates.
        control: of the same ranks, for messages that say where a rank is.
        ranks: the global ranks, in the order of the group.
        flight_recorder: of its calls, which ranks elsewhere do not issue.

    Attributes:
        ranks: as given.
        label: the layer that is computed, for messages, set by the code that computes it.
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

    # -- what torch asks of a group

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        """Of no use here."""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """By which torch's functional collectives find it."""
        return self._name

    def getBackendName(self) -> str:
        return "zeroaccel"

    def shutdown(self) -> None:
        """Forgets the other groups, which are shut down by themselves."""
        self._inner = self._control = None

    # -- collectives; torch calls them by these names, and passes options that the other group understands

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        parts = [-(-tensor.numel() // self.size()) * tensor.itemsize for tensor in tensors]
        sent = parts * 2  # a reduce-scatter, and an all-gather: see [Note: bytes of a sum]
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
        assert self._inner is not None, "a group that is shut down"
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
        """Issues one call. `full` are the tensors of all ranks together; `sent` the bytes of messages to each other."""
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
        """Messages to and from the others, which they send by the same tag: see [Note: meeting before a sum]."""
        group = self._control
        assert group is not None, "a group that is shut down"
        others = [place for place in range(self.size()) if place != self.rank()]
        received = [group.recv([self._nothing], place, tag) for place in others]
        return [*received, *(group.send([self._nothing], place, tag) for place in others)]


class _TrackedWork(dist.Work):
    """What torch waits for."""

    def __init__(self, work: MessageWork) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """As of the other group's work; the limit is the watchdog's.

        Raises:
            CollectiveError: the ranks have desynced, or one is gone.
        """
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()
