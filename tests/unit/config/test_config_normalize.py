"""Older spellings, dotted keys and "auto": their normal forms and notes."""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import pytest

from tests.support.refusals import message
from zeroaccel.config import load_config
from zeroaccel.config.diagnostics import Provenance
from zeroaccel.config.launch.launch_settings import LaunchFile
from zeroaccel.config.normalize import NormalizedConfig
from zeroaccel.config.parallel import with_config_axes
from zeroaccel.config.schema import Config
from zeroaccel.config.section import ConfigSection, field_paths, nested_section
from zeroaccel.errors import ConfigError


def test_auto_reads_as_the_default_and_is_listed() -> None:
    config = load_config("""
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "fp16": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-06}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto",
        "offload_optimizer": {"device": "none", "pin_memory": "auto"}}}
    """)
    assert " ".join(config.unresolved) == (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
        "bf16.enabled fp16 optimizer.params.lr optimizer.params.betas scheduler.params.total_num_steps "
        "zero_optimization.prefetch_bucket_size zero_optimization.offload_optimizer.pin_memory"
    )
    assert config.train_batch_size is None
    assert config.gradient_clipping == 0.0
    assert config.precision == "fp32"
    assert config.zero_optimization.prefetch_bucket_size == 50_000_000
    assert config.optimizer is not None
    assert config.optimizer.params == {"eps": 1e-6}
    assert config.scheduler is not None
    assert config.scheduler.params == {}
    assert config.raw["optimizer"]["params"]["lr"] == "auto"


def test_auto_is_a_value_where_the_default_is_auto() -> None:
    config = load_config({"data_types": {"keep_in_fp32_modules": "auto"}, "pipeline": {"stages": "auto"}})
    assert config.unresolved == ()
    assert config.data_types.keep_in_fp32_modules == "auto"
    assert load_config({"data_types": {"keep_in_fp32_modules": ["a"]}}).data_types.keep_in_fp32_modules == ("a",)


def test_every_key_of_the_config_may_be_auto() -> None:
    """Except names without a default."""
    tree = dict.fromkeys(Config.model_fields, "auto")
    assert load_config(tree).unresolved == tuple(tree)


def test_a_bare_flag_for_zero_is_stage_1_or_0() -> None:
    config = load_config({"zero_optimization": True})
    assert config.zero_optimization.stage == 1
    assert config.notes == ("zero_optimization: true is an older form of stage 1",)
    assert load_config({"zero_optimization": False}).zero_optimization.stage == 0


def test_retired_offload_keys_become_sections() -> None:
    given = {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}
    canonical = NormalizedConfig(Config, given)
    assert canonical.tree == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    }
    assert [note.line(Provenance()) for note in canonical.notes] == [
        "zero_optimization.cpu_offload: an older form of zero_optimization.offload_optimizer with device cpu",
        "zero_optimization.cpu_offload_param: an older form of zero_optimization.offload_param with device cpu",
    ]


def test_retired_keys_that_are_false_leave_no_section() -> None:
    config = load_config({"zero_optimization": {"cpu_offload": False, "cpu_offload_use_pin_memory": False}})
    assert config.zero_optimization.offload_optimizer is None
    assert config.notes == (
        "zero_optimization.cpu_offload: false is the default; the key is no longer needed",
        "zero_optimization.cpu_offload_use_pin_memory: pin_memory in the offload sections takes precedence",
    )
    assert load_config({"zero_optimization": {"cpu_offload": "auto"}}).unresolved == (
        "zero_optimization.offload_optimizer",
    )


def test_a_deprecated_name_leaves_a_note() -> None:
    config = load_config({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}})
    assert config.zero_optimization.gather_16bit_weights_on_model_save is True
    key = "zero_optimization.stage3_gather_fp16_weights_on_model_save"
    assert set(config.notes) == {
        f"{key}: an older name of zero_optimization.gather_16bit_weights_on_model_save",
        f"{key}: save_16bit_model always gathers the weights",
    }
    assert load_config({"zero_optimization": {"stage3_max_reuse_distance": 1}}).notes == ()


SAME = "zero_optimization.{}: the same setting as zero_optimization.{}; keep one"


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16: the same setting as bf16; keep one"),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 1, "max_live_parameters": 2}},
            SAME.format("max_live_parameters", "stage3_max_live_parameters"),
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "cpu_offload": True}},
            SAME.format("cpu_offload", "offload_optimizer"),
        ),
        (
            {"zero_optimization": {"cpu_offload": "perhaps"}},
            "zero_optimization.cpu_offload: expected true or false, got 'perhaps'",
        ),
    ],
)
def test_a_setting_given_under_two_names(tree: dict[str, Any], said: str) -> None:
    assert message(ConfigError, load_config, tree) == said


