"""Process groups and devices: the ranks of a job and their connections. Only this module creates groups.

A `Topology` is made once per default group and shared by all engines of the process. It has separate groups for
gathers, reductions and control, because ranks may start a gather and a reduction in different orders; `subgroup` makes
the same three for a subset of the ranks. The topology starts the `Watchdog`; apart from making groups it does not
communicate.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroaccel.comm.collective_tracker import CollectiveTracker
from zeroaccel.comm.environment import (
    allow_connections,
    avoid_record_streams,
    launcher_owns_store,
    launcher_wakes_stopped_ranks,
    local_rank_and_size,
    rank_and_world_size,
    ranks_may_share_devices,
    rendezvous_address,
    timeout_seconds,
    warn_of_one_queue,
)
from zeroaccel.comm.hangs.flight_recorder import FlightRecorder
from zeroaccel.comm.hangs.hang_report import RankNames
from zeroaccel.comm.hangs.peer_processes import PeerProcess, PeerProcesses, own_process
from zeroaccel.comm.hangs.side_channel import SideChannel
from zeroaccel.comm.hangs.watchdog import Watchdog, send_exit_notice_through
from zeroaccel.comm.rank_device import (
    ACCELERATOR,
    CPU,
    DeviceIdentity,
    check_one_device_each,
    identify,
    named_device,
    rank_device,
    sole_device,
    warn_of_another_accelerator,
    warn_of_unused_devices,
)
from zeroaccel.comm.tracked_group import TrackedGroup
from zeroaccel.comm.transport import (
    GATHERS,
    REDUCTIONS,
    SendRecvBackend,
    TransportFactory,
    close_connection,
    close_connections,
    exchange_first,
    gather_at_first,
    issue_first,
    transport_over,
)
from zeroaccel.config.parallel import RankGroups
from zeroaccel.errors import CollectiveError, ConfigError, EngineStateError, UsageError

__all__ = [
    "RankGroup",
    "Topology",
    "connect",
    "connect_peers",
    "current_topology",
    "destroy",
    "device_mesh",
    "init_process_group",
    "meet",
    "mesh_of",
    "pair_backends",
    "peer_recorder",
    "subgroup",
    "track",
]

T = TypeVar("T")

_BACKSTOP_SECONDS = 60.0  # delay of the backend's own timeout after the watchdog's


@dataclass(frozen=True)
class RankGroup:
    """A subset of a job's ranks that includes this one, with its process groups.

    Attributes:
        ranks: global ranks, in the order of their ranks in the group.
        rank: this rank's number in the group.
        gather_group, reduce_group, control_group: process groups of these ranks, as in `Topology`.
    """

    ranks: tuple[int, ...]
    rank: int
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    control_group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


@dataclass(frozen=True)
class Topology:
    """The ranks of a job and their connections.

    Attributes:
        nodes: the global ranks on each machine, in ascending order.
        groups: every process group made here, except the default group.
        subgroups: the groups made by `subgroup`, by partition.
        connected: the NCCL groups whose ranks are connected, each with a kind of collective.
        recorders: the flight recorders made by `recorder`, by name.
        tracked: the groups made by `track`, by ranks.
        pairs: the backends made by `pair_backends`, by the other rank.
        names: names ranks in messages, with their coordinates on the mesh of the job once it is known.
        limit: seconds that a collective may wait.
        local_rank, local_world_size: this rank and the number of ranks on this machine.
        device: device on which this rank computes.
        backend: name that torch gives the backend of the default group.
        gather_group, reduce_group: on the backend of `device`, and on gloo for tensors in host memory.
        control_group: on gloo.
        flight_recorder: recorder of the collectives of these groups.
        watchdog: watchdog of this rank; None with one rank, which waits for no other.
        transports: factory of the transports that move tensors between the ranks of a group.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    control_group: dist.ProcessGroup
    flight_recorder: FlightRecorder
    watchdog: Watchdog | None
    nodes: tuple[tuple[int, ...], ...]
    limit: float = math.inf
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    subgroups: dict[tuple[tuple[int, ...], ...], RankGroup] = field(default_factory=dict)
    transports: TransportFactory = transport_over
    connected: set[tuple[dist.ProcessGroup, str]] = field(default_factory=set)
    recorders: dict[str, FlightRecorder] = field(default_factory=dict)
    tracked: dict[tuple[int, ...], TrackedGroup] = field(default_factory=dict)
    pairs: dict[int, SendRecvBackend] = field(default_factory=dict)
    names: RankNames = field(default_factory=RankNames)

    @property
    def all_ranks(self) -> RankGroup:
        """All ranks of the job."""
        ranks = tuple(range(self.world_size))
        return RankGroup(ranks, self.rank, self.gather_group, self.reduce_group, self.control_group)

    def recorder(
        self, name: str, needs: Sequence[int] = (), *, alike: bool = False, in_turn: bool = False
    ) -> FlightRecorder:
        """Returns a flight recorder for calls that other ranks of the job do not issue; made at the first call.

        `Watchdog.follow` describes the other arguments.
        """
        if name not in self.recorders:
            self.recorders[name] = FlightRecorder()
            if self.watchdog is not None:
                self.watchdog.follow(name, self.recorders[name], frozenset(needs), alike=alike, in_turn=in_turn)
        return self.recorders[name]


