"""A new tier is one class and one table entry: engine, checkpoints and parameter access stay unchanged.

The classes here compress without loss, so a run with them has the bits of a run without them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.support.checkpoint_runs import Snapshot, assembled, resume, save
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Toy, batches, config, differences, train, train_step
from zeroaccel import zero
from zeroaccel.zero.layout import FlatRange, FlatTensor
from zeroaccel.zero.storage.masters import MasterPlace, MasterStorage, SeparateMasters, stand_in
from zeroaccel.zero.storage.placement import MASTER_STORAGES, SHARD_STORAGES
from zeroaccel.zero.storage.shards import ShardPlace, ShardStorage


def _compressed(values: Tensor) -> bytes:
    return zlib.compress(values.contiguous().view(torch.uint8).numpy().tobytes(), 1)


class CompressedShard(ShardStorage):
    """Keeps weights as zlib bytes and decompresses them for each use."""

    def __init__(self, place: ShardPlace) -> None:
        super().__init__(place)
        self._bytes = _compressed(torch.empty(self.range.numel, dtype=self.dtype))
        self._staged = torch.empty(0)

    def _values(self) -> Tensor:
        raw = zlib.decompress(self._bytes)
        return torch.frombuffer(bytearray(raw), dtype=self.dtype) if raw else torch.empty(0, dtype=self.dtype)

    def elements(self, interval: FlatRange) -> Tensor:
        return self._values()[interval.at(self.range.start)]

    def write(self, interval: FlatRange, values: Tensor) -> None:
        changed = self._values()
        changed[interval.at(self.range.start)].copy_(values)
        self._bytes = _compressed(changed)

    def stage(self) -> FlatTensor:
        self._staged = torch.empty(self.range.numel, dtype=self.dtype)
        return FlatTensor(self.range, self._staged)

    def commit(self) -> None:
        self._bytes = _compressed(self._staged)

    def gather_input(self) -> Tensor:
        return self._values()


class CompressedMasters(SeparateMasters):
    """Keeps masters as zlib bytes between steps; the optimizer's states stay in memory."""

    def __init__(self, place: MasterPlace) -> None:
        super().__init__(place)
        self._bytes = b""

    def _unpack(self) -> None:
        values = torch.frombuffer(bytearray(zlib.decompress(self._bytes)), dtype=torch.float32)
        self._point_at(values if self.range else torch.empty(0))

    def _pack(self) -> None:
        self._bytes = _compressed(self._masters.values)
        self._masters = FlatTensor(self.range, stand_in((self.range.numel,)))
        for piece in self.pieces:
            piece.param.data = stand_in(piece.shape)

    @contextmanager
    def _unpacked(self) -> Iterator[None]:
        self._unpack()
        yield
        self._pack()

    def initialize(self, source: Tensor) -> None:
        super().initialize(source)
        self._pack()

    def elements(self, interval: FlatRange, state: str | None = None) -> Tensor:
        with self._unpacked():
            return super().elements(interval, state)

    def write(self, interval: FlatRange, values: Tensor, state: str | None = None) -> None:
        with self._unpacked():
            super().write(interval, values, state)

    def swap_in(self, index: int, following: MasterStorage | None = None, *, joined: bool = True) -> None:
        self._unpack()
        super().swap_in(index, following, joined=joined)

    def swap_out(self, index: int) -> None:
        self._pack()

    def load(self, fill: Callable[[FlatRange, Tensor], None], flush: Callable[[], None]) -> None:
        with self._unpacked():
            super().load(fill, flush)
            flush()

    def publish(self) -> None:
        with self._unpacked():
            super().publish()

    def tensors(self) -> Iterator[Tensor]:
        return iter(())

    def as_weights(self, dtype: torch.dtype) -> Tensor | None:
        return None


@contextmanager
def compressing() -> Iterator[None]:
    """Registers both classes, so that parameters and masters in memory are compressed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHARD_STORAGES, "device", CompressedShard)
        patch.setitem(MASTER_STORAGES, "separate", lambda place, swapper: CompressedMasters(place))
        yield


def _train_both(settings: dict[str, Any]) -> list[str]:
    plain = train(settings, 4)
    with compressing():
        return differences(plain, train(settings, 4))


@pytest.mark.parametrize("optimizer", [ADAMW, SGD, {"type": "Lamb", "params": {"lr": 1e-2}}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_has_the_same_bits(ranks: Ranks, precision: str, optimizer: dict[str, Any]) -> None:
    """Lamb covers whole tensors in an owner layout."""
    for found in ranks(2).run(_train_both, config(3, precision, gradient_clipping=1.0, optimizer=optimizer)):
        assert found == []


def _save(root: Path) -> Snapshot:
    with compressing():
        return save(root / "compressed", 3, "bf16")


def _resume(root: Path) -> Snapshot:
    with compressing():
        return resume(root / "plain", "3-bf16", 3, "bf16")


def test_checkpoints_go_both_ways(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks(2).run(save, tmp_path / "plain", 3, "bf16")
    saved = ranks(2).run(_save, tmp_path)
    resumed = ranks(2).run(_resume, tmp_path)
    back = ranks(2).run(resume, tmp_path / "compressed", "3-bf16", 3, "bf16")
    expected = assembled(plain)
    for found in (saved, resumed, back):
        got = assembled(found)
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
        assert [one.losses for one in found] == [one.losses for one in plain]


def _read_and_write() -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = Toy()
    engine, *_ = zeroaccel.initialize(model, config=config(3, "bf16"))
    weight = model.layers[0].up.weight
    assert isinstance(weight, torch.nn.Parameter)
    batch = batches(engine.collectives.rank, 1)[0]
    train_step(engine, engine(batch))
    found: dict[str, Tensor] = {}

    def read(when: str) -> None:
        master, moment = zero.safe_get_full_fp32_param(weight), zero.safe_get_full_optimizer_state(weight, "exp_avg")
        assert master is not None
        assert moment is not None
        found.update({f"{when}, master": master, f"{when}, moment": moment})
        with zero.GatheredParameters([weight]):
            found[f"{when}, weight"] = weight.detach().clone()

    read("stepped")
    zero.safe_set_full_fp32_param(weight, found["stepped, master"] * 1.001)
    zero.safe_set_full_optimizer_state(weight, found["stepped, moment"] * 2, "exp_avg")
    read("set")
    with zero.GatheredParameters([weight], modifier_rank=0):
        weight.data[::2] *= 3
    read("written")
    train_step(engine, engine(batch))
    read("stepped again")
    engine.destroy()
    return found


def _access() -> list[str]:
    plain = _read_and_write()
    with compressing():
        found = _read_and_write()
    return [name for name in plain if not torch.equal(plain[name], found[name])]


def test_parameters_are_read_and_written(ranks: Ranks) -> None:
    assert ranks(2).run(_access) == [[], []]
