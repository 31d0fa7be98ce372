"""Conversion from FSDP2 and back through torch.distributed.checkpoint: the same values, and training continues."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import plain_step, train_step
from zeroaccel import zero
from zeroaccel.checkpoint.formats.dcp_export import export_dcp
from zeroaccel.checkpoint.formats.dcp_import import open_dcp
from zeroaccel.checkpoint.manifest import read_manifest
from zeroaccel.cli.checkpoint import checkpoint
from zeroaccel.errors import CheckpointError, UsageError


class Model(nn.Module):
    """A model with tied, frozen and odd-sized weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.layers[0].bias.requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.flatten()) * self.scale[0]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).square().mean()


def build(kind: type[torch.optim.Optimizer]) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Model()
    first = [model.embed.weight, model.layers[1].weight]
    second = [model.layers[0].weight, model.layers[1].bias]
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return model, kind([{"params": first, "lr": 1e-2}, {"params": second, "lr": 3e-3}], **more)  # type: ignore[call-arg]


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 * rank + step)
    return torch.randint(0, 11, (3, 4), generator=generator)


def fsdp(kind: type[torch.optim.Optimizer]) -> tuple[Model, torch.optim.Optimizer]:
    model, _ = build(kind)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    named = dict(model.named_parameters())
    first = [named["embed.weight"], named["layers.1.weight"]]
    second = [named["layers.0.weight"], named["layers.1.bias"]]
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return model, kind([{"params": first, "lr": 1e-2}, {"params": second, "lr": 3e-3}], **more)  # type: ignore[call-arg]


def fsdp_steps(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(plain_step(optimizer, model(batch(torch.distributed.get_rank(), step))))
    return losses


def engine_of(kind: type[torch.optim.Optimizer], stage: int) -> Any:
    model, optimizer = build(kind)
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}}
    return zeroaccel.initialize(model, optimizer, config=config)[0]


def engine_steps(engine: Any, steps: range) -> list[float]:
    return [train_step(engine, engine(batch(engine.collectives.rank, step))) for step in steps]


def full(value: Any) -> Any:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.clone() if isinstance(value, Tensor) else value


