"""Launch files: accelerate's load unchanged, and every mistake in one is reported with its position."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.refusals import message
from zeroaccel.config.launch.launch_file import LaunchConfig, find_launch_file, read_launch_file
from zeroaccel.errors import ConfigError

# The file that `accelerate config` writes for a machine with two devices and stage 3.
OF_ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: nvme
  offload_param_nvme_path: /nvme
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: false
enable_cpu_affinity: false
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def _read(folder: Path, text: str) -> LaunchConfig:
    path = folder / "launch.yaml"
    path.write_text(text)
    return read_launch_file(path)


def _refusal(folder: Path, text: str) -> str:
    return message(ConfigError, _read, folder, text).replace(f"{folder}/", "")


def test_accelerates_keys_are_read_unchanged(tmp_path: Path) -> None:
    given = _read(tmp_path, OF_ACCELERATE)
    assert given.values == json.loads("""
        {"debug": false, "multinode_launcher": "standard", "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5, "offload_optimizer_device": "cpu", "offload_param_device": "nvme",
        "offload_param_nvme_path": "/nvme", "zero3_init_flag": true, "zero3_save_16bit_model": true,
        "zero_stage": 3, "distributed_type": "DEEPSPEED", "dynamo_backend": "inductor",
        "dynamo_mode": "default", "dynamo_use_dynamic": false, "dynamo_use_fullgraph": false,
        "enable_cpu_affinity": false, "machine_rank": 0, "mixed_precision": "bf16", "num_machines": 1,
        "num_processes": 2, "rdzv_backend": "static", "same_network": true, "use_cpu": false}
    """)
    assert given.sources["zero_stage"] == f"{tmp_path}/launch.yaml:12:3"
    assert given.sources["num_processes"] == f"{tmp_path}/launch.yaml:27:1"
    assert given.settings().uses_zero


@pytest.mark.parametrize("backend", ["'NO'", "NO", "INDUCTOR"])
def test_a_key_of_older_files_keeps_its_meaning(tmp_path: Path, backend: str) -> None:
    (tmp_path / "old.yaml").write_text(f"num_processes: 2\ndynamo_backend: {backend}\ncommand_file: null\n")
    given = read_launch_file(tmp_path / "old.yaml")
    assert given.values["dynamo_backend"] == backend.strip("'").lower()
    assert given.sources["dynamo_backend"] == f"{tmp_path}/old.yaml:2:1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_proceses: 2", 'launch.yaml:1:1: num_proceses: unknown key; did you mean "num_processes"?'),
        ("deepspeed_config:\n  zero_stge: 3", "launch.yaml:2:3: deepspeed_config.zero_stge: unknown key; did you mean"),
        ("zero_stage: 3", 'launch.yaml:1:1: zero_stage: unknown key; did you mean "deepspeed_config.zero_stage"?'),
        ("deepspeed_config: {zero_stage: 7}", "launch.yaml:1:20: deepspeed_config.zero_stage: expected 0, 1, 2 or 3"),
        ("deepspeed_config:\n  offload_param_device: gpu", "offload_param_device: expected 'none', 'cpu' or 'nvme'"),
        ('num_processes: "two"', "num_processes: expected a whole number, got 'two'"),
        ("use_cpu: 2", "use_cpu: expected true or false, got 2"),
        ("deepspeed_config: 3", "deepspeed_config: expected an object, got 3"),
        (
            "num_processes: 2\nnum_processes: 3",
            "launch.yaml:2:1: num_processes: given 2 times, on lines 1, 2; keep one",
        ),
        ("distributed_type: XLA", "expected DEEPSPEED, MULTI_GPU, MULTI_CPU or NO, got 'XLA'"),
        ("compute_environment: AMAZON_SAGEMAKER", "expected 'LOCAL_MACHINE', got 'AMAZON_SAGEMAKER'"),
        ("mixed_precision: fp8", "launch.yaml:1:1: mixed_precision: expected 'no', 'fp16' or 'bf16', got 'fp8'"),
        ("distributed_type: MEGATRON_LM", "expected DEEPSPEED, MULTI_GPU, MULTI_CPU or NO, got 'MEGATRON_LM'"),
        (
            "parallelism_config: {parallelism_config_sp_backend: torch}",
            "launch.yaml:1:22: parallelism_config.parallelism_config_sp_backend: the only method of",
        ),
        (
            "parallelism_config: {sp_size: 4, cp_size: 2}",
            "launch.yaml:1:34: parallelism_config.cp_size: cp_size and sp_size 4 both split sequences: got 2",
        ),
        ("parallelism_config: 3", "launch.yaml:1:1: parallelism_config: expected sizes such as `sp_size: 2`, got 3"),
        ("parallelism_config: {sp_sise: 2}", 'did you mean "sp_size"?'),
        (
            "distributed_type: MULTI_CPU\nnum_machines: 2\nmpirun_config: {mpirun_hostfile: h}",
            "zeroaccel does not call",
        ),
        ("- num_processes", "launch.yaml: expected settings such as `num_processes: 2`, got ['num_processes']"),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    said = _refusal(tmp_path, text)
    assert words in said
    assert said.count("\n") == 0


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    said = _refusal(tmp_path, "num_proceses: 2\ndeepspeed_config:\n  zero_stge: 3\n  zero_stage: 7\n").splitlines()
    assert said[0] == "launch.yaml: 3 settings are wrong"
    assert [line.split(": ")[0].strip() for line in said[1:]] == [f"launch.yaml:{at}" for at in ("1:1", "3:3", "4:3")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_processes: [2\n", "launch.yaml:1:16: not valid YAML: "),
        ("a: 1\n  b: 2\n", "launch.yaml:2:4: not valid YAML: mapping values are not allowed here\n      b: 2\n"),
        ("a: !!python/object:os.system 1", "launch.yaml:1:4: not valid YAML: could not determine a constructor"),
        ("a: &a [*a]", "launch.yaml:1:4: "),
        ("a: \x07", "launch.yaml: not valid YAML: unacceptable character #x0007"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_with_the_line(tmp_path: Path, text: str, words: str) -> None:
    assert words in _refusal(tmp_path, text)


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    (tmp_path / "zeroaccel.yaml").touch()
    with pytest.raises(ConfigError, match=r"does not exist; did you mean .*zeroaccel\.yaml\?"):
        read_launch_file(tmp_path / "zeroacel.yaml")
    with pytest.raises(ConfigError, match=r"is a folder; YAML files in it: zeroaccel\.yaml"):
        read_launch_file(tmp_path)
    with pytest.raises(ConfigError, match=r"\(--config_file\) does not exist; there is no folder"):
        read_launch_file(tmp_path / "nowhere" / "launch.yaml", "--config_file")
    (tmp_path / "latin.yaml").write_bytes(b"role: \xe9\n")
    with pytest.raises(ConfigError, match="byte 6 is not UTF-8"):
        read_launch_file(tmp_path / "latin.yaml")


def test_the_file_is_looked_for_in_one_order(tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    below = project / "src" / "deep"
    below.mkdir(parents=True)
    environ = {"HOME": str(home)}

    def found(given: str | None = None) -> str | None:
        file = find_launch_file(given, environ, below)
        return None if file is None else str(file[0])

    assert found() is None
    of_user = home / ".config" / "zeroaccel" / "zeroaccel.yaml"
    of_user.parent.mkdir(parents=True)
    of_user.touch()
    assert found() == str(of_user)
    (project / "zeroaccel.yaml").touch()
    assert found() == str(of_user)  # no marker shows that the folders above belong to this project
    (project / "pyproject.toml").touch()
    assert found() == str(project / "zeroaccel.yaml")
    (below / "zeroaccel.yaml").touch()
    assert found() == "zeroaccel.yaml"
    environ["ZEROACCEL_CONFIG"] = "named.yaml"
    assert found() == "named.yaml"
    assert found("typed.yaml") == "typed.yaml"


def test_json_is_yaml_and_an_empty_file_has_no_settings(tmp_path: Path) -> None:
    assert _read(tmp_path, '{"num_processes": 3, "mixed_precision": "no"}').values["num_processes"] == 3
    assert _read(tmp_path, "").values == {}


def test_no_is_read_as_text_where_text_is_expected(tmp_path: Path) -> None:
    values = _read(tmp_path, "mixed_precision: no\ndistributed_type: NO\ndowncast_bf16: no\n").values
    assert values == {"mixed_precision": "no", "distributed_type": "NO", "num_processes": 1}


def test_two_keys_of_one_setting_must_agree(tmp_path: Path) -> None:
    text = "dynamo_backend: eager\ndynamo_config: {dynamo_backend: eager}\n"
    assert _read(tmp_path, text).values["dynamo_backend"] == "eager"
    with pytest.raises(ConfigError, match=r"launch.yaml:1:1: dynamo_backend: the same setting as dynamo_config"):
        _read(tmp_path, text.replace("eager", "tvm", 1))
