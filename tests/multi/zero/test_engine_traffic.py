"""Bytes that a step sends, and bytes in flight at a time, counted by recording collectives.

The formulas are those of Rajbhandari et al., ZeRO (2020), section 7, on the padded number of elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import Toy, batches, config, offloaded, recording, train_step
from zeroaccel.comm.collectives import Work
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError
from zeroaccel.zero import GatheredParameters, Init
from zeroaccel.zero.layout import ALIGN_NUMEL
from zeroaccel.zero.wrap_policy import LARGE_LEAF_NUMEL


class Trained(Toy):
    """A Toy whose parameters are all trained, because the formulas have one model size."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_(True)


def _step(engine: Engine, data: list[Tensor]) -> None:
    for batch in data:
        train_step(engine, engine(batch))


def _padded_numel(engine: Engine, world_size: int) -> tuple[int, int]:
    """Returns (trained, frozen) elements of all units, with each parameter and each unit padded."""
    sizes = {name: (param.numel(), param.requires_grad) for name, param in engine.module.named_parameters()}
    totals = {True: 0, False: 0}
    for unit in engine.units:
        for trained in (True, False):
            numels = [sizes[fqn][0] for fqn in unit.fqns() if sizes[fqn][1] is trained]
            numel = sum(-(-n // ALIGN_NUMEL) * ALIGN_NUMEL for n in numels)
            totals[trained] += -(-numel // (ALIGN_NUMEL * world_size)) * ALIGN_NUMEL * world_size
    return totals[True], totals[False]


def _measure(settings: dict[str, Any], make: type[nn.Module]) -> tuple[dict[str, int], dict[str, int], tuple[int, int]]:
    """Returns (elements, bytes sent) of the third step by operation and dtype, and the padded model sizes."""
    torch.manual_seed(7)
    counted = recording()
    engine, *_ = zeroaccel.initialize(make(), config=settings, collectives=counted)
    accumulation = engine.gradient_accumulation_steps()
    data = batches(engine.collectives.rank, 3 * accumulation)
    _step(engine, data[:-accumulation])
    counted.reset()
    _step(engine, data[-accumulation:])
    elements: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for call in counted.calls:
        if call.op in ("all_gather", "reduce_scatter"):
            elements[f"{call.op} {call.dtype}"] += call.numel
            sent[f"{call.op} {call.dtype}"] += call.nbytes
    small = [call for call in counted.calls if call.op not in ("all_gather", "reduce_scatter")]
    assert [call.label for call in small] == ["gradient overflow check", "gradient norm"], small
    sizes = _padded_numel(engine, engine.collectives.world_size)
    engine.destroy()
    return dict(elements), dict(sent), sizes


@pytest.mark.parametrize(
    ("stage", "accumulation", "gathers", "reductions"),
    [
        (0, 1, 1, 1),
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (3, 1, 2, 1),  # parameters for forward and for backward
        (0, 4, 1, 1),  # reduced once per step
        (1, 4, 1, 1),
        (2, 4, 1, 4),  # reduced every micro-step
        (3, 4, 8, 4),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_traffic_of_a_step(
    ranks: Ranks, world_size: int, stage: int, accumulation: int, gathers: int, reductions: int
) -> None:
    settings = config(stage, "bf16", accumulation, stage3_max_reuse_distance=0)
    for elements, sent, (numel, _) in ranks(world_size).run(_measure, settings, Trained):
        assert elements == {
            "all_gather bfloat16": gathers * numel,
            "reduce_scatter bfloat16": reductions * numel,
        }
        # Of each tensor a rank sends the parts that the W - 1 others need: about the model's bytes per pass.
        part = numel * 2 * (world_size - 1) // world_size
        assert sent == {"all_gather bfloat16": gathers * part, "reduce_scatter bfloat16": reductions * part}


def test_a_model_that_stays_unsharded_until_backward_is_gathered_once(ranks: Ranks) -> None:
    for elements, _, (numel, _) in ranks(2).run(_measure, config(3, "bf16"), Trained):
        assert elements == {"all_gather bfloat16": numel, "reduce_scatter bfloat16": numel}


def _visit_each_parameter(precision: str) -> tuple[int, int, int]:
    """Returns the elements gathered by a loop that reads and by one that writes, and those of the padded model."""
    torch.manual_seed(7)
    counted = recording()
    model = Trained()
    engine, *_ = zeroaccel.initialize(model, config=config(3, precision), collectives=counted)
    rank, data = counted.rank, batches(counted.rank, 3)
    _step(engine, data[:1])
    expected = {name: value.clone() for name, value in engine.iter_named_full_params()}
    gathered = []
    for modifier in (None, 1):
        counted.reset()
        views = {}
        for name, param in model.named_parameters():
            with GatheredParameters([param], modifier_rank=modifier), torch.no_grad():
                assert torch.equal(param, expected[name])
                views[name] = param.data
                if modifier == rank:
                    param.mul_(2)
            assert not param.numel() or "nan" in repr(param)
        gathered.append(sum(call.numel for call in counted.calls if call.op == "all_gather"))
        if modifier is None:
            for name, view in views.items():  # the program's own tensors: no gather reads writes to them
                assert torch.equal(view, expected[name])
                view.zero_()
    sizes = {unit.name: sum(buffer.nbytes for buffer in unit.buffers) for unit in engine.units}
    kept = sum(buffer.full.untyped_storage().nbytes() for unit in engine.units for buffer in unit.buffers)
    assert kept <= sizes.pop("root") + max(sizes.values())  # the root's values and those of the last other unit
    for name, value in engine.iter_named_full_params():
        assert torch.equal(value, expected[name] * 2), name
    for _, param in list(model.named_parameters())[:3]:  # a loop that ends early
        with GatheredParameters([param]):
            pass
    _step(engine, data[1:2])  # makes the remaining values stale
    last = list(model.named_parameters())[-1]
    for _ in range(2):
        with GatheredParameters([last[1]]):
            newest = last[1].detach().clone()
        _step(engine, data[2:])
    with GatheredParameters([last[1]]):
        assert not torch.equal(newest, last[1])
    numel = _padded_numel(engine, counted.world_size)[0]
    engine.destroy()
    return gathered[0], gathered[1], numel


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loop_that_gathers_one_parameter_at_a_time_gathers_each_unit_once(ranks: Ranks, precision: str) -> None:
    for read, written, numel in ranks(2).run(_visit_each_parameter, precision):
        assert read <= numel
        assert written <= 1.02 * numel


class _NormBeforeHead(nn.Module):
    """A root whose own parameters lie between two units that a loop visits one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, LARGE_LEAF_NUMEL // 16, bias=False)


def _visit_past_the_root() -> tuple[int, int]:
    counted = recording()
    model = _NormBeforeHead()
    engine, *_ = zeroaccel.initialize(model, config=config(3), collectives=counted)
    counted.reset()
    for param in model.parameters():
        with GatheredParameters([param]):
            pass
    gathers = [call for call in counted.calls if call.op == "all_gather"]
    numel = sum(buffer.layout.numel for unit in engine.units for buffer in unit.buffers)
    engine.destroy()
    return sum(call.numel for call in gathers), numel


def test_a_loop_gathers_the_root_once_although_other_units_lie_between_its_parameters(ranks: Ranks) -> None:
    for gathered, numel in ranks(2).run(_visit_past_the_root):
        assert gathered <= numel


def _sent(counted: RecordingCollectives) -> int:
    """Returns the number of 16-bit elements that all ranks sent to each other rank since the last call."""
    nbytes = sum(call.nbytes for call in counted.calls if call.op == "all_gather")
    total = sum(counted.gather_objects(nbytes, "count")) // (counted.world_size - 1)
    counted.reset()
    return total // 2


def _gather_parts(changes: dict[str, Any]) -> None:
    torch.manual_seed(7)
    counted = recording()
    model = Trained()
    engine, *_ = zeroaccel.initialize(model, config=config(3, "bf16", **changes), collectives=counted)
    data = batches(counted.rank, 3)
    _step(engine, data[:1])
    expected = {name: value.clone() for name, value in engine.iter_named_full_params()}
    up, down = model.layers[1].up, model.layers[1].down
    numels = {name: unit.numel for unit in engine.units for name in unit.fqns()}

    def forget() -> None:
        engine.finish_update()
        counted.reset()

    # One parameter: its unit. Its master: only its elements, from the ranks that have them.
    for name, param in model.named_parameters():
        forget()
        with GatheredParameters([param]):
            assert torch.equal(param, expected[name]), name
        assert _sent(counted) == numels[name], name
        assert zeroaccel.zero.safe_get_full_fp32_param(param) is not None
        assert _sent(counted) == 2 * param.numel(), name
    # Nothing twice: an inner block, the same again, another parameter of the unit.
    forget()
    with GatheredParameters([up.weight, up.bias]):
        assert _sent(counted) == numels["layers.1.up.weight"]
        with GatheredParameters([down.weight]):
            assert torch.equal(down.weight, expected["layers.1.down.weight"])
    for again in (up.weight, down.bias):
        with GatheredParameters([again]):
            pass
        with pytest.raises(EngineStateError, match=r"layers\.1\.(up\.weight|down\.bias)"):
            again.sum()
    assert _sent(counted) == 0
    # A forward inside uses the parameter that the block gathered and writes.
    forget()
    with GatheredParameters([up.weight], modifier_rank=0), torch.no_grad():
        before = engine(data[1])
        up.weight.zero_()
    with pytest.raises(EngineStateError, match=r"layers\.1\.up\.weight"):
        up.weight.sum()
    with torch.no_grad():
        assert engine(data[1]) != before
    with GatheredParameters([up.weight]):
        assert not bool(up.weight.any())
    # A view of a parameter that the program then uses in backward.
    with GatheredParameters([down.weight]):
        penalty = down.weight.float().square().sum()
    train_step(engine, engine(data[2]) + penalty)
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_block_gathers_the_unit_of_the_parameters_that_it_names(ranks: Ranks, tmp_path: Path, tier: str) -> None:
    ranks(3 if tier == "none" else 2).run(_gather_parts, {} if tier == "none" else offloaded(tmp_path, tier, tier))


def _stream_full(stage: int) -> tuple[int, int]:
    counted = recording()
    engine, *_ = zeroaccel.initialize(Trained(), config=config(stage, "bf16"), collectives=counted)
    counted.reset()
    for _ in engine.iter_named_full_params():
        pass
    sent, numel = _sent(counted), _padded_numel(engine, counted.world_size)[0]
    engine.destroy()
    return sent, numel


def test_all_full_parameters_are_gathered_once(ranks: Ranks) -> None:
    assert [sent for sent, _ in ranks(2).run(_stream_full, 2)] == [0, 0]
    for sent, numel in ranks(2).run(_stream_full, 3):
        assert sent == numel


def _visit_before_the_engine() -> int:
    counted = recording()
    with Init(collectives=counted):
        model = Trained()
    counted.reset()
    for name, param in model.named_parameters():
        with GatheredParameters([param], modifier_rank=0), torch.no_grad():
            param.fill_(len(name))
    gathered = Counter(call.label for call in counted.calls if call.op == "all_gather")
    engine, *_ = zeroaccel.initialize(model, config=config(3), collectives=counted)
    for name, value in engine.iter_named_full_params():
        assert bool((value == len(name)).all())
    engine.destroy()
    return max(gathered.values())


def test_a_loop_over_a_model_from_zero_init_gathers_each_module_once(ranks: Ranks) -> None:
    assert ranks(2).run(_visit_before_the_engine) == [1, 1]


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_send_no_gradients(ranks: Ranks, stage: int) -> None:
    settings = config(stage, "bf16", stage3_max_reuse_distance=0)
    for elements, _, (trained, frozen) in ranks(2).run(_measure, settings, Toy):
        gathers = 2 * (trained + frozen) if stage == 3 else trained
        assert elements == {"all_gather bfloat16": gathers, "reduce_scatter bfloat16": trained}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_may_travel_in_another_dtype(ranks: Ranks, stage: int) -> None:
    settings = config(stage, "bf16", communication_data_type="fp32", stage3_max_reuse_distance=0)
    for elements, _, (numel, _) in ranks(2).run(_measure, settings, Trained):
        parameters = {"all_gather bfloat16": (2 if stage == 3 else 1) * numel}
        summed = {"all_gather float32": numel} if stage == 0 else parameters  # stage 0 gathers the gradients
        assert elements == {"reduce_scatter float32": numel, **summed}


def test_persistent_parameters_are_gathered_once_a_step(ranks: Ranks) -> None:
    settings = config(3, "bf16", stage3_max_reuse_distance=0, stage3_param_persistence_threshold=10**6)
    for elements, _, (numel, _) in ranks(2).run(_measure, settings, Trained):
        assert elements == {"all_gather bfloat16": numel, "reduce_scatter bfloat16": numel}


def test_one_rank_sends_nothing(ranks: Ranks) -> None:
    for _, sent, _ in ranks(1).run(_measure, config(3, "bf16"), Trained):
        assert set(sent.values()) <= {0}


# -- limits


class _Noted:
    """A collective in flight that records when it has been waited for."""

    def __init__(self, work: Work, done: Callable[[], None]) -> None:
        self._work, self._done = work, done

    def wait(self) -> None:
        self._work.wait()
        done, self._done = self._done, lambda: None
        done()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class InFlight(RecordingCollectives):
    """Also measures the peak number of elements in flight, by operation; calls `probe` at each gather."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.probe: Callable[[], None] = lambda: None

    def _launched(self, op: str, numel: int, work: Work) -> Work:
        self.now[op] += numel
        self.peak[op] = max(self.peak[op], self.now[op])
        return _Noted(work, lambda: self.now.subtract({op: numel}))

    def all_gather(self, out: Tensor, shard: Tensor, label: str, split_sizes: Sequence[int] = ()) -> Work:
        self.probe()
        return self._launched("all_gather", out.numel(), super().all_gather(out, shard, label, split_sizes))

    def reduce_scatter(
        self, out: Tensor, flat: Tensor, label: str, scale: float = 1.0, split_sizes: Sequence[int] = ()
    ) -> Work:
        work = super().reduce_scatter(out, flat, label, scale, split_sizes)
        return self._launched("reduce_scatter", flat.numel(), work)


def _peaks(settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], int]:
    """Returns (peak elements in flight by operation, elements of each unit, peak unsharded elements)."""
    watched = InFlight(recording().inner)
    engine, *_ = zeroaccel.initialize(Trained(), config=settings, collectives=watched)
    data = batches(engine.collectives.rank, 3)
    _step(engine, data[:1])
    watched.peak.clear()
    whole = 0

    def probe() -> None:
        nonlocal whole
        stored = [b.full for unit in engine.units for b in unit.buffers]
        whole = max(whole, sum(full.untyped_storage().nbytes() // full.itemsize for full in stored))

    watched.probe = probe
    _step(engine, data[1:])
    assert set(watched.now.values()) == {0}, "a collective was never waited for"
    sizes = {unit.name: unit.numel for unit in engine.units}
    peaks = dict(watched.peak)
    engine.destroy()
    return peaks, sizes, whole


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_more_than_the_reduce_bucket_is_under_way(ranks: Ranks, stage: int, overlap: bool) -> None:
    _, sizes, _ = ranks(2).run(_peaks, config(stage, "bf16"))[0]
    block = sizes["layers.0"]
    for bucket in (1, 2 * block, 10**9):
        settings = config(stage, "bf16", reduce_bucket_size=bucket, overlap_comm=overlap)
        for peaks, _, _ in ranks(2).run(_peaks, settings):
            alone = max(sizes.values())
            # A unit larger than the bucket goes alone; without overlap every unit does.
            assert peaks["reduce_scatter"] <= (max(bucket, alone) if overlap else alone)
            if overlap and bucket == 10**9:
                assert peaks["reduce_scatter"] > alone


@pytest.mark.parametrize("stage", [1, 2])
def test_no_more_than_the_gather_bucket_is_under_way(ranks: Ranks, stage: int) -> None:
    for bucket in (1, 6000, 10**9):
        for peaks, sizes, _ in ranks(2).run(_peaks, config(stage, "bf16", allgather_bucket_size=bucket)):
            alone, total = max(sizes.values()), sum(sizes.values())
            assert peaks["all_gather"] <= max(bucket, alone)
            if bucket == 10**9:
                assert peaks["all_gather"] == total


def test_units_are_fetched_ahead_until_the_prefetch_limit(ranks: Ranks) -> None:
    _, sizes, _ = ranks(2).run(_peaks, config(3, "bf16"))[0]
    layer, needed = sizes["layers.0"], max(sizes.values())
    for limit, ahead in ((0, 0), (1, 1), (layer, 1), (layer + 1, 2)):
        settings = config(3, "bf16", stage3_prefetch_bucket_size=limit, stage3_max_reuse_distance=0)
        for peaks, _, _ in ranks(2).run(_peaks, settings):
            assert peaks["all_gather"] <= needed + ahead * layer
            assert (peaks["all_gather"] > needed) is (ahead > 0)


def test_at_most_the_root_and_one_unit_are_unsharded(ranks: Ranks) -> None:
    settings = config(3, "bf16", stage3_max_live_parameters=0, stage3_max_reuse_distance=0)
    for _, sizes, whole in ranks(2).run(_peaks, settings):
        # Computation needs the root and one more unit; nothing else is gathered.
        assert whole <= sizes["root"] + max(n for name, n in sizes.items() if name != "root")
    for _, sizes, whole in ranks(2).run(_peaks, config(3, "bf16")):
        assert whole == sum(sizes.values())
