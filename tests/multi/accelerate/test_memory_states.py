"""`ProjectConfiguration(memory_interval=...)`: states in memory, from which a restarted run resumes."""

from __future__ import annotations

import logging.handlers
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.conftest import Ranks
from zeroaccel import Accelerator, ProjectConfiguration, ZeroPlugin, set_seed
from zeroaccel.accelerate import memory_states
from zeroaccel.accelerate.memory_states import MemoryStates
from zeroaccel.accelerate.peer_copies import step_of
from zeroaccel.checkpoint.rank_file_writer import RankFileWriter
from zeroaccel.checkpoint.save import OVERWRITTEN
from zeroaccel.checkpoint.save_plan import saved_nbytes
from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger
from zeroaccel.ops.elementwise import Adam
from zeroaccel.ops.tensorwise import Lamb
from zeroaccel.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

VARIABLE = "ZEROACCEL_MEMORY_FOLDER"
STEPS = 16


class Lost(Exception):
    """Ends a run as if its process had died."""


@contextmanager
def waiting() -> Iterator[None]:
    """Completes each state at the batch after it, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_states._Writing, "is_over", property(lambda writing: writing.wait() is None))
        yield


def memory_of_machine(root: Path, machines: int, racks: str = "") -> Path:
    """Makes and returns the folder that acts as this rank's machine's memory, for a new process.

    Args:
        racks: a letter per machine.
    """
    memory_states._owners.clear()
    machine = int(os.environ["RANK"]) * machines // int(os.environ["WORLD_SIZE"])
    memory = root / f"memory{machine or ''}"
    memory.mkdir(exist_ok=True)
    os.environ |= {VARIABLE: str(memory), "ZEROACCEL_RACK": racks[machine] if racks else ""}
    return memory


def life(
    root: Path,
    *,
    interval: int | str | None,
    stage: int = 2,
    lost_at: int = -1,
    save_at: int = -1,
    offload: str = "none",
    before: Callable[[Path], object] | None = None,
    resume: bool = True,
    machines: int = 1,
    peer: dict[str, Any] | None = None,
    writes: bool = False,
    racks: str = "",
    is_new_process: bool = True,
) -> tuple[int, list[float], list[str]]:
    """Trains from the newest state to the end, or until it is lost; returns (first step, losses, newest state)."""
    owners = memory_states._owners[:]
    memory = memory_of_machine(root, machines, racks)
    if not is_new_process:
        memory_states._owners += owners
    project = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, memory_interval=interval)  # type: ignore[arg-type]
    plugin = ZeroPlugin(zero_stage=stage, offload_optimizer_device=offload)
    if peer is not None:
        plugin.deepspeed_config["checkpoint"] = {"peer": peer}
    accelerator = Accelerator(cpu=True, zero_plugin=plugin, project_config=project)
    set_seed(1)
    model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.3), nn.Linear(9, 1))
    loader = DataLoader(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    losses: list[float] = []
    try:
        if before is not None and accelerator.is_main_process:
            before(memory)
        accelerator.wait_for_everyone()
        if resume:
            accelerator.resume()
        begin = model.global_steps
        with suppress(Lost), waiting():
            for x in chain.from_iterable(loader for _ in range(loader.epoch, 2)):
                if writes:
                    scale_weights(model)
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if model.global_steps == save_at:
                    accelerator.save_state()
                if model.global_steps == lost_at:
                    raise Lost
    finally:
        accelerator.free_memory()
        del os.environ[VARIABLE]
    names = {path.name for path in memory.glob("*/checkpoints/*")} - {OVERWRITTEN}
    return begin, losses, sorted(names, key=step_of)[-1:]


def scale_weights(model: Any) -> None:
    """Writes weights, masters and moments, as programs may."""
    first, last = model.module[0].weight, model.module[2].weight
    with GatheredParameters([first], modifier_rank=0):
        first.data.mul_(1.01)
    master = safe_get_full_fp32_param(last)
    assert master is not None
    safe_set_full_fp32_param(last, master * 1.01)
    if model.global_steps:
        moment = safe_get_full_optimizer_state(last, "exp_avg")
        assert moment is not None
        safe_set_full_optimizer_state(last, moment * 0.5, "exp_avg")


def slowly_copied(root: Path, **settings: Any) -> tuple[int, list[float], list[str]]:
    """Runs `life` while a state's tensors are copied long after the next batch has started."""
    copy = RankFileWriter.copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankFileWriter, "copy", lambda writer: (time.sleep(0.05), copy(writer)))
        return life(root, writes=True, **settings)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_state_has_the_values_from_the_start_of_its_save(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    (tmp_path / "whole").mkdir()
    whole = ranks(2).run(life, tmp_path / "whole", interval=None, stage=stage, writes=True)
    for _ in range(2):
        ranks(2).run(slowly_copied, tmp_path, interval=3, lost_at=5, stage=stage)
    rest = ranks(2).run(life, tmp_path, interval=100, stage=stage, writes=True)
    for rank in range(2):
        assert rest[rank][:2] == (3, whole[rank][1][3:])


def held(root: Path, machines: int) -> tuple[list[tuple[int, set[int]]], int]:
    """Returns (bytes, inodes) of the ranks' files on this machine before each state, and the rank's own bytes."""
    found: list[tuple[int, set[int]]] = []
    rank = int(os.environ["RANK"])
    memory = root / f"memory{rank * machines // int(os.environ['WORLD_SIZE']) or ''}"
    give = MemoryStates._give_to_next_save

    def note(states: MemoryStates, earlier: Any) -> None:
        files = [path.stat() for path in memory.rglob("*.safetensors")]
        large = {path.stat().st_ino for path in memory.rglob("rank*.safetensors")}
        found.append((sum(file.st_size for file in files), large))
        give(states, earlier)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStates, "_give_to_next_save", note)
        life(root, interval=1, machines=machines)
    state = max(memory.glob("*/checkpoints/checkpoint_*"), key=lambda path: step_of(path.name))
    return found, sum(path.stat().st_size for path in state.rglob(f"*rank{rank:05}*.safetensors"))


