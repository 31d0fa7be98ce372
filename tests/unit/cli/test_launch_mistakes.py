"""Every mistake in a launch ends in one message and exit code 2, before any process starts."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.support.commands import typed
from zeroaccel.cli.launch import launch_job as launch_module
from zeroaccel.cli.launch import launch_machine as machine_module
from zeroaccel.cli.launch import launch_plan as plan_module
from zeroaccel.cli.machine import Device, Disk
from zeroaccel.offload import offload_folder as folder_module

NVME = "--zero_stage 3 --offload_optimizer_device nvme"
FOLDER = f"{NVME} --offload_optimizer_nvme_path"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script on a machine without accelerators; the test fails if a launch begins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_module.os, "environ", {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"})
    monkeypatch.setattr(machine_module, "local_disks", lambda: iter(()))
    monkeypatch.setattr(plan_module, "devices", lambda: ())
    monkeypatch.setattr(launch_module, "_run", lambda *_: pytest.fail("the launch began"))
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.json").write_text("{}")
    for name, text in {
        "broken.yaml": "num_processes: 2\ndeepspeed_config: [zero_stage: 3\n",
        "broken.json": '{\n  "bf16": {"enabled": true,\n',
        "typo.yaml": "deepspeed_config:\n  zero_stge: 3\n",
        "typo.json": '{"zero_optimization": {"stge": 3}}',
        "stage.json": '{"zero_optimization": {"stage": 7}}',
        "nvme.json": json.dumps(
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}}
        ),
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _refusal(arguments: str) -> str:
    said = typed(f"launch {arguments}", code=2)
    assert said.out == ""
    assert said.err.startswith("zeroaccel: ")
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--config_file nowhere.yaml", "file nowhere.yaml (--config_file) does not exist"),
        ("--config_file folder", "file folder (--config_file) is a folder; name a file"),
        ("--config_file typo.yaml", 'typo.yaml:2:3: deepspeed_config.zero_stge: unknown key; did you mean "zero_sta'),
        ("--deepspeed_config_file nowhere.json", "config file 'nowhere.json' does not exist"),
        ("--deepspeed_config_file folder", "config file 'folder' is a folder"),
        ("--deepspeed_config_file typo.json", 'zero_optimization.stge: unknown key; did you mean "stage"?'),
        ("--deepspeed_config_file stage.json", "zero_optimization.stage: expected 0, 1, 2 or 3, got 7"),
        ("--zero_stge 3", "No such option --zero_stge; did you mean --zero_stage?"),
        ("--zero_stage 7", "--zero_stage: expected 0, 1, 2 or 3, got 7"),
        ("--use_deepspeed --multi_gpu", "--multi_gpu: conflicts with --use_deepspeed; keep one of the two"),
        ("--use_deepspeed --distributed_type NO", "--use_deepspeed: conflicts with --distributed_type NO; keep one"),
        ("--num_machines 2 --num_nodes 3", "--num_nodes 3: conflicts with --num_machines 2; keep one of the two"),
        ("--num_processes 1:2 --min_processes 2", "--min_processes 2: conflicts with --min_processes 1; keep one"),
        ("--zero_stage two", "--zero_stage: expected a whole number, got 'two'"),
        (
            f"{FOLDER} /nowhere",
            "--offload_optimizer_nvme_path: expected a folder on a local disk, got '/nowhere, which",
        ),
        (f"{FOLDER} train.py", "train.py, which is a file'; create it or name another"),
        (NVME, '--offload_optimizer_nvme_path: missing, and offload_optimizer_device is "nvme"'),
        (f"{NVME} --deepspeed_config_file good.json", '_nvme_path: missing, and offload_optimizer_device is "n'),
        ("--deepspeed_config_file nvme.json", "offload_param.nvme_path: expected a folder on a local disk, got"),
        (
            "--num_machines 2 --machine_rank 0 --main_process_ip no.such.host.invalid",
            "expected an address or the name of a known host",
        ),
        ("--use_fsdp --fsdp_sharding_strategy FUL", "--fsdp_sharding_strategy: expected FULL_SHARD or SHARD_GR"),
        ("--use_megatron_lm", "--use_megatron_lm: Megatron-LM is another engine"),
        ("--nproc_per_node many", "--nproc_per_node: expected a whole number, got 'many'"),
        ("--nproc_per_node 0", '--nproc_per_node: expected a number above 0, "gpu", "cpu" or "auto", got 0'),
        ("--nproc-per-node=2 --num_gpus 3", "--nproc_per_node 2: conflicts with --num_gpus 3"),
        ("--nnodes two", "--nnodes: expected a whole number, got 'two'"),
        ("--nnodes 2 --num_nodes 3", "--nnodes 2: conflicts with --num_nodes 3; keep one"),
        ("--rdzv_endpoint a:1 --master_addr b", "--rdzv_endpoint a: conflicts with --master_addr"),
        ("--nproc 2", "No such option --nproc; use --nproc_per_node N"),
        ("--num_gpus two", "--num_gpus: expected a whole number, got 'two'"),
        ("--num_gpus 0", "--num_gpus: expected a number above 0, or -1 for all, got 0"),
        ("--num_gpus 2 --num_processes 3", "--num_gpus: 2 processes in all, but --num_processes is 3; keep"),
        ("--master_port 1 --main_process_port 2", "--master_port 1: conflicts with --main_process"),
        ("--include worker-0:0", "--inclusion_filter worker-0:0: it filters a hostfile, and none is set; set"),
        ("--include localhost:a", "--inclusion_filter: expected the form localhost:0,1, got 'localhost:a'"),
        ("--exclude localhost:0", "--exclusion_filter: expected devices to leave out, got 'localhost:0'"),
        ("--autotuning run", "--autotuning run: zeroaccel has no autotuner; `zeroaccel config --model NAME`"),
        ("--ssh_port 22", '--ssh_port 22: a variable sets the port of ssh; ZEROACCEL_SSH="ssh -p PORT"'),
        ("--pass_local_rank --no_python", "--pass_local_rank: --no_python starts a program with its own arguments"),
        (
            "--parallelism_config_cp_size 2 --sp_size 4",
            "--parallelism_config_cp_size 2: conflicts with --sp_size 4; keep one of the two, they are names of one",
        ),
        ("--ep_size 3 --num_processes 4", "--ep_size: ep 3 is not a divisor of dp_shard x sp, 4 ranks"),
        ("--sp_size 3 --num_processes 4", "--sp_size: sp 3 = 3, but the mesh needs sizes that divide"),
        ("--dp_replicate_size 2 --dp_shard_size 3 --num_processes 4", "dp_replicate 2 x dp_shard 3 = 6"),
        ("--parallelism_config_sp_backend torch", "--parallelism_config_sp_backend torch: the only method of"),
        ("--rdzv_conf foo=1", "--rdzv_conf: expected settings of the c10d rendezvous (join_timeout, last_call"),
        ("--tpu", "--tpu: there is no support for TPUs"),
        ("--fp8_backend te", "--fp8_backend: 8-bit training is not available; use --mixed_precision bf16"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, words: str) -> None:
    said = _refusal(f"{arguments} train.py")
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("json", ["", "--deepspeed_config_file good.json"])
def test_files_that_nobody_named_a_folder_for_go_to_the_roomiest_disk(
    json: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "folder")
    disks = Disk("/full", "xfs", 2**31), Disk(folder, "ext4", 64 * 2**30), Disk("/small", "xfs", 2**32)
    monkeypatch.setattr(machine_module, "local_disks", lambda: iter(disks))
    monkeypatch.setattr(folder_module, "_file_system", lambda _: "ext4")  # not the file system of the temporary folder
    said = typed(f"launch --dry_run --cpu {json} {NVME} train.py")
    assert f"no --offload_optimizer_nvme_path: files go to {folder} (ext4, 64 GiB free), the local disk" in said.err
    assert f"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH={folder}" in said.out


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            "--config_file broken.yaml",
            ["broken.yaml:2:19: not valid YAML: ", "    deepspeed_config: [zero_stage: 3", "                      ^"],
        ),
        ("--deepspeed_config_file broken.json", ["broken.json:", "    ", "    "]),
    ],
)
def test_a_syntax_error_shows_its_line(arguments: str, lines: list[str]) -> None:
    said = _refusal(f"{arguments} train.py").removeprefix("zeroaccel: ").splitlines()
    assert len(said) == len(lines)
    assert all(line.startswith(start) for line, start in zip(said, lines, strict=True)), said


def test_mistakes_about_this_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"--main_process_port {port}: address already in use" in _refusal(f"--main_process_port {port} train.py")
    assert "trian.py: there is no such script in" in _refusal("trian.py")
    monkeypatch.setattr(folder_module, "_file_system", lambda _: "tmpfs")
    said = _refusal(f"{FOLDER} folder train.py")
    assert "which is a tmpfs: its files use the memory that offload should save" in said
    monkeypatch.setattr(folder_module.os, "access", lambda *_: False)
    assert "expected a writable folder" in _refusal(f"{FOLDER} folder train.py")
    monkeypatch.undo()


def test_bf16_on_a_device_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "devices", lambda: (Device("V100", 2**34, has_bf16=False),))
    Path("bf16.json").write_text('{\n  "bf16": {"enabled": true}\n}')
    for words, where in [
        ("--mixed_precision bf16", "--mixed_precision bf16"),
        ("--deepspeed_config_file bf16.json", "bf16.json:2:12: bf16.enabled"),
    ]:
        assert _refusal(f"{words} train.py") == f"zeroaccel: {where}: V100 has no bf16; use fp16\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu_ids: '0,5'\n", "z.yaml:1:1: gpu_ids: expected devices 0 to 1, got '0,5'"),
        ("log_dir: train.py\n", "z.yaml:1:1: log_dir train.py: train.py is a file"),
        ("deepspeed_config:\n  deepspeed_hostfile: nowhere\n", "z.yaml:2:3: hostfile nowhere: there is no such file"),
        (
            "deepspeed_config:\n  deepspeed_hostfile: hosts\n  deepspeed_inclusion_filter: wibble\n",
            "z.yaml:3:3: inclusion_filter: expected machines of the hostfile, got 'wibble'",
        ),
        (
            "deepspeed_config:\n  deepspeed_hostfile: hosts\nnum_processes: 3\n",
            "z.yaml:3:1: num_processes: expected at",
        ),
    ],
)
def test_mistakes_that_the_plan_finds_have_the_place_of_the_setting(
    text: str, words: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "devices", lambda: (Device("A100", 2**36, has_bf16=True),) * 2)
    (project / "z.yaml").write_text(text)
    (project / "hosts").write_text("localhost slots=2\n")
    assert words in typed("launch --dry_run --config_file z.yaml train.py", code=2).err
    name = text.split(":")[0]
    if name in ("gpu_ids", "log_dir"):
        monkeypatch.setitem(
            launch_module.os.environ, f"ZEROACCEL_{name.upper()}", "train.py" if name == "log_dir" else "0,5"
        )
        assert f"environment ZEROACCEL_{name.upper()}: {name}" in typed("launch --dry_run train.py", code=2).err
