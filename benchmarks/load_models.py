"""Measures `from_pretrained` at stage 3: time, bytes and memory, beside transformers' own stage 3 path.

    python benchmarks/load_models.py --mb 300 --ranks 2,4
    python benchmarks/load_models.py --mb 2000 --ranks 2,4 --check
    python benchmarks/load_models.py --mb 2000 --ranks 2,4 --kinds fp8,mxfp4 --alone --check

The program writes checkpoints of one size (dense; a mixture with an entry per expert, which transformers merges into
tensors of three dimensions; FP8 with scales of 128 x 128 blocks; a mixture in MXFP4) and loads each in turn by ranges
and by transformers' path, in jobs of their own, so that each load has its own peak of memory. The files are in the page
cache. Bytes are those that the ranks read from the files, as the kernel counts them (`/proc/self/io`, `rchar`). Memory
is the growth of the resident memory that belongs to no file (`RssAnon`), above the shards. The weights of every
parameter are compared with those of one process.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
BARS = {"time": 0.6, "job": 1.05, "rank": 1.1, "memory": 256e6}


def config_of(kind: str, mb: int, width: int = 1024) -> Any:
    """Returns the configuration of a model of about `mb` MB in the files, or of one with narrower layers."""
    import transformers

    layers = max(mb // {"fp8": 13, "mxfp4": 27}.get(kind, 25), 1)
    sizes = {"vocab_size": 2048, "hidden_size": width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": width // 128, "num_key_value_heads": width // 128, "head_dim": 128}
    sizes |= {"max_position_embeddings": 512}
    if kind in ("dense", "fp8"):
        return transformers.LlamaConfig(**sizes, intermediate_size=(2752 if kind == "dense" else 2816) * width // 1024)
    if kind == "mxfp4":
        return transformers.GptOssConfig(**sizes, num_local_experts=8, num_experts_per_tok=2, intermediate_size=1408)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 344}
    experts["moe_intermediate_size"] = 344 * width // 1024
    return transformers.Qwen3MoeConfig(**sizes, **experts)


def write(kind: str, mb: int, folder: Path, width: int = 1024) -> None:
    """Writes a checkpoint in several files, and the digests of its weights in one process of transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, mb, width), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100MB")
    if kind in ("fp8", "mxfp4"):
        quantize(kind, folder)
    del model  # the memory of one model, not of two
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "digests").write_text(json.dumps({name: digest(each) for name, each in model.named_parameters()}))


