"""The model by itself: each rule on the shortest program that keeps or breaks it."""

from __future__ import annotations

import contextlib

import pytest

from tests.cuda_model import model_threads
from tests.cuda_model.caching_allocator import CachingAllocator
from tests.cuda_model.communicators import Call, deadlocks
from tests.cuda_model.stream_model import HOST, MAIN, Memory, StreamModel, Use


@pytest.fixture
def model() -> StreamModel:
    return StreamModel()


def _device(model: StreamModel, nbytes: int = 100) -> Memory:
    return model.allocate(nbytes, on_device=True)


def _write(model: StreamModel, lane: int, memory: Memory, start: int = 0, stop: int = 100) -> None:
    model.launch(lane, [], [Use(memory, start, stop)], "write", 1.0)


def _read(model: StreamModel, lane: int, memory: Memory, start: int = 0, stop: int = 100) -> None:
    model.launch(lane, [Use(memory, start, stop)], [], "read", 1.0)


def _kinds(model: StreamModel) -> list[str]:
    return [finding.partition(":")[0] for finding in model.findings]


def test_one_stream_is_in_order(model: StreamModel) -> None:
    memory = _device(model)
    _write(model, MAIN, memory)
    _read(model, MAIN, memory)
    _write(model, MAIN, memory)
    assert not model.findings


def test_two_streams_are_unordered(model: StreamModel) -> None:
    memory, side = _device(model), model.add_stream("side")
    _write(model, MAIN, memory)
    _read(model, side, memory)
    assert _kinds(model) == ["READ AFTER WRITE"]
    _write(model, MAIN, memory)
    assert _kinds(model) == ["READ AFTER WRITE", "WRITE AFTER READ"]


def test_a_wait_orders_what_came_before_it(model: StreamModel) -> None:
    memory, side = _device(model), model.add_stream("side")
    _write(model, MAIN, memory)
    event = model.moment(MAIN)
    _write(model, MAIN, memory, 0, 10)
    model.join(side, event)
    _read(model, side, memory, 10, 100)
    assert not model.findings
    _read(model, side, memory, 0, 10)
    assert _kinds(model) == ["READ AFTER WRITE"]


def test_accesses_to_other_bytes_need_no_order(model: StreamModel) -> None:
    memory, side = _device(model), model.add_stream("side")
    _write(model, MAIN, memory, 0, 50)
    _write(model, side, memory, 50, 100)
    assert not model.findings
    _write(model, side, memory, 49, 51)
    assert _kinds(model) == ["WRITE AFTER WRITE"]


def test_order_goes_through_a_third_stream(model: StreamModel) -> None:
    memory, second, third = _device(model), model.add_stream("second"), model.add_stream("third")
    _write(model, MAIN, memory)
    model.join(second, model.moment(MAIN))
    model.join(third, model.moment(second))
    _read(model, third, memory)
    assert not model.findings


def test_the_host_has_to_wait_for_a_copy(model: StreamModel) -> None:
    memory = model.allocate(100, on_device=False, pinned=True)
    _write(model, MAIN, memory)
    model.run_on_host([Use(memory, 0, 100)], [], "read", 0.0)
    assert _kinds(model) == ["READ AFTER WRITE"]


def test_a_wait_of_the_host_is_counted_and_orders(model: StreamModel) -> None:
    memory = model.allocate(100, on_device=False, pinned=True)
    _write(model, MAIN, memory)
    model.wait_on_host(model.moment(MAIN), "event")
    model.run_on_host([Use(memory, 0, 100)], [], "read", 0.0)
    assert not model.findings
    assert sum(model.waits.values()) == 1


def test_kernels_come_after_what_the_host_has_seen(model: StreamModel) -> None:
    memory, side = model.allocate(100, on_device=False, pinned=True), model.add_stream("side")
    _write(model, MAIN, memory)
    model.wait_on_host(model.moment(MAIN), "event")
    _read(model, side, memory)
    assert not model.findings


