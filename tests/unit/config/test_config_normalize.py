"""Older spellings, dotted keys and "auto": their normal form, and the notes about them."""

from __future__ import annotations

from typing import Any

import pytest

from zeroaccel.config import load_config
from zeroaccel.config.diagnostics import Provenance
from zeroaccel.config.normalize import NormalizedConfig
from zeroaccel.config.schema import Config
from zeroaccel.errors import ConfigError


def _message(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    return str(caught.value)


def test_auto_reads_as_the_default_and_is_listed() -> None:
    config = load_config(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": "auto",
                "offload_optimizer": {"device": "none", "pin_memory": "auto"},
            },
        }
    )
    assert config.unresolved == (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "fp16",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.params.total_num_steps",
        "zero_optimization.prefetch_bucket_size",
        "zero_optimization.offload_optimizer.pin_memory",
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
    """Except a name that has no default."""
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
        "zero_optimization.cpu_offload_use_pin_memory: pin_memory of the offload sections counts",
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
        f"{key}: save_16bit_model gathers whenever it is called",
    }
    assert load_config({"zero_optimization": {"stage3_max_reuse_distance": 1}}).notes == ()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
            "bfloat16: the same setting as bf16; keep one",
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 1, "max_live_parameters": 2}},
            "zero_optimization.max_live_parameters: the same setting as "
            "zero_optimization.stage3_max_live_parameters; keep one",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "cpu_offload": True}},
            "zero_optimization.cpu_offload: the same setting as zero_optimization.offload_optimizer; keep one",
        ),
        (
            {"zero_optimization": {"cpu_offload": "yes"}},
            "zero_optimization.cpu_offload: expected true or false, got 'yes'",
        ),
    ],
)
def test_a_setting_given_under_two_names(tree: dict[str, Any], message: str) -> None:
    assert _message(tree) == message


def test_two_names_that_agree_are_noted() -> None:
    config = load_config({"aio": {"thread_count": 2, "intra_op_parallelism": 2}})
    assert config.aio.intra_op_parallelism == 2
    assert config.notes == ("aio.intra_op_parallelism: the same setting as aio.thread_count, with the same value",)


def test_values_in_quotes_are_read_where_deepspeed_reads_them() -> None:
    zero = {
        "stage": "2",
        "overlap_comm": "True",
        "reduce_bucket_size": "500",
        "round_robin_gradients": "no",
        "offload_optimizer": {"device": "cpu", "ratio": " 0.5 "},
    }
    tree = {"zero_optimization": zero, "fp16": {"enabled": "true", "loss_scale": "0"}, "wandb": {"enabled": "off"}}
    config = load_config(tree)
    section = config.zero_optimization
    assert (section.stage, section.overlap_comm, section.reduce_bucket_size) == (2, True, 500)
    assert section.offload_optimizer is not None
    assert (section.offload_optimizer.ratio, config.precision, config.wandb.enabled) == (0.5, "fp16", False)
    assert "zero_optimization.stage: '2' in quotes is read as 2" in config.notes
    assert "zero_optimization.overlap_comm: 'True' in quotes is read as true" in config.notes
    assert len([note for note in config.notes if "in quotes" in note]) == 8
    for value in ("5e8", "many"):
        with pytest.raises(ConfigError, match="reduce_bucket_size: expected a whole number, got"):
            load_config({"zero_optimization": {"reduce_bucket_size": value}})
    with pytest.raises(ConfigError, match="gradient_clipping: expected a finite number, got '1'"):
        load_config({"gradient_clipping": "1"})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"gradient_clippin": 1.0}, 'gradient_clippin: unknown key; did you mean "gradient_clipping"?'),
        ({"stage": 3}, 'stage: unknown key; did you mean "zero_optimization.stage"?'),
        (
            {"stage3_max_live_parameters": 3},
            'stage3_max_live_parameters: unknown key; did you mean "zero_optimization.stage3_max_live_parameters"?',
        ),
        ({"cpu_offload": True}, 'cpu_offload: unknown key; did you mean "zero_optimization.cpu_offload"?'),
        (
            {"zero_optimization": {"stage3_param_persistance_threshold": 1}},
            "zero_optimization.stage3_param_persistance_threshold: unknown key; "
            'did you mean "stage3_param_persistence_threshold"?',
        ),
        (
            {"zero_optimization": {"offload_param": {"Device": "none"}}},
            'zero_optimization.offload_param.Device: unknown key; did you mean "device"?',
        ),
        (
            {"optimizer": {"type": "Adam", "lr": 1}},
            'optimizer.lr: unknown key; did you mean "params.lr"?',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "parms": {}}},
            'scheduler.parms: unknown key; did you mean "params"?',
        ),
        ({"aio": {"blocksize": 1}}, 'aio.blocksize: unknown key; did you mean "block_size"?'),
        (
            {"checkpoint": {"parallel_write": {"pipline_stage": True}}},
            'checkpoint.parallel_write.pipline_stage: unknown key; did you mean "pipeline_stage"?',
        ),
        (
            {"timers": {"throughput": {"enable": True}}},
            'timers.throughput.enable: unknown key; did you mean "enabled"?',
        ),
        ({"bfloat16": {"enable": True}}, 'bfloat16.enable: unknown key; did you mean "enabled"?'),
        ({"comet": {"api_kye": "x"}}, 'comet.api_kye: unknown key; did you mean "api_key"?'),
        ({3: 1}, "[3]: unknown key; keys are strings"),
        (
            {"optimizer": {"type": "Adam", "params": {3: 1}}},
            "optimizer.params[3]: unknown key; keys are strings",
        ),
    ],
)
def test_unknown_keys_at_any_depth(tree: dict[str, Any], message: str) -> None:
    assert _message(tree) == message


def test_an_array_among_arguments_is_passed_on() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(3)
    config = load_config({"optimizer": {"type": "Anything", "params": {"weights": array}}})
    assert config.optimizer is not None
    assert config.optimizer.params["weights"] is array


def test_arguments_of_optimizer_and_scheduler_are_not_judged_here() -> None:
    config = load_config({"optimizer": {"type": "Anything", "params": {"no_such_argument": {"x": 1}}}})
    assert config.optimizer is not None
    assert config.optimizer.params == {"no_such_argument": {"x": 1}}


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
        "zero_optimization.stage3_max_live_parameters: not used, since the section zero_optimization has a value of "
        "its own",
    )


def test_dotted_keys_are_validated_and_need_no_section() -> None:
    assert load_config({"zero_optimization.stage": 2}).zero_optimization.stage == 2
    assert _message({"zero_optimization.stage": 5}) == "zero_optimization.stage: expected 0, 1, 2 or 3, got 5"
    assert _message({"zero_optimization.reduce_bucket_size": float("nan")}) == (
        "zero_optimization.reduce_bucket_size: expected a whole number, got nan"
    )
    assert _message({"zero_optimization.stge": 2}) == (
        'zero_optimization.stge: unknown key; did you mean "zero_optimization.stage"?'
    )
    assert load_config({"zero_optimization.leaf_module": {"names": "a"}}).zero_optimization.leaf_module.names == ("a",)
    assert _message({"zero_optimization.leaf_module": {"nmes": "a"}}) == (
        'zero_optimization.leaf_module.nmes: unknown key; did you mean "names"?'
    )
    offload = {"zero_optimization": {"stage": 3, "offload_param": None}, "zero_optimization.offload_param.device": "x"}
    assert _message(offload).startswith("zero_optimization.offload_param.device: expected 'none', ")
    assert _message({"zero_optimization": 3, "zero_optimization.stage": 2}) == (
        "zero_optimization: expected an object, got 3"
    )
