"""The declared format: spellings and values of each key, and the JSON schema for editors."""

from __future__ import annotations

import copy
import json
import pathlib
import sys
from typing import Any

import pydantic
import pytest
import torch

from zeroaccel.config import Config, load_config
from zeroaccel.config.normalize import NormalizedConfig
from zeroaccel.config.section import ConfigSection, field_paths, nested_section, spellings
from zeroaccel.errors import ConfigError


def _sections(section: type[ConfigSection] = Config) -> dict[str, type[ConfigSection]]:
    found = {section.__name__: section}
    for field in section.model_fields.values():
        nested = nested_section(field)
        if nested is not None:
            found |= _sections(nested)
    return found


def _renamed() -> list[tuple[tuple[str, ...], str, str]]:
    """Returns (path of the section, name, other spelling) for each further spelling of a key."""
    found = []
    for path in field_paths(Config):
        section: type[ConfigSection] = Config
        for part in path[:-1]:
            section = nested_section(section.model_fields[part]) or section
        found += [(path[:-1], path[-1], mark.name) for mark in spellings(section.model_fields[path[-1]])]
    return found


def _wrap(path: tuple[str, ...], value: object) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def test_defaults_of_an_empty_config() -> None:
    config = load_config({})
    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.sub_group_size) == (0, 500_000_000, 1_000_000_000)
    assert (zero.prefetch_bucket_size, zero.param_persistence_threshold) == (50_000_000, 100_000)
    assert (zero.max_live_parameters, zero.max_reuse_distance) == (1_000_000_000, 1_000_000_000)
    assert zero.model_persistence_threshold == sys.maxsize
    assert config.precision == "fp32"
    assert config.optimizer is None
    assert config.managed_gradient_accumulation is True
    assert config.steps_per_print is None


def test_every_default_is_accepted_when_written_out() -> None:
    """The complete default config, as JSON, is a legal config with the same values."""
    written = json.loads(Config().model_dump_json(exclude={"optimizer", "scheduler"}))
    assert load_config(written) == Config()


NOT_THE_DEFAULT: dict[str, Any] = {
    "bf16": {"enabled": True},
    "tensor_parallel": {"tp_grain_size": 2},
    "seq_parallel_communication_data_type": "bf16",
    "gather_16bit_weights_on_model_save": True,
    "use_all_reduce_for_fetch_params": True,
    "allgather_sequential": True,
    "replace_with_kernel_inject": True,
}


@pytest.mark.parametrize(("path", "name", "other"), _renamed())
def test_both_spellings_reach_one_attribute(path: tuple[str, ...], name: str, other: str) -> None:
    value = NOT_THE_DEFAULT.get(name, 7)
    tree = NormalizedConfig(Config, _wrap(path, {name: value})).tree
    assert tree == _wrap(path, {name: value})
    assert NormalizedConfig(Config, _wrap(path, {other: value})).tree == tree
    assert Config.model_validate(tree) != Config()


def test_stage_3_keys_have_their_long_spelling() -> None:
    names = """prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
        max_reuse_distance gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save
        module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"""
    long = {other for path, _, other in _renamed() if path == ("zero_optimization",)}
    assert {f"stage3_{name}" for name in names.split()} <= long


ZERO, DTYPE = "zero_optimization", "communication_data_type"


