"""Every template is valid, and each template that a CPU can run is launched as a user would launch it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.environment import ROOT, free_port, outside_any_job
from tests.support.job import JobResult, run_command
from zeroaccel.cli.config.convert import validate_file
from zeroaccel.templates import ABOUT

TEMPLATES = ROOT / "templates"
LAUNCH = [sys.executable, "-m", "zeroaccel.cli", "launch"]
# Values of templates that depend on the machine: the folder of a disk, the number of processes.
HERE = [(r'"/local_nvme"', '"{folder}"'), (r'"zero_hpz_partition_size": 8', '"zero_hpz_partition_size": 2')]
CONFIGS = sorted(name for name in ABOUT if name.endswith(".json"))


@pytest.mark.parametrize("name", sorted(ABOUT))
def test_every_template_is_right(name: str) -> None:
    kind, _ = validate_file(str(TEMPLATES / name))
    assert kind == {"json": "JSON config", "yaml": "launch file", "sbatch": "job script", "hostfile": "hostfile"}.get(
        name.rpartition(".")[2], ""
    ) or (name, kind) in (("kubernetes.yaml", "Kubernetes PyTorchJob"), ("trainjob.yaml", "Kubernetes TrainJob"))


@pytest.mark.parametrize("name", ["slurm.sbatch", "kubernetes.yaml", "trainjob.yaml"])
def test_the_page_of_clusters_says_how_to_get_the_file(name: str) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    assert f"zeroaccel config template {name} -o {name}" in page


def test_every_json_config_trains_and_residency_changes_no_loss(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    for name in CONFIGS:
        text = (TEMPLATES / name).read_text()
        for there, here in HERE:
            text = re.sub(there, here.format(folder=tmp_path / "nvme"), text)
        (tmp_path / name).write_text(text)
    script = ROOT / "tests" / "e2e" / "templates_in_turn.py"
    result = run_command(
        [*LAUNCH, "--cpu", "--num_processes", 2, script, "losses", *CONFIGS], timeout=100.0, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"losses.{rank}").read_text()) for rank in range(2))
    assert first == second
    assert set(first) == set(CONFIGS)
    for precision in ("bf16", "fp16"):
        exact = [losses for name, losses in first.items() if precision in name and "zeropp" not in name]
        assert len(exact) == 6
        assert all(losses == exact[0] for losses in exact)
        assert len(set(exact[0])) == len(exact[0]) == 8
        assert first[f"zero_stage3_zeropp_{precision}.json"] == pytest.approx(
            exact[0], rel=0.05
        )  # quantized communication rounds


FACTS = """\
import os
names = ("RANK", "WORLD_SIZE", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_MIXED_PRECISION", "MASTER_PORT")
open("facts." + os.environ["RANK"], "w").write(",".join(os.environ[name] for name in names))
"""


def _launched(folder: Path, command: list[object], **environment: str) -> list[str]:
    (folder / "train.py").write_text(FACTS)
    result: JobResult = run_command([*command, "train.py"], cwd=folder, env=environment)
    assert result.returncode == 0, result.stderr
    return [file.read_text() for file in sorted(folder.glob("facts.*"))]


def test_launch_files(tmp_path: Path) -> None:
    port = free_port()
    several = ["--num_machines", 1, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    for name, flags, expected in [
        ("gpu_one_machine.yaml", ["--num_processes", 1], ["0,1,3,bf16,"]),
        ("several_machines.yaml", [*several, "--num_processes", 2], ["0,2,3,bf16,", "1,2,3,bf16,"]),
    ]:
        facts = _launched(tmp_path, [*LAUNCH, "--config_file", TEMPLATES / name, "--cpu", *flags])
        assert [fact.rpartition(",")[0] + "," for fact in facts] == expected


def test_the_job_script_of_slurm(tmp_path: Path) -> None:
    # srun and scontrol behave as in a job on one machine.
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": 'shift; SLURM_NODEID=0 exec "$@"',
        "scontrol": "[ $1 = requeue ] && echo $2 > requeued || echo 127.0.0.1",
        "zeroaccel": f'exec {sys.executable} -m zeroaccel.cli "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    text = (TEMPLATES / "slurm.sbatch").read_text()
    (tmp_path / "job").write_text(text.replace("PORT=29500", f"PORT={free_port()}"))
    slurm = {
        "SLURM_JOB_ID": "17",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_GPUS_ON_NODE": "2",
        "ZEROACCEL_USE_CPU": "1",
    }
    path = f"{programs}{os.pathsep}{outside_any_job()['PATH']}"
    facts = _launched(tmp_path, ["bash", "job"], PATH=path, **slurm)
    assert [fact.rpartition(",")[0] for fact in facts] == ["0,2,3,bf16", "1,2,3,bf16"]
    assert not (tmp_path / "requeued").exists()
    (programs / "zeroaccel").write_text("#!/bin/sh\nexit 85\n")
    assert run_command(["bash", "job"], cwd=tmp_path, env={"PATH": path, **slurm}).returncode == 85
    assert (tmp_path / "requeued").read_text() == "17\n"