def test_a_block_is_reused_on_its_stream(model: StreamModel) -> None:
    first = _device(model)
    _write(model, MAIN, first)
    model.free(first)
    _write(model, MAIN, _device(model))
    assert not model.findings


def test_a_block_is_not_reused_while_another_stream_reads_it(model: StreamModel) -> None:
    first, side = _device(model), model.add_stream("side")
    _write(model, MAIN, first)
    model.join(side, model.moment(MAIN))
    _read(model, side, first)
    model.free(first)
    _write(model, MAIN, _device(model))
    assert _kinds(model) == ["FREED IN USE"]


@pytest.mark.parametrize("how", ["recorded", "waited for"])
def test_a_block_is_reused_after_a_recorded_or_awaited_read(how: str, model: StreamModel) -> None:
    first, side = _device(model), model.add_stream("side")
    _write(model, MAIN, first)
    model.join(side, model.moment(MAIN))
    _read(model, side, first)
    if how == "recorded":
        first.recorded.add(side)
    model.free(first)
    second = _device(model)
    if how == "waited for":
        model.join(MAIN, model.moment(side))
    _write(model, MAIN, second)
    assert not model.findings
    assert bool(model.early_frees) == (how == "waited for")


def test_a_new_block_may_still_be_used_by_its_stream(model: StreamModel) -> None:
    side = model.add_stream("side")
    _write(model, MAIN, _device(model))
    memory = _device(model)
    _write(model, side, memory)
    assert _kinds(model) == ["USED TOO EARLY"]


def test_memory_that_is_allocated_anew_has_no_past(model: StreamModel) -> None:
    memory, side = _device(model), model.add_stream("side")
    _write(model, side, memory)
    model.join(MAIN, model.moment(side))
    model.free(memory)
    model.reallocate(memory, 60)
    _write(model, MAIN, memory)
    assert not model.findings
    assert (model.live_nbytes, model.peak_nbytes) == (60, 100)


def test_pages_are_unlocked_after_copies_on_known_streams(model: StreamModel) -> None:
    side = model.add_stream("side")
    for copied_on, awaited, kinds in ((MAIN, False, []), (side, True, []), (side, False, ["UNLOCKED IN USE"])):
        memory = model.allocate(100, on_device=False)
        model.pin(memory)
        _write(model, copied_on, memory)
        if awaited:
            model.wait_on_host(model.moment(side), "a copy")
        model.free(memory)
        assert _kinds(model) == kinds
    assert model.host_peak_nbytes == 100
    assert [why for _, why, _ in model.waits] == ["a copy"]


def test_launches_of_two_threads_on_one_stream_are_not_in_order(model: StreamModel) -> None:
    memory, thread = _device(model), model.add_thread("another")
    _write(model, MAIN, memory)
    with model.as_thread(thread):
        _write(model, MAIN, memory)
    assert _kinds(model) == ["WRITE AFTER WRITE"]


def test_the_clock_overlaps_streams(model: StreamModel) -> None:
    first, second, side = _device(model), _device(model), model.add_stream("side")
    model.reset_counts()
    _write(model, MAIN, first)
    _write(model, side, second)
    assert model.elapsed_seconds() == pytest.approx(1.0, abs=1e-3)
    model.join(side, model.moment(MAIN))
    _write(model, side, second)
    assert model.elapsed_seconds() == pytest.approx(2.0, abs=1e-3)


# -- freed and unwritten memory


def test_freed_memory_is_not_used(model: StreamModel) -> None:
    memory = _device(model)
    _write(model, MAIN, memory)
    model.free(memory)
    _read(model, MAIN, memory)
    assert _kinds(model) == ["USED AFTER FREE"]


def test_memory_is_written_before_it_is_read(model: StreamModel) -> None:
    memory = _device(model)
    _write(model, MAIN, memory, 0, 50)
    _read(model, MAIN, memory, 40, 60)  # padding behind the written bytes
    assert not model.findings
    _read(model, MAIN, memory, 50, 60)
    assert _kinds(model) == ["READ BEFORE ANY WRITE"]