def test_two_names_that_agree_are_noted() -> None:
    config = load_config({"aio": {"thread_count": 2, "intra_op_parallelism": 2}})
    assert config.aio.intra_op_parallelism == 2
    assert config.notes == ("aio.intra_op_parallelism: the same setting as aio.thread_count, with the same value",)


def _numeric_keys(root: type[ConfigSection]) -> list[tuple[tuple[str, ...], object]]:
    """Returns (path, a numeric or boolean value) of every key that takes a number or a flag."""
    found = []
    properties = cache(lambda section: section.model_json_schema()["properties"])
    for path in field_paths(root):
        section = root
        for part in path[:-1]:
            section = nested_section(section.model_fields[part]) or section
        schema = properties(section)[path[-1]]
        choices = schema.get("anyOf", [schema])
        types = {choice.get("type") for choice in choices} | {type(choice.get("const")).__name__ for choice in choices}
        if {"integer", "number"} & types:
            found.append((path, 1 if "integer" in types else 0.5))
        elif types & {"boolean", "bool"}:
            found.append((path, True))
    return found


@pytest.mark.parametrize("root", [Config, LaunchFile])
def test_every_key_reads_a_quoted_number_or_flag(root: type[ConfigSection]) -> None:
    keys = _numeric_keys(root)
    assert len(keys) > {Config: 150, LaunchFile: 30}[root]
    for path, value in keys:
        plain, quoted, spaced = (
            NormalizedConfig(root, reduce(lambda below, key: {key: below}, reversed(path), given))
            for given in (value, str(value), f" {str(value).upper()} ")
        )
        assert repr(quoted.tree) == repr(plain.tree) == repr(spaced.tree), path
        assert [note.path for note in quoted.notes if "in quotes is read as" in note.text] == [path]


def test_quoted_values_in_a_config_count_like_plain_ones() -> None:
    zero = {
        "stage": "2",
        "overlap_comm": "True",
        "reduce_bucket_size": "5e8",
        "round_robin_gradients": "no",
        "cpu_offload": "true",
    }
    params = {"lr": "1e-3", "betas": ["0.9", "0.95"], "amsgrad": "False", "name": "warm"}
    config = load_config(
        {
            "train_batch_size": "8",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "1",
            "zero_optimization": zero,
            "fp16": {"enabled": "true", "loss_scale": "0"},
            "optimizer": {"type": "AdamW", "params": params},
        }
    )
    section = config.zero_optimization
    assert (section.stage, section.overlap_comm, section.reduce_bucket_size) == (2, True, 500_000_000)
    assert (section.round_robin_gradients, config.precision, config.gradient_clipping) == (False, "fp16", 1.0)
    assert section.offload_optimizer is not None
    assert section.offload_optimizer.device == "cpu"
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.95], "amsgrad": False, "name": "warm"}
    assert config.unresolved == ("train_micro_batch_size_per_gpu",)
    assert config.resolved["zero_optimization"]["stage"] == 2
    assert "zero_optimization.stage: '2' in quotes is read as 2" in config.notes
    assert len([note for note in config.notes if "in quotes" in note]) == 12


@pytest.mark.parametrize("text", ["8.5", "0x8", "8 GB", "٣", "inf", "8_", "", "true"])
def test_text_that_is_not_exactly_a_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"train_batch_size: expected a whole number, got {text!r}"):
        load_config({"train_batch_size": text})


def test_a_mesh_in_quotes_divides_the_ranks() -> None:
    mesh = with_config_axes({"sequence_parallel_size": "2", "tensor_parallel": {"autotp_size": "4"}}, None)
    assert mesh is not None
    assert (mesh.sp, mesh.tp) == (2, 4)


@pytest.mark.parametrize("key", ["cp_size", "sp_size"])
def test_ranks_that_share_sequences_have_other_names(key: str) -> None:
    assert load_config({key: 2}).sequence_parallel_size == 2
    mesh = with_config_axes({key: 2}, None)
    assert mesh is not None
    assert mesh.sp == 2
    with pytest.raises(ConfigError, match=f"{key}.*sequence_parallel_size|sequence_parallel_size.*{key}"):
        load_config({key: 2, "sequence_parallel_size": 4})


