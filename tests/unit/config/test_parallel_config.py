"""`ParallelConfig`: the ranks that divide experts, and sizes that contradict each other."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest

from zeroaccel.config.launch.launch_settings import LaunchSettings
from zeroaccel.config.launch.launch_sources import from_environment, launched_environment
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
        ({"ep": 2, "tp": 2}, r"ParallelConfig\(ep=2, tp=2\): expected tp=1 if ranks divide the experts"),
        ({"ep": 2, "dp_replicate": 2}, r"ParallelConfig\(ep=2, dp_replicate=2\): expected dp_replicate=1"),
    ],
)
def test_sizes_that_do_not_go_together_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParallelConfig(**sizes).resolve(4)


@pytest.mark.parametrize(
    ("section", "ep"),
    [
        ({"enabled": True, "autoep_size": 4, "preset_model": "mixtral"}, 4),
        ({"enabled": "true", "autoep_size": "4"}, 4),
        ({"enabled": True}, None),
        ({"enabled": False, "autoep_size": 4, "top_k": 2}, None),
        ({"autoep_size": 4}, None),
    ],
)
def test_the_json_says_how_many_ranks_divide_experts(section: dict[str, object], ep: int | None) -> None:
    mesh = with_config_axes({"expert_parallel": section}, None)
    assert (None if mesh is None else mesh.ep) == ep


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_k", 1), ("load_balance_coeff", 0.1), ("expert_tensor_parallel_size", 2), ("comm_max_tokens_per_rank", 0)],
)
def test_routing_that_is_not_the_models_is_refused(key: str, value: object) -> None:
    section = {"enabled": True, "autoep_size": 2, key: value}
    with pytest.raises(UsageError, match=f"expert_parallel.{key}: expected no such key"):
        with_config_axes({"expert_parallel": section}, None)


def test_sizes_of_json_and_program_must_agree() -> None:
    section = {"enabled": True, "autoep_size": 2}
    assert with_config_axes({"expert_parallel": section}, ParallelConfig(ep=2)) == ParallelConfig(ep=2)
    with pytest.raises(UsageError, match=r"ParallelConfig\(ep\): expected 2, the value of expert_parallel.autoep_size"):
        with_config_axes({"expert_parallel": section}, ParallelConfig(ep=4))


@pytest.mark.parametrize("size", [0, -1, 2.5, True, None])
def test_a_buffer_has_a_positive_number_of_bytes(size: Any) -> None:
    with pytest.raises(UsageError, match=r"ParallelConfig\(ep_buffer_nbytes\): expected a positive number of bytes"):
        ParallelConfig(ep=2, ep_buffer_nbytes=size)


def test_transformers_distributed_config_is_a_mesh(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    plan = {"layers.*.mlp.experts": "ep_dispatch_experts"}
    with caplog.at_level(logging.INFO, logger="zeroaccel"):
        mesh = ParallelConfig.of(transformers.DistributedConfig(fsdp_size=4, ep_size=2, ep_plan=plan), "parallel")
    assert (mesh.dp_shard, mesh.ep, mesh.tp) == (4, 2, 1)
    assert "parallel: DistributedConfig(ep_plan): does nothing" in caplog.text
    mesh = ParallelConfig.of(transformers.DistributedConfig(tp_size=2, dp_replicate_size=2, fsdp_size=2), "parallel")
    assert (mesh.dp_shard, mesh.dp_replicate, mesh.tp, mesh.tp_plan) == (2, 2, 2, "auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 2, "enable_expert_parallel": True}, "(ep_size): expected 1, got 2; ranks that divide experts"),
        ({"tp_size": 2, "tp_plan": {}}, "(tp_plan): expected 'auto', got {}"),
        ({"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}, "(ep_implementation): expected 'auto'"),
        ({"fsdp_size": 2, "fsdp_cpu_offload": True}, "(fsdp_cpu_offload): expected False, got True; set zero_opt"),
        ({"fsdp_size": 2, "fsdp_mixed_precision": True}, "(fsdp_mixed_precision): expected False, got True; set bf16"),
    ],
)
def test_unsupported_settings_of_a_distributed_config_are_refused(arguments: dict[str, Any], message: str) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.warns(FutureWarning) if "enable_expert_parallel" in arguments else nullcontext():
        config = transformers.DistributedConfig(**arguments)
    with pytest.raises(UsageError) as caught:
        ParallelConfig.of(config, "parallel")
    assert f"parallel: DistributedConfig{message}" in str(caught.value)


def test_context_parallel_ranks_of_accelerate_split_sequences(caplog: pytest.LogCaptureFixture) -> None:
    handler = type("TorchContextParallelConfig", (), {"cp_comm_strategy": "alltoall"})()
    source = type("ParallelismConfig", (), {"cp_size": 4, "sp_size": 1, "tp_size": 2, "cp_handler": handler})()
    with caplog.at_level("INFO", logger="zeroaccel"):
        assert ParallelConfig.of(source, "parallel") == ParallelConfig(sp=4, tp=2)
    assert "parallel: cp_size=4 is sp=4" in caplog.text
    assert "cp_comm_strategy='alltoall'" in caplog.text


def test_the_launch_passes_the_axis_of_experts_on() -> None:
    variables = launched_environment(LaunchSettings(num_processes=4, ep_size=2), {"ep_size": "--ep_size"})
    settings, _ = from_environment(variables)
    assert settings.parallel == ParallelConfig(ep=2)