def test_memory_from_outside_has_values(model: StreamModel) -> None:
    memory = model.allocate(100, on_device=False)
    memory.is_from_outside = True
    model.run_on_host([Use(memory, 0, 100)], [], "read", 0.0)
    assert not model.findings


# -- the caching allocator


_MIB = 1 << 20


def test_a_freed_block_is_split_and_merged_again() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(0, 40 * _MIB)
    allocator.free(first)
    parts = [allocator.malloc(0, 20 * _MIB) for _ in range(2)]
    assert (allocator.num_mallocs, allocator.reserved) == (1, 40 * _MIB)
    for part in parts:
        allocator.free(part)
    allocator.malloc(0, 40 * _MIB)
    assert allocator.num_mallocs == 1


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(0, 60 * _MIB), allocator.malloc(0, 20 * _MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.malloc(0, 20 * _MIB)
    allocator.malloc(0, 60 * _MIB)
    assert allocator.num_mallocs == 2


def test_streams_and_small_requests_have_pools_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(0, 1000))
    assert allocator.reserved == 2 * _MIB
    allocator.malloc(1, 1000)
    allocator.malloc(0, 2 * _MIB)
    assert allocator.reserved == 24 * _MIB
    assert allocator.allocated == 2 * _MIB + 1024


@pytest.mark.parametrize(("expandable", "reserved"), [(False, 160), (True, 80)])
def test_expandable_segments_serve_large_requests_from_what_small_ones_left(expandable: bool, reserved: int) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for block in [allocator.malloc(0, 20 * _MIB) for _ in range(4)]:
        allocator.free(block)
    allocator.malloc(0, 80 * _MIB)
    assert allocator.reserved == reserved * _MIB


# -- calls that block the host at their first use


def test_a_request_without_a_block_asks_the_driver_once(model: StreamModel) -> None:
    model.phase = "forward"
    for _ in range(3):
        model.free(_device(model))
    assert model.first_calls["forward", "cudaMalloc"] == 1


def test_a_kernel_is_loaded_at_its_first_launch(model: StreamModel) -> None:
    memory = _device(model)
    model.phase = "forward"
    _write(model, MAIN, memory)
    _write(model, MAIN, memory)
    assert model.first_calls["forward", "first launch"] == 1


def test_first_uses_after_construction_are_late(model: StreamModel) -> None:
    model.log.first_use("gather", (0, 1), "all_gather")
    model.phase = "backward"
    model.log.first_use("gather", (0, 1), "all_gather")
    assert not model.log.late
    model.log.first_use("gather", (0, 1), "broadcast")
    assert len(model.log.late) == 1


# -- several ranks


def _call(model: StreamModel, lane: int, name: str, *, waits: bool = False) -> None:
    model.launch(lane, [], [], "all_gather", 1.0)
    model.log.launch(name, (0, 1), "collective", "all_gather", lane)
    if waits:
        model.wait_on_host(model.moment(lane), "a wait")


def _rank(*order: str, waits: bool = False, connects: bool = False, allocates: bool = False) -> list[Call]:
    model = StreamModel()
    lanes = {name: model.add_stream(name) for name in sorted(order)}
    for name in order:
        if connects:
            model.log.first_use(name, (0, 1), "all_gather")
        _call(model, lanes[name], name, waits=waits)
        if allocates:
            _device(model, 30 * _MIB)
    return model.log.calls


def test_communicators_in_another_order_are_fine_as_long_as_nothing_waits() -> None:
    assert deadlocks({0: _rank("gather", "reduce"), 1: _rank("reduce", "gather")}) == []