_current: tuple[dist.ProcessGroup, Topology] | None = None
_made_default_group = False
_generation = 0
_finished_rounds: dict[str, int] = {}  # by label of `all_ranks_call`, of this generation
_stores: dict[str, Store] = {}  # by address: stores of this process's earlier default groups, reused for the next


def init_process_group(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    *,
    device: torch.device | str | None = None,
    transports: TransportFactory | None = None,
) -> Topology:
    """Joins the job that torchrun's environment variables describe; without them, this process is the only rank.

    An existing default group is used unchanged. (all ranks)

    Args:
        backend: backend of the default group; by default gloo, and NCCL for CUDA tensors if CUDA is available.
        timeout: seconds that a collective may wait for the other ranks, 0 for no limit. By default
            ZEROACCEL_COLLECTIVE_TIMEOUT, or 600.
        device: device on which this rank computes: "cpu" or a CUDA device. By default the CUDA device with this rank's
            local rank if the backend is NCCL, and the CPU otherwise.
        transports: factory of the transports that move tensors between the ranks of a group; by default
            `transport_over`. For backends that torch does not have, and for simulations of one.

    Raises:
        ConfigError: the environment is incomplete or contradictory; or the ranks compute on CUDA devices, and the group
            has no backend for their tensors.
        EngineStateError: the ranks are already connected, with another device or other transports.
        CollectiveError: the ranks did not find each other.
    """
    global _made_default_group
    limit = timeout_seconds(timeout)
    # Checked before the rendezvous, so that a wrong device leaves nothing behind.
    device = None if device is None else named_device(device)
    if not dist.is_initialized():
        rank, world_size = rank_and_world_size()
        backend = backend or ACCELERATOR.default_backend
        if world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            _rendezvous(backend, rank, world_size, limit)
        _made_default_group = True
    return current_topology(limit, device=device, transports=transports)