@pytest.mark.parametrize("machines", [1, 2])
def test_two_states_are_the_most_that_a_machine_holds(ranks: Ranks, tmp_path: Path, machines: int) -> None:
    found = ranks(4).run(held, tmp_path, machines)
    of_all = sum(own for _, own in found)  # on two machines, each also holds copies of the other's ranks
    for moments, _ in found[:: 4 // machines]:
        assert [nbytes for nbytes, _ in moments] == [0, of_all, 2 * of_all, 2 * of_all]
        inodes = [numbers for _, numbers in moments]
        assert len(inodes[2]) == 2 * len(inodes[1])
        assert inodes[2] == inodes[3], "a state overwrote the files of the one before the last"


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "cpu"), (2, "none"), (3, "cpu")])
def test_a_run_that_starts_again_has_the_same_bits(ranks: Ranks, tmp_path: Path, stage: int, offload: str) -> None:
    settings: dict[str, Any] = {"stage": stage, "offload": offload}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = ranks(2).run(life, tmp_path / "whole", interval=None, **settings)
    first = ranks(2).run(life, tmp_path / "parts", interval=3, lost_at=8, **settings)
    second = ranks(2).run(life, tmp_path / "parts", interval=3, lost_at=14, **settings)
    third = ranks(2).run(life, tmp_path / "parts", interval=3, **settings)
    for rank in range(2):
        losses = whole[rank][1]
        assert len(losses) == STEPS
        assert (first[rank][0], first[rank][1], first[rank][2]) == (0, losses[:8], ["checkpoint_6"])
        assert (second[rank][0], second[rank][1], second[rank][2]) == (6, losses[6:14], ["checkpoint_12"])
        assert (third[rank][0], third[rank][1]) == (12, losses[12:])


def test_the_config_sets_interval_and_memory(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(2).run(life, tmp_path, interval=None, peer={"interval": 4}, lost_at=7)
    assert first[0][2] == ["checkpoint_4"]
    rest = ranks(2).run(life, tmp_path, interval=None, peer={"interval": 100}, lost_at=8)
    assert [facts[0] for facts in rest] == [4, 4]
    shutil.rmtree(tmp_path / "memory")
    for peer in ({"interval": 4, "memory": 1000}, {"interval": 4, "enabled": False}):
        assert ranks(2).run(life, tmp_path, interval=None, peer=peer, lost_at=7)[0][2] == []


def rooms(stage: int, optimizer: str, folder: Path) -> tuple[int, int]:
    """Returns the number of bytes that a rank expects to save, and the number that it saves."""
    accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin(zero_stage=stage))
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False))
    model[1].requires_grad_(False)
    model[1].bfloat16()
    classes: dict[str, Any] = {"adamw": partial(torch.optim.AdamW, amsgrad=True), "sgd": torch.optim.SGD, "lamb": Lamb}
    classes["int8"] = partial(Adam, moments_dtype="int8")
    engine, optimizer_ = accelerator.prepare(model, classes[optimizer](model[0].parameters(), lr=0.1))
    expected = saved_nbytes(engine.checkpointer.state())
    accelerator.backward(engine(torch.ones(2, 64)).float().square().mean())
    optimizer_.step()
    engine.save_checkpoint(folder, tag="one")
    accelerator.wait_for_everyone()
    (file,) = (folder / "one").glob(f"rank{accelerator.process_index:05}*.safetensors")
    accelerator.free_memory()
    return expected, file.stat().st_size


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "sgd"), (1, "adamw"), (3, "lamb"), (2, "int8")])
def test_the_size_of_a_state_is_known_before_the_first_step(
    ranks: Ranks, tmp_path: Path, stage: int, optimizer: str
) -> None:
    for expected, saved in ranks(2).run(rooms, stage, optimizer, tmp_path):
        assert 0 <= saved - expected < 6000, "the file only adds a header and small tensors"