def quantize(kind: str, folder: Path) -> None:
    """Replaces the matrices of layers in a folder's files by codes and scales: random ones for MXFP4."""
    import torch
    from safetensors.torch import load_file, save_file

    index = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name in list(tensors):
            if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
                experts, width, rows = tensors.pop(name).shape
                shape = (experts, rows, width // 32, 16)
                tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8)
                tensors[f"{name}_scales"] = torch.randint(110, 125, shape[:3], dtype=torch.uint8)
            elif kind == "fp8" and name.endswith("proj.weight"):
                rows, columns = tensors[name].shape
                tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.rand(rows // 128, columns // 128) / 100
        save_file(tensors, file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": kind}
    if kind == "fp8":
        config["quantization_config"] |= {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    if len(set(index.values())) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def digest(tensor: Any) -> str:
    """Returns a digest of a tensor's bytes."""
    import torch

    return hashlib.blake2b(tensor.detach().contiguous().view(torch.uint8).numpy(), digest_size=8).hexdigest()


class Peak(threading.Thread):
    """Samples the resident memory without a file, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_nbytes = self.peak_nbytes = self._now()
        self.running = True
        self.start()

    def _now(self) -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.partition("RssAnon:")[2].split()[0])

    def run(self) -> None:
        while self.running:
            self.peak_nbytes = max(self.peak_nbytes, self._now())
            time.sleep(0.002)


def rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def rank(folder: Path, way: str) -> None:
    """Loads as one rank and prints what it measured."""
    sys.path.insert(0, str(ROOT))
    from zeroaccel import compat

    compat.install()
    import deepspeed
    import torch
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    torch.set_num_threads(1)
    if way == "theirs":
        from zeroaccel.compat import finder

        method = finder._ORIGINALS[transformers.PreTrainedModel, "_load_pretrained_model"]
        transformers.PreTrainedModel._load_pretrained_model = method
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    library = HfDeepSpeedConfig(config)
    deepspeed.init_distributed("gloo")
    transformers.utils.logging.disable_progress_bar()
    # A small model first: the first load imports modules, and opens connections.
    transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "warm-up")
    gc.collect()  # what earlier loads of this process left
    torch.distributed.barrier()
    before, peak, busy, start = rchar(), Peak(), time.process_time(), time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak.running = False
    read = rchar() - before
    shards = (
        sum(param.numel() * param.element_size() for param in model.parameters()) / torch.distributed.get_world_size()
    )
    expected = json.loads((folder / "digests").read_text())
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            assert digest(param) == expected[name], f"{name} differs from one process's"
    measured = {"seconds": seconds, "busy": busy, "read": read, "above": peak.peak_nbytes - peak.start_nbytes - shards}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, measured)
    if not torch.distributed.get_rank():
        print(json.dumps(gathered))
    del library


def load(folder: Path, way: str, ranks: int) -> list[dict[str, float]]:
    """Returns the measurements of each rank of a job."""
    command = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(ranks)]
    command += [__file__, "--rank-of", str(folder), "--way", way]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if result.returncode:
        raise click.ClickException(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    measured: list[dict[str, float]] = json.loads(result.stdout.strip().splitlines()[-1])
    return measured


@click.command()
@click.option("--mb", default=300, show_default=True, help="Size of each checkpoint in MB.")
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--kinds", default="dense,mixture", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--alone", is_flag=True, help="Do not load by transformers' path, which needs more memory and time.")
@click.option("--work", type=click.Path(path_type=Path), default=None, help="Folder for the checkpoints.")
@click.option("--check", is_flag=True, help="Exit with 1 if a bar is missed.")
@click.option("--rank-of", type=click.Path(path_type=Path), default=None, hidden=True)
@click.option("--way", default="", hidden=True)
@click.option("--write", "kind_to_write", default="", hidden=True)
def main(
    mb: int,
    ranks: str,
    kinds: str,
    rounds: int,
    alone: bool,
    work: Path | None,
    check: bool,
    rank_of: Path | None,
    way: str,
    kind_to_write: str,
) -> None:
    """Measures loads by ranges beside transformers' path."""
    if rank_of is not None:
        rank(rank_of, way)
        return
    if kind_to_write:
        assert work is not None
        write(kind_to_write, mb, work)
        return
    missed, ways = False, ("ranges",) if alone else ("ranges", "theirs")
    with tempfile.TemporaryDirectory(dir=work) as made:
        for kind in kinds.split(","):
            for name, size in ((kind, mb), ("warm-up", 1)):
                # In another process, whose imports are without the facade.
                command = [sys.executable, __file__, "--write", kind, "--mb", str(size), "--work", f"{made}/{name}"]
                subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
            nbytes = sum(file.stat().st_size for file in Path(made, kind).glob("*.safetensors"))
            for count in map(int, ranks.split(",")):
                jobs = [{way: load(Path(made, kind), way, count) for way in ways} for _ in range(rounds)]
                loads = [each for job in jobs for each in job["ranges"]]
                row = {
                    "job": sum(each["read"] for each in loads) / rounds / nbytes,
                    "rank": max(each["read"] for each in loads) / nbytes * count,
                    "memory": max(each["above"] for each in loads),
                }
                click.echo(
                    f"{kind}, {nbytes / 1e6:.0f} MB, {count} ranks: "
                    f"{statistics.median(each['seconds'] for each in loads):.2f} s; the job reads {row['job']:.3f} x "
                    f"the files, a rank at most {row['rank']:.3f} / W; {row['memory'] / 1e6:.0f} MB above the shards"
                )
                if not alone:
                    times = [{way: max(each["seconds"] for each in job[way]) for way in ways} for job in jobs]
                    ratios = [each["ranges"] / each["theirs"] for each in times]
                    row["time"] = statistics.median(ratios)
                    theirs = [each for job in jobs for each in job["theirs"]]
                    click.echo(
                        f"    {row['time']:.2f} x [{min(ratios):.2f}, {max(ratios):.2f}] of transformers' path, with "
                        f"{max(each['above'] for each in theirs) / 1e6:.0f} MB above the shards and "
                        f"{max(each['read'] for each in theirs) / nbytes:.2f} x the files on rank 0"
                    )
                missed |= any(row[name] > bar for name, bar in BARS.items() if name in row)
    sys.exit(check and missed)


if __name__ == "__main__":
    main()
