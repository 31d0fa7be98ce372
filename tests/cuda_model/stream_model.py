"""The order of accesses to memory: vector clocks over streams and host threads, and the caching allocator's rules.

A *lane* runs its operations one after the other: a CUDA stream, or a thread of the host. Each lane has a vector clock:
how far it has seen every other lane. An event is a copy of a lane's clock, and to wait for it is to take the maximum.
Two accesses to the same bytes, one of them a write, must be ordered: the later one's lane has seen the earlier one.
What is not ordered may run in either order on a GPU, whatever order this run took, so one run finds it.

Device memory comes from torch's caching allocator, which hands a freed block to the next request on the stream that it
was allocated on, at once. So whatever another stream still does with the block must be ordered before that request's
first use, unless `record_stream` has named the stream. Which block a request gets, and when the driver has to make one,
says `caching_allocator.py`.

Some calls block the host, or make it wait for all that it has launched, when they are made first: a group's first
collective of a kind, a kernel's first launch, a request for which there is no block. They are counted, and noted in the
rank's log of calls (`communicators.py`), but order no accesses: another run of the program may have had them before.

The clock is a rough one: a lane's operations take as long as their bytes or their arithmetic take at the `Rates`, and
the host some microseconds per call. It compares schedules and predicts no seconds.

This module knows nothing of torch's dispatcher or of zeroaccel; `fake_cuda.py` and `modelled_ranks.py` feed it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""Lane -> the number of its operations that have been seen."""


@dataclass(frozen=True)
class Rates:
    """How fast the modelled machine is; the figures of an H100 with PCIe 5, rounded.

    Attributes:
        device, pinned, pageable, host, network, disk: bytes per second: of device memory, of a copy between the device
            and pinned or pageable host memory (each way), of host memory, of a collective per rank, of a file.
        flops: of matrix products, per second.
        kernel_seconds: the least that a kernel takes.
        launch_seconds, view_seconds, event_seconds: of the host, per kernel, per operation without one, per event.
        collective_seconds: the least that a collective of the device takes.
        control_seconds: of a small collective through host memory.
    """

    device: float = 4.0e12
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
    """Of a lane: all that it has seen, itself included, and the time on the model's clock."""

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
    """Bytes [start, stop) of a memory, which an operation reads or writes."""

    memory: Memory
    start: int
    stop: int


@dataclass(eq=False)
class Memory:
    """One allocation.

    Attributes:
        nbytes: its size.
        on_device: in device memory; else of the host.
        lane: the stream it was allocated on; HOST for memory of the host.
        place: where.
        pinned: page-locked.
        slab: page-locked pages of the package's own, which are unlocked when the device has finished all its work.
            Other pinned memory is of torch's allocator, which waits for copies before it hands a block out again.
        recorded: streams that `record_stream` named.
        blocks: of device memory, in each of the model's allocators.
        is_from_outside: it was there before the model, with values.
        changed: the model's count of operations at the latest write.
        born, born_tick: when it was allocated: on the model's count of allocations and frees, on the clock of `lane`.
    """

    nbytes: int
    on_device: bool
    lane: int
    place: str
    pinned: bool = False
    slab: bool = False
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
    """Memory that went back to its stream while other lanes might still use it."""

    freed: int
    place: str
    allocated: str
    lane: int
    late: tuple[Access, ...]