def meet(backend: str | None, init_method: str, rank: int, world_size: int, timeout: float | timedelta | None) -> None:
    """Makes the default group of a job with an explicit init method, rank or world size. (all ranks)

    Args:
        backend: default as in `init_process_group`.
        init_method: "env://", "tcp://HOST:PORT" or "file://PATH", as in torch.distributed.
        rank, world_size: negative values are replaced by RANK and WORLD_SIZE.

    Raises:
        UsageError: the arguments do not describe a job.
        CollectiveError: the ranks did not find each other.
    """
    global _made_default_group
    backend = backend or ACCELERATOR.default_backend
    if rank < 0 or world_size < 1:
        known = rank_and_world_size()
        rank, world_size = known[0] if rank < 0 else rank, known[1] if world_size < 1 else world_size
    if not 0 <= rank < world_size:
        raise UsageError(
            "init_distributed(rank, world_size)", expected="a rank below the world size", got=(rank, world_size)
        )
    try:
        dist.init_process_group(
            backend, init_method, rank=rank, world_size=world_size, timeout=_backstop(timeout_seconds(timeout))
        )
    except ValueError as error:
        raise UsageError(f"init_distributed(init_method={init_method!r}): {error}") from error
    except dist.DistError as error:
        raise CollectiveError(
            f"rank {rank} of {world_size} did not meet the others at {init_method}: {str(error).splitlines()[0]}",
            fix="check that every rank is started with this address and world size",
        ) from error
    _made_default_group = True


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh over all ranks on the type of device that they compute on. (all ranks)"""
    return init_device_mesh(current_topology().device.type, shape, mesh_dim_names=names)


def current_topology(
    timeout: float | timedelta | None = None,
    *,
    device: torch.device | str | None = None,
    transports: TransportFactory | None = None,
) -> Topology:
    """Returns the topology of the default group; made at the first call. (all ranks)

    Args:
        timeout: as in `init_process_group`; changes the limit of an existing topology.
        device, transports: as in `init_process_group`.

    Raises:
        EngineStateError: there is no default group, or its topology has another device or other transports.
    """
    global _current
    if not dist.is_initialized():
        raise EngineStateError("process group", expected="an initialized one", fix="call init_process_group() first")
    default = dist.group.WORLD
    assert default is not None, "torch.distributed is initialized without a default group"
    # Other code may destroy the default group and make another one; the topology is then rebuilt for it.
    if _current is None or _current[0] is not default:
        _leave_current()
        allow_connections(default.size())
        _current = default, _build(default, timeout_seconds(timeout), device, transports or transport_over)
        return _current[1]
    _require_same(_current[1], device, transports)
    if timeout is not None and _current[1].watchdog is not None:
        _current[1].watchdog.limit = timeout_seconds(timeout)
    return _current[1]


def destroy() -> None:
    """Publishes this rank's exit notice and destroys the groups; the default group only if this module made it."""
    global _current, _made_default_group
    current, _current = _current, None
    if current is None:
        return
    default, topology = current
    if topology.watchdog is not None:
        topology.watchdog.leave("closed its process groups")
    if not dist.is_initialized() or dist.group.WORLD is not default:
        return
    if _made_default_group:
        _made_default_group = False
        dist.destroy_process_group()
        return
    # A default group made by the user stays; only the groups made here are destroyed.
    for group in (*topology.tracked.values(), *topology.groups):
        dist.destroy_process_group(group)


def _destroy_at_exit() -> None:
    """Destroys the groups after a run without a failure; NCCL warns of groups that remain, and does not free them."""
    if _current is None or not _outlives_the_program(_current[1]):
        return
    topology = _current[1]
    # After a failure, or within a wait, other ranks may not arrive, and NCCL would wait for them.
    if topology.watchdog is not None and topology.watchdog.left_in_order:
        destroy()


def _outlives_the_program(topology: Topology) -> bool:
    return ACCELERATOR.backend in topology.backend


def _leave_current() -> None:
    """Ends the watchdog of a topology whose default group was destroyed by other code."""
    if _current is not None and _current[1].watchdog is not None:
        _current[1].watchdog.leave("closed its process groups")


def _require_same(topology: Topology, device: torch.device | str | None, transports: TransportFactory | None) -> None:
    """Raises EngineStateError if an existing topology differs from the arguments of a caller."""
    if device is not None and torch.device(device) != topology.device:
        raise _state_error("device", topology.device, device)
    if transports is not None and transports is not topology.transports:
        raise _state_error("transports", topology.transports, transports)


def _state_error(name: str, expected: object, got: object) -> EngineStateError:
    return EngineStateError(
        f"init_process_group({name}): the ranks are already connected",
        expected=str(expected),
        got=str(got),
        fix="pass it in the first call, or destroy the process group before this one",
    )


