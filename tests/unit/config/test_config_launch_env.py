"""The variables that the launcher sets and the script reads; accelerate's spellings, and unknown variables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import zeroaccel
from tests.support.environment import ROOT
from tests.support.refusals import refused
from zeroaccel.cli.main import main
from zeroaccel.config.launch.launch_sources import (
    SOURCES_VARIABLE,
    LaunchedSettings,
    check_variables,
    from_environment,
    known_variables,
    to_environment,
)
from zeroaccel.errors import ConfigError

FULL = LaunchedSettings(
    **json.loads("""
    {"use_zero": true, "mixed_precision": "bf16", "zero_stage": 3, "gradient_accumulation_steps": 5,
    "peak_tflops": 989.0, "gradient_clipping": 0.5, "offload_optimizer_device": "nvme", "offload_param_device": "cpu",
    "offload_optimizer_nvme_path": "/fast", "offload_param_nvme_path": "/faster", "zero3_init_flag": false,
    "zero3_save_16bit_model": true, "deepspeed_config_file": "ds.json",
    "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock,Other", "zero_hpz_partition_size": 4,
    "zero_quantized_weights": true, "zero_quantized_gradients": true, "frozen_weights": "nf4", "use_cpu": true,
    "dynamo_backend": "inductor", "dynamo_mode": "max-autotune", "dynamo_use_fullgraph": false,
    "dynamo_use_dynamic": true, "dynamo_use_regional_compilation": true, "debug": false,
    "use_parallelism_config": true, "dp_replicate_size": 2, "dp_shard_size": 4, "pp_size": 1, "sp_size": 2,
    "tp_size": 1, "ep_size": 4, "sp_seq_length": 4096, "sp_seq_length_is_variable": true,
    "sp_attn_implementation": "sdpa"}
    """)
)


def test_written_variables_are_read_back() -> None:
    assert all(value is not None for value in vars(FULL).values()), "the test must set every field"
    sources = {name: f"--{name}" for name in vars(FULL)} | {"zero_stage": "zeroaccel.yaml:12"}
    environment = to_environment(FULL, sources)
    assert from_environment(environment) == (FULL, sources)
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"] == "/fast"
    assert environment["ACCELERATE_CONFIG_DS_FIELDS"] == "zero_stage"
    assert all(name.startswith(("ACCELERATE_", "PARALLELISM_")) for name in set(environment) - {SOURCES_VARIABLE})


def test_unset_settings_are_not_written() -> None:
    assert to_environment(LaunchedSettings(), {}) == {}
    assert from_environment({}) == (LaunchedSettings(), {})
    assert to_environment(LaunchedSettings(mixed_precision="no"), {"mixed_precision": "default"}) == {
        "ACCELERATE_MIXED_PRECISION": "no",
        SOURCES_VARIABLE: '{"ACCELERATE_MIXED_PRECISION": "default"}',
    }


def test_the_variables_of_another_launcher() -> None:
    """They have no sources, capitalised True and False, and "none" and "auto" for settings that are not given."""
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
        (SOURCES_VARIABLE, "[1]", "expected a JSON object that maps variables to sources"),
        (SOURCES_VARIABLE, "{", "expected a JSON object that maps variables to sources"),
    ],
)
def test_invalid_values_are_refused_by_variable(variable: str, text: str, message: str) -> None:
    with refused(ConfigError, message, variable):
        from_environment({variable: text})


def test_a_named_source_is_the_address() -> None:
    environ = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "x",
        SOURCES_VARIABLE: '{"ACCELERATE_DEEPSPEED_ZERO_STAGE": "a.yaml:3"}',
    }
    with pytest.raises(ConfigError, match=r"^a.yaml:3: zero_stage: "):
        from_environment(environ)


def test_every_variable_that_is_read_is_known_and_the_other_way_round() -> None:
    sources = [path for folder in ("zeroaccel", "cli") for path in (ROOT / folder).rglob("*.py")]
    literal = {
        name
        for path in sources
        if path.name != "variables.py"
        for name in re.findall(r'"(ZEROACCEL_[A-Z_]+)"', path.read_text())
    }
    assert literal - {"ZEROACCEL_"} <= known_variables()
    settings = {
        f"ZEROACCEL_{name.upper()}" for name in zeroaccel.config.launch.launch_settings.LaunchSettings.model_fields
    }
    assert known_variables() - settings == literal - {"ZEROACCEL_"} - settings


def test_all_unknown_ones_are_reported_with_the_nearest_name() -> None:
    check_variables(
        {"ZEROACCEL_ZERO_STAGE": "3", "ACCELERATE_ZEOR": "1", "MY_ZEROACCEL_X": "1", "ZEROACCEL_TIMEOUT": "1"}
    )
    with pytest.raises(ConfigError) as error:
        check_variables(["ZEROACCEL_ZERO_STGE", "ZEROACCEL_HOME", "PATH"])
    assert str(error.value).splitlines() == [
        "environment: 2 variables are wrong",
        "  ZEROACCEL_HOME: no such setting; zeroaccel reserves names with ZEROACCEL_; unset it",
        "  ZEROACCEL_ZERO_STGE: no such setting; did you mean ZEROACCEL_ZERO_STAGE?",
    ]


@pytest.mark.parametrize("words", [("launch", "--dry_run", "train.py"), ("config", "show", "--resolve")])
def test_a_launch_and_its_settings_are_refused(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    result = CliRunner().invoke(main, words, env={"ZEROACCEL_NUM_PROCESES": "2"})
    assert result.exit_code == 2
    assert result.stderr == (
        "zeroaccel: environment ZEROACCEL_NUM_PROCESES: no such setting; did you mean ZEROACCEL_NUM_PROCESSES?\n"
    )


def test_a_script_that_was_started_without_the_launcher_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from zeroaccel.comm.topology import destroy

    monkeypatch.setenv("ZEROACCEL_COLECTIVE_TIMEOUT", "5")
    with pytest.raises(ConfigError, match=r"did you mean ZEROACCEL_COLLECTIVE_TIMEOUT\?"):
        zeroaccel.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})
    destroy()
