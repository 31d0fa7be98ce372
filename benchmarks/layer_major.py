"""Counts the bytes of files that a step moves in layer-major order and in the ordinary one, with equal losses.

The model's weights are in files, and its optimizer's states in memory or in files. The counts are those of the
operating system for this process (`/proc/self/io`), of the last of several steps. Prints a Markdown table.

    python benchmarks/layer_major.py FOLDER [--micro-batches 8] [--layers 8] [--width 512]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zeroaccel

STEPS, SEQUENCE, VOCABULARY = 4, 32, 512


def moved() -> tuple[int, int]:
    """Returns the bytes that this process has read and written so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


def step_bytes(arguments: argparse.Namespace, schedule: str, states: str) -> tuple[int, int, list[float]]:
    """Returns the bytes that the last step read and wrote, and the losses of all steps."""
    torch.manual_seed(0)
    width = arguments.width
    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": arguments.layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=8, **sizes))
    model.activation_checkpointing_enable()
    folder = tempfile.mkdtemp(dir=arguments.folder)
    files = {"device": "nvme", "nvme_path": folder}
    states_in = files if states == "files" else {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.micro_batches,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": {**files, "max_in_cpu": 0}, "offload_optimizer": states_in},
    }
    engine, *_ = zeroaccel.initialize(model, config=config, pipeline=zeroaccel.PipelineConfig(schedule=schedule))
    tokens = torch.randint(VOCABULARY, (STEPS * arguments.micro_batches, 1, SEQUENCE))
    data, losses, before = iter([{"input_ids": ids, "labels": ids} for ids in tokens]), [], (0, 0)
    for _ in range(STEPS):
        before = moved()
        losses.append(engine.train_batch(data).item())
    read, written = (after - count for after, count in zip(moved(), before, strict=True))
    engine.destroy()
    shutil.rmtree(folder)
    return read, written, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder on the disk to use")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    print("| states in | order | read, MB | written, MB | read beside the ordinary order | same losses |")
    print("|---|---|---|---|---|---|")
    for states in ("memory", "files"):
        usual = step_bytes(arguments, "1f1b", states)
        for schedule, (read, written, losses) in (
            ("ordinary", usual),
            ("layer-major", step_bytes(arguments, "layer_major", states)),
        ):
            same = "yes" if losses == usual[2] else "no"
            ratio = f"{read / usual[0]:.3f}"
            print(f"| {states} | {schedule} | {read / 1e6:.1f} | {written / 1e6:.1f} | {ratio} | {same} |")


if __name__ == "__main__":
    main()