def _build(
    default: dist.ProcessGroup, limit: float, own_device: torch.device | str | None, transports: TransportFactory
) -> Topology:
    global _generation
    _finished_rounds.clear()
    _generation += 1  # separates the side channels of one default group from those of the next
    rank, world_size = default.rank(), default.size()
    backend = str(dist.get_backend_config(default))
    flight_recorder = FlightRecorder()
    # "fake" is torch's group without peers, for measurements.
    accelerated, simulated = ACCELERATOR.backend in backend, "fake" in backend
    if not (accelerated or simulated or _made_default_group) and own_device is None:
        warn_of_unused_devices(backend)
    if not (accelerated or simulated) and own_device is None:
        warn_of_another_accelerator()
    if world_size == 1:
        default_device = named_device(own_device) if own_device is not None else sole_device() if accelerated else CPU
        return _sole_rank(default, default_device, backend, transports)
    backstop = _backstop(limit)
    control = dist.new_group(backend="fake" if simulated else "gloo", timeout=backstop)
    processes = {rank: own_process()} if simulated else _exchange(own_process(), control)
    nodes = ((rank,),) if simulated else _nodes(rank, processes, control)
    node_group = next(node for node in nodes if rank in node)
    launched = None if simulated else local_rank_and_size()
    local = launched or (node_group.index(rank), len(node_group))  # rank and world size
    device = CPU if own_device is None else named_device(own_device)
    if accelerated and (own_device is None or device.type != "cpu"):
        bound = default.bound_device_id if own_device is None else device
        device = _agreed_device(bound, *local, processes[rank].host, control)
    _require_data_backend(device, backend, transports)
    _make_current(device)
    if accelerated and device.type != "cpu":
        warn_of_one_queue()
    avoid_record_streams(_torch_version())
    # Ranks may issue a gather and a reduction in different orders (a prefetch that one rank starts early), which would
    # deadlock within one NCCL communicator; with separate groups, only calls of one kind must agree in order.
    gather, reduce = (dist.new_group(backend=_data_backend(backend), timeout=backstop) for _ in range(2))
    made, names, watchdog, pairs = [gather, reduce, control], RankNames(), None, dict[int, SendRecvBackend]()
    if not simulated:
        peers = PeerProcesses(rank, processes, signals=not launcher_wakes_stopped_ranks())
        interrupter = _interrupter(made, pairs, rank, device)
        watchdog = Watchdog(flight_recorder, _side_channel(rank, world_size), peers, limit, interrupter, names, device)
        send_exit_notice_through(watchdog, _destroy_at_exit)
    topology = Topology(
        rank,
        world_size,
        *local,
        device,
        backend,
        gather,
        reduce,
        control,
        flight_recorder,
        watchdog,
        nodes,
        limit,
        made,
        transports=transports,
        names=names,
        pairs=pairs,
    )
    connect(topology, {"gathers": (gather, GATHERS), "reductions": (reduce, REDUCTIONS)})
    return topology


def _sole_rank(
    default: dist.ProcessGroup, device: torch.device, backend: str, transports: TransportFactory
) -> Topology:
    _make_current(device)
    parts = (default, default, default, FlightRecorder(), None, ((0,),))
    topology = Topology(0, 1, 0, 1, device, backend, *parts, transports=transports)
    if _outlives_the_program(topology):
        Finalize(None, destroy, exitpriority=0)
    return topology


def _side_channel(rank: int, world_size: int) -> SideChannel:
    store = dist.distributed_c10d._get_default_store()
    return SideChannel(store, rank, world_size, _generation, launcher_owns_store=launcher_owns_store())


def connect(topology: Topology, groups: Mapping[str, tuple[dist.ProcessGroup, Sequence[str]]]) -> None:
    """Connects the ranks of NCCL groups now, group after group. (all ranks, in one order)

    NCCL connects the ranks of a group at its first use and, since 2.22, at the first use of each kind of collective;
    it blocks the host until all ranks arrive. Ranks may begin a gather and a reduction in different orders, and would
    then deadlock.

    Args:
        groups: groups by name (for messages), each with the kinds of collectives that the ranks will issue in it.

    Raises:
        CollectiveError: NCCL could not connect the ranks.
    """
    if not _connects_at_first_use(topology):
        return
    tracker = CollectiveTracker(topology.flight_recorder, topology.watchdog)
    for name, (group, kinds) in groups.items():
        for kind in kinds if group.size() > 1 else ():
            if (group, kind) not in topology.connected:
                topology.connected.add((group, kind))
                probe = torch.ones(1, device=topology.device)
                entry = tracker.issue("control", kind, f"connect {name}", probe)
                tracker.wait(entry, [_FirstUse(probe, partial(issue_first, kind, probe, group))])


