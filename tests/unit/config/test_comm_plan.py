"""Communication plans: the ranks of each shard, the bits in which it is sent, and the formulas of the traffic."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.log_lines import log_lines
from tests.support.refusals import refused
from zeroaccel.comm.mesh_layout import MeshLayout
from zeroaccel.config import (
    CommPlan,
    Config,
    ShardPlan,
    TierPlan,
    comm_plan,
    load_config,
    overlaps_communication,
    shard_plan,
    tier_plan,
)
from zeroaccel.config.comm_plan import StepTraffic, code_nbytes, step_traffic
from zeroaccel.config.schema_zero import OffloadOptimizer, OffloadParam, ZeroOptimization
from zeroaccel.errors import ConfigError


def _plan(world_size: int, **zero: Any) -> CommPlan:
    config = load_config({"train_batch_size": 24, "zero_optimization": {"stage": 3, **zero}})
    return comm_plan(config, shard_plan(config), world_size)


def test_a_config_without_communication_settings_is_plain() -> None:
    assert _plan(6).plain
    assert _plan(6, mics_shard_size=6).plain
    assert _plan(6, mics_shard_size=-1, zero_hpz_partition_size=1).plain
    for asked in ({"mics_shard_size": 2}, {"zero_hpz_partition_size": 3}, {"zero_quantized_weights": True}):
        assert not _plan(6, **asked).plain


def test_a_partition_larger_than_the_job_is_the_job() -> None:
    """So a template for machines with 8 ranks also runs on one rank; a log line names the setting without effect."""
    with log_lines() as lines:
        assert _plan(3, zero_hpz_partition_size=77).secondary_size == 3
    assert lines == ["zero_optimization.zero_hpz_partition_size: no second copy: 77 is more than the 3 ranks"]


@pytest.mark.parametrize(
    ("zero", "key", "says"),
    [
        ({"mics_shard_size": 4}, "mics_shard_size", "a divisor of the 6 ranks: 1, 2, 3, 6"),
        ({"zero_hpz_partition_size": 4}, "zero_hpz_partition_size", "a divisor of the 6 ranks: 1, 2, 3, 6"),
        (
            {"mics_shard_size": 3, "zero_hpz_partition_size": 2},
            "zero_hpz_partition_size",
            "a divisor of mics_shard_size 3: 1, 3",
        ),
        ({"zeropp": {"node_size": 5}}, "zeropp.node_size", "a divisor of the 6 ranks"),
        ({"zero_hpz_partition_size": 0}, "zero_hpz_partition_size", "a number above 0; 1 is off"),
        ({"mics_shard_size": 0}, "mics_shard_size", "a number above 0, or -1 for all"),
        ({"mics_shard_size": -2}, "mics_shard_size", "a number above 0, or -1 for all"),
        (
            {"mics_shard_size": 3, "zero_quantized_gradients": True},
            "zero_quantized_gradients",
            "sums across replicas (mics_shard_size) cannot be quantized",
        ),
    ],
)
def test_mistakes_have_an_address(zero: dict[str, Any], key: str, says: str) -> None:
    with refused(ConfigError, f"zero_optimization.{key}: ", says):
        _plan(6, **zero)


_OF_STAGE_3 = {
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
    "zero_quantized_nontrainable_weights": True,
    "zero_quantized_gradients": True,
}


@pytest.mark.parametrize("key", _OF_STAGE_3)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_each_is_a_note_and_changes_nothing(key: str, stage: int) -> None:
    config = load_config({"train_batch_size": 6, "zero_optimization": {"stage": stage, key: _OF_STAGE_3[key]}})
    assert config.notes == (
        f"zero_optimization.{key}: parameters are sharded at stage 3 only, and the stage is {stage}",
    )
    assert comm_plan(config, shard_plan(config), 6).plain


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicas_need_stage_3(stage: int) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": {"stage": stage, "mics_shard_size": 2}})
    assert f"mics_shard_size: parameters are sharded at stage 3 only, and the stage is {stage}" in str(caught.value)


ALL = (tuple(range(8)),)


def test_groups_of_a_layout() -> None:
    plan = _plan(8, mics_shard_size=4, zero_hpz_partition_size=2)
    layout = MeshLayout.of(plan, ALL, ((0, 1), (2, 3), (4, 5), (6, 7)))
    assert layout.shard_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.replicate_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.secondary_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.hops is None


def test_hops_follow_the_nodes() -> None:
    plan = _plan(8, zero_quantized_gradients=True)
    layout = MeshLayout.of(plan, ALL, ((0, 2, 4, 6), (1, 3, 5, 7)))  # ranks need not be numbered node by node
    assert layout.hops == (((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 1), (2, 3), (4, 5), (6, 7)))


def test_a_grid_has_hops_of_its_own_in_each_column() -> None:
    plan = _plan(4, zero_quantized_gradients=True)
    layout = MeshLayout.of(plan, ((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert layout.hops == (((0, 2), (4, 6), (1, 3), (5, 7)), ((0, 4), (2, 6), (1, 5), (3, 7)))


def test_four_bit_gradients_need_several_equal_nodes() -> None:
    plan, forced = _plan(8, zero_quantized_gradients=True), {"quantize_gradients_on_one_node": True}
    alone = MeshLayout.of(plan, ALL, ALL)
    assert alone.hops is None
    assert "one node" in alone.exact_reason
    uneven = MeshLayout.of(plan, ALL, ((0, 1, 2), (3, 4, 5, 6, 7)))
    assert uneven.hops is None
    assert "different numbers of ranks (3, 5)" in uneven.exact_reason
    plan = _plan(8, zero_quantized_gradients=True, zeropp=forced)
    assert MeshLayout.of(plan, ALL, ALL).hops == (ALL, tuple((rank,) for rank in range(8)))
    assert MeshLayout.of(plan, ALL, ((0, 1, 2), (3, 4, 5, 6, 7))).hops == (tuple((rank,) for rank in range(8)), ALL)


def test_the_formulas_of_the_paper() -> None:
    """Traffic across nodes in units of the model's 2 bytes per element; with large units, scales and padding vanish."""
    numel, per_node, ranks = 1 << 24, 4, 64
    unit = 2 * numel * (ranks - per_node) / ranks

    def across(**zero: Any) -> float:
        return step_traffic(_plan(ranks, **zero), [numel], per_node).across / unit

    hpz, qwz, qgz = {"zero_hpz_partition_size": 4}, {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
    assert across() == 3
    assert across(**hpz) == 2
    assert across(**qwz) == pytest.approx(2, rel=0.01)
    assert across(**qwz, **hpz) == pytest.approx(1.5, rel=0.01)
    assert across(**qwz, **hpz, **qgz) == pytest.approx(0.5 + 0.25 / per_node, rel=0.02)
    assert across(mics_shard_size=4) < 1  # only a fourth of the sums crosses nodes


def test_everything_inside_one_node_crosses_nothing() -> None:
    traffic = step_traffic(_plan(8, zero_quantized_weights=True), [4096], 8, accumulation=3)
    assert traffic.across == 0
    assert traffic.inside == 7 * (6 * code_nbytes(512, 8, 512) + 3 * 512 * 2)
    assert StepTraffic(1.0, 2.0).times(2) + StepTraffic(1.0, 1.0) == StepTraffic(3.0, 5.0)


@pytest.mark.parametrize(
    ("stage", "plan"),
    [
        (0, ShardPlan(optimizer=False, grads=False, params=False)),
        (1, ShardPlan(optimizer=True, grads=False, params=False)),
        (2, ShardPlan(optimizer=True, grads=True, params=False)),
        (3, ShardPlan(optimizer=True, grads=True, params=True)),
    ],
)
def test_a_stage_is_three_booleans(stage: int, plan: ShardPlan) -> None:
    assert shard_plan(load_config({"zero_optimization": {"stage": stage}})) == plan


def test_without_offload_everything_is_on_the_device() -> None:
    nothing = TierPlan(param="device", optimizer="device")
    assert tier_plan(load_config({})) == nothing
    assert tier_plan(load_config({"zero_optimization": {"offload_optimizer": {"device": "none"}}})) == nothing


def test_devices_are_residences() -> None:
    zero = ZeroOptimization(
        stage=3, offload_param=OffloadParam(device="nvme"), offload_optimizer=OffloadOptimizer(device="cpu")
    )
    assert tier_plan(Config(zero_optimization=zero)) == TierPlan(param="nvme", optimizer="host")


def test_plans_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard_plan(load_config({})).params = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("stage", "asked", "on_cpu", "with_streams"),
    [
        (1, None, False, True),
        (2, None, False, True),
        (3, None, True, True),
        (2, True, True, True),
        (2, False, False, False),
        (3, False, False, False),
    ],
)
def test_overlap_is_on_by_default_with_streams_or_sharded_parameters(
    stage: int, asked: bool | None, on_cpu: bool, with_streams: bool
) -> None:
    config = load_config({"zero_optimization": {"stage": stage, "overlap_comm": asked}})
    assert overlaps_communication(config, has_streams=False) is on_cpu
    assert overlaps_communication(config, has_streams=True) is with_streams