@contextmanager
def messages() -> Iterator[list[str]]:
    """Yields the messages of the log, after the block."""
    handler, found = logging.handlers.BufferingHandler(1000), list[str]()
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        found += [record.getMessage() for record in handler.buffer]


def without_room(root: Path) -> list[str]:
    """Returns the warnings of a run whose second machine has too little memory."""
    rank = int(os.environ["RANK"])
    with messages() as found:
        life(root, interval=None, peer={"interval": 3, "memory": 10**9 if rank < 2 else 2000}, lost_at=4, machines=2)
    return [message for message in found if "no states" in message]


def test_a_machine_without_room_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (message,) = ranks(4).run(without_room, tmp_path)[0]
    # While an earlier test's engine lives, messages also name the place in its mesh: "ranks 2-3 (pp 1)".
    assert re.fullmatch(
        r"no states in memory: the machine of ranks 2-3(?: \(\w+ 1\))? needs [.\d]+ MB for two states of "
        r"[.\d]+ MB of its ranks and [.\d]+ MB of another machine's, "
        r"and may take [.\d]+ MB by checkpoint\.peer\.memory; training continues without them",
        message,
    )
    assert not list(tmp_path.glob("memory*/*/checkpoints/*"))


def damage(memory: Path) -> None:
    for path in memory.glob("*/checkpoints/*/pytorch_model/rank00001-of-*.safetensors"):
        flip(path)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_newest_intact_state_counts(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(2).run(life, tmp_path, interval=3, save_at=8, lost_at=12)  # in memory at step 9, on disk at step 8
    assert whole[0][2] == ["checkpoint_9"]
    resumed = ranks(2).run(life, tmp_path, interval=100, lost_at=12)
    assert (resumed[0][0], resumed[0][1]) == (9, whole[0][1][9:])
    damaged = ranks(2).run(life, tmp_path, interval=100, save_at=11, lost_at=12, before=damage)
    assert (damaged[0][0], damaged[0][1]) == (8, whole[0][1][8:])
    later = ranks(2).run(life, tmp_path, interval=100, lost_at=12)
    assert (later[0][0], later[0][1]) == (11, whole[0][1][11:])


def flip_newest(name: str, memory: Path) -> None:
    """Damages the file `name` of the newest state in a machine's memory."""
    newest = max(memory.glob("*/checkpoints/checkpoint_*"), key=lambda path: step_of(path.name))
    (path,) = newest.rglob(name)
    flip(path)


def resumed(root: Path, name: str, machines: int = 1) -> tuple[int, list[float], list[str]]:
    """Runs `life` after damage to the file `name` of the newest state; returns its step, losses and messages."""
    with messages() as found:
        step, losses, _ = life(root, interval=100, before=partial(flip_newest, name), lost_at=10, machines=machines)
    return step, losses, [message for message in found if "memory" in message]


@pytest.mark.parametrize(
    "name",
    ["rank00000-of-*", "run_state_rank00001.safetensors", "manifest.json", "files.json", "run_state.json"],
)
def test_the_older_state_replaces_a_damaged_one_then_the_run_starts_anew(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    whole = ranks(2).run(life, tmp_path, interval=3, lost_at=9)[0][1]  # states of the steps 3 and 6
    step, losses, said = ranks(2).run(resumed, tmp_path, name)[0]
    assert (step, losses[:6]) == (3, whole[3:]), said
    assert said[0].startswith("deleted the state of step 6 in memory: ")
    assert said[1].startswith("resuming from the memory of the machine, step 3; ")
    step, losses, said = ranks(2).run(resumed, tmp_path, name)[0]
    assert (step, losses[:9]) == (0, whole)
    assert [said[0].partition(" in ")[0], said[1]] == [
        "deleted the state of step 3",
        "the memory of the machine has no intact state; the run starts anew",
    ]


def test_a_damaged_file_has_a_copy_on_another_machine(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(2).run(life, tmp_path, interval=3, lost_at=9, machines=2)[0][1]
    (first, *_), _ = ranks(2).run(resumed, tmp_path, "rank00000-of-*", 2)
    assert first == 6
    step, losses, said = ranks(2).run(resumed, tmp_path, "run_state_rank00000.safetensors", 2)[0]
    assert (step, losses[:3]) == (6, whole[6:])
    assert [message[:13] for message in said] == ["resuming from"]


def two_phases(root: Path) -> list[tuple[int, list[float], list[str]]]:
    """Trains twice in one process, as folds and sweeps do."""
    memory_states._owners.clear()
    settings: dict[str, Any] = {"interval": 3, "lost_at": 9, "is_new_process": False}
    found = [life(root, **settings), life(root, **settings)]
    left = sorted(path.name.rpartition("_")[2] for path in (root / "memory").iterdir())
    return [*found, life(root, interval=3, lost_at=10), (len(left), [], left)]


def test_a_second_accelerator_does_not_resume_from_the_states_of_the_first(ranks: Ranks, tmp_path: Path) -> None:
    first, second, restarted, left = ranks(2).run(two_phases, tmp_path)[0]
    assert (first[0], second[:2]) == (0, (0, first[1]))
    assert left[2] == ["1"], "the second one's first state removes the states of the first"
    assert restarted[0] == 0


def another_shape(root: Path, project: str, width: int) -> int:
    """Returns the step at which a process resumes with a project's folder and a width of the model."""
    memory_of_machine(root, 1)
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(root / project), memory_interval=1))
    model: Any = nn.Linear(4, width)
    try:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = accelerator.prepare(DataLoader(torch.ones(40, 4)))
        accelerator.resume()
        begin: int = model.global_steps
        with waiting():
            for _, x in zip(range(3), loader, strict=False):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
    finally:
        accelerator.free_memory()
        del os.environ[VARIABLE]
    return begin


def test_states_belong_to_a_project_and_its_parameters(ranks: Ranks, tmp_path: Path) -> None:
    cases = [("a", 1), ("a", 2), ("b", 1), ("a", 1)]
    assert [ranks(2).run(another_shape, tmp_path, *case)[0] for case in cases] == [0, 0, 0, 1]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_machine_has_copies_on_another(ranks: Ranks, tmp_path: Path, lost: int) -> None:
    (tmp_path / "whole").mkdir()
    whole = ranks(4).run(life, tmp_path / "whole", interval=None)
    first = ranks(4).run(life, tmp_path, interval=3, lost_at=5, machines=2)
    assert [facts[2] for facts in first] == [["checkpoint_3"]] * 4
    shutil.rmtree(tmp_path / ("memory1" if lost else "memory"))
    rest = ranks(4).run(life, tmp_path, interval=100, machines=2)
    for rank in range(4):
        assert rest[rank][0] == 3
        assert rest[rank][1] == whole[rank][1][3:]


def test_a_run_survives_the_loss_of_one_of_three_machines(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(3).run(life, tmp_path, interval=3, lost_at=5, machines=3)
    assert first[0][2] == ["checkpoint_3"]
    files = [sorted(path.name for path in (tmp_path / name).rglob("*rank*")) for name in ("memory", "memory1")]
    assert [[name[:9] for name in names if name.startswith("rank")] for names in files] == [
        ["rank00000", "rank00002"],
        ["rank00000", "rank00001"],
    ]
    shutil.rmtree(tmp_path / "memory1")
    assert ranks(3).run(life, tmp_path, interval=100, lost_at=4, machines=3)[2][0] == 3
    # The replacement machine holds the files that its rank reads, but no copies; the next save makes them.
    assert [path.name[:9] for path in (tmp_path / "memory1").rglob("rank*")] == ["rank00001"]
    assert ranks(3).run(life, tmp_path, interval=2, lost_at=7, machines=3)[2][0] == 3
    (tmp_path / "memory").rename(tmp_path / "away")
    assert ranks(3).run(life, tmp_path, interval=100, lost_at=8, machines=3)[2][0] == 5


def test_a_run_survives_the_loss_of_one_of_two_racks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = ranks(4).run(life, tmp_path / "whole", interval=None)
    ranks(4).run(life, tmp_path, interval=3, lost_at=5, machines=4, racks="baab")
    for name in ("memory1", "memory2"):
        shutil.rmtree(tmp_path / name)
    rest = ranks(4).run(life, tmp_path, interval=100, machines=4, racks="baab")
    assert [(begin, losses) for begin, losses, _ in rest] == [(3, losses[3:]) for _, losses, _ in whole]


@pytest.mark.parametrize(("stage", "names"), [(0, [0, 1, 2]), (3, [2])])  # rank 3 has no elements
def test_a_machine_gets_what_its_ranks_read(ranks: Ranks, tmp_path: Path, stage: int, names: list[int]) -> None:
    ranks(4).run(life, tmp_path, interval=3, lost_at=5, machines=2, stage=stage)
    shutil.rmtree(tmp_path / "memory1")
    rest = ranks(4).run(life, tmp_path, interval=100, lost_at=6, machines=2, stage=stage)
    assert [facts[0] for facts in rest] == [3] * 4
    files = (tmp_path / "memory1").glob("*/checkpoints/checkpoint_3/pytorch_model/rank*")
    assert sorted(int(path.name[4:9]) for path in files) == names


def test_two_neighbours_that_are_lost_together_take_the_state_with_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3).run(life, tmp_path, interval=3, save_at=2, lost_at=5, machines=3)
    shutil.rmtree(tmp_path / "memory1")
    shutil.rmtree(tmp_path / "memory2")
    rest = ranks(3).run(life, tmp_path, interval=100, lost_at=4, machines=3)
    assert [facts[0] for facts in rest] == [2] * 3  # the project folder has the state of step 2


def test_fewer_ranks_go_on_as_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(life, tmp_path, interval=4, save_at=4, lost_at=6, machines=2)
    shutil.rmtree(tmp_path / "memory1")
    from_memory = ranks(2).run(life, tmp_path, interval=100, lost_at=9, before=hide_disk)
    shutil.rmtree(tmp_path / "memory")
    (tmp_path / "hidden").rename(tmp_path / "checkpoints")
    from_disk = ranks(2).run(life, tmp_path, interval=100, lost_at=9)
    assert [facts[0] for facts in from_memory] == [4, 4]
    assert [facts[:2] for facts in from_memory] == [facts[:2] for facts in from_disk]


def hide_disk(memory: Path) -> None:
    (memory.parent / "checkpoints").rename(memory.parent / "hidden")


def test_a_run_that_does_not_resume_removes_the_states(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(life, tmp_path, interval=3, lost_at=8)
    found = ranks(2).run(life, tmp_path, interval=2, lost_at=6, resume=False)
    assert (found[0][0], found[0][2]) == (0, ["checkpoint_4"])


def measured(root: Path) -> list[str]:
    return life(root, interval="auto")[2]


def test_the_interval_is_measured(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2).run(measured, tmp_path)
    assert found[0] == found[1]
    assert len(found[0]) == 1  # the first state comes after two steps


@pytest.mark.parametrize("interval", [0, -1, True, "often"])
def test_an_interval_is_a_number_of_steps(interval: Any) -> None:
    with pytest.raises(ConfigError, match=r"memory_interval: expected a number of steps"):
        ProjectConfiguration("runs", memory_interval=interval)


def samples(root: Path, *, lost_at: int = -1, machines: int = 1) -> list[list[int]]:
    """Returns the samples of each step on this rank; the config fixes the number of samples per step on all ranks."""
    memory_of_machine(root, machines)
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
    }
    project = ProjectConfiguration(str(root), memory_interval=2)
    accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin(config), project_config=project)
    set_seed(1)
    loader = DataLoader(torch.arange(96.0)[:, None], batch_size=4, shuffle=True)
    model: Any = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, sgd, loader)
    found: list[list[int]] = [[] for _ in range(6)]
    try:
        accelerator.resume()
        with waiting():
            for x in loader:
                if model.global_steps == lost_at:
                    break
                found[model.global_steps] += map(int, x.view(-1).tolist())
                with accelerator.accumulate(model):
                    accelerator.backward(model(x / 96).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        accelerator.free_memory()
        del os.environ[VARIABLE]
    return found


def test_fewer_ranks_take_the_same_samples_in_each_step(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = ranks(4).run(samples, tmp_path / "whole", lost_at=6)
    ranks(4).run(samples, tmp_path, lost_at=3, machines=2)
    shutil.rmtree(tmp_path / "memory1")
    rest = ranks(2).run(samples, tmp_path)
    for step in range(6):
        of_all = [sorted(chain.from_iterable(found[step] for found in runs)) for runs in (whole, rest)]
        assert len(of_all[0]) == 16
        assert of_all[1] == (of_all[0] if step >= 2 else [])
