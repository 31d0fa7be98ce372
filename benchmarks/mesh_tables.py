"""Compares meshes of several axes with one process, and resumes states from mesh to mesh.

    python benchmarks/mesh_tables.py [--parity] [--resume] [--markdown FILE]

Parity: each mesh trains a small Llama and a GPT-2 for three steps of three micro-batches, with SGD and momentum and
with AdamW, at every stage and with states in host memory, in fp32; the reference is a plain loop of one process.
Resume: a training goes from mesh to mesh by its checkpoints; the program compares the bits of masters and moments after
each load with those before the save.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.mesh_training import train_micro_step

VOCABULARY, BATCH, LENGTH, MICRO_BATCHES, STEPS, CLIPPING = 64, 2, 8, 3, 3, 0.5
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
# The key biases of GPT-2 have gradients that are rounding errors; with a smaller eps Adam makes full steps of them.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}}
OPTIMIZERS = {"SGD, momentum": SGD, "AdamW": ADAMW}
KINDS = ("llama", "gpt2")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SETTINGS: list[tuple[str, int, dict[str, Any]]] = [
    ("0", 0, {}),
    ("1", 1, {}),
    ("2", 2, {}),
    ("3", 3, {}),
    ("2, optimizer in host memory", 2, OFFLOAD),
]
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 2 x dp 2 x tp 2": (8, {"pp": 2, "dp_shard": 2, "tp": 2, "tp_plan": "auto"}),
    "sp 2 x dp 2": (4, {"dp_shard": 2, "sp": 2}),
    "pp 3 x dp 2": (6, {"pp": 3, "dp_shard": 2}),
    "sp 2 x tp 2": (4, {"sp": 2, "tp": 2, "tp_plan": "auto"}),
    "pp 2 x sp 2": (4, {"pp": 2, "sp": 2}),
}
RESUMES = {
    ("llama", "8, 6, 4 (sp), 1"): ["pp 2 x dp 2 x tp 2", "pp 3 x dp 2", "sp 2 x dp 2", "1"],
    ("llama", "8, 6, 4 (tp), 1"): ["pp 2 x dp 2 x tp 2", "pp 3 x dp 2", "tp 2 x dp 2", "1"],
    ("gpt2", "8, 6, 4 (tp), 1"): ["pp 2 x dp 2 x tp 2", "pp 3 x dp 2", "tp 2 x dp 2", "1"],
}
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp 2 x dp 2": (4, {"dp_shard": 2, "tp": 2, "tp_plan": "auto"}),
}


def build(kind: str) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes, **dropout))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes, **heads))


def batches(place: int) -> Iterator[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(100 + place)
    while True:
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = ids.clone()
        labels[0, 6:] = -100
        yield {"input_ids": ids, "labels": labels}


def alone(kind: str, optimizer: dict[str, Any], places: int) -> dict[str, Any]:
    """Trains in the plain loop: mean over micro-batches and data-parallel ranks."""
    import torch

    model = build(kind)
    cls = torch.optim.AdamW if optimizer["type"] == "AdamW" else torch.optim.SGD
    torch_optimizer = cls(model.parameters(), **optimizer["params"])
    data = [batches(place) for place in range(places)]
    run: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(STEPS):
        loss = torch.stack([model(**next(source)).loss for _ in range(MICRO_BATCHES) for source in data]).mean()
        loss.backward()
        run["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING).item())
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        run["losses"].append(loss.item())
    return {**run, "weights": {name: param.detach() for name, param in model.named_parameters()}}


def _engine(kind: str, stage: int, zero: dict[str, Any], optimizer: dict[str, Any], mesh: Any, precision: str) -> Any:
    import zeroaccel

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    return zeroaccel.initialize(build(kind), config=config, parallel=mesh)[0]


def _train(engine: Any, mesh: Any) -> dict[str, Any]:
    rank = engine.collectives.job.rank
    data: Iterator[Any] = batches(mesh.resolve(engine.collectives.job.world_size).data_parallel_rank(rank))
    if mesh.sp > 1:
        data = map(engine.sequence_group.shard, data)
    run: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(STEPS):
        if mesh.pp > 1:
            loss = engine.train_batch(data).item()
        else:
            loss = sum(train_micro_step(engine, next(data)) for _ in range(MICRO_BATCHES)) / MICRO_BATCHES
        run["losses"].append(loss)
        run["norms"].append(engine.get_global_grad_norm())
    of_ranks = engine.collectives.job.gather_objects(run["losses"], "losses of the table")
    run["losses"] = [sum(losses) / len(losses) for losses in zip(*of_ranks, strict=True)]
    return run


def _furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def parity_of_a_rank(name: str) -> None:
    from zeroaccel.config.parallel import ParallelConfig

    mesh = ParallelConfig(**MESHES[name][1])
    for kind, (optimizer_name, optimizer) in itertools.product(KINDS, OPTIMIZERS.items()):
        plain: dict[str, Any] = {}
        for label, stage, zero in SETTINGS:
            engine = _engine(kind, stage, zero, optimizer, mesh, "fp32")
            run, weights = _train(engine, mesh), engine.consolidated_state_dict()
            job = engine.collectives.job
            places = mesh.resolve(job.world_size).data_parallel_size
            if weights is not None:
                plain = plain or alone(kind, optimizer, places)
                row = {
                    "model": kind,
                    "optimizer": optimizer_name,
                    "stage": label,
                    "loss": _furthest(run["losses"], plain["losses"]),
                    "norm": _furthest(run["norms"], plain["norms"]),
                    "weight": max((weights[key] - value).abs().max().item() for key, value in plain["weights"].items()),
                }
                print(json.dumps(row), flush=True)
            engine.destroy()


def resume_of_a_rank(kind: str, name: str, load: str, save: str) -> None:
    import torch

    from zeroaccel.config.parallel import ParallelConfig
    from zeroaccel.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

    mesh = ParallelConfig(**{**MESHES, **OTHERS}[name][1])
    engine = _engine(kind, 2, {}, ADAMW, mesh, "bf16")

    def states() -> dict[str, Any]:
        values = {}
        for param_name, param in engine.module.named_parameters():
            values[param_name] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                values[f"{key} {param_name}"] = safe_get_full_optimizer_state(param, key)
        whole: dict[str, Any] = {}
        for rank_values in engine.collectives.job.gather_objects(values, "states of the table"):
            for key, value in rank_values.items():
                if not torch.equal(whole.setdefault(key, value), value):
                    raise SystemExit(f"{key} differs between ranks")
        return whole

    if load:
        engine.load_checkpoint(load)
        loaded, before = states(), torch.load(f"{load}/states.pt")
        equal = sum(torch.equal(loaded[key], before[key]) for key in before)
        if engine.collectives.job.rank == 0:
            print(json.dumps({"tensors": len(before), "equal": equal, "same_names": loaded.keys() == before.keys()}))
    loss = _train(engine, mesh)["losses"][-1]
    engine.save_checkpoint(save)
    saved = states()
    if engine.collectives.job.rank == 0:
        torch.save(saved, f"{save}/states.pt")
        print(json.dumps({"loss": loss}), flush=True)
    engine.destroy()


def _launched(ranks: int, words: list[str]) -> list[dict[str, Any]]:
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(ranks), __file__, *words]
    result = subprocess.run(
        launch, capture_output=True, text=True, check=False, env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    )
    if result.returncode:
        raise SystemExit(result.stderr[-4000:])
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def parity() -> list[str]:
    lines = [
        "## Parity with one process",
        "",
        "Largest difference over three steps, fp32: relative for losses and gradient norms, absolute for weights "
        "(the learning rates are 0.1 and 0.01).",
        "",
        "| mesh | ranks | model | optimizer | stage | loss | norm | weight |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (ranks, _) in MESHES.items():
        for row in _launched(ranks, ["--rank", "parity", name]):
            what = f"{row['model']} | {row['optimizer']} | {row['stage']}"
            lines.append(f"| {name} | {ranks} | {what} | {row['loss']:.1e} | {row['norm']:.1e} | {row['weight']:.1e} |")
        print(*lines[-20:], sep="\n", flush=True)
    return [*lines, ""]


def resume(asked: str | None = None) -> list[str]:
    lines = [
        "## States from mesh to mesh",
        "",
        "bf16, ZeRO-2, AdamW; three steps on each mesh, then a checkpoint that the next one loads. Tensors are the "
        "fp32 masters and both moments of every parameter, whole; equal means equal bits.",
        "",
        "| model | meshes | loaded by | tensors | equal | loss after three steps more |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, label), names in RESUMES.items():
        if asked not in (kind, None):
            continue
        with tempfile.TemporaryDirectory() as folder:
            load = ""
            for index, name in enumerate(names):
                ranks, save = {**MESHES, **OTHERS}[name][0], f"{folder}/{index}"
                answers = _launched(ranks, ["--rank", "resume", kind, name, load, save])
                found = {key: value for answer in answers for key, value in answer.items()}
                if load:
                    counts = f"{found['tensors']} | {found['equal']}"
                    lines.append(f"| {kind} | {label} | {name} | {counts} | {found['loss']:.7f} |")
                    if found["equal"] != found["tensors"] or not found["same_names"]:
                        raise SystemExit(f"states differ: {found}")
                load = save
        print(*lines[-3:], sep="\n", flush=True)
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parity", action="store_true", help="print only this table")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--model", choices=KINDS, help="model in the table of states; by default both")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        kind, *words = asked.rank
        return parity_of_a_rank(*words) if kind == "parity" else resume_of_a_rank(*words)
    both = not (asked.parity or asked.resume)
    lines = [f"# Meshes of several axes, {date.today()}", "", "CPU ranks over gloo, all on one machine.", ""]
    lines += parity() if asked.parity or both else []
    lines += resume(asked.model) if asked.resume or both else []
    if asked.markdown:
        asked.markdown.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
