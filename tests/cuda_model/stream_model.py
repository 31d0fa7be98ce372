"""The order of memory accesses: vector clocks over streams and host threads, and the caching allocator's rules.

A *lane* runs its operations one after the other: a CUDA stream, or a thread of the host. Each lane has a vector clock:
the latest operation of every other lane that it has seen. An event is a copy of a lane's clock, and a wait for the
event takes the maximum of both clocks. Two accesses to the same bytes, one of them a write, must be ordered: the later
one's lane has seen the earlier one. Unordered accesses may run in either order on a GPU, whatever order this run took,
so one run finds them.

Device memory comes from torch's caching allocator, which immediately gives a freed block to the next request on the
stream on which it was allocated. So any other stream's remaining use of the block must be ordered before that request's
first use, unless `record_stream` has named the stream. `caching_allocator.py` decides which block a request gets, and
when the driver has to make one.

Some calls block the host, or make it wait for all launched work, at their first use: a group's first
collective of a kind, a kernel's first launch, a request for which there is no block. The model counts them and notes
them in the rank's log of calls (`communicators.py`), but they order no accesses: another run of the program may have
made them before.

The clock is approximate: the duration of an operation follows from its bytes or its arithmetic at the `Rates`, and
the host takes some microseconds per call. It compares schedules and does not predict seconds.

This module does not depend on torch's dispatcher or on zeroaccel; `fake_cuda.py` and `modelled_ranks.py` call it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.cuda_model.caching_allocator import Block, CachingAllocator
from tests.cuda_model.communicators import CallLog

HOST = -1
"""The main thread. Other threads of the host have lower numbers; streams count from 0."""

MAIN = 0
"""The default stream."""

Clock = dict[int, int]
"""For each lane, the number of its operations that were seen."""


@dataclass(frozen=True)
class Rates:
    """Speed of the modelled machine; rounded figures of an H100 with PCIe 5, of which `device` was measured.

    Attributes:
        device, pinned, pageable, host, network, disk: bytes per second: of device memory, of a copy between the device
            and pinned or pageable host memory (each way), of host memory, of a collective per rank, of a file.
        flops: floating-point operations of matrix products per second.
        kernel_seconds: minimum duration of a kernel.
        launch_seconds, view_seconds, event_seconds: host time per kernel, per operation without a kernel, per event.
        collective_seconds: minimum duration of a collective of the device.
        control_seconds: duration of a small collective through host memory.
    """

    device: float = 2.96e12
    pinned: float = 50e9
    pageable: float = 8e9
    host: float = 100e9
    network: float = 200e9
    disk: float = 5e9
    flops: float = 6.0e14
    kernel_seconds: float = 2e-6
    launch_seconds: float = 6e-6
    view_seconds: float = 1.5e-6
    event_seconds: float = 1e-6
    collective_seconds: float = 15e-6
    control_seconds: float = 150e-6


class Moment(NamedTuple):
    """Operations that a lane has seen, including its own, and the time on the model's clock."""

    clock: Clock
    seconds: float


class Access(NamedTuple):
    """One operation's use of some bytes of a memory.

    `thread` and `call` are the host thread that launched it and that thread's number of operations then.
    """

    lane: int
    tick: int
    thread: int
    call: int
    start: int
    stop: int
    what: str
    place: str


class Use(NamedTuple):
    """Bytes [start, stop) of a memory that an operation reads or writes."""

    memory: Memory
    start: int
    stop: int


@dataclass(eq=False)
class Memory:
    """One allocation.

    Attributes:
        nbytes: its size.
        on_device: True for device memory, False for host memory.
        lane: the stream on which it was allocated; HOST for memory of the host.
        place: line of the package that allocated it.
        pinned: True if it is page-locked.
        slab: True for pages that the package locks itself, and unlocks when `copying_lanes` have done what they have.
        populated: True for pages that are not locked, and allocated at once.
            Other pinned memory belongs to torch's allocator, which waits for copies before it reuses a block.
        recorded: streams that `record_stream` named.
        blocks: blocks of device memory, in each of the model's allocators.
        is_from_outside: True if it existed before the model, with values.
        changed: the model's count of operations at the latest write.
        born, born_tick: time of the allocation, on the model's count of allocations and frees and on the clock of
            `lane`.
    """

    nbytes: int
    on_device: bool
    lane: int
    place: str
    pinned: bool = False
    slab: bool = False
    populated: bool = False
    alive: bool = True
    born: int = 0
    born_tick: int = 0
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    latest: dict[int, Access] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    blocks: tuple[Block, ...] = ()
    is_from_outside: bool = False
    changed: int = 0


