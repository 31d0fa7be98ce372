"""Stages and devices as plans."""

from __future__ import annotations

import dataclasses

import pytest

from zeroaccel.config import Config, ShardPlan, TierPlan, load_config, overlaps_communication, shard_plan, tier_plan
from zeroaccel.config.schema_zero import OffloadOptimizer, OffloadParam, ZeroOptimization


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
    ("stage", "asked", "overlaps"), [(2, None, False), (3, None, True), (2, True, True), (3, False, False)]
)
def test_overlap_is_on_by_default_where_parameters_are_sharded(stage: int, asked: bool | None, overlaps: bool) -> None:
    config = load_config({"zero_optimization": {"stage": stage, "overlap_comm": asked}})
    assert overlaps_communication(config) is overlaps
