"""Templates of configuration files, as package data: `importlib.resources.files("zeroaccel.templates")`."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ABOUT"]

_JSON = {
    "zero_stage1": "optimizer states are sharded",
    "zero_stage2": "optimizer states and gradients are sharded",
    "zero_stage2_offload": "stage 2 with optimizer states in host memory",
    "zero_stage3": "optimizer states, gradients and parameters are sharded",
    "zero_stage3_offload": "stage 3 with optimizer states and parameters in host memory",
    "zero_stage3_nvme": "stage 3 with optimizer states and parameters on a local disk: nvme_path is the folder",
    "zero_stage3_zeropp": "stage 3 with ZeRO++: zero_hpz_partition_size is the number of processes per machine",
}

ABOUT: Mapping[str, str] = {
    **{
        f"{name}_{precision}.json": f"JSON config, {precision}: {words}"
        for name, words in _JSON.items()
        for precision in ("bf16", "fp16")
    },
    "train_13b_on_32gb.json": "JSON config, bf16: 13 billion parameters on a GPU with 32 GB and 125 GB of host memory",
    "cpu_one_machine.yaml": "launch file for one machine without accelerators",
    "gpu_one_machine.yaml": "launch file for one machine with accelerators",
    "several_machines.yaml": "launch file for several machines",
    "hostfile": "machines of a job that you start on one of them",
    "slurm.sbatch": "job script for SLURM",
    "kubernetes.yaml": "job for Kubernetes, as a PyTorchJob",
    "trainjob.yaml": "job for Kubernetes, as a TrainJob of Kubeflow Trainer v2",
}
"""File of this folder -> its purpose."""
