"""Makes the checkpoints of this folder with DeepSpeed, and stores its values in memory beside them.

Run as `python make.py OUT [--only NAME ...]` in an environment with deepspeed; README.md says more.
The model is tiny and unusual: tied, frozen, one-element and empty parameters, buffers, odd sizes, two param groups.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6}
STEPS = 3

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
STATIC_FP16 = {"fp16": {"enabled": True, "loss_scale": 8}}
BF16 = {"bf16": {"enabled": True}}
MUON_PARAMS = {"muon_lr": 0.02, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
MUON = {"optimizer": {"type": "Muon", "params": {**MUON_PARAMS, "betas": [0.9, 0.99], "eps": 1e-6}}}
BF16_FP32_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}

# name -> (world size, changes of the config)
CASES = {
    "stage0_fp32_w1": (1, {}),
    "stage0_bf16_w1": (1, BF16),
    "stage2_fp32_w1": (1, {"zero_optimization": {"stage": 2}}),
    "stage0_fp16_w2": (2, STATIC_FP16),
    "stage1_fp32_w2": (2, {"zero_optimization": {"stage": 1}}),
    "stage1_bf16_optimizer_w2": (2, {**BF16_FP32_SUMS, "zero_optimization": {"stage": 1}}),
    "stage1_elastic_w2": (2, {**BF16, "zero_optimization": {"stage": 1, "elastic_checkpoint": True}}),
    "stage2_round_robin_w2": (2, {**BF16, "zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
    "stage2_aligned_w2": (2, {**BF16, "zero_optimization": {"stage": 2, "parameter_alignment": True}}),
    "stage3_bf16_w2": (2, {**BF16, "zero_optimization": {"stage": 3}}),
    "stage1_bf16_optimizer_w3": (3, {**BF16_FP32_SUMS, "zero_optimization": {"stage": 1}}),
    "stage2_fp16_w3": (3, {**FP16, "zero_optimization": {"stage": 2}}),
    "stage3_fp32_w3": (3, {"zero_optimization": {"stage": 3}}),
    "stage3_sub_groups_w3": (3, {**BF16, "zero_optimization": {"stage": 3, "sub_group_size": 9}}),
    "stage1_muon_w2": (2, {**MUON, "zero_optimization": {"stage": 1}}),
    "stage2_muon_w2": (2, {**MUON, "zero_optimization": {"stage": 2}}),
    "stage2_muon_bf16_w3": (3, {**MUON, **BF16, "zero_optimization": {"stage": 2}}),
    "stage2_muon_offload_w2": (
        2,
        {**MUON, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
    "stage3_muon_w2": (2, {**MUON, "zero_optimization": {"stage": 3, "reduce_scatter": False}}),
}
UNIVERSAL = ("stage1_bf16_optimizer_w2", "stage1_fp32_w2", "stage3_bf16_w2")


class Awkward(nn.Module):
    def __init__(self, *, empty: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3)
        self.up = nn.Linear(3, 5)
        self.held = nn.Linear(5, 5).requires_grad_(False)
        self.down = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor([1.25]))
        if empty:
            self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(0.1, 0.3, 3))
        self.register_buffer("seen", torch.tensor(41))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.offset.to(hidden.dtype))
        hidden = self.down(self.held(torch.tanh(self.up(hidden)))) * self.scale
        return F.cross_entropy(self.head(hidden).float(), tokens.roll(1))


def build(*, empty: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Awkward(empty=empty)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    return model, torch.optim.AdamW(groups, **ADAM)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 7, (11,), generator=torch.Generator().manual_seed(step))


def plain(muon: bool) -> dict[str, torch.Tensor]:
    """Runs the same steps in plain fp32: every rank of the other runs sees the same batches."""
    model, optimizer = build(empty=False)
    if muon:
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        matrices = [p for name, p in model.named_parameters() if name in ("up.weight", "down.weight")]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        adam = {"betas": ADAM["betas"], "eps": ADAM["eps"], "lr": 0.02}
        optimizer = MuonWithAuxAdam(
            [
                {"params": matrices, "use_muon": True, "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
                {"params": others, "use_muon": False, "weight_decay": 0.1, **adam},
            ]
        )
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad and p.numel()]
    for step in range(STEPS):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    for name, param in model.named_parameters():
        found[f"plain/fp32/{name}"] = param.detach().clone()
        for key, value in optimizer.state.get(param, {}).items():
            found[f"plain/{key}/{name}"] = torch.as_tensor(value).detach().clone()
    return found


def run_case(name: str, out: Path) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _, changes = CASES[name]
    stage = changes.get("zero_optimization", {}).get("stage", 0)
    model, optimizer = build(empty=stage != 3)  # stage 3 cannot gather an empty parameter
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1000.0,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 2, "warmup_max_lr": [0.01, 0.02], "warmup_min_lr": [0.01, 0.02]},
        },
        **changes,
    }
    if "muon" in name:
        optimizer = None  # DeepSpeed makes it, and divides the parameters between Muon and Adam
        params = {**config["optimizer"]["params"], "torch_adam": True}  # its own Adam needs a compiler
        config |= {"optimizer": {"type": "Muon", "params": params}, "zero_force_ds_cpu_optimizer": False}
    if stage:
        small = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
        config["zero_optimization"] = {**small, **config["zero_optimization"]}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        engine.backward(engine(batch(step)))
        engine.step()
    folder = out / name
    engine.save_checkpoint(str(folder), client_state={"epoch": 7, "history": [0.5, torch.arange(3)]})

    truth = {}
    for key, value in model.named_parameters():
        with deepspeed.zero.GatheredParameters([value], enabled=stage == 3):
            truth[f"module/{key}"] = value.detach().clone()
        if stage == 0 or not value.requires_grad or not value.numel():
            continue
        if "round_robin" in name:
            continue  # safe_get_full_fp32_param returns values of other parameters there
        truth[f"fp32/{key}"] = safe_get_full_fp32_param(value).clone()
        for state in states_of(name, value, stage):
            truth[f"{state}/{key}"] = safe_get_full_optimizer_state(value, state).clone()
    if "muon" in name:
        truth["losses"] = more_losses(engine)
    if torch.distributed.get_rank() == 0:
        finish(folder, {key: value.contiguous() for key, value in truth.items()}, engine)
    torch.distributed.barrier()
    if name in UNIVERSAL and torch.distributed.get_rank() == 0:
        make_universal(folder)
    torch.distributed.barrier()
    engine.destroy()


def more_losses(engine) -> torch.Tensor:
    """Returns the losses of DeepSpeed's own next steps."""
    losses = []
    for step in range(STEPS, STEPS + 2):
        losses.append(engine(batch(step)))
        engine.backward(losses[-1])
        engine.step()
    return torch.stack(losses).detach()


