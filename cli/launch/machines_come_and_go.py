"""`--num_machines MIN:MAX`: changes torch's rendezvous for lost machines, and for more machines than MAX.

The changes to torch's classes hold while a job runs: the rendezvous does not wait for lost machines, and spare machines
wait for a loss. `agent.py` runs the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, SimpleElasticAgent, WorkerState
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _Action,
    _DistributedRendezvousOpExecutor,
    _RendezvousJoinOp,
    _should_keep_alive,
)

from zeroaccel.config.launch.launch_settings import LaunchSettings

# Wait for more machines than MIN, from the end of this machine's ranks; at the first start torch's 30 s apply.
_LAST_CALL_SECONDS = 3.0
# Shortest such wait: each machine checks once a second if the last attempt is over.
_LAST_JOIN_SECONDS = 1.5
_BETWEEN_ROUNDS_SECONDS = 0.3  # a machine leaves a round and joins the next one within milliseconds


@contextmanager
def machines_come_and_go(
    settings: LaunchSettings, ended: Callable[[], float | None], spare: SpareMachine
) -> Iterator[None]:
    """Changes the rendezvous while a job runs: it does not wait for lost machines, and spare machines wait.

    Args:
        ended: returns the time at which the ranks of the last attempt ended; None before.
    """
    if settings.min_machines is None:
        yield
        return
    with _lost_machines_are_not_awaited(ended), _spare_machines_wait(settings.num_machines, spare):
        yield


def _lost_machines_are_not_awaited(ended: Callable[[], float | None]) -> AbstractContextManager[None]:
    """Makes torch's rendezvous wait the full time for more machines than MIN at the first start only.

    torch would wait as long at every restart, whose usual reason is a lost machine. A machine that comes later joins by
    another restart.
    """

    def last_call(timeouts: RendezvousTimeout) -> timedelta:
        if (since := ended()) is None:
            return timeouts._last_call
        # The other machines have come while this one waited for a lost machine.
        rest = max(_LAST_JOIN_SECONDS, _LAST_CALL_SECONDS - (time.monotonic() - since))
        return min(timedelta(seconds=rest), timeouts._last_call)

    return replaced(RendezvousTimeout, "last_call", property(last_call))


class SpareMachine:
    """A machine that waits while the job is full; implements the changed calls of torch's rendezvous.

    As many spares join as machines are lost, in a fixed order. No spare joins while a machine of the job may only be
    between two rounds, since that machine has states in its memory.

    Attributes:
        waits: true while the machine is not a part of the job.
    """

    def __init__(self, num_machines: int, log: Callable[[str], None]) -> None:
        self._num_machines = num_machines
        self._log = log
        self.waits = False
        self._free_since: float | None = None  # time at which this machine first saw a free place

    def say_that_it_waits(self) -> None:
        if not self.waits:
            self._log(f"the job has its {self._num_machines} machines: this one waits as a spare")
        self.waits, self._free_since = True, None

    def joins(self) -> None:
        """Notes that the machine has become a part of the job."""
        if self.waits:
            self._log("a machine was lost: this spare machine replaces it")
        self.waits = False

    def job_ended(self) -> bool:
        """Returns True, and logs it, if this machine was a spare until the job or machine 0 has ended."""
        if self.waits:
            self._log("the job or machine 0 has ended; this spare machine was not needed")
        return self.waits

    def next_action(self, ctx: Any) -> _Action | None:
        """Returns the next action of the rendezvous, or None to use torch's own."""
        state, node = ctx.state, ctx.node
        if state.closed:
            return None
        free = self._num_machines - len(state.participants) - len(state.wait_list)
        if node in state.wait_list and state.complete and len(state.participants) >= self._num_machines:
            return _Action.REMOVE_FROM_WAIT_LIST  # it came late and becomes a spare
        if node not in state.redundancy_list:
            return None
        wait = _Action.KEEP_ALIVE if _should_keep_alive(ctx) else _Action.SYNC
        if sorted(map(str, state.redundancy_list)).index(str(node)) >= free:
            self._free_since = None
            return wait
        if self._free_since is None:
            self._free_since = time.monotonic()
            time.sleep(_BETWEEN_ROUNDS_SECONDS)
            return _Action.KEEP_ALIVE
        if state.complete and time.monotonic() - self._free_since < _LAST_CALL_SECONDS:
            return wait
        return _Action.REMOVE_FROM_REDUNDANCY_LIST


@contextmanager
def _spare_machines_wait(num_machines: int, spare: SpareMachine) -> Iterator[None]:
    """Makes a machine that finds the job full wait until another one is lost.

    torch's rendezvous does the same (2.13), with gaps: after a loss all spares ask to join, and may come before
    machines of the job; late ones end the attempt of the others, and time out; and torch's launcher fails if a spare
    was never needed.
    """
    executor, run, join = _DistributedRendezvousOpExecutor, SimpleElasticAgent.run, _RendezvousJoinOp.__call__
    wait = getattr(executor, "_add_to_redundancy_list", None)
    num_waiting = DynamicRendezvousHandler.num_nodes_waiting

    def say_and_wait(own: _DistributedRendezvousOpExecutor) -> None:
        spare.say_that_it_waits()
        assert wait is not None, "no machine waits in this release of torch"
        wait(own)

    def run_or_wait(agent: SimpleElasticAgent, role: str = DEFAULT_ROLE) -> RunResult:
        result: RunResult | None = run(agent, role)
        if result is None:
            spare.job_ended()
        return result or RunResult(WorkerState.SUCCEEDED, {}, {})

    def join_or_wait(operation: _RendezvousJoinOp, ctx: Any, deadline: float) -> _Action:
        action = spare.next_action(ctx) or join(operation, ctx, deadline)
        if action == _Action.FINISH:
            spare.joins()
        return action

    def num_that_can_join(handler: DynamicRendezvousHandler) -> int:
        count = num_waiting(handler)
        return 0 if len(handler._state_holder.state.participants) >= num_machines else count

    if wait is None:
        yield
        return
    with (
        replaced(executor, "_add_to_redundancy_list", say_and_wait),
        replaced(SimpleElasticAgent, "run", run_or_wait),
        replaced(_RendezvousJoinOp, "__call__", join_or_wait),
        replaced(DynamicRendezvousHandler, "num_nodes_waiting", num_that_can_join),
    ):
        yield


@contextmanager
def replaced(owner: type, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute of one of torch's classes, until the end of the block."""
    own = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)