def connect_peers(
    topology: Topology,
    group: dist.ProcessGroup,
    peers: Iterable[int],
    name: str,
    tracker: CollectiveTracker,
    *,
    alone: bool,
) -> None:
    """Connects pairs of ranks, as `connect` does, in an already connected group. (all ranks that are in a pair)

    Args:
        peers: global ranks to which this one sends and from which it receives.
        tracker: tracker of calls that other ranks need not issue.
        alone: True if the ranks also send messages outside of batches.
    """
    others = sorted(set(peers) - {topology.rank})
    if not others or not _connects_at_first_use(topology):
        return
    probe = torch.ones(1, device=topology.device)
    entry = tracker.issue("control", "send and receive", f"connect {name}", probe)
    tracker.wait(entry, [_FirstUse(probe, partial(exchange_first, probe, group, others, alone=alone))])


def _connects_at_first_use(topology: Topology) -> bool:
    """True for NCCL groups; gloo connects all pairs when it makes a group."""
    return topology.device.type != "cpu" and ACCELERATOR.backend in topology.backend


class _FirstUse:
    """A `PendingTransfer`: the first collective of a kind in a group; the host waits for it."""

    def __init__(self, probe: Tensor, begin: Callable[[], object]) -> None:
        self._one = probe
        self._begin = begin

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._begin()
        if self._one.device.type != "cpu":
            torch.get_device_module(self._one.device).synchronize(self._one.device)
        return True

    def is_completed(self) -> bool:
        return False


def subgroup(topology: Topology, partition: Sequence[Sequence[int]]) -> RankGroup:
    """Returns this rank's group of a partition of the job. (all ranks, with the same partition)

    Made at the first call and kept, so that engines with the same partition share its process groups.

    Args:
        partition: groups of global ranks, each in group order, with every rank of the job in exactly one group.
    """
    key = tuple(tuple(ranks) for ranks in partition)
    covered = sorted(rank for ranks in key for rank in ranks)
    assert covered == list(range(topology.world_size)), f"a partition has every rank once, got {key}"
    if key == (topology.all_ranks.ranks,):
        return topology.all_ranks
    if key not in topology.subgroups:
        # torch.distributed.new_group is collective over the default group: every rank makes every group, in one order.
        groups = [_rank_group(topology, ranks) for ranks in key]
        topology.subgroups[key] = next(group for group in groups if group is not None)
    return topology.subgroups[key]


def pair_backends(topology: Topology, peers: Iterable[int]) -> Mapping[int, SendRecvBackend]:
    """Returns a gloo backend for each pair of this rank and a peer. (all ranks in a pair, each with the other's rank)

    Made at the first call and kept. For threads: no collective of the main thread uses these backends.
    `dist.new_group` does not fit, because every rank would have to call it equally often.

    Args:
        peers: global ranks.
    """
    store, rank = dist.distributed_c10d._get_default_store(), topology.rank
    # The lowest pair first; otherwise ranks could wait for each other in a cycle.
    for low, high, peer in sorted((min(peer, rank), max(peer, rank), peer) for peer in set(peers)):
        if peer not in topology.pairs:
            pair_store = PrefixStore(f"pair/{_generation}/{low}/{high}", store)
            gloo = ProcessGroupGloo(pair_store, int(rank == high), 2, _backstop(topology.limit))
            topology.pairs[peer] = cast(SendRecvBackend, gloo)
    return topology.pairs


def all_ranks_call(topology: Topology, label: str, seconds: float) -> bool:
    """Returns True if every rank makes this call within `seconds` of the others; otherwise False on the ranks that do.

    The ranks meet in the rendezvous store: unlike a collective, a call on one rank alone ends after that time.

    Args:
        label: name of the common step, the same on all ranks.
    """
    if topology.world_size == 1:
        return True
    store = PrefixStore(f"call/{_generation}/{label}", dist.distributed_c10d._get_default_store())
    started = itertools.count(_finished_rounds.get(label, 0))
    number = next(number for number in started if not store.check([f"{number}/decided"]))
    _finished_rounds[label] = number + 1
    decided = f"{number}/decided"
    if store.add(f"{number}/ranks", 1) == topology.world_size:
        store.compare_set(decided, "", "all")
    with suppress(dist.DistStoreError):
        store.wait([decided], timedelta(seconds=seconds))
    return store.compare_set(decided, "", "few") == b"all"


