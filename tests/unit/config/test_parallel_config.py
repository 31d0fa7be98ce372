"""`ParallelConfig`: which ranks divide experts, and sizes that do not go together."""

from __future__ import annotations

import pytest

from zeroaccel.config.parallel import ParallelConfig, with_config_axes
from zeroaccel.errors import UsageError


def test_neighbours_of_a_data_group_divide_experts() -> None:
    mesh = ParallelConfig(pp=2, sp=2, ep_size=2).resolve(8)
    assert (mesh.ep, mesh.dp_shard) == (2, 2)
    assert mesh.data_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.expert_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.expert_holders == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.described == "pp 2 x (dp x sp) 4 x tp 1, ep 2"


def test_ep_is_no_factor_of_the_mesh() -> None:
    assert ParallelConfig(ep=4).resolve(4).data_parallel_size == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ep": 3}, r"ParallelConfig\(ep=3\): expected a divisor of dp_shard x sp, 4 ranks, got 3"),
        ({"ep": 0}, r"ParallelConfig\(ep\): expected a positive number of ranks, got 0"),
        ({"ep": 2, "tp": 2}, r"ParallelConfig\(ep=2, tp=2\): expected tp of 1 where ranks divide the experts"),
        ({"ep": 2, "dp_replicate": 2}, r"ParallelConfig\(ep=2, dp_replicate=2\): expected dp_replicate of 1"),
    ],
)
def test_sizes_that_do_not_go_together_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParallelConfig(**sizes).resolve(4)


@pytest.mark.parametrize(
    ("section", "ep"),
    [
        ({"enabled": True, "autoep_size": 4, "preset_model": "mixtral"}, 4),
        ({"enabled": True}, None),
        ({"enabled": False, "autoep_size": 4, "top_k": 2}, None),
        ({"autoep_size": 4}, None),
    ],
)
def test_the_json_says_how_many_ranks_divide_experts(section: dict[str, object], ep: int | None) -> None:
    mesh = with_config_axes({"expert_parallel": section}, None)
    assert (None if mesh is None else mesh.ep) == ep


@pytest.mark.parametrize(
    ("key", "value"), [("top_k", 1), ("load_balance_coeff", 0.1), ("expert_tensor_parallel_size", 2)]
)
def test_routing_that_is_not_the_models_is_refused(key: str, value: object) -> None:
    section = {"enabled": True, "autoep_size": 2, key: value}
    with pytest.raises(UsageError, match=f"expert_parallel.{key}: expected nothing"):
        with_config_axes({"expert_parallel": section}, None)


def test_sizes_of_json_and_program_must_agree() -> None:
    section = {"enabled": True, "autoep_size": 2}
    assert with_config_axes({"expert_parallel": section}, ParallelConfig(ep=2)) == ParallelConfig(ep=2)
    with pytest.raises(UsageError, match=r"ParallelConfig\(ep\): expected 2, as expert_parallel.autoep_size"):
        with_config_axes({"expert_parallel": section}, ParallelConfig(ep=4))