class StreamModel:
    """What has happened on each lane, and what is wrong with it.

    Operations are entered in the order in which the program calls them, by `launch`; the thread that calls is
    `thread`. Not safe for threads that run at the same time: the model's own threads take turns (`model_threads.py`).

    Attributes:
        findings: unordered accesses, uses of memory that is freed or that nothing has written, and work on another
            device, in words -> how often.
        early_frees: blocks that were freed before their stream had seen every use: right as long as another wait comes
            before the next allocation, in words -> how often.
        waits: of the host for the device, (phase, why, place) -> how often.
        control: blocking collectives in host memory, (phase, label, place) -> how often.
        kernels, kernel_nbytes: operations of the device and the bytes that they read and write, by (phase, place).
        busy: seconds that each lane worked.
        live_nbytes, peak_nbytes: of device memory: now, and the most since `reset_counts`.
        pinned_nbytes, pinned_peak_nbytes: likewise of page-locked host memory.
        allocator, expandable: what torch's allocator would do for these requests, as it is by default, and with
            expandable segments.
        first_calls: of the host, which waits for the device meanwhile: "cudaMalloc" and "first launch", by phase.
        log: of collectives.
        num_operations: so far.
        phase: of the program, by which counts are kept.
        names: of the lanes.
        current_stream: returns the stream that the calling thread's operations go to.
    """

    def __init__(self, rates: Rates | None = None, *, root: str = "/zeroaccel/") -> None:
        self.rates = rates or Rates()
        self.names = {HOST: "the host", MAIN: "the default stream"}
        self.thread = HOST
        self.phase = ""
        self.current_stream: Callable[[], int] = lambda: MAIN
        self.findings: Counter[str] = Counter()
        self.early_frees: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.control: Counter[tuple[str, str, str]] = Counter()
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.kernel_nbytes: Counter[tuple[str, str]] = Counter()
        self.busy: Counter[int] = Counter()
        self.live_nbytes = self.peak_nbytes = 0
        self.pinned_nbytes = self.pinned_peak_nbytes = 0
        self.allocator, self.expandable = CachingAllocator(), CachingAllocator(expandable=True)
        self.first_calls: Counter[tuple[str, str]] = Counter()
        self.log = CallLog(self)
        self.num_operations = 0
        self._launched: set[str] = set()
        self._root = root
        self._clocks: dict[int, Clock] = {HOST: {}, MAIN: {}}
        self._ticks: Counter[int] = Counter()
        self._seconds: dict[int, float] = {HOST: 0.0, MAIN: 0.0}
        self._begin = 0.0
        self._freed: dict[int, list[_FreedBlock]] = {}
        self._count = 0
        # Tensors are freed in autograd's thread, too, which runs while the main thread waits for it.
        self._lock = threading.RLock()

    # -- lanes

    def add_stream(self, name: str = "") -> int:
        """The number of a new stream."""
        number = max(self._clocks) + 1
        self._clocks[number], self._seconds[number] = {}, 0.0
        self.names[number] = name or f"stream {number} ({self.place()})"
        return number

    def add_thread(self, name: str) -> int:
        """The number of a new thread of the host, which begins with what the calling thread has seen."""
        number = min(self._clocks) - 1
        self._clocks[number], self._seconds[number] = {}, 0.0
        self.names[number] = name
        self.join(number, self.moment(self.thread))
        return number

    def moment(self, lane: int) -> Moment:
        """Of a lane, now: what an event recorded on it stands for."""
        return Moment({**self._clocks[lane], lane: self._ticks[lane]}, self._seconds[lane])

    def join(self, lane: int, moment: Moment) -> None:
        """Later operations of the lane come after a moment of another."""
        own = self._clocks[lane]
        for other, tick in moment.clock.items():
            if tick > own.get(other, 0):
                own[other] = tick
        self._seconds[lane] = max(self._seconds[lane], moment.seconds)

    def has_seen(self, lane: int, moment: Moment) -> bool:
        """Whether the lane's next operation comes after a moment of another lane anyway."""
        own = self._clocks[lane]
        return all(tick <= own.get(other, 0) for other, tick in moment.clock.items() if other != lane)

    def spend(self, seconds: float) -> None:
        """The calling thread is busy for a while."""
        self._seconds[self.thread] += seconds

    def wait_on_host(self, moment: Moment, why: str) -> None:
        """The calling thread waits for a stream."""
        self.waits[self.phase, why, self.place()] += 1
        self.join(self.thread, moment)

    def synchronize(self, why: str) -> None:
        """The calling thread waits for every stream."""
        self.waits[self.phase, why, self.place()] += 1
        for lane in list(self._clocks):
            if lane >= 0:
                self.join(self.thread, self.moment(lane))

    def control_collective(self, label: str) -> None:
        """A collective in host memory that the calling thread waits for."""
        self.control[self.phase, label, self.place()] += 1
        self.spend(self.rates.control_seconds)

    def place(self) -> str:
        """The innermost line of the package that is being run: "zero/engine.py:190"."""
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
        """New memory; on the device, of the current stream."""
        memory = Memory(nbytes, on_device, HOST, self.place(), pinned)
        with self._lock:
            self._begin_life(memory)
        return memory

    def reallocate(self, memory: Memory, nbytes: int) -> None:
        """A storage that was freed by resizing it has memory again."""
        with self._lock:
            assert not memory.alive, "memory is allocated once"
            memory.nbytes, memory.place, memory.alive = nbytes, self.place(), True
            memory.reads, memory.writes = [], []
            memory.latest.clear()
            memory.recorded.clear()
            self._begin_life(memory)

    def pin(self, memory: Memory) -> None:
        """Memory of the host is page-locked from now on, as a slab of its own."""
        with self._lock:
            assert not memory.pinned, "pages are locked once"
            memory.pinned = memory.slab = True
            self._count_pinned(memory.nbytes)

    def free(self, memory: Memory) -> None:
        """Memory goes back to the stream that it was allocated on, or to the host."""
        with self._lock:
            if not memory.alive:
                return
            memory.alive = False
            if memory.on_device:
                self.live_nbytes -= memory.nbytes
            elif memory.pinned:
                self.pinned_nbytes -= memory.nbytes
            if memory.on_device:
                self._note_late_uses(memory)
                for allocator, block in zip((self.allocator, self.expandable), memory.blocks, strict=True):
                    allocator.free(block)
            elif memory.slab:
                self.synchronize("unlocking of pages")

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
            self._count_pinned(memory.nbytes)

    def _wait_at_first(self, what: str) -> None:
        self.first_calls[self.phase, what] += 1
        self.log.host_waited_for_all()

    def _count_pinned(self, nbytes: int) -> None:
        self.pinned_nbytes += nbytes
        self.pinned_peak_nbytes = max(self.pinned_peak_nbytes, self.pinned_nbytes)

    def _note_late_uses(self, memory: Memory) -> None:
        """Keeps what a next owner of the block has to come after."""
        home = memory.lane
        # What runs on the home stream next has been launched by a thread, and so comes after all that it has seen; and
        # the allocator hands the block out after all that the recorded streams have seen by now.
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
        """Enters an operation: of a stream, launched by the calling thread, or of that thread itself.

        Args:
            what: its name.
            seconds: that it takes.
            nbytes: that it reads and writes, for the counts.
        """
        with self._lock:
            place = self.place()
            self.num_operations += 1
            if lane >= 0:
                self._ticks[self.thread] += 1  # the call itself: what other threads launched later is not ordered by it
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
        """Enters work of the calling thread on host memory."""
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
        # What is overwritten entirely needs no record: later accesses are compared with this one.
        memory.reads = [r for r in memory.reads if r.start < access.start or r.stop > access.stop]
        memory.writes = [w for w in memory.writes if w.start < access.start or w.stop > access.stop]
        memory.writes.append(access)
        memory.changed = self.num_operations
        memory.latest[access.lane] = access

    def _is_ordered(self, earlier: Access, access: Access) -> bool:
        """Whether `access`, which is about to run, comes after `earlier` on every run of the program."""
        if earlier.lane != access.lane:
            return earlier.tick <= self._clocks[access.lane].get(earlier.lane, 0)
        # On one stream the order is that of the calls, which is certain of calls of one thread only.
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
        """Whether memory that is new may be a block that another lane still uses."""
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
        """Notes that something is wrong."""
        self.findings[text] += 1

    # -- what a run shows

    def reset_counts(self) -> None:
        """Begins to count anew: kernels, waits, the clock and the peaks. Findings stay."""
        for counter in (self.waits, self.control, self.kernels, self.kernel_nbytes, self.busy, self.first_calls):
            counter.clear()
        self.peak_nbytes, self.pinned_peak_nbytes = self.live_nbytes, self.pinned_nbytes
        self._begin = max(self._seconds.values())
        self._seconds = dict.fromkeys(self._seconds, self._begin)

    def elapsed_seconds(self) -> float:
        """Since `reset_counts`, until the last lane is done."""
        return max(self._seconds.values()) - self._begin

    @contextmanager
    def as_thread(self, number: int) -> Iterator[None]:
        """Work of another thread of the host."""
        before, self.thread = self.thread, number
        try:
            yield
        finally:
            self.thread = before

    def sum_of(self, counter: Counter[tuple[str, str]], phases: Iterable[str]) -> int:
        """The counts of some phases."""
        wanted = set(phases)
        return sum(count for (phase, _), count in counter.items() if phase in wanted)