def peer_recorder(topology: Topology, peers: RankGroups | None) -> FlightRecorder | None:
    """Returns the recorder for calls that only this rank's group issues; None if one group has all ranks.

    Args:
        peers: groups of ranks that issue the same collectives.
    """
    if peers is None or len(peers) == 1:
        return None
    group = next(ranks for ranks in peers if topology.rank in ranks)
    return topology.recorder(f"stage of ranks {group}", group, alike=True)


_BACKEND = "zeroaccel"  # name under which torch makes the groups of `track`
_to_track: list[TrackedGroup] = []  # torch takes the group from here; a closure would keep it until the process ends


def track(topology: Topology, partition: Sequence[Sequence[int]]) -> None:
    """Makes the watchdog see what torch's DTensors send in the groups of a partition. (all ranks, same partition)

    Made at the first call and kept, so that engines with the same partition share its groups.
    """
    group = subgroup(topology, partition)
    if topology.watchdog is None or group.ranks in topology.tracked:
        return
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _take_tracked, devices=["cpu", ACCELERATOR.type])
    for ranks in map(tuple, partition):
        if topology.rank in ranks:
            recorder = topology.recorder(f"layers of ranks {ranks}", needs=ranks, alike=True, in_turn=True)
            made = TrackedGroup(group.reduce_group, group.control_group, ranks, recorder, topology.watchdog)
            _to_track.append(made)
            topology.tracked[ranks] = made
        # torch.distributed.new_group is collective over the default group: every rank makes every group, in one order.
        _new_group(ranks, _BACKEND, _backstop(topology.limit))


def _take_tracked(*described: object) -> TrackedGroup:
    return _to_track.pop()


def mesh_of(topology: Topology, group: RankGroup) -> DeviceMesh:
    """Returns a one-axis mesh over the ranks of a group, for torch's DTensors. Makes no process group."""
    over = topology.tracked.get(group.ranks, group.reduce_group)
    # torch identifies meshes with equal ranks and names, and returns the first, whose groups may be destroyed by now.
    return DeviceMesh.from_group(over, topology.device.type, mesh_dim_names=(f"layers of group {over.group_name}",))


def _rank_group(topology: Topology, ranks: tuple[int, ...]) -> RankGroup | None:
    """Makes the process groups of some ranks; returns None if this rank is not among them."""
    backstop = _backstop(topology.limit)
    backend = None if topology.watchdog is None else _data_backend(topology.backend)
    gather, reduce = (_new_group(ranks, backend, backstop) for _ in range(2))
    control = _new_group(ranks, None if topology.watchdog is None else "gloo", backstop)
    if topology.rank not in ranks:
        return None
    topology.groups.extend((gather, reduce, control))
    return RankGroup(ranks, ranks.index(topology.rank), gather, reduce, control)


def _new_group(ranks: tuple[int, ...], backend: str | None, backstop: timedelta) -> dist.ProcessGroup:
    # torch sorts by default, which would change the ranks' numbers in the group. torch 2.6 always sorts.
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise UsageError(
            f"process group of ranks {', '.join(map(str, ranks))}",
            expected="a torch version that accepts ranks in any order",
            got=torch.__version__,
            fix="install a newer torch, or list the ranks in ascending order",
        )
    return dist.new_group(list(ranks), backend=backend, timeout=backstop, **order)  # type: ignore[no-any-return]


def _data_backend(backend: str) -> str | None:
    """Returns the backend of a group for tensors of the model; None for the default group's."""
    return f"cpu:gloo,{ACCELERATOR.type}:{ACCELERATOR.backend}" if ACCELERATOR.backend in backend else None


