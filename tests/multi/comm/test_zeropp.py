"""Hierarchical sharding and quantized communication: exact settings keep the bits, rounding stays within its bound."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.log_lines import log_lines
from tests.support.pool import Ranks
from tests.support.training import SGD, Run, Toy, batches, config, differences, train, train_step
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.hierarchical import HierarchicalCollectives, QuantError, arrange
from zeroaccel.comm.quantized import FP8, INT4, INT8, Codec
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config import comm_plan, load_config, shard_plan
from zeroaccel.engine import Engine


def _trained(changes: list[dict[str, Any]], precision: str, **common: Any) -> list[Run]:
    """Trains one run per set of changes, in one call of the pool."""
    steps = 8 if precision == "fp16" else 4
    return [train(config(3, precision, **common, **change), steps) for change in changes]


EXACT: dict[str, dict[str, Any]] = {
    "replicas of 2": {"mics_shard_size": 2},
    "every rank a replica": {"mics_shard_size": 1},
    "one shard group": {"mics_shard_size": 4},
    "second copy in 2": {"zero_hpz_partition_size": 2},
    "second copy in 4": {"zero_hpz_partition_size": 4},
    "second copy, nothing kept": {"zero_hpz_partition_size": 2, "stage3_max_reuse_distance": 0},
    "second copy in a replica": {"mics_shard_size": 4, "zero_hpz_partition_size": 2},
    "replicas, optimizer on the host": {"mics_shard_size": 2, "offload_optimizer": {"device": "cpu"}},
    "second copy, weights on the host": {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}},
    "second copy and persistent vectors": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 30},
}


@pytest.mark.parametrize(
    ("precision", "accumulation", "optimizer"),
    [
        ("bf16", 2, SGD),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("fp32", 2, None), ("fp16", 2, SGD)]),
    ],
)
def test_the_placement_of_shards_changes_no_bit(
    ranks: Ranks, precision: str, accumulation: int, optimizer: Any
) -> None:
    common = {"accumulation": accumulation, "gradient_clipping": 0.5}
    if optimizer is not None:
        common["optimizer"] = optimizer
    runs = ranks(4).run(_trained, [{}, *EXACT.values()], precision, **common)
    for rank, (plain, *others) in enumerate(runs):
        assert plain.losses[-1] < plain.losses[0]
        for name, other in zip(EXACT, others, strict=True):
            assert differences(plain, other) == [], (name, rank)
    assert all(torch.equal(runs[0][0].weights[name], runs[3][1].weights[name]) for name in runs[0][0].weights)


# -- quantized communication


QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
NODES = {"zeropp": {"node_size": 2}}
ALL = {**QWZ, **QGZ, **NODES, "zero_hpz_partition_size": 2}


def _collectives(changes: dict[str, Any]) -> Collectives:
    """Makes the collectives of a config, over the ranks of this test."""
    plain = Collectives(init_process_group())
    zero = {"stage": 3, **changes}
    config = load_config({"train_batch_size": 24, "zero_optimization": zero})
    return arrange(plain, comm_plan(config, shard_plan(config), plain.world_size))


def _round_trip(changes: dict[str, Any], numel: int, dtype: torch.dtype, bad: float | None) -> dict[str, Tensor]:
    """Gathers and reduces this rank's random tensors, both exactly and quantized."""
    plain, coded = Collectives(init_process_group()), _collectives(changes)
    generator = torch.Generator().manual_seed(plain.rank)
    shard = torch.randn(numel, generator=generator).to(dtype)
    flat = torch.randn(plain.world_size * numel, generator=generator).to(dtype)
    if bad is not None and plain.rank == plain.world_size - 1:
        flat[0] = bad
    found = {"shard": shard, "flat": flat}
    for name, collectives in (("exact", plain), ("coded", coded)):
        full, mean = torch.empty(plain.world_size * numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        works = [
            collectives.gather_weights(full, shard, "unshard test"),
            collectives.reduce_scatter(mean, flat, "reduce test", 1 / plain.world_size),
        ]
        for work in works:
            work.wait()
        found[f"{name} full"], found[f"{name} mean"] = full, mean
    return found


def _absmax(values: Tensor, codec: Codec) -> Tensor:
    """Returns the largest magnitude in each element's block, of shape (n,)."""
    blocks = values.float().abs().split(codec.block_numel)
    return torch.cat([block.max().expand(block.numel()) for block in blocks])


@pytest.mark.parametrize(
    ("world_size", "changes", "nodes"),
    [
        (4, {"zeropp": {"node_size": 2}}, [[0, 1], [2, 3]]),
        (3, {"zeropp": {"node_size": 1}}, [[0], [1], [2]]),
        (3, {"zeropp": {"quantize_gradients_on_one_node": True}}, [[0, 1, 2]]),
        (6, {"zeropp": {"node_size": 3}}, [[0, 1, 2], [3, 4, 5]]),
        (6, {"zeropp": {"node_size": 2}}, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_codes_keep_their_bounds(
    ranks: Ranks, world_size: int, changes: dict[str, Any], nodes: list[list[int]]
) -> None:
    for numel, dtype in ((1, torch.float32), (997, torch.bfloat16), (4096, torch.float16)):
        found = ranks(world_size).run(_round_trip, {**QWZ, **QGZ, **changes}, numel, dtype, None)
        tiny = 2.0 ** -{torch.float32: 20, torch.bfloat16: 7, torch.float16: 10}[dtype]
        for rank, mine in enumerate(found):
            assert torch.equal(mine["coded full"], found[0]["coded full"])
            shards = torch.cat([other["shard"] for other in found])
            steps = torch.cat([_absmax(other["shard"], INT8) / INT8.levels for other in found])
            error = (mine["coded full"].float() - shards.float()).abs()
            assert (error <= 0.501 * steps + tiny * shards.float().abs()).all(), (numel, dtype)
            # First hop: one code per part of the other ranks of each node; second: one per sum of each other node.
            parts = [[found[peer]["flat"].view(world_size, -1)[rank].float() for peer in node] for node in nodes]
            home = next(index for index, node in enumerate(nodes) if rank in node)
            place = nodes[home].index(rank)
            bound = torch.zeros(numel)
            for index, node in enumerate(parts):
                inner = sum((_absmax(part, INT4) for at, part in enumerate(node) if at != place), torch.zeros(numel))
                bound += 0.501 * inner / INT4.levels
                if index != home:
                    decoded = _absmax(sum(node, torch.zeros(numel)), INT4)
                    slack = _absmax(0.501 * inner / INT4.levels, INT4)
                    bound += 0.501 * (decoded + slack) / INT4.levels
            exact = sum((part for node in parts for part in node), torch.zeros(numel)) / world_size
            error = (mine["coded mean"].float() - exact).abs()
            assert (error <= bound / world_size * 1.001 + tiny * exact.abs() + 1e-6).all(), (numel, dtype, rank)
            if numel > 1:
                # The result is the mean over all ranks; a sum over a node, half or twice the mean would exceed this by
                # far.
                assert error.norm() < 0.35 * exact.norm()


def test_weights_travel_as_e4m3(ranks: Ranks) -> None:
    fp8 = {**QWZ, "zeropp": {"node_size": 2, "weight_format": "fp8"}}
    for numel, dtype in ((1, torch.float32), (997, torch.bfloat16), (4096, torch.float16)):
        found, as_int8 = (ranks(4).run(_round_trip, changes, numel, dtype, None) for changes in (fp8, {**QWZ, **NODES}))
        tiny = 2.0 ** -{torch.float32: 20, torch.bfloat16: 7, torch.float16: 10}[dtype]
        shards = torch.cat([mine["shard"].float() for mine in found])
        steps = torch.cat([_absmax(mine["shard"], FP8) / FP8.levels for mine in found])
        for mine in found:
            assert torch.equal(mine["coded full"], found[0]["coded full"])
            error = (mine["coded full"].float() - shards).abs()
            assert (error <= torch.maximum(shards.abs() / 16, steps / 1024) + (tiny + 2.0**-15) * shards.abs()).all()
        assert numel == 1 or not torch.equal(found[0]["coded full"], as_int8[0]["coded full"])
    for plain, coded, adam in ranks(4).run(_trained, [{"optimizer": SGD}, {"optimizer": SGD, **fp8}, fp8], "bf16"):
        assert differences(plain, coded) != []
        assert coded.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1)
        assert adam.losses[-1] < adam.losses[0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_values_stay_non_finite(ranks: Ranks, bad: float) -> None:
    found = ranks(4).run(_round_trip, {**QGZ, **NODES}, 600, torch.bfloat16, bad)
    assert not found[0]["coded mean"][0].isfinite()
    assert all(other["coded mean"].isfinite().all() for other in found[1:])


def _own_masters(engine: Any) -> list[Tensor]:
    """Returns this rank's live masters, one per buffer."""
    buffers = [buffer for unit in engine.units for buffer in unit.buffers if buffer.trainable]
    return [buffer.masters.read(buffer.masters.range) for buffer in buffers]


def _overflowing(changes: dict[str, Any]) -> tuple[int, bool, list[float]]:
    """Returns (skipped steps, whether they kept the weights, losses) when the second step overflows on one rank."""
    torch.manual_seed(7)
    model = Toy()
    settings = config(3, "fp16", **changes, fp16={"enabled": True, "initial_scale_power": 4})
    engine, *_ = zeroaccel.initialize(model, config=settings)
    losses: list[float] = []
    before: list[Tensor] = []
    for step, batch in enumerate(batches(engine.collectives.rank, 3)):
        loss = engine(batch)
        losses.append(loss.item())
        huge = step == 1 and engine.collectives.rank == 1
        engine.backward(loss * math.inf if huge else loss)
        if step == 1:
            before = [master.clone() for master in _own_masters(engine)]
        engine.step()
        if step == 1:
            same = all(torch.equal(one, other) for one, other in zip(before, _own_masters(engine), strict=True))
    skipped = engine.skipped_steps
    engine.destroy()
    return skipped, same, losses


def test_an_overflow_is_seen_through_the_codes(ranks: Ranks) -> None:
    for skipped, same, losses in ranks(4).run(_overflowing, ALL):
        assert skipped == 1
        assert same
        assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("world_size", [3, 4])
def test_training_with_codes_learns_as_without(ranks: Ranks, world_size: int) -> None:
    """Odd sizes, and numbers of ranks that are no powers of two."""
    hpz = {} if world_size == 3 else {"zero_hpz_partition_size": 2}
    nodes = {"zeropp": {"node_size": 1 if world_size == 3 else 2}}
    changes = [{}, {**QWZ, **nodes}, {**QGZ, **nodes}, {**QWZ, **QGZ, **hpz, **nodes}]
    for plain, *coded in ranks(world_size).run(_trained, changes, "bf16"):
        for run in coded:
            assert differences(plain, run) != []
            assert run.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1)
            assert abs(run.losses[0] / plain.losses[0] - 1) < 0.02  # at the first step
    runs = ranks(world_size).run(_trained, changes[3:], "bf16")
    again = ranks(world_size).run(_trained, changes[3:], "bf16")
    assert [differences(one[0], other[0]) for one, other in zip(runs, again, strict=True)] == [[]] * world_size


def _masters(changes: dict[str, Any]) -> tuple[bool, dict[str, Tensor]]:
    """Returns (whether forward and backward kept the masters, the weights that a gather outside training returns)."""
    torch.manual_seed(7)
    model = Toy()
    engine, *_ = zeroaccel.initialize(model, config=config(3, "bf16", **changes))
    masters = _own_masters(engine)
    before = [master.clone() for master in masters]
    engine.backward(engine(batches(0, 1)[0]))
    untouched = all(torch.equal(one, other) for one, other in zip(before, masters, strict=True))
    with zeroaccel.zero.GatheredParameters(list(model.parameters())):
        shown = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine.zero_grad()
    engine.destroy()
    return untouched, shown


def test_masters_and_what_is_saved_stay_exact(ranks: Ranks) -> None:
    plain, coded = ranks(4).run(_masters, {}), ranks(4).run(_masters, ALL)
    for (_, exact), (untouched, shown) in zip(plain, coded, strict=True):
        assert untouched
        assert all(torch.equal(exact[name], shown[name]) for name in exact)


def _watched(changes: dict[str, Any]) -> tuple[Run, list[QuantError], list[str]]:
    """Returns (a run of 4 steps, the quantization errors that its watch recorded, its log lines)."""
    seen: list[QuantError] = []

    def keep(engine: Engine) -> None:
        assert isinstance(engine.collectives, HierarchicalCollectives)
        assert engine.collectives.watch is not None
        nonlocal seen
        seen = engine.collectives.watch.seen

    with log_lines(logging.INFO) as lines:
        run = train(config(3, "bf16", **changes), steps=4, before=keep)
    return run, seen, [line for line in lines if "is off by" in line]


def test_the_watch_compares_and_changes_nothing(ranks: Ranks) -> None:
    watched = ranks(4).run(_watched, {**ALL, "zeropp": {"node_size": 2, "watch_interval": 3}})
    plain = ranks(4).run(_trained, [ALL], "bf16")
    for rank, (run, seen, lines) in enumerate(watched):
        assert differences(run, plain[rank][0]) == []
        assert [(d.step, d.kind) for d in seen] == [(step, k) for step in (0, 3) for k in ("gather", "reduction")]
        assert all(0 < d.relative_error < (0.01 if d.kind == "gather" else 0.25) for d in seen), seen
        assert len(lines) == (4 if rank == 0 else 0)


def _log_of_fallback(changes: dict[str, Any]) -> list[str]:
    with log_lines() as records:
        for _ in range(2):
            _collectives(changes)
    return [line for line in records if "zero_quantized_gradients" in line]


def test_quantized_gradients_on_one_node_fall_back_with_a_note(ranks: Ranks) -> None:
    first, *others = ranks(3).run(_log_of_fallback, QGZ)
    assert len(first) == 1
    assert "all ranks are on one node" in first[0]
    assert others == [[], []]
    exact = ranks(3).run(_round_trip, QGZ, 100, torch.float32, None)
    assert all(torch.equal(found["exact mean"], found["coded mean"]) for found in exact)


# -- checkpoints


class _Adapted(Toy):
    """A Toy in which only norms and temperature are trained, as under an adapter."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_("norm" in name or "temperature" in name)


def _resumed(
    folder: str, saves: dict[str, Any], resumes: list[dict[str, Any]], make: type[nn.Module]
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Returns the weights after six uninterrupted steps, and after resuming at step 3 under each of other settings."""

    def run(changes: dict[str, Any], load: bool) -> dict[str, Tensor]:
        torch.manual_seed(7)
        model = make()
        engine, *_ = zeroaccel.initialize(model, config=config(3, "bf16", **changes))
        if load:
            engine.load_checkpoint(folder)
        for step, batch in enumerate(batches(engine.collectives.rank, 6)):
            if step < 3 and load:
                continue
            if step == 3 and not load:
                engine.save_checkpoint(folder)
            train_step(engine, engine(batch))
        engine.destroy()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    return run(saves, False), [run(changes, True) for changes in resumes]


def test_checkpoints_of_replicas(ranks: Ranks, tmp_path: Path) -> None:
    layouts = [{}, {"mics_shard_size": 2}, {"mics_shard_size": 1}, {"zero_hpz_partition_size": 2}]
    for index, saves in enumerate(layouts[:3]):
        folder = str(tmp_path / str(index))
        for straight, resumed in ranks(4).run(_resumed, folder, saves, layouts, Toy):
            for again in resumed:
                assert all(torch.equal(straight[name], again[name]) for name in straight)
    # One set of shards is written, regardless of the number of replicas.
    sizes = [sum(file.stat().st_size for file in (tmp_path / str(i)).rglob("*.safetensors")) for i in range(3)]
    assert max(sizes) < 1.3 * min(sizes)


def test_frozen_weights_in_eight_bits(ranks: Ranks, tmp_path: Path) -> None:
    packed = {"zero_quantized_nontrainable_weights": True}
    for straight, resumed in ranks(2).run(_resumed, str(tmp_path), packed, [packed, {}], _Adapted):
        assert all(torch.equal(straight[name], resumed[0][name]) for name in straight)
        assert all(torch.equal(straight[name], resumed[1][name]) for name in straight)


def _stored(changes: dict[str, Any]) -> tuple[int, list[float], dict[str, Tensor]]:
    torch.manual_seed(7)
    model = _Adapted()
    engine, *_ = zeroaccel.initialize(model, config=config(3, "bf16", **changes))
    losses = []
    for batch in batches(engine.collectives.rank, 6):
        loss = engine(batch)
        losses.append(loss.item())
        train_step(engine, loss)
    nbytes = engine.model_state_nbytes()["params"]
    engine.destroy()
    return nbytes, losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def test_frozen_weights_in_eight_bits_are_half_as_large(ranks: Ranks) -> None:
    plain, packed = (ranks(2).run(_stored, change)[0] for change in ({}, {"zero_quantized_nontrainable_weights": True}))
    assert packed[0] < 0.75 * plain[0]  # padding to blocks of 512 is a third of matrices of 1,081
    assert packed[1][-1] == pytest.approx(plain[1][-1], rel=0.02)
    for name, weight in plain[2].items():
        step = weight.float().abs().max() / INT8.levels if weight.numel() else torch.tensor(0.0)
        if name in ("embed.weight", "layers.0.up.weight"):
            error = (packed[2][name].float() - weight.float()).abs().max()
            assert 0 < error <= 0.51 * step + 2.0**-8 * weight.float().abs().max(), name