@dataclass(frozen=True)
class _FreedBlock:
    """Memory that was returned to its stream while other lanes might still use it."""

    freed: int
    place: str
    allocated: str
    lane: int
    late: tuple[Access, ...]


class StreamModel:
    """The operations of each lane, and the errors in their order.

    The program's operations are recorded in the order of their calls, by `launch`; the calling thread is
    `thread`. Not safe for threads that run at the same time: the model's own threads take turns (`model_threads.py`).

    Attributes:
        findings: number of unordered accesses, of uses of memory that is freed or that nothing has written, and of
            operations on another device, by description.
        early_frees: number of blocks freed before their stream had seen every use, by description: correct as long as
            another wait comes before the next allocation.
        waits: number of times the host waits for the device, by (phase, why, place).
        control: number of blocking collectives in host memory, by (phase, label, place).
        kernels, kernel_nbytes: device operations and the bytes that they read and write, by (phase, place).
        busy: seconds that each lane worked.
        live_nbytes, peak_nbytes: bytes of device memory: now, and the peak since `reset_counts`.
        host_nbytes, host_peak_nbytes: the same for page-locked and populated host memory.
        allocator, expandable: models of torch's allocator for these requests, with its default settings and with
            expandable segments.
        first_calls: number of host calls that wait for the device, "cudaMalloc" and "first launch", by phase.
        log: log of collectives.
        num_operations: number of operations so far.
        num_locks: number of slabs that the package has page-locked since `reset_counts`; each blocks the host.
        phase: phase of the program; counts are kept per phase.
        names: names of the lanes.
        current_stream: returns the stream of the calling thread's operations.
        copying_lanes: returns the streams whose work the package awaits before it unlocks pages.
    """

    def __init__(self, rates: Rates | None = None, *, root: str = "/zeroaccel/") -> None:
        self.rates = rates or Rates()
        self.names = {HOST: "the host", MAIN: "the default stream"}
        self.thread = HOST
        self.phase = ""
        self.current_stream: Callable[[], int] = lambda: MAIN
        self.copying_lanes: Callable[[], Collection[int]] = lambda: {MAIN, self.current_stream()}
        self.findings: Counter[str] = Counter()
        self.early_frees: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.control: Counter[tuple[str, str, str]] = Counter()
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.kernel_nbytes: Counter[tuple[str, str]] = Counter()
        self.busy: Counter[int] = Counter()
        self.live_nbytes = self.peak_nbytes = 0
        self.host_nbytes = self.host_peak_nbytes = 0
        self.allocator, self.expandable = CachingAllocator(), CachingAllocator(expandable=True)
        self.first_calls: Counter[tuple[str, str]] = Counter()
        self.log = CallLog(self)
        self.num_operations = self.num_locks = 0
        self._launched: set[str] = set()
        self._root = root
        self._clocks: dict[int, Clock] = {HOST: {}, MAIN: {}}
        self._ticks: Counter[int] = Counter()
        self._seconds: dict[int, float] = {HOST: 0.0, MAIN: 0.0}
        self._begin = 0.0
        self._freed: dict[int, list[_FreedBlock]] = {}
        self._count = 0
        # Autograd's thread frees tensors as well; it runs while the main thread waits for it.
        self._lock = threading.RLock()

    # -- lanes

    def add_stream(self, name: str = "") -> int:
        """Returns the number of a new stream."""
        number = max(self._clocks) + 1
        self._clocks[number], self._seconds[number] = {}, 0.0
        self.names[number] = name or f"stream {number} ({self.place()})"
        return number

    def add_thread(self, name: str) -> int:
        """Returns the number of a new host thread; it begins with everything that the calling thread has seen."""
        number = min(self._clocks) - 1
        self._clocks[number], self._seconds[number] = {}, 0.0
        self.names[number] = name
        self.join(number, self.moment(self.thread))
        return number

    def moment(self, lane: int) -> Moment:
        """Returns the current moment of a lane, which an event recorded on it represents."""
        return Moment({**self._clocks[lane], lane: self._ticks[lane]}, self._seconds[lane])

    def join(self, lane: int, moment: Moment) -> None:
        """Orders later operations of the lane after a moment of another lane."""
        own = self._clocks[lane]
        for other, tick in moment.clock.items():
            if tick > own.get(other, 0):
                own[other] = tick
        self._seconds[lane] = max(self._seconds[lane], moment.seconds)

    def has_seen(self, lane: int, moment: Moment) -> bool:
        """Returns True if the lane's next operation is already ordered after a moment of another lane."""
        own = self._clocks[lane]
        return all(tick <= own.get(other, 0) for other, tick in moment.clock.items() if other != lane)

    def spend(self, seconds: float) -> None:
        """Advances the clock of the calling thread."""
        self._seconds[self.thread] += seconds

    def wait_on_host(self, moment: Moment, why: str) -> None:
        """Makes the calling thread wait for a stream."""
        self.waits[self.phase, why, self.place()] += 1
        self.join(self.thread, moment)

    def synchronize(self, why: str) -> None:
        """Makes the calling thread wait for every stream."""
        self.waits[self.phase, why, self.place()] += 1
        for lane in list(self._clocks):
            if lane >= 0:
                self.join(self.thread, self.moment(lane))

    def control_collective(self, label: str) -> None:
        """Records a collective in host memory for which the calling thread waits."""
        self.control[self.phase, label, self.place()] += 1
        self.spend(self.rates.control_seconds)

    def place(self) -> str:
        """Returns the innermost running line of the package: "zero/engine_core.py:190"."""
        frame = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if self._root in path and "/cuda_model/" not in path:
                return f"{path.rpartition(self._root)[2]}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        if self.thread != HOST:
            return self.names[self.thread]
        return "the program" if threading.current_thread() is threading.main_thread() else "autograd"

    # -- memory

    def allocate(self, nbytes: int, *, on_device: bool, pinned: bool = False) -> Memory:
        """Allocates memory; on the device, memory of the current stream."""
        memory = Memory(nbytes, on_device, HOST, self.place(), pinned)
        with self._lock:
            self._begin_life(memory)
        return memory

    def reallocate(self, memory: Memory, nbytes: int) -> None:
        """Allocates the memory of a storage again that was freed by resizing it."""
        with self._lock:
            assert not memory.alive, "the memory is already allocated"
            memory.nbytes, memory.place, memory.alive = nbytes, self.place(), True
            memory.reads, memory.writes = [], []
            memory.latest.clear()
            memory.recorded.clear()
            self._begin_life(memory)

    def pin(self, memory: Memory) -> None:
        """Page-locks memory of the host from now on, as a slab of its own."""
        with self._lock:
            assert not memory.pinned, "the pages are already locked"
            memory.pinned = memory.slab = True
            self.num_locks += 1
            self._count_on_host(memory.nbytes)

    def populate(self, memory: Memory) -> None:
        """Allocates the pages of memory of the host."""
        with self._lock:
            memory.populated = True
            self._count_on_host(memory.nbytes)

    def free(self, memory: Memory) -> None:
        """Returns memory to the stream on which it was allocated, or to the host."""
        with self._lock:
            if not memory.alive:
                return
            memory.alive = False
            if memory.on_device:
                self.live_nbytes -= memory.nbytes
            elif memory.pinned or memory.populated:
                self.host_nbytes -= memory.nbytes
            if memory.on_device:
                self._note_late_uses(memory)
                for allocator, block in zip((self.allocator, self.expandable), memory.blocks, strict=True):
                    allocator.free(block)
            elif memory.slab:
                self._check_unlocking(memory)

    def _check_unlocking(self, memory: Memory) -> None:
        """Checks that pages are unlocked after their copies: the package waits for the streams that it knows of."""
        seen, known = self._clocks[self.thread], self.copying_lanes()
        for access in memory.latest.values():
            if access.lane >= 0 and access.lane not in known and access.tick > seen.get(access.lane, 0):
                self.find(f"UNLOCKED IN USE: pages of {memory.place}, dropped at {self.place()}: {self._name(access)}")

    def _begin_life(self, memory: Memory) -> None:
        self._count += 1
        memory.born = self._count
        memory.lane = self.current_stream() if memory.on_device else HOST
        memory.born_tick = self._ticks[memory.lane]
        if memory.on_device:
            mallocs = self.allocator.num_mallocs
            memory.blocks = tuple(each.malloc(memory.lane, memory.nbytes) for each in (self.allocator, self.expandable))
            if self.allocator.num_mallocs > mallocs:
                self._wait_at_first("cudaMalloc")
            self.live_nbytes += memory.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        elif memory.pinned:
            self._count_on_host(memory.nbytes)

    def _wait_at_first(self, what: str) -> None:
        self.first_calls[self.phase, what] += 1
        self.log.host_waited_for_all()

    def _count_on_host(self, nbytes: int) -> None:
        self.host_nbytes += nbytes
        self.host_peak_nbytes = max(self.host_peak_nbytes, self.host_nbytes)

    def _note_late_uses(self, memory: Memory) -> None:
        """Keeps the accesses that must precede the next owner of the block."""
        home = memory.lane
        # A thread that has seen all this launches the next work on the home stream, so that work comes after it;
        # and the allocator reuses the block after everything that the recorded streams have seen by now.
        seen = [self._clocks[lane] for lane in (home, self.thread, *memory.recorded)]
        late = tuple(
            access
            for access in memory.latest.values()
            if access.lane not in (home, self.thread, *memory.recorded)
            and access.tick > max(clock.get(access.lane, 0) for clock in seen)
        )
        if not late:
            return
        self._count += 1
        place = self.place()
        self._freed.setdefault(home, []).append(_FreedBlock(self._count, place, memory.place, home, late))
        last = late[-1]
        self.early_frees[
            f"memory of {memory.place} is freed at {place} before {self.names[home]} waits for {last.what} on "
            f"{self.names[last.lane]} at {last.place}"
        ] += 1

    # -- operations

    def launch(
        self, lane: int, reads: Sequence[Use], writes: Sequence[Use], what: str, seconds: float, nbytes: int = 0
    ) -> None:
        """Records an operation: of a stream, launched by the calling thread, or of that thread itself.

        Args:
            what: name of the operation.
            seconds: its duration.
            nbytes: bytes that it reads and writes, for the counts.
        """
        with self._lock:
            place = self.place()
            self.num_operations += 1
            if lane >= 0:
                self._ticks[self.thread] += 1  # the call itself: it does not order later launches of other threads
                self.spend(self.rates.launch_seconds)
                self.join(lane, self.moment(self.thread))
                self.kernels[self.phase, place] += 1
                self.kernel_nbytes[self.phase, place] += nbytes
                if what not in self._launched and not what.endswith("copy"):
                    self._launched.add(what)
                    self._wait_at_first("first launch")
            self._ticks[lane] += 1
            for use in (*reads, *writes):
                access = self._access(lane, use, what, place)
                if not use.memory.alive:
                    self.find(f"USED AFTER FREE: memory of {use.memory.place}: {self._name(access)}")
                if use.memory.on_device:
                    self._check_reuse(use.memory, access)
            for use in reads:
                self._read(use.memory, self._access(lane, use, what, place))
            for use in writes:
                self._write(use.memory, self._access(lane, use, what, place))
            self._seconds[lane] += seconds
            self.busy[lane] += seconds

    def run_on_host(self, reads: Sequence[Use], writes: Sequence[Use], what: str, seconds: float) -> None:
        """Records work of the calling thread on host memory."""
        self.launch(self.thread, reads, writes, what, seconds)

    def _access(self, lane: int, use: Use, what: str, place: str) -> Access:
        return Access(lane, self._ticks[lane], self.thread, self._ticks[self.thread], use.start, use.stop, what, place)

    def _read(self, memory: Memory, access: Access) -> None:
        if not memory.is_from_outside and not any(
            w.start < access.stop and access.start < w.stop for w in memory.writes
        ):
            self.find(f"READ BEFORE ANY WRITE: memory of {memory.place}: {self._name(access)}")
        for earlier in memory.writes:
            self._check(memory, access, earlier, "READ AFTER WRITE")
        span = access.start, access.stop
        memory.reads = [r for r in memory.reads if r.lane != access.lane or (r.start, r.stop) != span]
        memory.reads.append(access)
        memory.latest[access.lane] = access

    def _write(self, memory: Memory, access: Access) -> None:
        for earlier in memory.writes:
            self._check(memory, access, earlier, "WRITE AFTER WRITE")
        for earlier in memory.reads:
            self._check(memory, access, earlier, "WRITE AFTER READ")
        # Drops accesses whose bytes this write overwrites entirely: later accesses are compared with this write.
        memory.reads = [r for r in memory.reads if r.start < access.start or r.stop > access.stop]
        memory.writes = [w for w in memory.writes if w.start < access.start or w.stop > access.stop]
        memory.writes.append(access)
        memory.changed = self.num_operations
        memory.latest[access.lane] = access

    def _is_ordered(self, earlier: Access, access: Access) -> bool:
        """Returns True if `access`, which is about to run, comes after `earlier` in every run of the program."""
        if earlier.lane != access.lane:
            return earlier.tick <= self._clocks[access.lane].get(earlier.lane, 0)
        # On one stream the order is that of the calls, which is certain only for calls of one thread.
        if earlier.thread == access.thread or access.lane < 0:
            return True
        return earlier.call <= self._clocks[access.thread].get(earlier.thread, 0)

    def _check(self, memory: Memory, access: Access, earlier: Access, kind: str) -> None:
        overlap = earlier.start < access.stop and access.start < earlier.stop
        same = earlier.lane == access.lane and earlier.tick == access.tick
        if same or not overlap or self._is_ordered(earlier, access):
            return
        self.find(
            f"{kind}: {'device' if memory.on_device else 'host'} memory of {memory.place}: {self._name(access)} is not "
            f"ordered after {self._name(earlier)}"
        )

    def _check_reuse(self, memory: Memory, access: Access) -> None:
        """Checks that new memory is not a block that another lane still uses."""
        home = memory.lane
        if access.lane != home and memory.born_tick > self._clocks[access.lane].get(home, 0):
            self.find(
                f"USED TOO EARLY: memory allocated on {self.names[home]} at {memory.place}, whose earlier kernels may "
                f"still use the block: {self._name(access)}"
            )
        blocks = self._freed.get(home)
        if not blocks:
            return
        remaining = []
        for block in blocks:
            late = [use for use in block.late if not self._is_ordered(use, access)]
            if block.freed < memory.born and late:
                self.find(
                    f"FREED IN USE: memory of {block.allocated} on {self.names[home]}, freed at {block.place} while "
                    f"{self._name(late[0])} may still run; {self._name(access)} may get it"
                )
            elif late or access.lane != home:
                remaining.append(block)
        self._freed[home] = remaining

    def _name(self, access: Access) -> str:
        return f"{access.what} on {self.names[access.lane]} at {access.place}"

    def find(self, text: str) -> None:
        """Records a finding."""
        self.findings[text] += 1

    # -- what a run shows

    def reset_counts(self) -> None:
        """Resets the counts of kernels and waits, the clock and the peaks. Findings stay."""
        for counter in (self.waits, self.control, self.kernels, self.kernel_nbytes, self.busy, self.first_calls):
            counter.clear()
        self.num_locks = 0
        self.peak_nbytes, self.host_peak_nbytes = self.live_nbytes, self.host_nbytes
        self._begin = max(self._seconds.values())
        self._seconds = dict.fromkeys(self._seconds, self._begin)

    def elapsed_seconds(self) -> float:
        """Seconds from `reset_counts` to the end of the last lane."""
        return max(self._seconds.values()) - self._begin

    @contextmanager
    def as_thread(self, number: int) -> Iterator[None]:
        """Records work of another thread of the host."""
        before, self.thread = self.thread, number
        try:
            yield
        finally:
            self.thread = before

    def sum_of(self, counter: Counter[tuple[str, str]], phases: Iterable[str]) -> int:
        """Returns the sum of the counts of some phases."""
        wanted = set(phases)
        return sum(count for (phase, _), count in counter.items() if phase in wanted)
