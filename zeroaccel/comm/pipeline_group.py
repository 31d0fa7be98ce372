"""The ranks of one pipeline and their messages: for torch's schedules, and for tensors that two stages share.

torch's schedules send over `PipelineGroup.process_group` without notifying this package. The caller therefore announces
each message (`count`) and each wait between two computations (`begin_wait`); the watchdog then sees it like a
collective.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zeroaccel.comm.collective_tracker import CollectiveTracker
from zeroaccel.comm.hangs.flight_recorder import CollectiveRecord
from zeroaccel.comm.topology import Topology, connect, connect_peers, subgroup
from zeroaccel.comm.transport import Meter, PendingTransfer
from zeroaccel.config.parallel import RankGroups
from zeroaccel.errors import CollectiveError


class PipelineGroup:
    """The ranks with the stages of one pipeline, which see the same samples. (all ranks make it, with the same groups)

    Args:
        pipelines: the ranks of each pipeline, in stage order.

    Attributes:
        rank: stage of this rank.
        size: number of stages.
        process_group: process group of these ranks; only the schedule sends in it.
        flight_recorder: recorder of the pipeline's messages.
        meter: called for every message: (tag of the call, global rank of the receiver, bytes); None for no metering.
    """

    def __init__(self, topology: Topology, pipelines: RankGroups) -> None:
        group = subgroup(topology, pipelines)
        self.rank, self.size = group.rank, group.size
        self.process_group = group.gather_group
        self._shared = group.reduce_group
        self._ranks = group.ranks
        self._topology = topology
        groups = {"stages": group.gather_group, "shared parameters": group.reduce_group}
        connect(topology, {name: (over, ["all_reduce"]) for name, over in groups.items()})
        recorder = topology.recorder("pipeline", needs=range(topology.world_size))
        self.flight_recorder = recorder
        self.meter: Meter | None = None
        self._tracker = CollectiveTracker(recorder, topology.watchdog)
        # torch's schedules send in batches, and outside of batches if all messages have one direction.
        neighbours = [group.ranks[(group.rank + step) % group.size] for step in (-1, 1)]
        connect_peers(topology, self.process_group, neighbours, "neighbouring stages", self._tracker, alone=True)
        self._sent: list[tuple[PendingTransfer, Tensor]] = []
        self._waiting: CollectiveRecord | None = None

    def connect_sharers(self, stages: Collection[int]) -> None:
        """Connects this stage to those with which it shares parameters. (all ranks of the pipeline)"""
        peers = [self._ranks[stage] for stage in stages]
        connect_peers(self._topology, self._shared, peers, "stages that share parameters", self._tracker, alone=False)

    # -- messages of the schedule

    def begin_wait(self, label: str, tensor: Tensor, op: str = "send and receive") -> None:
        """Marks the start of a wait for messages of the schedule; until `end_wait` this rank does not compute.

        Args:
            label: the awaited message or the last computation: "gradient of micro-batch 2 from stage 1".
            tensor: tensor of the messages.
        """
        self.end_wait()
        self._waiting = self._tracker.issue("control", op, label, tensor)
        self._tracker.flight_recorder.begin_wait(self._waiting)

    def end_wait(self) -> None:
        """Marks the arrival of the awaited message. Without a preceding `begin_wait` it does nothing."""
        entry, self._waiting = self._waiting, None
        if entry is not None:
            self._tracker.flight_recorder.end_wait(entry)
            self._tracker.finish(entry)

    def failure(self, error: RuntimeError) -> CollectiveError | None:
        """Returns the error to raise if a message of the schedule failed; None if this rank was computing."""
        entry = self._waiting
        return None if entry is None else self._tracker.explain(entry, error)

    def count(self, tensor: Tensor, stage: int, label: str) -> None:
        """Counts a message that the schedule is about to send to a stage, if a meter is set."""
        if self.meter is not None:
            entry = self._tracker.issue("gather", "send", label, tensor)
            self._tracker.finish(entry)
            self.meter(entry.tag, self._ranks[stage], tensor.nbytes)

    # -- tensors that two stages share

    def send(self, tensor: Tensor, stage: int, label: str) -> None:
        """Sends a contiguous tensor without waiting; it must not change until `finish_sends`."""
        entry = self._tracker.issue("gather", "send", label, tensor)
        if self.meter is not None:
            self.meter(entry.tag, self._ranks[stage], tensor.nbytes)
        works = self._tracker.start(entry, lambda tag: self._start(dist.isend, tensor, stage))
        self._sent += [(work, tensor) for work in works]
        self._tracker.finish(entry)

    def receive(self, tensor: Tensor, stage: int, label: str) -> None:
        """Receives the next tensor that a stage sends to this one. Blocks."""
        entry = self._tracker.issue("gather", "receive", label, tensor)
        self._tracker.wait(entry, self._tracker.start(entry, lambda tag: self._start(dist.irecv, tensor, stage)))

    def finish_sends(self) -> None:
        """Waits until all sends are complete."""
        sent, self._sent = self._sent, []
        for work, tensor in sent:
            entry = self._tracker.issue("gather", "finish send", "shared parameters", tensor)
            self._tracker.wait(entry, [work])

    def _start(self, operation: Any, tensor: Tensor, stage: int) -> Sequence[PendingTransfer]:
        # A batch, even for one message: outside of batches NCCL makes a communicator for each pair of ranks at their
        # first message, which here comes during backward, and blocks the host until the other rank arrives.
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, self._ranks[stage], self._shared)])