@pytest.mark.parametrize(
    ("tree", "path", "value"),
    [
        ({}, "gradient_clipping", 0.0),
        ({"gradient_clipping": "auto"}, "gradient_clipping", 0.0),
        ({"gradient_clipping": 1}, "gradient_clipping", 1.0),
        ({ZERO: {"reduce_bucket_size": 500_000_000}}, "zero_optimization.reduce_bucket_size", 500_000_000),
        ({ZERO: {"reduce_bucket_size": 5e8}}, "zero_optimization.reduce_bucket_size", 500_000_000),
        ({"zero_allow_untested_optimizer": 0}, "zero_allow_untested_optimizer", False),
        ({"zero_allow_untested_optimizer": 1}, "zero_allow_untested_optimizer", True),
        *(({DTYPE: name}, DTYPE, "fp16") for name in ("fp16", "half")),
        *(({DTYPE: name}, DTYPE, "bf16") for name in ("BF16", torch.bfloat16)),
        ({DTYPE: "torch.float32"}, DTYPE, "fp32"),
        *(({DTYPE: name}, DTYPE, None) for name in ("none", None)),
        ({"steps_per_print": float("inf")}, "steps_per_print", None),
        ('{"steps_per_print": Infinity}', "steps_per_print", None),
        ({"steps_per_print": 10}, "steps_per_print", 10),
        ({"checkpoint": {"tag_validation": "Warn"}}, "checkpoint.tag_validation", "warn"),
        ({"gradient_allreduce_op": "SUM"}, "gradient_allreduce_op", "sum"),
        ({"log_level": "INFO"}, "log_level", "info"),
        ({ZERO: {"leaf_module": {"classes": "Block"}}}, "zero_optimization.leaf_module.classes", ("Block",)),
        ({ZERO: {"leaf_module": {"classes": ["Block"]}}}, "zero_optimization.leaf_module.classes", ("Block",)),
        (
            {ZERO: {"offload_optimizer": {"device": "none", "nvme_path": pathlib.Path("/local")}}},
            "zero_optimization.offload_optimizer.nvme_path",
            "/local",
        ),
    ],
)
def test_a_value_has_one_form_however_it_was_written(tree: Any, path: str, value: object) -> None:
    found: Any = load_config(tree)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("number", ["five", "500 MB", 1.5, True, None, [1], float("inf"), float("nan"), -1])
def test_sizes_must_be_whole_numbers(number: object) -> None:
    with pytest.raises(ConfigError, match=r"^zero_optimization\.reduce_bucket_size: expected a "):
        load_config({"zero_optimization": {"reduce_bucket_size": number}})


@pytest.mark.parametrize("flag", ["enabled", "2", 2, 1.0, None])
def test_flags_are_true_or_false_only(flag: object) -> None:
    with pytest.raises(ConfigError, match=r"^dump_state: expected true or false, got "):
        load_config({"dump_state": flag})


def test_the_config_is_immutable() -> None:
    config = load_config({})
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.train_batch_size = 3  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.zero_optimization.stage = 3  # type: ignore[misc]


def test_a_copy_keeps_its_origin() -> None:
    config = load_config({"zero_optimization": {"reduce_scatter": True, "stage": "auto"}})
    twin = copy.deepcopy(config)
    assert twin == config
    assert (twin.notes, twin.unresolved, twin.raw) == (config.notes, config.unresolved, config.raw)


def test_equality_is_of_values_not_of_spelling() -> None:
    assert load_config({"bfloat16": {"enabled": True}}) == load_config({"bf16": {"enabled": True}})
    assert load_config({"bf16": {"enabled": True}}) != load_config({})


@pytest.mark.parametrize("section", _sections().values(), ids=_sections())
def test_every_key_is_described(section: type[ConfigSection]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no description"
        assert len(field.description) > 5


@pytest.mark.parametrize("value", [None, "x", [1], {1: 2}, float("nan")], ids=repr)
def test_any_value_anywhere_is_taken_or_a_config_error(value: object) -> None:
    refused = 0
    for path in field_paths(Config):
        try:
            load_config(_wrap(path, value))
        except ConfigError:
            refused += 1
    assert refused > 100


def test_json_schema_serves_an_editor() -> None:
    schema = Config.model_json_schema()
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    size = schema["properties"]["train_batch_size"]
    assert {"const": "auto"} in size["anyOf"]
    assert size["description"].startswith("Number of samples per optimizer step")
    zero = schema["$defs"]["ZeroOptimization"]["properties"]
    assert zero["stage3_prefetch_bucket_size"] == zero["prefetch_bucket_size"]
    assert zero["prefetch_bucket_size"]["default"] == 50_000_000
    assert zero["stage3_gather_fp16_weights_on_model_save"]["deprecated"] is True
    assert zero["cpu_offload"]["deprecated"] is True
    assert "deprecated" not in zero["stage3_max_live_parameters"]
    stages = schema["$defs"]["Pipeline"]["properties"]["stages"]
    assert "anyOf" not in stages, "`auto` is this key's own value"
