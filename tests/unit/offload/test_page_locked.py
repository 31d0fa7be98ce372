"""Page-locked host memory over a simulated CUDA runtime: exact sizes, unlocking with the last view, and refusals."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import zeroaccel
from zeroaccel.config import TierPlan, load_config
from zeroaccel.offload import page_locked
from zeroaccel.offload.host_buffers import HostArena, aligned_bytes, empty_on_host
from zeroaccel.offload.tier import HostTier
from zeroaccel.ops import Adam
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.storage import placement
from zeroaccel.zero.storage.masters import MasterPlace, SeparateMasters
from zeroaccel.zero.storage.placement import BufferPlan, OffloadRules, TierSet
from zeroaccel.zero.storage.shards import MemoryShard, ShardPlace

PAGE = mmap.PAGESIZE


class Runtime:
    """The functions of the CUDA runtime that lock pages; `locked` has the sizes by address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = 0
        self.pending_error = 0
        self.copying = False
        self.current_device = 3
        self.devices: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1
        self.devices.append(self.current_device)
        assert address % PAGE == 0
        if self.refuses:
            self.pending_error = self.refuses
            return self.refuses
        assert address not in self.locked
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert not self.copying, "unlocked while copies may be under way"
        self.devices.append(self.current_device)
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory", 801: "operation not supported"}[code]


class Stream(SimpleNamespace):
    """A stream whose copies are complete unless the runtime is `copying`."""

    __hash__ = object.__hash__


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = Runtime()

    def launch(*size: int, device: str) -> None:
        runtime.pending_error = 0
        raise RuntimeError("CUDA error of the launch before")

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, runtime.current_device = runtime.current_device, index
        yield
        runtime.current_device = before

    def wait() -> None:
        runtime.copying = False

    def never() -> None:
        raise AssertionError("the host waits for the whole device")

    copies = SimpleNamespace(query=lambda: not runtime.copying, synchronize=wait)
    stream = Stream(device=torch.device("cuda", 3), record_event=lambda: copies)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: runtime.current_device)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(page_locked, "_last_device", None)
    monkeypatch.setattr(torch.cuda, "synchronize", never)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    ones = torch.ones
    monkeypatch.setattr(
        torch, "ones", lambda *size, device="cpu": (launch if device == "cuda" else ones)(*size, device=device)
    )
    monkeypatch.setattr(page_locked, "_said", set())
    # Other tests of this process leave streams of their own stand-ins.
    monkeypatch.setattr(page_locked, "_streams", set())
    monkeypatch.setattr(page_locked, "_dropped", deque())
    yield runtime
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Lets each `gc.collect()` here scan only what these tests make: with all that others leave, it takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logging.getLogger("zeroaccel").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("zeroaccel").removeHandler(caplog.handler)


def test_a_slab_has_the_pages_it_needs_and_no_more(runtime: Runtime) -> None:
    slab = aligned_bytes(33 * PAGE, pinned=True)
    assert runtime.locked == {slab.data_ptr(): 33 * PAGE}
    assert slab.untyped_storage().nbytes() == 33 * PAGE
    assert not slab.any()
    slab.view(torch.float32)[-1] = 1.5
    aligned_bytes(PAGE, pinned=False)
    assert len(runtime.locked) == 1


def test_pages_without_views_are_unlocked_after_their_copies(runtime: Runtime) -> None:
    slab = empty_on_host((100, 3), torch.float32, pinned=True)
    view = slab[7]
    del slab
    gc.collect()
    assert runtime.locked
    runtime.copying = True
    del view
    gc.collect()
    assert runtime.locked, "the host neither waits nor unlocks"
    aligned_bytes(PAGE, pinned=True)
    gc.collect()
    assert len(runtime.locked) == 2
    runtime.copying = False
    aligned_bytes(PAGE, pinned=True)
    gc.collect()
    assert runtime.locked == {}, "the next request and its end unlock them"


