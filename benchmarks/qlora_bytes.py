"""Counts the bytes of a quantized base on a rank, and of its gathers: QLoRA at stage 3 on 1, 2 and 4 CPU ranks.

    python benchmarks/qlora_bytes.py [--ranks 1 2 4] [--markdown FILE] [--check]

Trains adapters on a small Llama with random weights for two steps in bf16. The base is bitsandbytes' NF4 (with or
without double quantization), or stored with `frozen_weights`. Engine and `RecordingCollectives` count the bytes. Needs
peft, transformers and, for its rows, bitsandbytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

LAYERS, WIDTH, ROWS, LENGTH, VOCABULARY = 2, 256, 4, 32, 256
RESIDENT_BAR, GATHER_BAR = 0.57, 0.30
LIBRARY = ("bitsandbytes NF4", "bitsandbytes NF4, double")
FORMATS = ("nf4", "mxfp4", "int8")


def _model(base: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, tie_word_embeddings=True, **sizes)
    )
    if base in LIBRARY:
        quantize(llama, nested="double" in base)
    return get_peft_model(llama.bfloat16(), LoraConfig(r=8, target_modules="all-linear")).train()


def quantize(llama: nn.Module, *, nested: bool) -> None:
    """Replaces all linear layers except the head by bitsandbytes' NF4 layers."""
    from bitsandbytes.nn import Linear4bit

    for name, module in list(llama.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            options = {"quant_type": "nf4", "compress_statistics": nested, "compute_dtype": torch.bfloat16}
            layer = Linear4bit(module.in_features, module.out_features, False, **options)
            layer.load_state_dict({"weight": module.weight.data})
            setattr(llama.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], layer.to("cpu"))


def _measured(base: str) -> dict[str, float]:
    import zeroaccel
    from zeroaccel.comm.collectives import Collectives
    from zeroaccel.comm.recording import RecordingCollectives
    from zeroaccel.comm.topology import current_topology, init_process_group
    from zeroaccel.zero.tensor_subclasses import scales_of

    init_process_group()
    counted = RecordingCollectives(Collectives(current_topology()))
    model = _model(base)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero if base in LIBRARY else {**zero, "frozen_weights": base},
    }
    engine, *_ = zeroaccel.initialize(model, config=config, collectives=counted)
    numel = LAYERS * (4 * WIDTH * WIDTH + 3 * 4 * WIDTH * WIDTH)
    if base in LIBRARY:
        buffers = [b for unit in engine.units for b in unit.buffers if any(scales_of(p) is not None for p in b.params)]
    else:
        buffers = [b for unit in engine.units if unit.name.startswith("codes of") for b in unit.buffers]
    resident = sum(t.nbytes for b in buffers for t in (b.shard_tensors() if not b.persistent else [b.full]))
    for step in range(2):
        if step:
            counted.reset()
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    if base in LIBRARY:
        calls = [c for c in counted.calls if c.label.startswith("unshard") and c.dtype in ("uint8", "float32")]
        units = {c.label for c in calls}
        sweeps = sum(c.dtype == "uint8" and c.numel > numel // LAYERS // 4 for c in calls) / LAYERS
    else:
        calls = [c for c in counted.calls if c.label.startswith("unshard codes of")]
        units = {c.label for c in calls}
        sweeps = len(calls) / max(1, len(units))
    world = counted.world_size
    whole = 2 * numel * sweeps * (world - 1) / world
    assert world == 1 or units, f"{base}: nothing was gathered"
    engine.destroy()
    return {"resident": resident * world / numel, "gather": sum(c.nbytes for c in calls) / whole if whole else 0.0}


def _rank(folder: Path) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    library = LIBRARY if find_spec("bitsandbytes") is not None else ()
    found = {base: _measured(base) for base in (*library, *FORMATS)}
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


def _table(results: dict[int, list[dict[str, Any]]]) -> tuple[str, bool]:
    lines = [
        "| base | ranks W | bytes per weight on a rank, times W | gathers / those of bf16 |",
        "|---|---:|---:|---:|",
    ]
    kept = True
    for world, of_ranks in results.items():
        for base in of_ranks[0]:
            resident = max(found[base]["resident"] for found in of_ranks)
            gather = max(found[base]["gather"] for found in of_ranks)
            lines.append(f"| {base} | {world} | {resident:.4f} | {f'{gather:.4f}' if gather else 'none'} |")
            kept &= base == "int8" or (resident <= RESIDENT_BAR and gather <= GATHER_BAR)
    return "\n".join(lines), kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        _rank(arguments.folder)
        return 0
    results = {}
    for world in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
            subprocess.run([*launch, __file__, "--folder", folder], check=True)
            results[world] = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    table, kept = _table(results)
    names = [name for name in ("bitsandbytes", "peft", "transformers", "torch") if find_spec(name)]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    text = (
        f"# QLoRA at stage 3, {date.today()}\n\n{versions}; CPU ranks, bf16.\nLlama of {LAYERS} layers and "
        f"width {WIDTH} with random weights; rank-8 adapters on all projections. Counted, not timed.\n\n"
        f"`python benchmarks/qlora_bytes.py`\n\n{table}\n\n"
        "Not counted: nested statistics, whole on each rank, 4 bytes per 64 * 256 weights, and code books.\n"
        f"Bars, for 4 bits: {RESIDENT_BAR} bytes per weight, and {GATHER_BAR:.2f} of the bytes of bf16.\n"
    )
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text)
    return int(arguments.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
