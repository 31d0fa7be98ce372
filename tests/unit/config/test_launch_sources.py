"""Flag, environment, file, default: every setting has this order of precedence and reaches the processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.support.refusals import refused
from zeroaccel.cli.launch.launch_command import setting_flags
from zeroaccel.cli.launch.typed_settings import TypedSettings
from zeroaccel.config.launch.launch_file import read_launch_file
from zeroaccel.config.launch.launch_settings import LaunchSettings
from zeroaccel.config.launch.launch_sources import (
    ExplicitSettings,
    LaunchedSettings,
    from_environment,
    launched_environment,
    settings_from_environment,
)
from zeroaccel.config.launch.resolution import check_json, resolve
from zeroaccel.config.launch.setting_table import GROUP_ORDER, SETTINGS
from zeroaccel.errors import ConfigError

# Each setting with three valid values, as text; a file has them as YAML parses them.
VALUES = """
distributed_type DEEPSPEED MULTI_GPU MULTI_CPU; num_processes 2 3 4; num_machines 2 3 4; min_machines 1 2 3;
min_processes 1 2 3;
machine_rank 1 2 3; main_process_ip a b c; main_process_port 1 2 3; rdzv_backend static c10d static;
rdzv_conf timeout=1 timeout=2 timeout=3; max_restarts 1 2 3; monitor_interval 1.5 2.5 3.5;
shutdown_timeout 1.5 2.5 3.5; gpu_ids 0 1 2; num_cpu_threads_per_process 2 3 4; engine zeroaccel deepspeed zeroaccel;
mixed_precision fp16 bf16 no; role a b c; log_dir a b c; tee 1 2 3; redirects 1 2 3; timeout 1.5 2.5 3.5;
deepspeed_config_file a b c; zero_stage 1 2 3; offload_optimizer_device none cpu nvme;
offload_param_device none cpu nvme; offload_optimizer_nvme_path a b c; offload_param_nvme_path a b c;
gradient_accumulation_steps 2 3 4; gradient_clipping 0.5 1.5 2.5; deepspeed_moe_layer_cls_names A B C; hostfile a b c;
inclusion_filter a b c; exclusion_filter a b c; multinode_launcher ssh standard ssh; log_line_prefix all none all;
zero_hpz_partition_size 2 4 8; dp_replicate_size 1 2 3; dp_shard_size 1 2 3; pp_size 1 2 3; sp_size 1 2 3;
tp_size 1 2 3; ep_size 1 2 3; sp_seq_length 8 16 32; sp_attn_implementation sdpa flash_attention_2 flash_attention_3;
frozen_weights int8 nf4 mxfp4; peak_tflops 0.5 1.5 2.5;
dynamo_backend inductor eager cudagraphs; dynamo_mode default reduce-overhead max-autotune
"""
TRIPLES = {name: tuple(values) for name, *values in (row.split() for row in VALUES.split(";"))}
SWITCHES = dict.fromkeys(set(LaunchSettings.model_fields) - set(TRIPLES), ("true", "false", "true"))
SECTIONS = {name: row.section for name, row in SETTINGS.items() if row.section}


def _typed(name: str, text: str) -> ExplicitSettings:
    """Returns the settings of a command line with only this flag."""
    said: list[ExplicitSettings] = []

    @click.command()
    @setting_flags
    def command(**typed: Any) -> None:
        said.append(TypedSettings.of(typed).settings)

    flag = SETTINGS[name].flag_name
    values = [flag, text] if name in TRIPLES or SETTINGS[name].takes_value else [flag]
    if text == "false" and len(values) == 1:
        values = [flag.replace("--", "--no_")]
    command.main(values, standalone_mode=False)
    return said[0]


@pytest.mark.parametrize("name", sorted(LaunchSettings.model_fields))
def test_flag_before_environment_before_file_before_default(name: str, tmp_path: Path) -> None:
    by_flag, by_variable, by_file = (TRIPLES | SWITCHES)[name]
    path = tmp_path / "launch.yaml"
    value = {"timeout": 3} if name == "rdzv_conf" else yaml.safe_load(by_file)
    path.write_text(yaml.safe_dump({SECTIONS[name]: {name: value}} if name in SECTIONS else {name: value}))
    environ = {f"ZEROACCEL_{name.upper()}": by_variable}
    file, flags = read_launch_file(path), _typed(name, by_flag)

    # Stage 3 by the scheduler, because offload of parameters and ZeRO++ have no effect at others.
    stage = ExplicitSettings.of({} if name == "zero_stage" else {"zero_stage": 3}, "scheduler")

    def won(flags: ExplicitSettings, environ: dict[str, str], file: ExplicitSettings) -> tuple[object, str]:
        given, _ = resolve(flags, environ, stage, lambda _: file, lambda _: None)
        settings = LaunchSettings(**given.values)
        return getattr(settings, name), given.sources.get(name, "default")

    first, second, third = (
        won(*one)
        for one in [(flags, environ, file), (ExplicitSettings(), environ, file), (ExplicitSettings(), {}, file)]
    )
    assert (first[1], second[1]) == (SETTINGS[name].flag_name, f"environment ZEROACCEL_{name.upper()}")
    assert third[1].startswith(f"{path}:")
    assert first[0] != second[0]
    assert second[0] != third[0]
    assert won(ExplicitSettings(), {}, ExplicitSettings()) == (getattr(LaunchSettings(), name), "default")


def test_every_setting_has_a_flag_in_one_group() -> None:
    assert {row.group for row in SETTINGS.values()} == set(GROUP_ORDER)
    assert sorted(SETTINGS) == sorted(LaunchSettings.model_fields)


def test_settings_reach_the_ranks_with_their_sources() -> None:
    values: dict[str, Any] = {
        "mixed_precision": "fp16",
        "zero_stage": 3,
        "gradient_accumulation_steps": 5,
        "gradient_clipping": 1.0,
        "offload_param_device": "cpu",
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/nvme",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "deepspeed_moe_layer_cls_names": ("A", "B"),
        "use_cpu": True,
        "dynamo_backend": "inductor",
        "dynamo_use_fullgraph": True,
        "debug": False,
    }
    given = ExplicitSettings(
        values, {name: f"zeroaccel.yaml:{line}:1" for line, name in enumerate(values)} | {"use_cpu": "--cpu"}
    )
    settings, sources = from_environment(launched_environment(given.settings(), given.sources))
    received = {**values, "deepspeed_moe_layer_cls_names": "A,B", "use_zero": True, "use_cpu": False}
    assert settings == LaunchedSettings(**received)
    assert sources == {**given.sources, "use_zero": "default"}


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MULTI_CPU", None])
def test_on_cpus_accelerate_is_not_asked_for_ddp_instead_of_zero(kind: str | None) -> None:
    """accelerate ignores plugins if ACCELERATE_USE_CPU is true, which ranks would inherit from the environment."""
    settings = LaunchSettings.model_validate({"use_cpu": True, "distributed_type": kind})
    environment = launched_environment(settings, {"use_cpu": "--cpu", "distributed_type": "default"})
    assert environment.get("ACCELERATE_USE_DEEPSPEED", "false") == str(kind == "DEEPSPEED").lower()
    assert environment["ACCELERATE_USE_CPU"] == str(kind == "MULTI_CPU").lower()


def test_unset_settings_are_not_passed_on() -> None:
    assert launched_environment(LaunchSettings(), {}) == {}


def test_variables_that_launchers_hand_on_are_read_too() -> None:
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "auto",
        "ZEROACCEL_NUM_PROCESSES": "",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ZEROACCEL_MIXED_PRECISION": "bf16",
        "ZEROACCEL_COLLECTIVE_TIMEOUT": "30",
    }
    given = settings_from_environment(environ)
    assert given.values == {
        "distributed_type": "DEEPSPEED",
        "zero_stage": 3,
        "mixed_precision": "bf16",
        "timeout": 30.0,
    }
    # Settings of variables, unlike those of the launch file, may fill an "auto" of a JSON config.
    handed_on = launched_environment(given.settings(), given.sources)
    assert "ACCELERATE_CONFIG_DS_FIELDS" not in handed_on
    assert json.loads(handed_on["ZEROACCEL_LAUNCH_SOURCES"])["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == (
        "environment ACCELERATE_DEEPSPEED_ZERO_STAGE"
    )


def test_variables_that_the_processes_read_themselves_count_more_than_the_file() -> None:
    file = ExplicitSettings(
        {"num_cpu_threads_per_process": 4, "gpu_ids": "0"},
        dict.fromkeys(("num_cpu_threads_per_process", "gpu_ids"), "f"),
    )
    given, _ = resolve(environ={"OMP_NUM_THREADS": "8,2", "CUDA_VISIBLE_DEVICES": "-1"}, file=lambda _: file)
    assert given.values == {"num_cpu_threads_per_process": None, "gpu_ids": "all"}


def test_a_variable_that_cannot_be_read() -> None:
    with pytest.raises(
        ConfigError, match=r"environment ZEROACCEL_ZERO_STAGE: zero_stage: expected a whole number, got"
    ):
        settings_from_environment({"ZEROACCEL_ZERO_STAGE": "three"})


AUTO = {"enabled": "auto"}
ALL_AUTO = {
    "fp16": AUTO,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": "auto"},
}
DECIDED = {
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 5,
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
}
LAUNCH: dict[str, Any] = {
    "mixed_precision": "bf16",
    "zero_stage": 3,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
}


@pytest.fixture
def launched(tmp_path: Path) -> Callable[[dict[str, Any], dict[str, str] | str], ExplicitSettings]:
    """Returns a launch with a JSON config and the settings of LAUNCH, from one source or from one per setting."""

    def launched(json_config: dict[str, Any], source: dict[str, str] | str) -> ExplicitSettings:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(json_config))
        values = {**LAUNCH, "deepspeed_config_file": str(path)}
        return ExplicitSettings(
            values, {name: source if isinstance(source, str) else source.get(name, "f:1:1") for name in values}
        )

    return launched


def test_a_file_that_repeats_settings_of_the_json_is_refused_by_the_keys(
    launched: Callable[..., ExplicitSettings], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="3 settings are given twice") as caught:
        check_json(launched(DECIDED, "z.yaml:1:1"))
    said = str(caught.value).replace(f"{tmp_path}/", "")
    assert "z.yaml:1:1: zero_stage 3: repeats ds.json:1:" in said
    assert "z.yaml:1:1: gradient_accumulation_steps 4: conflicts with ds.json:1:" in said
    assert "z.yaml:1:1: mixed_precision bf16: repeats ds.json:1:" in said
    assert "gradient_clipping" not in said


def test_flags_and_variables_may_repeat_the_json_but_not_contradict_it(
    launched: Callable[..., ExplicitSettings], tmp_path: Path
) -> None:
    for source, words in [("--x", "--x 4"), ("environment X", "environment X: gradient_accumulation_steps 4")]:
        with refused(ConfigError, f"{words}: conflicts with {tmp_path}/ds.json:1:", lines=1):
            check_json(launched(DECIDED, source))
        check_json(launched({**DECIDED, "gradient_accumulation_steps": 4}, source))


def test_auto_and_absent_keys_are_left_to_the_launch(launched: Callable[..., ExplicitSettings]) -> None:
    for source in ("z.yaml:1:1", "--x"):
        assert check_json(launched(ALL_AUTO, source)) is not None
        assert check_json(launched({"train_micro_batch_size_per_gpu": 1}, source)) is not None


def test_another_precision_conflicts(launched: Callable[..., ExplicitSettings]) -> None:
    with pytest.raises(ConfigError, match=r"--x bf16: conflicts with .*fp16.enabled true"):
        check_json(launched({"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}}, "--x"))


def test_a_json_next_to_the_launch_file_is_pointed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    given = ExplicitSettings({"deepspeed_config_file": "ds.json"}, {"deepspeed_config_file": "configs/launch.yaml:3:1"})
    with pytest.raises(ConfigError, match=r"ds\.json does not exist in .*; write configs/ds\.json"):
        check_json(given)


def test_a_range_of_machines_is_two_settings() -> None:
    assert _typed("num_machines", "1:4").values == {"num_machines": 4, "min_machines": 1}
    assert _typed("num_processes", "1:4").values == {"num_processes": 4, "min_processes": 1}
    with pytest.raises(ConfigError, match="--min_machines: expected at most num_machines"):
        ExplicitSettings({"num_machines": 2, "min_machines": 3, "main_process_ip": "a"}).settings()
    for values, message in (
        ({"num_processes": 2, "min_processes": 3}, r"--min_processes: expected at most num_processes \(2\)"),
        ({"min_processes": 3}, "--min_processes: expected at most num_processes, got 3"),
        ({"num_processes": 3, "min_processes": 2, "max_restarts": 1}, "set max_restarts to 2 or more"),
        (
            {"num_processes": 4, "num_machines": 2, "min_processes": 2, "main_process_ip": "a", "machine_rank": 0},
            "is fixed on several machines; pass --num_machines MIN:MAX instead",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            ExplicitSettings(values).settings()
    values = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "a", "max_restarts": 1, "rdzv_backend": "static"}
    with pytest.raises(ConfigError, match="the static rendezvous does not inform other machines about a restart"):
        ExplicitSettings(values).settings()