def test_a_destroyed_engine_waits_for_copies_from_its_pages(runtime: Runtime) -> None:
    runtime.copying = True
    aligned_bytes(PAGE, pinned=True)
    gc.collect()
    assert runtime.locked
    zeroaccel.initialize(torch.nn.Linear(4, 2), config={"train_micro_batch_size_per_gpu": 1})[0].destroy()
    assert runtime.locked == {}


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="no MADV_POPULATE_WRITE")
def test_threads_allocate_the_pages_before_the_runtime_locks_them(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, register = [], runtime.cudaHostRegister

    def measured(address: int, nbytes: int, flags: int) -> int:
        resident.append(psutil.Process().memory_info().rss)
        return register(address, nbytes, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", measured)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    before = psutil.Process().memory_info().rss
    nbytes = (64 << 20) + PAGE  # no multiple of the threads' spans
    slab = aligned_bytes(nbytes, pinned=True)
    assert resident[0] - before > 0.9 * nbytes
    assert not slab.any()


def test_threads_use_the_device_of_the_process(runtime: Runtime) -> None:
    slabs = [aligned_bytes(PAGE, pinned=True)]

    def work() -> None:
        runtime.current_device = 0  # the initial device of any thread
        slabs.append(aligned_bytes(PAGE, pinned=True))
        slabs.clear()
        gc.collect()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert runtime.devices == [3, 3, 3, 3]
    assert runtime.locked == {}


@pytest.mark.parametrize(("code", "text"), [(2, "CUDA error 2: out of memory"), (801, "CUDA error 801: operation not")])
def test_memory_that_cannot_be_locked_is_named_and_works(
    code: int, text: str, runtime: Runtime, warnings: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = code
    slabs = [aligned_bytes(PAGE, pinned=True) for _ in range(3)]
    (record,) = warnings.records
    for part in (text, "`ulimit -l` is", "run fewer ranks here, offload less, or set pin_memory to false"):
        assert part in record.getMessage()
    assert runtime.pending_error == 0, "the next kernel launch would report it"
    for slab in slabs:
        slab.fill_(3)
    assert sum(int(slab.sum()) for slab in slabs) == 9 * PAGE
    runtime.refuses = 0
    assert aligned_bytes(PAGE, pinned=True).data_ptr() in runtime.locked, "smaller slabs may fit later"


def test_memory_that_cannot_be_locked_halfway_is_named_with_the_locked_half(
    runtime: Runtime, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locked._Pages, "locked_nbytes", 0)
    locked = [aligned_bytes(10 << 20, pinned=True) for _ in range(2)]
    runtime.refuses = 2
    pageable = [aligned_bytes(10 << 20, pinned=True) for _ in range(2)]
    (record,) = warnings.records
    assert (
        "pin_memory: 0.01 GB of host memory cannot be page-locked (CUDA error 2: out of memory" in record.getMessage()
    )
    assert "(locked so far: 0.02 GB)" in record.getMessage()
    assert getattr(record, "all_ranks", False), "the ranks whose memory is refused may be others than rank 0"
    assert sorted(runtime.locked) == sorted(slab.data_ptr() for slab in locked)
    assert int(sum(slab.fill_(1).sum() for slab in (*locked, *pageable))) == 40 << 20


def test_more_than_is_free_is_not_locked(
    runtime: Runtime, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locked, "free_nbytes", lambda: 3 * PAGE)
    assert aligned_bytes(3 * PAGE, pinned=True).data_ptr() in runtime.locked
    slab = aligned_bytes(4 * PAGE, pinned=True)
    assert slab.data_ptr() not in runtime.locked
    assert slab.numel() == 4 * PAGE
    (record,) = warnings.records
    assert "0.00 GB are free" in record.getMessage()


def test_free_memory_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    membership, groups = tmp_path / "membership", tmp_path / "groups"
    own = groups / "job" / "step"
    own.mkdir(parents=True)

    def write(group: Path, limit: str, used: int, stat: str = "inactive_file 0\nactive_file 0") -> None:
        for name, text in (("memory.max", limit), ("memory.current", str(used)), ("memory.stat", stat)):
            (group / name).write_text(f"{text}\n")

    by_machine = page_locked.free_nbytes(groups, membership)  # without control groups
    assert by_machine > 0
    membership.write_text("1:cpu:/elsewhere\n0::/job/step\n")
    write(own, "max", 1000)
    assert page_locked.free_nbytes(groups, membership) == pytest.approx(by_machine, rel=0.2)
    write(groups / "job", "5000", 1000, "anon 900\ninactive_file 60\nactive_file 7")
    assert page_locked.free_nbytes(groups, membership) == 5000 - 1000 + 67
    write(own, "3000", 1000)
    assert page_locked.free_nbytes(groups, membership) == 2000
    write(own, "3000", 9000)
    assert page_locked.free_nbytes(groups, membership) == 0
    membership.write_text("0::/\n")  # a container sees its own group as the root
    write(groups, "800", 100)
    assert page_locked.free_nbytes(groups, membership) == 700


def test_a_forked_process_leaves_the_pages_alone(runtime: Runtime) -> None:
    slab = aligned_bytes(PAGE, pinned=True)
    context = multiprocessing.get_context("fork")

    def drop(sender: multiprocessing.connection.Connection) -> None:
        nonlocal slab
        del slab
        gc.collect()
        sender.send(list(runtime.locked))

    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=drop, args=(sender,))
    process.start()
    assert receiver.recv() == [slab.data_ptr()]
    process.join()
    assert process.exitcode == 0
    assert os.getpid() != process.pid


def test_an_arena_uses_memory_again(runtime: Runtime) -> None:
    arena = HostArena(pinned=True)
    steps = []
    for _ in range(3):
        gradients = [arena.empty((numel,), torch.bfloat16) for numel in (50_000, 70_000, 50_000)]
        assert len({gradient.data_ptr() for gradient in gradients}) == 3
        steps.append(sorted(gradient.data_ptr() for gradient in gradients))
        del gradients
    assert steps[0] == steps[1] == steps[2]
    assert sum(runtime.locked.values()) < 2 * 170_000 + 3 * PAGE
    assert arena.empty((), torch.float32).shape == ()
    assert arena.empty((0, 4), torch.float32).shape == (0, 4)
    gc.collect()
    arena.clear()
    assert runtime.locked == {}


def test_an_arena_takes_no_block_that_is_much_too_large_and_none_in_use(runtime: Runtime) -> None:
    arena = HostArena(pinned=True)
    large = arena.empty((100 * PAGE,), torch.uint8)
    part = large[3:5]
    del large
    arena.empty((90 * PAGE,), torch.uint8)
    assert sorted(runtime.locked.values()) == [90 * PAGE, 100 * PAGE], "a view of the first tensor remains"
    del part
    arena.empty((10 * PAGE,), torch.uint8)
    assert sorted(runtime.locked.values()) == [10 * PAGE, 90 * PAGE, 100 * PAGE]
    arena.empty((85 * PAGE,), torch.uint8)
    assert len(runtime.locked) == 3


def test_an_arena_serves_threads_and_finalizers(runtime: Runtime) -> None:
    """Memory returns in whichever thread the last view ends, and no memory in use is allocated again."""
    arena = HostArena(pinned=True)
    wrong: list[str] = []

    def work(number: int) -> None:
        for round_number in range(200):
            tensor = arena.empty((1000 + number,), torch.float32)
            tensor.fill_(number * 1000 + round_number)
            if not bool((tensor == number * 1000 + round_number).all()):
                wrong.append(f"{number} {round_number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(runtime.locked) <= 8, "each of four threads has at most two tensors at a time"


@pytest.mark.parametrize("moments_dtype", ["fp32", "bf16", "int8"])
def test_states_of_the_host_are_made_and_loaded_there(moments_dtype: str, runtime: Runtime) -> None:
    def make() -> tuple[Adam, torch.Tensor]:
        master = torch.arange(3000, dtype=torch.float32).div_(1000)
        return Adam([master], moments_dtype=moments_dtype), master

    plain, reference = make()
    pinned, master = make()
    pinned.host_memory = lambda shape, dtype: empty_on_host(shape, dtype, pinned=True)
    for step in range(4):
        for optimizer, param in ((plain, reference), (pinned, master)):
            param.grad = torch.sin(param * (step + 1))
            optimizer.step()
        if step == 1:
            pinned.load_state_dict(pinned.state_dict())
    assert torch.equal(master, reference)
    states = [value for value in pinned.state[master].values() if isinstance(value, torch.Tensor) and value.dim()]
    assert len(states) == (4 if moments_dtype == "int8" else 2)
    assert all(value.data_ptr() in runtime.locked for value in states)
    expected = plain.portable(plain.state[reference])
    for name, value in pinned.portable(pinned.state[master]).items():
        assert value == expected[name] if name == "step" else torch.equal(value, expected[name])


def _tiers(monkeypatch: pytest.MonkeyPatch, device: str, stage: int = 3, **sections: object) -> TierSet:
    monkeypatch.setattr(placement, "CopyStream", lambda device, pinned: None)
    config = load_config({"zero_optimization": {"stage": stage, **sections}, "train_micro_batch_size_per_gpu": 1})
    residences = [sections.get(key) for key in ("offload_param", "offload_optimizer")]
    rules = OffloadRules.of(config, TierPlan(*("host" if section else "device" for section in residences)))  # type: ignore[arg-type]
    return TierSet(rules, [], None, torch.device(device))


@pytest.mark.parametrize(
    ("device", "section", "pins"),
    [
        ("cuda", {"device": "cpu"}, True),
        ("cuda", {"device": "cpu", "pin_memory": False}, False),
        ("cuda", None, False),
        ("cpu", {"device": "cpu"}, False),
    ],
)
def test_settings_that_lock_masters(
    device: str, section: dict[str, object] | None, pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {} if section is None else {"offload_optimizer": section}
    assert _tiers(monkeypatch, device, **sections).pins_masters == pins


def _planned(
    monkeypatch: pytest.MonkeyPatch, master_weights: str, *, dtype: torch.dtype = torch.bfloat16, stage: int = 3
) -> tuple[Adam, BufferPlan, TierSet]:
    """Returns an optimizer and tiers of 1,500,000 weights, with masters and states on the host of a device."""
    monkeypatch.setattr(placement, "CopyStream", lambda device, pinned: None)
    sections = {"offload_optimizer": {"device": "cpu"}, **({"offload_param": {"device": "cpu"}} if stage == 3 else {})}
    document = {
        "zero_optimization": {"stage": stage, **sections},
        "bf16": {"enabled": dtype is torch.bfloat16},
        "data_types": {"master_weights": master_weights},
        "train_micro_batch_size_per_gpu": 1,
    }
    param = torch.nn.Parameter(torch.linspace(-1, 1, 1_500_000))
    layout = FlatLayout.build([("a", tuple(param.shape))], 1)
    plan = BufferPlan("a/0", 0, layout, (param,), dtype, (0,), persistent=False)
    optimizer = Adam([param])
    rules = OffloadRules.of(load_config(document), TierPlan("host" if stage == 3 else "device", "host"))
    return optimizer, plan, placement.plan_tiers(rules, [plan], optimizer, torch.device("cuda"))


def test_states_that_no_device_copies_are_not_locked(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, *_ = _planned(monkeypatch, "fp32")
    param, plain = optimizer.param_groups[0]["params"][0], Adam([torch.linspace(-1, 1, 1_500_000)])
    populated: list[int] = []
    populate = page_locked._Pages.populate
    monkeypatch.setattr(
        page_locked._Pages, "populate", lambda self, address: populated.append(len(self)) or populate(self, address)
    )
    for each in (param, plain.param_groups[0]["params"][0]):
        each.grad = torch.ones_like(each)
    for _ in range(2):
        optimizer.step()
        plain.step()
    assert populated == [6_000_640] * 2, "the pages of both moments, at the first step"
    assert runtime.locked == {}
    assert torch.equal(param, plain.param_groups[0]["params"][0])


def test_masters_are_locked_if_the_device_copies_them(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fp32 weights it does at each step, otherwise once, at the start."""
    for dtype, locked in ((torch.bfloat16, []), (torch.float32, [6_000_640])):
        _, plan, tiers = _planned(monkeypatch, "fp32", dtype=dtype, stage=2)
        tiers.open([])
        full = torch.empty(plan.layout.numel, dtype=dtype, device="meta")
        _, masters = tiers.storages(plan, ShardPlace("a/0", plan.layout, 0, full))
        values = torch.linspace(-1, 1, plan.layout.numel)
        masters.initialize(values)
        assert list(runtime.locked.values()) == locked
        assert torch.equal(next(masters.tensors()), values)


def test_sub_groups_on_the_host_are_not_locked(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _, tiers = _planned(monkeypatch, "residual")
    assert optimizer.host_memory is None, "an update would lock states for the time until they are in the tier"
    tiers.open([])
    populated: list[int] = []
    monkeypatch.setattr(page_locked._Pages, "populate", lambda self, address: populated.append(len(self)))
    assert tiers.swapper is not None
    for key in [group.key for group in tiers.swapper.sub_groups["a/0"]]:
        assert not tiers.swapper.tier.take(key).any()
    assert sum(populated) > 10 * 1_500_000, "2 bytes of residuals and 8 of moments"
    assert runtime.locked == {}
    tiers.tiers["params, host"].take("a/0")
    assert list(runtime.locked.values()) == [3_002_368], "the device gathers shards"


def test_masters_of_the_host_are_locked(runtime: Runtime) -> None:
    layout = FlatLayout.build([("a", (100, 7))], 1)
    full = torch.zeros(layout.numel, dtype=torch.bfloat16)
    source = torch.randn(layout.numel)
    shard = MemoryShard.on_device(ShardPlace("a", layout, 0, full))
    found = []
    for pinned in (False, True):
        masters = SeparateMasters(MasterPlace("a", layout, 0, shard, (), torch.device("cpu"), pinned=pinned))
        masters.initialize(source)
        found.append(masters)
    plain, locked = (next(masters.tensors()) for masters in found)
    assert torch.equal(plain, source)
    assert torch.equal(locked, source)
    assert list(runtime.locked) == [locked.data_ptr()]


def test_a_tier_of_the_host_has_exact_slabs(runtime: Runtime) -> None:
    tier = HostTier({"a": 5 * PAGE, "b": 100}, pinned=True)
    tier.take("a"), tier.take("b")
    assert sorted(runtime.locked.values()) == [PAGE, 5 * PAGE]
    tier.close()
    gc.collect()
    assert runtime.locked == {}


def test_an_interpreter_that_ends_does_not_complain(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may shut down before the last tensor ends."""
    slab = aligned_bytes(PAGE, pinned=True)

    def gone(device: torch.device) -> None:
        raise RuntimeError("driver shutting down")

    monkeypatch.setattr(torch.cuda, "current_stream", gone)
    with contextlib.suppress(KeyError):
        runtime.locked.clear()
    del slab
    gc.collect()


def test_the_end_of_an_interpreter_unlocks_nothing(runtime: Runtime) -> None:
    """By then its modules are gone, and the system frees the pages."""
    slab = aligned_bytes(PAGE, pinned=True)
    pages = next(found for found in gc.get_objects() if type(found) is page_locked._Pages)
    pages.__del__(is_ending=lambda: True)
    assert list(runtime.locked.values()) == [PAGE]
    del slab, pages
    gc.collect()
    assert runtime.locked == {}


def test_large_slabs_request_huge_pages_and_log_the_time_they_take(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    advice: list[int] = []
    monkeypatch.setattr(page_locked._Pages, "madvise", lambda pages, *arguments: advice.append(arguments[0]))
    monkeypatch.setattr(page_locked, "_SAID_NBYTES", 4 << 20)
    with warnings.at_level(logging.INFO, logger="zeroaccel"):
        small, large = (page_locked.mapped_bytes(nbytes, pinned=True) for nbytes in (PAGE, 4 << 20))
    assert advice == [mmap.MADV_DONTFORK, mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE]
    assert "page-locking 0.0 GB of host memory" in warnings.text
    del small, large
