"""The engine's checkpoint calls on two ranks: refused calls, restored state, and the files left on the disk."""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import resource
import time
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zeroaccel
from tests.support.checkpoint_runs import STEPS, assembled, make_engine, resume, save, snapshot, train
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import Toy, batches, config, offloaded
from zeroaccel.checkpoint import atomic_write
from zeroaccel.checkpoint.atomic_write import FolderLock
from zeroaccel.checkpoint.plain_codec import with_class, without_class
from zeroaccel.checkpoint.save_plan import SavePlan
from zeroaccel.checkpoint.tensor_store import TensorStore
from zeroaccel.engine import Engine
from zeroaccel.errors import CheckpointError, EngineStateError, UsageError
from zeroaccel.offload.nvme import NvmeTier

# -- other precisions, optimizers and models


@pytest.mark.parametrize(("saved", "resumed"), [("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16")])
def test_another_precision_takes_the_exact_masters(ranks: Ranks, tmp_path: Path, saved: str, resumed: str) -> None:
    before = ranks(2).run(save, tmp_path, 2, saved)
    after = ranks(3).run(resume, tmp_path, f"2-{saved}", 3, resumed)
    one, other = assembled(before), assembled(after)
    assert one.keys() == other.keys()
    frozen = "value/frozen"
    assert [key for key in one if key != frozen and not torch.equal(one[key], other[key])] == []
    assert torch.equal(one[frozen].float(), other[frozen].float())  # 0.5 is exact in all of them


class Factored(torch.optim.Optimizer):
    """An optimizer that depends on the shape: its state is a row mean, a full tensor and two scalars."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                grad = param.grad
                rows = grad.mean(-1, keepdim=True) if grad.dim() > 1 else grad
                state["rows"] = rows + 0.5 * state.get("rows", torch.zeros_like(rows))
                state["count"] = state.get("count", 0) + 1
                state["scale"] = torch.tensor(1.0 / state["count"])
                param.sub_(group["lr"] * state["scale"] * (grad + state["rows"]))


class Projector:
    """A state with plain values and tensors, as GaLore's projectors are."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0
        self.basis: Any = None
        self.parts: list[Tensor] = []

    def projected(self, grad: Tensor) -> Tensor:
        if self.count % 3 == 0:  # a basis is used for three steps, so a resumed run needs it
            self.basis = torch.linalg.svd(grad)[0][:, : self.rank]
            self.parts = [self.basis * 0.5, self.basis * 0.5]
        self.count += 1
        return (self.parts[0] + self.parts[1]) @ (self.basis.t() @ grad)


class WithObjects(torch.optim.SGD):
    """An optimizer whose states are objects: of a class of its module, or of another one."""

    def __init__(self, params: Any, lr: float, make: Any = Projector) -> None:
        super().__init__(params, lr=lr)
        self.make = make

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            projector = self.state[param].setdefault("projector", self.make(rank=4))
            if param.dim() == 2 and self.make is Projector:
                param.grad = projector.projected(param.grad)
        return super().step(closure)


