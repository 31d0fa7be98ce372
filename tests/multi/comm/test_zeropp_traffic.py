"""Bytes between nodes per step, counted message by message on ranks that simulate several machines.

The unit is the model's bytes, per rank and without the factor (W - L) / W, with L ranks per node. Plain gathers and
reductions, which send each element directly to the ranks that need it, take 3 units (forward, backward, gradients).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import SGD, Toy, batches, config, recording, train_step
from zeroaccel.config import CommPlan, comm_plan, load_config, shard_plan
from zeroaccel.config.comm_plan import step_traffic

QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}


class Wide(Toy):
    """A model whose parameters are all trained, and wide enough that scales are small compared with the codes."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=151)
        self.frozen.requires_grad_(True)


def _measure(node_size: int, combinations: list[dict[str, Any]]) -> list[tuple[int, int, list[int], dict[str, int]]]:
    """Returns, per combination: bytes (inside, across) of step 3, elements per unit, bytes across nodes by purpose."""
    found = []
    for changes in combinations:
        torch.manual_seed(7)
        recorder = recording()
        zero = {**changes, "zeropp": {"node_size": node_size, **changes.get("zeropp", {})}}
        settings = config(3, "bf16", stage3_max_reuse_distance=0, optimizer=SGD, **zero)
        engine, *_ = zeroaccel.initialize(Wide(), config=settings, collectives=recorder)
        recorder = engine.collectives
        for batch in batches(recorder.rank, 3):
            recorder.reset()
            train_step(engine, engine(batch))
        traffic = recorder.traffic()
        sums = {link: sum(sent.nbytes for sent in traffic if sent.link == link) for link in ("inside", "across")}
        assert sums["across"] == recorder.across_nbytes()
        purposes = {sent.purpose: 0 for sent in traffic} | {
            s.purpose: sum(o.nbytes for o in traffic if (o.purpose, o.link) == (s.purpose, "across")) for s in traffic
        }
        # The requested and the sent bytes are counted independently.
        asked = sum(c.nbytes for c in recorder.calls if c.op.startswith(("gather_", "all_gather", "reduce_scatter")))
        assert asked == sum(sums.values()), (asked, sums)
        found.append((sums["inside"], sums["across"], [unit.numel for unit in engine.units], purposes))
        engine.destroy()
    return found


def _combinations(node_size: int) -> dict[str, tuple[dict[str, Any], float]]:
    """Maps each combination to (settings, expected model bytes across nodes per step, without scales)."""
    hpz = {"zero_hpz_partition_size": node_size}
    return {
        "plain": ({}, 3.0),
        "qwZ": (QWZ, 2.0),
        "hpZ": (hpz, 2.0),
        "qwZ + hpZ": ({**QWZ, **hpz}, 1.5),
        "qgZ": (QGZ, 2 + 0.25 / node_size),
        "all three": ({**QWZ, **hpz, **QGZ}, 0.5 + 0.25 / node_size),
    }


@pytest.mark.parametrize(("world_size", "node_size"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.slow)])
def test_traffic_across_nodes(ranks: Ranks, world_size: int, node_size: int) -> None:
    combinations = _combinations(node_size)
    measured = ranks(world_size).run(_measure, node_size, [settings for settings, _ in combinations.values()])
    for index, (name, (settings, expected)) in enumerate(combinations.items()):
        everyone = [of_rank[index] for of_rank in measured]
        numels = everyone[0][2]
        unit = sum(numels) * 2 * (world_size - node_size) / world_size
        for _, across, _, _ in everyone:
            ratio = across / unit
            print(f"{world_size} ranks as {world_size // node_size}x{node_size}, {name}: {ratio:.4f} of the model")
            assert expected <= ratio <= expected * 1.03, (name, ratio)
        if name == "all three":
            assert ratio <= 0.75 * 1.03
            assert everyone[0][3]["unshard"] / unit == pytest.approx(0.5, rel=0.03)
        formula = step_traffic(_plan(settings, world_size), numels, node_size)
        assert [sum(row[k] for row in everyone) / world_size for k in (0, 1)] == [formula.inside, formula.across], name


def _plan(settings: dict[str, Any], world_size: int) -> CommPlan:
    config = load_config({"train_batch_size": 24, "zero_optimization": {"stage": 3, **settings}})
    return comm_plan(config, shard_plan(config), world_size)


@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_the_formula_counts_replicas(ranks: Ranks, node_size: int) -> None:
    combinations = [{"mics_shard_size": 2}, {"mics_shard_size": 1}]
    measured = ranks(4).run(_measure, node_size, combinations)
    for index, settings in enumerate(combinations):
        everyone = [of_rank[index] for of_rank in measured]
        formula = step_traffic(_plan(settings, 4), everyone[0][2], node_size)
        assert [sum(row[k] for row in everyone) / 4 for k in (0, 1)] == [formula.inside, formula.across], settings