def _rendezvous(backend: str, rank: int, world_size: int, limit: float) -> None:
    # The first group of the process keeps the server of a TCPStore: a second bind to its port would fail.
    address = rendezvous_address()
    allow_connections(world_size)
    # A second default group numbers its groups from 0 again, and would read the first one's keys in the store.
    store = PrefixStore(f"again/{_generation}", _stores[address]) if address in _stores else None
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_backstop(limit))
        _stores.setdefault(address, dist.distributed_c10d._get_default_store())
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise CollectiveError(
            f"rank {rank} of {world_size} did not meet the others at {address}: {reason}",
            fix="check that every rank is started with this address and WORLD_SIZE, and that the port is free",
        ) from error


def _exchange(value: T, control: dist.ProcessGroup) -> dict[int, T]:
    """Returns the objects of all ranks, by rank. (all ranks)"""
    return dict(enumerate(gather_at_first(value, control)))


def _nodes(rank: int, processes: Mapping[int, PeerProcess], control: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Returns the global ranks on each machine, from LOCAL_RANK or else from host names. (all ranks)"""
    # Launchers number the ranks of a machine one after the other, so rank - LOCAL_RANK is the machine's first rank.
    local = local_rank_and_size()
    firsts: dict[int, int | None] = _exchange(local and rank - local[0], control)
    launched = all(first is not None for first in firsts.values())
    keys = [firsts[r] if launched else process.host for r, process in processes.items()]
    return tuple(tuple(r for r in processes if keys[r] == key) for key in dict.fromkeys(keys))


def _make_current(device: torch.device) -> None:
    """Makes `device` current, even for a group that the program made: streams, events and pinned memory use it."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def _require_data_backend(device: torch.device, backend: str, transports: TransportFactory) -> None:
    """Raises ConfigError if several ranks compute on a device and no transport moves its tensors between them."""
    carries = ACCELERATOR.backend in backend or "fake" in backend or transports is not transport_over
    if device.type != "cpu" and not carries:
        raise ConfigError(
            "init_process_group(device)",
            expected=f'"cpu" with several ranks, because the backend {backend} only carries tensors in host memory',
            got=str(device),
            fix="use the nccl backend, or pass transports that carry CUDA tensors",
        )


def _agreed_device(
    bound: torch.device | None, local_rank: int, local_world_size: int, host: str, control: dist.ProcessGroup
) -> torch.device:
    """Returns this rank's CUDA device after checking that no two ranks share one. (all ranks)

    Args:
        bound: the device that the program named, or None.
    """
    found: torch.device | ConfigError
    identity: DeviceIdentity | ConfigError
    try:
        found = rank_device(local_rank, local_world_size, bound)
        identity = identify(found, host, shares=ranks_may_share_devices())
    except ConfigError as error:  # exchanged first: the other ranks would wait for this one
        found = identity = error
    identities: dict[int, DeviceIdentity] = {}
    failures: dict[int, ConfigError] = {}
    for rank, other in _exchange(identity, control).items():
        if isinstance(other, ConfigError):
            failures[rank] = other
        else:
            identities[rank] = other
    if isinstance(found, ConfigError):
        raise found
    for rank, failure in failures.items():
        raise ConfigError(f"rank {rank}: {failure}")
    check_one_device_each(identities)
    return found


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _backstop(limit: float) -> timedelta:
    """Returns the backend's own timeout: later than the watchdog's, whose report is more detailed."""
    return timedelta(seconds=limit + _BACKSTOP_SECONDS) if math.isfinite(limit) else timedelta(days=365)


def _interrupter(
    groups: list[dist.ProcessGroup], pairs: Mapping[int, SendRecvBackend], rank: int, device: torch.device
) -> Callable[[], None]:
    """Returns a function that breaks the groups' connections, so that threads blocked in them raise."""

    def interrupt() -> None:
        # gloo: closing the sockets makes blocked operations raise. NCCL: abort ends the kernels that wait for a peer.
        for group in tuple(groups):
            close_connections(group)
            if device.type != "cpu" and device.type in str(group._device_types):
                group._get_backend(device).abort()
        for peer, backend in tuple(pairs.items()):
            close_connection(backend, int(rank < peer))

    return interrupt