def any_optimizer(kind: str, root: Path, stage: int, *, resumed: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(11 if resumed else 7)
    settings = config(stage, "bf16", optimizer=None)
    builders: dict[str, Any] = {
        "Factored": Factored,
        "objects": lambda params: WithObjects(params, 0.01),
        "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
        "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
        "AMSGrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
        "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
    }
    engine, *_ = zeroaccel.initialize(Toy(), optimizer=builders[kind], config=settings)
    if resumed:
        engine.load_checkpoint(root)
    else:
        train(engine, batches(0, STEPS))
        engine.save_checkpoint(root)
    found = snapshot(engine, {})
    return found.losses, found.weights


@pytest.mark.parametrize("kind", ["Factored", "objects", "NAdam", "SGD", "AMSGrad", "Rprop"])
def test_states_of_any_optimizer_come_back(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    stages = (0, 0) if kind == "Factored" else (1, 3)
    before = ranks(2).run(any_optimizer, kind, tmp_path, stages[0], resumed=False)
    for world_size in (2, 1):
        after = ranks(world_size).run(any_optimizer, kind, tmp_path, stages[1], resumed=True)
        for losses, weights in after:
            assert losses == before[0][0]
            assert [name for name in weights if not torch.equal(weights[name], before[0][1][name])] == []


def save_objects(root: Path) -> str:
    model = Toy()
    optimizer = WithObjects(model.parameters(), 0.1, SimpleNamespace)
    engine, *_ = zeroaccel.initialize(model, optimizer, config=config(2, optimizer=None))
    train(engine, batches(engine.collectives.rank, 1))
    return message(UsageError, lambda: engine.save_checkpoint(root))


def test_states_that_are_objects_are_refused_with_what_can_be_saved(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(save_objects, tmp_path):
        assert "['projector']: expected plain data" in said
        assert "save the weights alone" in said
    assert not list(tmp_path.iterdir())


def test_objects_keep_the_order_of_dims_in_memory() -> None:
    projector, optimizer = Projector(3), WithObjects([nn.Parameter(torch.zeros(1))], 0.1)
    projector.projected(torch.randn(6, 5))
    plain = without_class(projector, optimizer)
    plain.basis = plain.basis.contiguous()
    restored = with_class(plain, optimizer, torch.device("cpu"), "the checkpoint")
    assert restored.basis.stride() == projector.basis.stride() == (1, 6)
    assert torch.equal(restored.basis, projector.basis)
    vars(plain)["with"] = {"basis": [0, 7]}
    with pytest.raises(CheckpointError, match="the checkpoint: state of kind Projector: damaged"):
        with_class(plain, optimizer, torch.device("cpu"), "the checkpoint")


def test_a_class_that_the_optimizer_does_not_have_is_named() -> None:
    kind = argparse.Namespace(**{"class": "Popen", "rank": 4})
    optimizer = WithObjects([nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(CheckpointError, match=r"expected a class of .*Projector.*, got 'Popen'"):
        with_class(kind, optimizer, torch.device("cpu"), "the checkpoint")


def tied_both_ways(root: Path) -> list[bool]:
    engine = make_engine(1)
    train(engine, batches(0, 2))
    engine.save_checkpoint(root)
    untied = Toy()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    other = make_engine(3, model=untied)
    other.load_checkpoint(root)
    other.destroy()
    same = torch.equal(untied.head.weight, engine.module.embed.weight) and untied.head.weight is not untied.embed.weight
    separate = make_engine(1, model=Toy())
    untied_root = root / "untied"
    loaded = make_engine(2, model=untied)
    loaded.save_checkpoint(untied_root)
    refused = message(CheckpointError, lambda: separate.load_checkpoint(untied_root))
    return [same, "not in the model: head.weight" in refused]


def test_ties_are_followed_but_never_dropped(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(tied_both_ways, tmp_path) == [[True, True]] * 2


# -- tags and options


def parts_on_request(root: Path) -> dict[str, Any]:
    engine = make_engine(2, "bf16")
    train(engine, batches(0, STEPS))
    engine.save_checkpoint(root, tag="full")
    masters = {e.key: e.data.clone() for e in SavePlan.collect(engine.checkpointer.state()).entries}

    def loaded(**arguments: Any) -> Any:
        fresh = make_engine(2, "bf16", seed=11)
        fresh.load_checkpoint(root, tag="full", **arguments)
        entries = {e.key: e.data for e in SavePlan.collect(fresh.checkpointer.state()).entries}
        right = all(torch.equal(masters[key], data) for key, data in entries.items() if key.startswith("master/"))
        states = any(key.startswith("state/") for key in entries)
        return right, states, fresh.global_steps, fresh.get_lr()[0]

    rate = engine.get_lr()[0]
    fresh_rate = make_engine(2, "bf16").get_lr()[0]
    return {
        "all": loaded() == (True, True, STEPS, rate),
        "module": loaded(load_module_only=True) == (True, False, 0, fresh_rate),
        "no states": loaded(load_optimizer_states=False)[:3] == (True, False, STEPS),
        "no scheduler": loaded(load_lr_scheduler_states=False) == (True, True, STEPS, rate),
    }


def test_each_part_is_loaded_on_request(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(parts_on_request, tmp_path):
        assert all(found.values()), found


def without_frozen(root: Path) -> tuple[list[str], float]:
    engine = make_engine(3, "bf16")
    engine.save_checkpoint(root, exclude_frozen_parameters=True)
    engine.save_16bit_model(root, "thin.safetensors", exclude_frozen_parameters=True)
    names = json.loads((root / "global_step0" / "manifest.json").read_text())["manifest"]["tensors"]
    model = Toy()
    model.frozen.data.fill_(0.75)
    other = make_engine(3, "bf16", model=model)
    other.load_checkpoint(root)
    other.destroy()
    return [name for name in names if "frozen" in name], float(model.frozen[0])


def test_frozen_parameters_can_be_left_out(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(without_frozen, tmp_path) == [([], 0.75)] * 2
    assert "frozen" not in load_file(tmp_path / "thin.safetensors")


def model_file(root: Path, stage: int, precision: str) -> dict[str, torch.Tensor]:
    engine = make_engine(stage, precision)
    train(engine, batches(0, 1))
    assert engine.save_16bit_model(root, "all.safetensors") is True
    assert engine.save_16bit_model(root) is True
    train(engine, batches(0, 1))  # training continues unaffected
    engine = make_engine(stage, precision)
    train(engine, batches(0, 1))
    engine.destroy()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (2, "bf16"), (3, "bf16"), (3, "fp32")])
def test_the_model_alone_is_a_plain_state_dict(ranks: Ranks, tmp_path: Path, stage: int, precision: str) -> None:
    expected = ranks(2).run(model_file, tmp_path, stage, precision)[0]
    pickled = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    streamed = load_file(tmp_path / "all.safetensors")
    assert list(pickled) == list(expected)
    assert set(streamed) == set(expected) - {"head.weight"}
    for name, value in expected.items():
        assert torch.equal(pickled[name], value), name
        assert pickled[name].dtype == value.dtype, name
        assert torch.equal(streamed.get(name, streamed["embed.weight"]), value), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.safetensors", "pytorch_model.bin"]


def drawn(root: Path, *, resumed: bool) -> tuple[list[float], list[float]]:
    engine = make_engine(1, checkpoint={"save_random_state": True})
    rank = engine.collectives.rank
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    if resumed:
        random.seed(50), np.random.seed(50), torch.manual_seed(50)
        engine.load_checkpoint(root)
    else:
        random.gauss(0, 1), np.random.standard_normal()
        engine.save_checkpoint(root)
    own = [random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(1).item()]
    return own, own


def test_random_generators_are_restored_on_request(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks(2).run(drawn, tmp_path, resumed=False)
    assert before[0] != before[1]
    assert ranks(2).run(drawn, tmp_path, resumed=True) == before


# -- refused calls


def refusals(root: Path) -> dict[str, str]:
    engine = make_engine(2)
    rank = engine.collectives.rank
    train(engine, batches(0, 1))
    found = {
        "tags": message(UsageError, lambda: engine.save_checkpoint(root, tag=f"rank{rank}")),
        "object": message(
            UsageError, lambda: engine.save_checkpoint(root, client_state={"a": [0, {"model": Toy() if rank else 1}]})
        ),
        "numpy": message(UsageError, lambda: engine.save_checkpoint(root, client_state={"loss": np.float64(1)})),
        "tag": message(CheckpointError, lambda: engine.save_checkpoint(root, tag="../elsewhere")),
    }
    loss = engine(batches(0, 1)[0])
    engine.backward(loss)
    found["middle"] = message(EngineStateError, lambda: engine.save_checkpoint(root))
    engine.step()
    found["nothing"] = message(CheckpointError, lambda: engine.load_checkpoint(root))
    assert not root.exists() or not any(root.iterdir())
    assert engine.load_checkpoint(root, tag="auto") == (None, {})
    return found


def test_saves_that_cannot_succeed_are_refused_on_every_rank_before_a_write(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(refusals, tmp_path / "new"):
        assert "'rank0' on rank 0, 'rank1' on rank 1" in found["tags"]
        assert "client_state['a'][1]['model']" in found["object"]
        assert "Toy" in found["object"]
        assert "client_state['loss']" in found["numpy"]
        assert "float64" in found["numpy"]
        assert "'../elsewhere'" in found["tag"]
        assert "gradients of an unfinished accumulation" in found["middle"]
        assert "latest" in found["nothing"]
        assert "none" in found["nothing"]


class Other(Toy):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.norm = nn.LayerNorm(23, bias=False)
        self.extra = nn.Parameter(torch.zeros(4))
        self.temperature = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.zeros(3))


def misfits(root: Path) -> dict[str, str]:
    engine = make_engine(2)
    train(engine, batches(0, 1))
    engine.save_checkpoint(root)
    other = make_engine(3, model=Other())
    before = [buffer.shard.read(buffer.own).clone() for unit in other.units for buffer in unit.buffers]
    found = {
        "strict": message(CheckpointError, lambda: other.load_checkpoint(root)),
        "auto": message(CheckpointError, lambda: other.load_checkpoint(root, tag="auto")),
        "loose": message(CheckpointError, lambda: other.load_checkpoint(root, load_module_strict=False)),
    }
    after = [buffer.shard.read(buffer.own) for unit in other.units for buffer in unit.buffers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    settings = config(1, optimizer={"type": "Lion", "params": {"lr": 1e-3}})
    lion, *_ = zeroaccel.initialize(Toy(), config=settings)
    found["optimizer"] = message(CheckpointError, lambda: lion.load_checkpoint(root))
    assert lion.load_checkpoint(root, load_optimizer_states=False)[0] is not None
    one_group, *_ = zeroaccel.initialize(Toy(), config=config(1))
    found["groups"] = message(CheckpointError, lambda: one_group.load_checkpoint(root))
    return found


def test_another_model_or_optimizer_is_refused_with_all_differences_named(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(misfits, tmp_path):
        for text in (found["strict"], found["auto"]):
            for part in (
                "temperature: () in the checkpoint, (2,) in the model",
                "offset: (23,) in the checkpoint, (3,) in the model",
                "not in the checkpoint: extra",
                "not in the model: layers.2.norm.weight",
                "layers.2.down.bias",
                "norm.bias",
            ):
                assert part in text, part
        assert "other shapes" in found["loose"]
        assert "expected Lion, got 'Adam'" in found["optimizer"]
        assert "of groups [0, 1], which differ in" in found["groups"]
        assert "weight_decay" in found["groups"]


# -- disk errors


def full_disk(root: Path, *, background: bool) -> tuple[str, int, bool]:
    engine = make_engine(1, checkpoint={"async_save": background})
    train(engine, batches(0, 1))
    engine.save_checkpoint(root)
    engine.wait_for_checkpoint()
    before = sorted(path.name for path in root.rglob("*"))
    train(engine, batches(0, 1))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = ""
    begin = os.open
    if engine.collectives.rank == 0:  # the other rank fails before this one begins
        os.open = lambda path, *rest, **at: (time.sleep(0.3 * str(path).endswith(".tmp")), begin(path, *rest, **at))[1]  # type: ignore[assignment]
    if engine.collectives.rank == 1:  # the disk of one rank is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        if background:
            engine.save_checkpoint(root, tag="second")
            engine.checkpointer._saving._writer.join(timeout=None if engine.collectives.rank else 0.0)  # type: ignore[union-attr]
            engine.collectives.barrier("both have written")
            told = message(CheckpointError, lambda: train(engine, batches(0, 1)))
            engine.reset()
        else:
            told = message(CheckpointError, lambda: engine.save_checkpoint(root, tag="second"))
    finally:
        os.open = begin
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    engine.collectives.barrier("tidied")
    assert not (root / "second").exists()
    left = [path.name for path in root.rglob("*") if path.is_file()]
    resumed = make_engine(3)
    path, _ = resumed.load_checkpoint(root)
    # The run whose save failed continues, and can save again.
    train(engine, batches(0, 1))
    engine.save_checkpoint(root, tag="third")
    engine.wait_for_checkpoint()
    again, _ = resumed.load_checkpoint(root)
    files = len(left) - len([name for name in before if "." in name or name == "latest"])
    return told, files, (os.path.basename(path or ""), os.path.basename(again or "")) == ("global_step1", "third")


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_error_on_all_ranks_and_costs_no_checkpoint(
    ranks: Ranks, tmp_path: Path, background: bool
) -> None:
    for told, more_files, resumes in ranks(2).run(full_disk, tmp_path, background=background):
        assert "File too large" in told
        assert "rank" in told
        assert "00001-of-00002" in told
        assert "00000-of-00002" not in told  # the disk of the other rank is not full
        assert more_files == 0
        assert resumes


def full_at_the_end(root: Path, name: str, *, background: bool) -> tuple[str, list[str]]:
    """Saves to a disk that has space for the ranks' files, but not for a file whose name ends in `name`."""
    left = 1
    engine = make_engine(1, checkpoint={"async_save": background})
    replace = os.replace

    def full(source: Any, target: Any, **folders: int) -> None:
        nonlocal left
        if str(target).endswith(name) and left:
            left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target, **folders)

    def save_again() -> None:
        engine.save_checkpoint(root, tag="second")
        engine.wait_for_checkpoint()

    engine.save_checkpoint(root, tag="first")
    engine.wait_for_checkpoint()
    os.replace = full
    try:
        told = message(CheckpointError, save_again)
    finally:
        os.replace = replace
    engine.collectives.barrier("tidied")
    assert engine.load_checkpoint(root)[0] == str(root / "first")
    return told, sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize(
    ("name", "background", "words"),
    [
        ("manifest.json", False, "second: cannot be written (No space left on device)"),
        ("manifest.json", True, "second: cannot be written (No space left on device)"),
        (".part.json", True, ".part.json: cannot be written (No space left on device)"),
    ],
)
def test_a_disk_that_is_full_at_the_end_leaves_nothing_of_the_save(
    ranks: Ranks, tmp_path: Path, name: str, background: bool, words: str
) -> None:
    for told, left in ranks(2).run(full_at_the_end, tmp_path, name, background=background):
        assert words in told
        assert "[rank 0]" in told
        assert left == ["first", "latest", "zero_to_fp32.py"]


def saves_of_two_runs(root: Path) -> dict[str, Any]:
    """Saves while another process writes into folders of this run."""
    engine = make_engine(1, checkpoint={"keep_last": 1})
    rank = engine.collectives.rank
    found: dict[str, Any] = {}
    for tag in ("other", "abandoned"):
        if rank == 0:
            (root / tag).mkdir(parents=True)
            (root / tag / "rank00000-of-00002-0123abcd.safetensors.tmp").touch()
    other = FolderLock(root / "other") if rank == 0 else None
    patience, atomic_write._LOCK_TIMEOUT_SECONDS = atomic_write._LOCK_TIMEOUT_SECONDS, 0.2
    found["refused"] = message(CheckpointError, lambda: engine.save_checkpoint(root, tag="other"))
    atomic_write._LOCK_TIMEOUT_SECONDS = patience
    engine.save_checkpoint(root, tag="own")
    found["kept"] = sorted(path.name for path in root.iterdir() if path.is_dir())
    engine.collectives.barrier("looked")
    if other is not None:
        Timer(0.2, other.release).start()  # a save waits for a lock that will be released soon
    for background in (False, True):
        engine = make_engine(1, checkpoint={"async_save": background})
        engine.save_checkpoint(root, tag="other")
        engine.wait_for_checkpoint()
        engine.collectives.barrier("saved")
        lock = FolderLock.if_free(root / "other", 1.0)  # the other rank holds it briefly
        found[f"free after {background}"] = lock is not None
        if lock is not None:
            lock.release()
    found["valid"] = engine.load_checkpoint(root)[0] == str(root / "other")
    return found


def test_two_runs_never_write_into_one_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(saves_of_two_runs, tmp_path / "new"):
        assert "other: another save is writing into it" in found["refused"]
        assert "[rank 0]" in found["refused"]
        assert found["kept"] == ["other", "own"]  # the abandoned save is removed, the other run's save stays
        assert found["free after False"]
        assert found["free after True"]
        assert found["valid"]


def full_for_the_model(root: Path) -> dict[str, str]:
    engine = make_engine(3)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = {}
    for name in ("x.bin", "x.safetensors"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        try:
            found[name] = message(CheckpointError, lambda name=name: engine.save_16bit_model(root / "m", name))  # type: ignore[misc]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (root / "file").touch()
    found["folder"] = message(CheckpointError, lambda: engine.save_16bit_model(root / "file"))
    found["suffix"] = message(CheckpointError, lambda: engine.save_16bit_model(root / "m", "x.zip"))
    train(engine, batches(0, 1))
    return found


def test_a_model_that_cannot_be_written_is_a_named_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(full_for_the_model, tmp_path):
        assert "cannot be written (File too large)" in found["x.bin"]
        assert "cannot be written (File too large)" in found["x.safetensors"]
        assert "file: cannot be written (File exists)" in found["folder"]
        assert "x.zip: expected a name ending in .safetensors" in found["suffix"]
        assert all("[rank 0]" in told for told in found.values())
    assert list((tmp_path / "m").iterdir()) == []


def damage(folder: Path, kind: str) -> None:
    """Damages a checkpoint of two ranks."""
    file = sorted(folder.glob("rank*.safetensors"))[1]
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif kind == "manifest":
        (folder / "manifest.json").unlink()
    else:
        data = bytearray(file.read_bytes())
        data[{"start": 3, "middle": len(data) // 2, "end": len(data) - 1}[kind]] ^= 0x10
        file.write_bytes(data)


def load_damaged(root: Path) -> tuple[str, str, str, int]:
    engine = make_engine(3)
    told = message(CheckpointError, lambda: engine.load_checkpoint(root))
    unusable = ""
    if engine.checkpointer._half_loaded:
        unusable = message(EngineStateError, lambda: engine(batches(0, 1)[0]))
        message(EngineStateError, lambda: engine.save_checkpoint(root))
    path, _ = engine.load_checkpoint(root, tag="auto")
    train(engine, batches(0, 1))
    return told, unusable, os.path.basename(path or ""), engine.global_steps


def save_two(root: Path) -> None:
    engine = make_engine(1)
    for tag in ("first", "second"):
        train(engine, batches(0, 1))
        engine.save_checkpoint(root, tag=tag)


@pytest.mark.parametrize("kind", ["missing", "truncated", "manifest", "start", "middle", "end"])
def test_a_damaged_checkpoint_is_never_loaded(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(save_two, tmp_path)
    damage(tmp_path / "second", kind)
    for told, unusable, path, steps in ranks(2).run(load_damaged, tmp_path):
        assert str(tmp_path / "second") in told
        assert (path, steps) == ("first", 2)
        if kind in ("start", "middle", "end"):
            assert "damaged" in told
            assert "rank00001-of-00002" in told
            assert "failed halfway" in unusable


def load_apart(root: Path) -> str:
    engine = make_engine(1)
    own = root / str(engine.collectives.rank)
    if engine.collectives.rank == 0:
        own.mkdir()
    return message(CheckpointError, lambda: engine.load_checkpoint(own, tag="one"))


def test_a_rank_that_fails_takes_the_others_with_it(ranks: Ranks, tmp_path: Path) -> None:
    # Every rank raises the error: no rank waits in a collective.
    for told in ranks(2).run(load_apart, tmp_path):
        assert "[rank 0]" in told
        assert "[rank 1]" in told


def scheduler_of_another_kind(root: Path) -> tuple[str, bool]:
    engine = make_engine(1)
    engine.save_checkpoint(root)
    settings = config(1, optimizer={"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}})
    settings["scheduler"] = {"type": "CosineAnnealingLR", "params": {"T_max": 10}}
    other, *_ = zeroaccel.initialize(Toy(), config=settings)
    told = message(CheckpointError, lambda: other.load_checkpoint(root, load_optimizer_states=False))
    other(batches(0, 1)[0])  # the engine is unchanged
    path, _ = other.load_checkpoint(root, load_optimizer_states=False, load_lr_scheduler_states=False)
    return told, path is not None


def test_another_scheduler_is_refused_before_anything_is_touched(ranks: Ranks, tmp_path: Path) -> None:
    for told, loaded in ranks(2).run(scheduler_of_another_kind, tmp_path):
        assert "expected CosineAnnealingLR, got 'WarmupLR'" in told
        assert loaded


def files_of_a_load(root: Path, stage: int, tier: str) -> tuple[set[str], set[str], int]:
    """Returns the files that this rank expects to read and those it reads, and its writes to a tier for the former."""
    saver = make_engine(stage, "bf16")
    train(saver, batches(0, 2))
    saver.save_checkpoint(root, tag="one")
    saver.destroy()
    engine = make_engine(stage, "bf16", seed=11, **offloaded(root, tier))
    before = pieces_of(engine)
    stored, opened = list[object](), set[str]()
    read = TensorStore._read

    def noted(store: TensorStore, file: int, *others: Any) -> None:
        opened.add(store.manifest.files[file].name)
        read(store, file, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvmeTier, "store", lambda *call: stored.append(call))
        expected = engine.checkpointer.files_to_read(root, "one")
    after = pieces_of(engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before), "files_to_read() changed the state"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorStore, "_read", noted)
        engine.load_checkpoint(root, tag="one")
    engine.destroy()
    return expected, opened, len(stored)


def pieces_of(engine: Engine) -> dict[str, torch.Tensor]:
    entries = SavePlan.collect(engine.checkpointer.state()).entries
    return {one.key: one.data.clone() if isinstance(one.data, torch.Tensor) else one.data.copy() for one in entries}


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (2, "nvme"), (3, "none")])
def test_the_files_of_a_load_are_known_before_it(ranks: Ranks, tmp_path: Path, stage: int, tier: str) -> None:
    for expected, opened, stored in ranks(2).run(files_of_a_load, tmp_path, stage, tier):
        assert opened
        assert expected == opened
        assert stored == 0
