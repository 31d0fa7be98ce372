"""Background saves: their contents, the calls that wait for them, and the places that raise their errors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_runs import assembled, make_engine, resume, train
from tests.support.environment import ROOT
from tests.support.job import run_job
from tests.support.pool import Ranks
from tests.support.training import batches, train_step
from zeroaccel.checkpoint import rank_file_writer
from zeroaccel.checkpoint.save_plan import SavePlan
from zeroaccel.checkpoint.zero_to_fp32 import CHUNK_NBYTES
from zeroaccel.engine import Engine

Pieces = dict[str, tuple[int, torch.Tensor]]


def pieces(engine: Engine) -> Pieces:
    contents = SavePlan.collect(engine.checkpointer.state())
    return {entry.key: (entry.start, entry.data.clone()) for entry in contents.entries}


def train_while_saving(root: Path) -> tuple[Pieces, list[float]]:
    """Delays the copies of a save until the next step begins: the checkpoint must still have the state before it."""
    engine = make_engine(2, "bf16", checkpoint={"async_save": True})
    train(engine, batches(0, 2))
    before = pieces(engine)
    copy = rank_file_writer.RankFileWriter._copy

    def late(self: rank_file_writer.RankFileWriter) -> None:
        time.sleep(0.15)
        copy(self)

    rank_file_writer.RankFileWriter._copy = late  # type: ignore[method-assign]
    try:
        engine.module.offset.fill_(9.0)
        assert engine.save_checkpoint(root, tag="kept")
        engine.module.offset.fill_(0.25)  # small tensors were copied before the call returned
        assert not (root / "kept" / "manifest.json").exists()
        losses = train(engine, batches(0, 4)[2:])
        engine.wait_for_checkpoint()
    finally:
        rank_file_writer.RankFileWriter._copy = copy  # type: ignore[method-assign]
    assert not engine.collectives.rank or (root / "kept" / "manifest.json").exists()
    engine.destroy()
    return before, losses


def never_saved() -> list[float]:
    engine = make_engine(2, "bf16")
    return train(engine, batches(0, 4))[2:]


def test_a_background_save_has_the_state_of_its_call(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks(2).run(train_while_saving, tmp_path)
    after = ranks(3).run(resume, tmp_path, "kept", 3, "bf16")
    expected = {key: value for rank in before for key, value in rank[0].items()}
    found = assembled(after)
    for key in expected:
        parts = sorted(rank[0][key] for rank in before if key in rank[0])
        assert torch.equal(torch.cat([data for _, data in parts]), found[key]), key
    assert before[0][1] == ranks(2).run(never_saved)[0]
    assert ranks(1).run(offset_of, tmp_path) == [9.0], "the call copies buffers at once"


def offset_of(root: Path) -> float:
    engine = make_engine(1, seed=11)
    engine.load_checkpoint(root)
    return float(engine.module.offset[0])


def many_saves(root: Path) -> int:
    engine = make_engine(1, checkpoint={"async_save": True, "keep_last": 2, "staging_nbytes": 1})
    for batch in batches(0, 6):
        train(engine, [batch])
        engine.save_checkpoint(root)
    engine.destroy()
    return engine.checkpointer._staging._num_allocated * CHUNK_NBYTES


def test_staging_memory_is_bounded_and_only_the_last_saves_are_kept(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "rank00000-of-00002-0123abcd.safetensors.tmp").touch()  # an unfinished file
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "manifest.json").write_text("{}")
    assert ranks(2).run(many_saves, tmp_path) == [CHUNK_NBYTES] * 2  # all of it fits in one chunk
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["global_step5", "global_step6", "latest", "notes", "zero_to_fp32.py"]
    assert (tmp_path / "latest").read_text() == "global_step6"
    files = sorted(path.name[:14] for path in (tmp_path / "global_step6").iterdir())
    assert files == ["manifest.json", "rank00000-of-0", "rank00001-of-0"]


def test_a_small_staging_buffer_gives_the_same_file(ranks: Ranks, tmp_path: Path) -> None:
    runs = [ranks(1).run(large_save, tmp_path / str(nbytes), nbytes)[0] for nbytes in (1, 1 << 28)]
    one, other = (sorted((tmp_path / str(nbytes)).rglob("rank*")) for nbytes in (1, 1 << 28))
    assert one[0].stat().st_size > 3 * CHUNK_NBYTES
    assert one[0].read_bytes() == other[0].read_bytes()
    assert all(share < 1.1 for share in runs)


def large_save(root: Path, staging_nbytes: int) -> float:
    """Saves a model of several chunks and loads it; returns the ratio of bytes read to bytes needed."""
    model = torch.nn.Sequential(torch.nn.Linear(1100, 1101), torch.nn.Linear(1101, 1))
    engine = make_engine(1, model=model, checkpoint={"async_save": True, "staging_nbytes": staging_nbytes})
    train_step(engine, engine(torch.ones(1, 1100)).sum())
    engine.save_checkpoint(root)
    found = pieces(engine)
    engine.load_checkpoint(root)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(found.values(), pieces(engine).values(), strict=True))
    assert engine.loaded is not None
    return engine.loaded.read_nbytes / engine.loaded.requested_nbytes


SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.support.checkpoint_runs import make_engine, train
from tests.support.training import batches
from zeroaccel.checkpoint import rank_file_writer as write
copy = write.RankFileWriter._copy
def slow(self):
    time.sleep(1.0)
    copy(self)
write.RankFileWriter._copy = slow
engine = make_engine(1, checkpoint={{"async_save": True}})
train(engine, batches(0, 1))
engine.save_checkpoint({folder!r})
print("end of the script", os.path.exists({folder!r} + "/latest"))
"""


@pytest.mark.timeout(120)
def test_the_end_of_the_program_waits_for_the_save(ranks: Ranks, tmp_path: Path) -> None:
    folder, script = tmp_path / "saved", tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), folder=str(folder)))
    result = run_job(2, script, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("end of the script False") == 2
    assert (folder / "latest").read_text() == "global_step1"
    assert ranks(1).run(offset_of, folder) == [0.25]


KILLED = """
import os, sys, time
sys.path.insert(0, {root!r})
from tests.support.checkpoint_runs import make_engine, train
from tests.support.training import batches
from zeroaccel.checkpoint import rank_file_writer as write
def dying(self):
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
engine = make_engine(1, checkpoint={{"async_save": True}})
train(engine, batches(0, 1))
engine.save_checkpoint({folder!r})
train(engine, batches(0, 1))
engine.wait_for_checkpoint()
if engine.collectives.rank == 1:
    write.RankFileWriter._copy = dying
engine.save_checkpoint({folder!r})
engine.wait_for_checkpoint()
"""


@pytest.mark.timeout(120)
def test_a_killed_rank_ends_the_save_at_once(ranks: Ranks, tmp_path: Path) -> None:
    folder, script = tmp_path / "saved", tmp_path / "script.py"
    script.write_text(KILLED.format(root=str(ROOT), folder=str(folder)))
    result = run_job(2, script, timeout=100)
    assert result.returncodes[1] == -9
    assert result.returncodes[0] not in (0, -9)
    assert "rank 1 ended before it wrote its part" in result.stderr
    assert (folder / "latest").read_text() == "global_step1"
    assert ranks(1).run(offset_of, folder) == [0.25]