def states_of(name: str, value: torch.Tensor, stage: int) -> tuple[str, ...]:
    """Returns the kinds of states that `safe_get_full_optimizer_state` knows."""
    if "muon" in name or (stage < 3 and value.dim() <= 1):
        return ()  # below stage 3, DeepSpeed returns the states of the first group only
    return ("exp_avg", "exp_avg_sq")


def finish(folder: Path, truth: dict[str, torch.Tensor], engine) -> None:
    torch.save({**truth, **plain("muon" in folder.name)}, folder / "truth.pt")
    facts = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "lr": engine.get_lr(),
        "loss_scale": getattr(engine.optimizer, "loss_scale", None) if engine.fp16_enabled() else None,
    }
    (folder / "truth.json").write_text(json.dumps(facts, indent=1))
    for left in folder.glob("zero_to_*.py"):
        left.unlink()


def make_universal(folder: Path) -> None:
    tag = (folder / "latest").read_text()
    target = folder.with_name(folder.name + "_universal")
    command = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--input_folder",
        str(folder / tag),
        "--output_folder",
        str(target / f"{tag}_universal"),
        "--num_extract_workers",
        "1",
        "--num_merge_workers",
        "1",
        "--inject_missing_state",
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    shutil.copy(folder / "truth.pt", target)
    shutil.copy(folder / "truth.json", target)


def run_ranks(world_size: int, names: list[str], out: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": str(world_size),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(out), "--ranks", "--only", *names],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    if any([rank.wait() for rank in ranks]):  # noqa: C419  (waits for all of them)
        raise SystemExit(f"world size {world_size}: a rank failed")


def pack(out: Path) -> None:
    """Packs each checkpoint into an archive that does not depend on the time or place of its making."""
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        with tarfile.open(out / f"{folder.name}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(folder.rglob("*")):
                entry = tarfile.TarInfo(str(path.relative_to(out)))
                if path.is_file():
                    entry.size = path.stat().st_size
                    with path.open("rb") as content:
                        archive.addfile(entry, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.ranks:
        given.out.mkdir(parents=True, exist_ok=True)
        for world_size in sorted({CASES[name][0] for name in given.only}):
            run_ranks(world_size, [name for name in given.only if CASES[name][0] == world_size], given.out)
        pack(given.out)
        return
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    torch.set_num_threads(1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # needs a compiler
    deepspeed.init_distributed("gloo", verbose=False)
    for name in given.only:
        # DeepSpeed denies it for CPUs; torch can. Muon would compute in it, and in fp32 without it.
        get_accelerator().is_fp16_supported = lambda: "muon" not in name  # noqa: B023 - called in this turn
        run_case(name, given.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
