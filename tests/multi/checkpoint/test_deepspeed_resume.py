"""Training continues from a DeepSpeed checkpoint, on any number of ranks and at any stage."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.multi.checkpoint.deepspeed_runs import MAKE, Resumed, resume_deepspeed
from tests.support.environment import ROOT
from tests.support.pool import Ranks
from tests.support.scripts import load_script
from tests.support.training import plain_step
from zeroaccel.checkpoint.formats.deepspeed_checkpoint import open_deepspeed_checkpoint
from zeroaccel.checkpoint.formats.deepspeed_resume import manifest_of
from zeroaccel.checkpoint.save_plan import SavePlan
from zeroaccel.checkpoint.tensor_store import TorchStore
from zeroaccel.compat.deepspeed_engine import initialize
from zeroaccel.compat.deepspeed_pipe import LayerSpec, PipelineModule, TiedLayerSpec

DATA = ROOT / "tests" / "data" / "deepspeed"
GROUPS = (
    ("embed.weight", "up.weight", "down.weight"),
    ("scale", "norm.weight", "norm.bias", "up.bias", "down.bias"),
)


def assembled(ranks: list[Resumed], key: str) -> Tensor:
    parts = sorted((rank.pieces[key] for rank in ranks if key in rank.pieces), key=lambda part: part[0])
    assert [start for start, _ in parts] == [sum(p.numel() for _, p in parts[:i]) for i in range(len(parts))], key
    return torch.cat([part.flatten() for _, part in parts])


def plain_losses() -> list[float]:
    model, optimizer = MAKE.build(empty=False)
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param.requires_grad]
    losses = []
    for step in range(MAKE.STEPS + 2):
        losses.append(plain_step(optimizer, model(MAKE.batch(step))))
    return losses[MAKE.STEPS :]


@pytest.mark.parametrize(
    ("name", "world_size", "stage"),
    [
        ("stage1_muon_w2", 2, 3),
        ("stage2_muon_w2", 1, 2),
        ("stage2_muon_offload_w2", 2, 0),
        ("stage3_muon_w2", 2, 1),
        ("stage2_muon_bf16_w3", 2, 3),
    ],
)
def test_losses_after_deepspeeds_muon_are_its_own(
    name: str, world_size: int, stage: int, ranks: Ranks, tmp_path: Path
) -> None:
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    precision = "bf16" if "bf16" in name else "fp32"
    found = ranks(world_size).run(resume_deepspeed, tmp_path / name, stage, precision, "stage3" not in name, muon=True)
    truth = torch.load(tmp_path / name / "truth.pt", weights_only=True)
    accuracy = 1e-6 if precision == "fp32" else 5e-3
    assert found[0].losses == pytest.approx(truth["losses"].tolist(), rel=accuracy)


@pytest.mark.parametrize(
    ("name", "world_size", "stage", "precision"),
    [
        ("stage0_fp32_w1", 2, 3, "fp32"),
        ("stage1_fp32_w2", 1, 2, "fp32"),
        ("stage3_fp32_w3", 2, 1, "fp32"),
        ("stage1_fp32_w2_universal", 2, 3, "fp32"),
        ("stage2_round_robin_w2", 2, 3, "bf16"),
        ("stage1_bf16_optimizer_w3", 2, 0, "bf16"),
        ("stage3_sub_groups_w3", 2, 2, "bf16"),
        ("stage1_elastic_w2", 1, 3, "bf16"),
        ("stage2_fp16_w3", 2, 2, "bf16"),
    ],
)
def test_training_continues_from_a_deepspeed_checkpoint(
    name: str, world_size: int, stage: int, precision: str, ranks: Ranks, tmp_path: Path
) -> None:
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / name
    checkpoint = open_deepspeed_checkpoint(root)
    checkpoint.name_positions(GROUPS)
    store = TorchStore(checkpoint.folder, manifest_of(checkpoint), checkpoint.files)
    found = ranks(world_size).run(resume_deepspeed, root, stage, precision, "stage3" not in name)

    keys = {key for rank in found for key in rank.pieces}
    for fqn in (*GROUPS[0], *GROUPS[1]):
        (weight,) = keys & {f"master/{fqn}", f"value/{fqn}"}
        expected = store.fetch(checkpoint.weight_key(fqn) or "").float()
        assert torch.equal(assembled(found, weight), expected.flatten()), fqn
        for kind in ("exp_avg", "exp_avg_sq"):
            expected = store.fetch(f"state/{kind}/{fqn}").float()
            assert torch.equal(assembled(found, f"state/{kind}/{fqn}"), expected.flatten()), (kind, fqn)
    frozen = assembled(found, "value/held.weight")
    assert torch.equal(frozen, store.fetch("value/held.weight").flatten().to(frozen.dtype))
    for rank in found:
        assert rank.global_steps == 3
        assert rank.rates == [0.01, 0.02]
        assert rank.scheduler == {"last_batch_iteration": 2}
        assert rank.client_state["epoch"] == 7
        assert rank.client_state["history"][1].tolist() == [0, 1, 2]
        assert rank.buffers["seen"].item() == 41
        assert rank.losses == pytest.approx(plain_losses(), rel=1e-6 if precision == "fp32" else 5e-3)


def test_auto_takes_the_newest_complete_one_of_any_format(ranks: Ranks, tmp_path: Path) -> None:
    with tarfile.open(DATA / "stage3_fp32_w3.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "stage3_fp32_w3"
    (root / "latest").unlink()
    (whole,) = (path for path in root.iterdir() if path.is_dir())
    broken = Path(shutil.copytree(whole, root / "newer"))
    next(broken.glob("*optim_states.pt")).unlink()
    for path in broken.iterdir():
        path.touch()
    (root / "ours").mkdir()
    (root / "ours" / "manifest.json").write_text("{}")
    (found,) = ranks(1).run(resume_deepspeed, root, 1, "fp32", False, "auto")
    assert found.global_steps == 3
    assert found.losses == pytest.approx(plain_losses(), rel=1e-6)


def _resume_pipeline(root: Path, stages: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loads a checkpoint of DeepSpeed's pipeline, trains a step, and returns weights and first moments before it."""
    make = load_script("tests/data/deepspeed/parallel/make.py")
    layers = [LayerSpec(nn.Linear, 4, 6), LayerSpec(make.Block), LayerSpec(make.Block), LayerSpec(nn.Linear, 6, 4)]
    if "tied" in root.name:
        layers = [TiedLayerSpec("ends", make.Ends), *layers, TiedLayerSpec("ends", make.Ends)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = initialize(model=model, config=config)
    _, client_state = engine.load_checkpoint(str(root))
    assert client_state == {"epoch": 3}
    assert engine.global_steps == 2
    state = engine.consolidated_state_dict() or {}
    entries = SavePlan.collect(engine.checkpointer.state()).entries
    moments = {entry.key: entry.data.clone() for entry in entries if entry.key.startswith("state/exp_avg/")}
    engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 2))
    engine.destroy()
    return state, moments


@pytest.mark.parametrize(("case", "world_size"), [("pipe_stage1", 1), ("pipe_stage1_tied", 2)])
def test_a_pipeline_continues(case: str, world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    with tarfile.open(DATA / "parallel" / f"{case}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    truth = torch.load(tmp_path / case / "truth.pt")
    found = ranks(world_size).run(_resume_pipeline, tmp_path / case, world_size)
    weights = {key.removeprefix("module/"): value for key, value in truth.items() if key.startswith("module/")}
    assert {name for name, value in weights.items() if not torch.equal(found[0][0][name], value)} == set()
    moments = {key: value for key, value in truth.items() if key.startswith("state/")}
    for key, value in moments.items():
        shards = [part[key].flatten() for _, part in found if key in part]
        assert torch.equal(torch.cat(shards), value.flatten()), key