@pytest.mark.parametrize(
    ("tree", "path", "meant"),
    [
        ({"gradient_clippin": 1.0}, "gradient_clippin", "gradient_clipping"),
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        (
            {"stage3_max_live_parameters": 3},
            "stage3_max_live_parameters",
            "zero_optimization.stage3_max_live_parameters",
        ),
        ({"cpu_offload": True}, "cpu_offload", "zero_optimization.cpu_offload"),
        ({"zero_optimization": {"stage3_param_persistance_threshold": 1}}, "", "stage3_param_persistence_threshold"),
        (
            {"zero_optimization": {"offload_param": {"Device": "none"}}},
            "zero_optimization.offload_param.Device",
            "device",
        ),
        ({"optimizer": {"type": "Adam", "lr": 1}}, "optimizer.lr", "params.lr"),
        ({"scheduler": {"type": "WarmupLR", "parms": {}}}, "scheduler.parms", "params"),
        ({"aio": {"blocksize": 1}}, "aio.blocksize", "block_size"),
        ({"checkpoint": {"parallel_write": {"pipline_stage": True}}}, "checkpoint.parallel_write.", "pipeline_stage"),
        ({"timers": {"throughput": {"enable": True}}}, "timers.throughput.enable", "enabled"),
        ({"bfloat16": {"enable": True}}, "bfloat16.enable", "enabled"),
        ({"comet": {"api_kye": "x"}}, "comet.api_kye", "api_key"),
        ({3: 1}, "[3]", None),
        ({"optimizer": {"type": "Adam", "params": {3: 1}}}, "optimizer.params[3]", None),
    ],
)
def test_unknown_keys_at_any_depth(tree: dict[str, Any], path: str, meant: str | None) -> None:
    said = message(ConfigError, load_config, tree)
    assert said.startswith(path)
    assert said.endswith(": unknown key; " + (f'did you mean "{meant}"?' if meant else "keys are strings"))


def test_arguments_of_optimizer_and_scheduler_are_not_judged_here() -> None:
    array = pytest.importorskip("numpy").zeros(3)
    params = {"no_such_argument": {"x": 1}, "weights": array}
    config = load_config({"optimizer": {"type": "Anything", "params": params}})
    assert config.optimizer is not None
    assert config.optimizer.params == params
    assert config.optimizer.params["weights"] is array


def test_dotted_keys_fill_absent_and_auto_keys_of_their_section() -> None:
    config = load_config(
        {
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "max_live_parameters": 7},
            "zero_optimization.reduce_bucket_size": 4096,
            "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 4097,
            "zero_optimization.stage3_max_live_parameters": 8,
        }
    )
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.max_live_parameters) == (4096, 3687, 7)
    assert config.unresolved == ()
    assert config.notes == (
        "zero_optimization.stage3_max_live_parameters: not used, because the section zero_optimization has its "
        "own value",
    )


def test_dotted_keys_are_validated_and_need_no_section() -> None:
    assert load_config({"zero_optimization.stage": 2}).zero_optimization.stage == 2
    assert (
        message(ConfigError, load_config, {"zero_optimization.stage": 5})
        == "zero_optimization.stage: expected 0, 1, 2 or 3, got 5"
    )
    assert message(ConfigError, load_config, {"zero_optimization.reduce_bucket_size": float("nan")}) == (
        "zero_optimization.reduce_bucket_size: expected a whole number, got nan"
    )
    assert message(ConfigError, load_config, {"zero_optimization.stge": 2}) == (
        'zero_optimization.stge: unknown key; did you mean "zero_optimization.stage"?'
    )
    assert load_config({"zero_optimization.leaf_module": {"names": "a"}}).zero_optimization.leaf_module.names == ("a",)
    assert message(ConfigError, load_config, {"zero_optimization.leaf_module": {"nmes": "a"}}) == (
        'zero_optimization.leaf_module.nmes: unknown key; did you mean "names"?'
    )
    offload = {"zero_optimization": {"stage": 3, "offload_param": None}, "zero_optimization.offload_param.device": "x"}
    assert message(ConfigError, load_config, offload).startswith(
        "zero_optimization.offload_param.device: expected 'none', "
    )
    assert message(ConfigError, load_config, {"zero_optimization": 3, "zero_optimization.stage": 2}) == (
        "zero_optimization: expected an object, got 3"
    )
