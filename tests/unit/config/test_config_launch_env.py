"""The variables between launcher and script: both directions agree, and accelerate's own spelling is understood."""

from __future__ import annotations

from dataclasses import fields

import pytest

from zeroaccel.config.launch.launch_sources import SOURCES_VARIABLE, LaunchedSettings, from_environment, to_environment
from zeroaccel.errors import ConfigError

FULL = LaunchedSettings(
    use_zero=True,
    mixed_precision="bf16",
    zero_stage=3,
    gradient_accumulation_steps=5,
    gradient_clipping=0.5,
    offload_optimizer_device="nvme",
    offload_param_device="cpu",
    offload_optimizer_nvme_path="/fast",
    offload_param_nvme_path="/faster",
    zero3_init_flag=False,
    zero3_save_16bit_model=True,
    deepspeed_config_file="ds.json",
    deepspeed_moe_layer_cls_names="MixtralSparseMoeBlock,Other",
    zero_hpz_partition_size=4,
    zero_quantized_weights=True,
    zero_quantized_gradients=True,
    use_cpu=True,
    dynamo_backend="inductor",
    dynamo_mode="max-autotune",
    dynamo_use_fullgraph=False,
    dynamo_use_dynamic=True,
    dynamo_use_regional_compilation=True,
    debug=False,
    use_parallelism_config=True,
    dp_replicate_size=2,
    dp_shard_size=4,
    pp_size=1,
    sp_size=2,
    tp_size=1,
    sp_seq_length=4096,
    sp_seq_length_is_variable=True,
    sp_attn_implementation="sdpa",
)


def test_what_is_written_is_read() -> None:
    assert all(getattr(FULL, field.name) is not None for field in fields(FULL)), "every field takes part"
    sources = {field.name: f"--{field.name}" for field in fields(FULL)} | {"zero_stage": "zeroaccel.yaml:12"}
    environment = to_environment(FULL, sources)
    assert from_environment(environment) == (FULL, sources)
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"] == "/fast"
    assert environment["ACCELERATE_CONFIG_DS_FIELDS"] == "zero_stage"
    assert all(name.startswith(("ACCELERATE_", "PARALLELISM_")) for name in set(environment) - {SOURCES_VARIABLE})


def test_what_nobody_said_is_not_written() -> None:
    assert to_environment(LaunchedSettings(), {}) == {}
    assert from_environment({}) == (LaunchedSettings(), {})
    assert to_environment(LaunchedSettings(mixed_precision="no"), {"mixed_precision": "default"}) == {
        "ACCELERATE_MIXED_PRECISION": "no",
        SOURCES_VARIABLE: '{"ACCELERATE_MIXED_PRECISION": "default"}',
    }


def test_the_variables_of_another_launcher() -> None:
    """No sources, True and False capitalised, and "none" and "auto" where nothing was said."""
    settings, sources = from_environment(
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_MIXED_PRECISION": "fp16",
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag,mixed_precision",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "True",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
            "ACCELERATE_GRADIENT_CLIPPING": "auto",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "none",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        }
    )
    assert settings == LaunchedSettings(use_zero=True, mixed_precision="fp16", zero3_init_flag=True, zero_stage=3)
    assert sources["mixed_precision"] == "the launch config (ACCELERATE_MIXED_PRECISION)"
    assert sources["zero_stage"] == "environment ACCELERATE_DEEPSPEED_ZERO_STAGE"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "two", "zero_stage: expected a whole number, got 'two'"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1.5", "expected a whole number, got '1.5'"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "inf", "zero_stage: expected a whole number, got 'inf'"),
        ("ACCELERATE_GRADIENT_CLIPPING", "high", "gradient_clipping: expected a number, got 'high'"),
        ("ACCELERATE_MIXED_PRECISION", "half", "expected one of no, fp16, bf16, fp8, got 'half'"),
        ("ACCELERATE_DEEPSPEED_ZERO3_INIT", "maybe", "expected true or false, got 'maybe'"),
        (SOURCES_VARIABLE, "[1]", "expected a JSON object from variable to source"),
        (SOURCES_VARIABLE, "{", "expected a JSON object from variable to source"),
    ],
)
def test_a_value_that_means_nothing(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment({variable: text})
    assert message in str(caught.value)
    assert variable in str(caught.value)


def test_a_named_source_is_the_address() -> None:
    environ = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "x",
        SOURCES_VARIABLE: '{"ACCELERATE_DEEPSPEED_ZERO_STAGE": "a.yaml:3"}',
    }
    with pytest.raises(ConfigError, match=r"^a.yaml:3: zero_stage: "):
        from_environment(environ)