@pytest.mark.parametrize("why", ["waits", "connects", "allocates"])
def test_ranks_in_another_order_deadlock_if_one_waits(why: str) -> None:
    [circle] = deadlocks({0: _rank("gather", "reduce", **{why: True}), 1: _rank("reduce", "gather", **{why: True})})
    assert "a circle" in circle
    assert deadlocks({rank: _rank("gather", "reduce", **{why: True}) for rank in range(2)}) == []


def test_a_rank_that_stays_away_is_named() -> None:
    [text] = deadlocks({0: _rank("gather", "gather"), 1: _rank("gather")})
    assert text.startswith("rank 1 never takes part in all_gather in gather")


# -- threads


@pytest.fixture
def turns(model: StreamModel) -> model_threads.Turns:
    return model_threads.Turns(model, contextlib.nullcontext)


def test_a_thread_is_apart_until_it_is_joined(model: StreamModel, turns: model_threads.Turns) -> None:
    threading, _, _ = model_threads.thread_classes(turns)
    memory = model.allocate(100, on_device=False)
    use = [Use(memory, 0, 100)]
    thread = threading.Thread(target=lambda: model.run_on_host([], use, "write", 0.0))
    thread.start()
    thread.join()
    model.run_on_host(use, [], "read", 0.0)
    assert not model.findings
    other = threading.Thread(target=lambda: model.run_on_host([], use, "write", 0.0))
    other.start()
    model.run_on_host(use, [], "read", 0.0)
    turns.finish()
    assert _kinds(model) == ["WRITE AFTER READ"]


def test_results_items_and_events_order(model: StreamModel, turns: model_threads.Turns) -> None:
    threading, queue, executor = model_threads.thread_classes(turns)
    memory = model.allocate(100, on_device=False)
    items, event = queue.SimpleQueue(), threading.Event()

    def work() -> int:
        model.run_on_host([], [Use(memory, 0, 10)], "write", 0.0)
        items.put("an item")
        model.run_on_host([], [Use(memory, 10, 20)], "write", 0.0)
        event.set()
        model.run_on_host([], [Use(memory, 20, 30)], "write", 0.0)
        return 7

    result = executor(1, "worker").submit(work)
    assert items.get() == "an item"
    model.run_on_host([Use(memory, 0, 10)], [], "read", 0.0)
    event.wait()
    model.run_on_host([Use(memory, 0, 20)], [], "read", 0.0)
    assert result.result() == 7
    model.run_on_host([Use(memory, 0, 30)], [], "read", 0.0)
    assert not model.findings


def test_an_item_orders_nothing_that_comes_after_it(model: StreamModel, turns: model_threads.Turns) -> None:
    threading, queue, _ = model_threads.thread_classes(turns)
    memory, items = model.allocate(100, on_device=False), queue.SimpleQueue()

    def work() -> None:
        items.put("an item")
        model.run_on_host([], [Use(memory, 0, 100)], "write", 0.0)

    threading.Thread(target=work).start()
    items.get()
    model.run_on_host([Use(memory, 0, 100)], [], "read", 0.0)
    turns.finish()
    assert _kinds(model) == ["READ AFTER WRITE"]


def test_threads_that_wait_for_each_other_are_named(model: StreamModel, turns: model_threads.Turns) -> None:
    threading, _, _ = model_threads.thread_classes(turns)
    with pytest.raises(RuntimeError, match="deadlock: the host waits for an event"):
        threading.Event().wait()
    assert model.thread == HOST


def test_an_error_of_a_thread_is_the_callers(turns: model_threads.Turns) -> None:
    _, _, executor = model_threads.thread_classes(turns)

    def fail() -> None:
        raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        executor(1, "worker").submit(fail).result()


def test_a_call_that_is_cancelled_before_its_turn_does_not_run(turns: model_threads.Turns) -> None:
    _, _, executor = model_threads.thread_classes(turns)
    calls: list[str] = []
    pool = executor(1, "worker")
    cancelled, later = pool.submit(calls.append, "cancelled"), pool.submit(calls.append, "later")
    assert cancelled.cancel()
    later.result()
    assert calls == ["later"]