KINDS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def _there_and_back(kind: str, flat: bool, folder: str) -> dict[str, Any]:
    """Trains and saves with FSDP2, continues and saves in the engine, and continues from that with FSDP2."""
    root = Path(folder)
    model, optimizer = fsdp(KINDS[kind])
    losses = fsdp_steps(model, optimizer, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    own = {"epoch": 4, "curve": torch.arange(3)}
    dcp.save({"model": weights, "optim": states, "mine": own}, checkpoint_id=root / "fsdp")
    expected = {name: full(value) for name, value in weights.items()}
    _, nested = get_state_dict(model, optimizer)
    momenta = {name: {k: full(v) for k, v in state.items()} for name, state in nested["state"].items()}
    losses += fsdp_steps(model, optimizer, range(2, 4))

    engine = engine_of(KINDS[kind], 3)
    path, client = engine.load_checkpoint(root / "fsdp")
    assert path == str(root / "fsdp")
    assert client["mine"]["epoch"] == 4
    assert torch.equal(client["mine"]["curve"], torch.arange(3))
    if kind == "adamw":
        assert engine.global_steps == 2
    for name, param in engine.module.named_parameters():
        assert torch.equal(zero.safe_get_full_fp32_param(param), expected[name]), name
        for key in STATES[kind] if param.requires_grad else ():
            known = momenta.get(name) or momenta["head.weight"]
            assert torch.equal(zero.safe_get_full_optimizer_state(param, key), known[key]), name
    assert torch.equal(engine.module.scale, torch.full((3,), 1.5))
    continued = engine_steps(engine, range(2, 4))
    torch.testing.assert_close(continued, losses[2:], rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(root / "ours", tag="four")
    weights_now = {name: value.clone() for name, value in engine.iter_named_full_params()}
    after = engine_steps(engine, range(4, 6))
    engine.destroy()

    if torch.distributed.get_rank() == 0:
        export_dcp(root / "ours", root / "back")
    torch.distributed.barrier()
    again, optimizer = fsdp(KINDS[kind])
    fsdp_steps(again, optimizer, range(20, 21))  # so that the optimizer has states to load into
    weights, states = get_state_dict(again, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=root / "back")
    set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=states)
    for name, param in again.named_parameters():
        assert torch.equal(full(param.detach()), weights_now[name]), name
    torch.testing.assert_close(fsdp_steps(again, optimizer, range(4, 6)), after, rtol=1e-5, atol=1e-6)
    return weights_now


@pytest.mark.parametrize(("kind", "flat"), [("adamw", False), ("sgd", False), ("adamw", True)])
def test_fsdp2_to_the_engine_and_back(ranks: Ranks, tmp_path: Path, kind: str, flat: bool) -> None:
    weights, _ = ranks(2).run(_there_and_back, kind, flat, str(tmp_path))
    if kind == "sgd" or flat:
        return
    out = tmp_path / "imported"
    arguments = ["--tie", "head.weight=embed.weight", "--buffer", "scale", "--world_size", "3", "--tag", "x"]
    done = CliRunner().invoke(checkpoint, ["import", str(tmp_path / "back"), str(out), *arguments])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{out / 'x'}: 3 files, ")
    assert CliRunner().invoke(checkpoint, ["verify", str(out)]).output.startswith("x: valid")
    (held,) = ranks(1).run(_load, str(out))
    assert weights.keys() == held.keys()
    assert all(torch.equal(weights[name], held[name]) for name in weights)
    exported = CliRunner().invoke(checkpoint, ["export", str(out), str(tmp_path / "again")])
    assert exported.exit_code == 0, exported.output
    taken = CliRunner().invoke(checkpoint, ["export", str(out), str(tmp_path / "again")])
    assert isinstance(taken.exception, UsageError)


def _load(folder: str) -> dict[str, Tensor]:
    engine = engine_of(torch.optim.AdamW, 1)
    engine.load_checkpoint(folder)
    weights = {name: value.clone() for name, value in engine.iter_named_full_params()}
    engine.destroy()
    return weights


class Attack:
    def __reduce__(self) -> Any:
        return eval, ("open('owned', 'w')",)


@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
def test_bad_folders_are_named(tmp_path: Path) -> None:
    whole = {"model": {"a.weight": torch.arange(6.0).view(2, 3)}, "note": "x"}
    dcp.save(whole, checkpoint_id=tmp_path / "good")
    store = open_dcp(tmp_path / "good", ties={})
    assert torch.equal(store.fetch("value/a.weight"), whole["model"]["a.weight"])

    def spoiled(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "good", tmp_path / name))

    def opened(folder: Path) -> str:
        return message(CheckpointError, lambda: open_dcp(folder, ties={}).fetch("value/a.weight"))

    (spoiled("attack") / ".metadata").write_bytes(pickle.dumps(Attack()))
    assert "its pickle refers to builtins.eval" in opened(tmp_path / "attack")
    (spoiled("gone") / "__0_0.distcp").unlink()
    assert "__0_0.distcp: cannot be read" in opened(tmp_path / "gone")
    cut = spoiled("cut") / "__0_0.distcp"
    cut.write_bytes(cut.read_bytes()[:900])
    assert "__0_0.distcp: ends at byte 900" in opened(tmp_path / "cut")
    bad = spoiled("flipped") / "__0_0.distcp"
    content = bytearray(bad.read_bytes())
    content[content.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    bad.write_bytes(content)
    assert "damaged (Bad CRC-32" in opened(tmp_path / "flipped")
    dcp.save({"left": whole["model"], "right": whole["model"]}, checkpoint_id=tmp_path / "which")
    assert "cannot tell which dict is the model's" in opened(tmp_path / "which")
    metadata = pickle.loads((tmp_path / "good" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../good/__0_0.distcp"
    (spoiled("outside") / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "expected a file in the same folder" in opened(tmp_path / "outside")


@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
def test_an_import_says_which_names_and_tags_it_cannot_take(tmp_path: Path) -> None:
    model = {"a.weight": torch.arange(6.0), "bn.running_mean": torch.ones(2), "rotary.scale": torch.ones(3)}
    dcp.save({"model": model}, checkpoint_id=tmp_path / "theirs")
    out = tmp_path / "out"

    def imported(*arguments: str) -> str:
        done = CliRunner().invoke(checkpoint, ["import", str(tmp_path / "theirs"), str(out), *arguments])
        return done.output if done.exception is None else str(done.exception)

    assert "names of its model, got 'gone'" in imported("--buffer", "gone")
    assert "names of its model, got 'gone'" in imported("--tie", "a.weight=gone")
    assert "got '../../elsewhere'" in imported("--tag", "../../elsewhere")
    assert not out.exists()
    assert imported("--buffer", "rotary.scale").startswith(f"{out / 'theirs'}: 1 files")
    manifest = read_manifest(out / "theirs")
    assert set(manifest.buffers) == {"bn.running_mean", "rotary.scale"}  # batch-norm statistics are found without names
    assert manifest.order == ("a.weight",)


def test_boxes_of_a_matrix(tmp_path: Path) -> None:
    """Parts split along the second dimension, as tensor parallelism does, consist of many runs."""
    from zeroaccel.checkpoint.formats.dcp_import import _pieces

    whole = torch.arange(4 * 6 * 2).view(4, 6, 2)
    found = torch.full((48,), -1)
    for file, (low, high) in enumerate([(0, 2), (2, 6)]):
        box = whole[1:3, low:high].contiguous().flatten()
        for number, start, length, place in _pieces(
            file, (4, 6, 2), (1, low, 0), (2, high - low, 2), [(0, box.numel(), 0)], 1
        ):
            assert number == file
            found[start : start + length] = box[place : place + length]
    assert torch.equal(found[12:36], whole.flatten()[12:36])
    assert (found[:12] == -1).all()
