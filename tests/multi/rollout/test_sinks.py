"""Sinks send weights to other programs; all ranks report a failure of either side, and training continues."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

import zeroaccel
from tests import time_limits
from tests.support.pool import Ranks
from tests.support.training import Toy, batches, config, train_step
from zeroaccel.engine import Engine
from zeroaccel.errors import UsageError
from zeroaccel.rollout import Channel, ChannelSink, FileSink, SafetensorsSink, Sink, WeightReceiver, send
from zeroaccel.rollout.receiver import Packet, receive_files, receive_version, refusal_file


def _engine(stage: int = 3, precision: str = "bf16", **changes: Any) -> Engine:
    torch.manual_seed(7)
    return zeroaccel.initialize(Toy(), config=config(stage, precision, **changes))[0]


def _step(engine: Engine, index: int, loss_factor: float = 1.0) -> float:
    loss = engine(batches(engine.collectives.rank, index + 1)[index])
    train_step(engine, loss * loss_factor)
    return float(loss.item())


def _weights(engine: Engine) -> dict[str, Tensor]:
    values = {name: value.clone() for name, value in engine.iter_named_full_params()}
    return {**values, **{name: value.clone() for name, value in engine.module.named_buffers()}}


class Generator(threading.Thread):
    """Another program, beside rank 0, that receives versions until it gets the end signal."""

    def __init__(self, port: int, tensors: dict[str, Tensor], versions: list[int]) -> None:
        super().__init__(daemon=True)
        self.receiver, self.said, self._port, self._versions = WeightReceiver(tensors), list[str](), port, versions

    def run(self) -> None:
        store = TCPStore("127.0.0.1", self._port, is_master=False)
        channels = [Channel(store, sender, 1, 1, timeout_seconds=60) for sender in (0, 1)]
        for senders in self._versions:
            self.said.append(receive_version(self.receiver, channels[:senders]))


def _over_channels() -> None:
    engine = _engine()
    rank, ranks = engine.collectives.rank, engine.collectives
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = ranks.gather_objects(store.port if store else 0, "port")[0]
    tensors = {name: torch.full_like(value, 7) for name, value in _weights(engine).items()}
    lacking = {name: value for name, value in tensors.items() if name != "layers.1.up.bias"}
    generator = Generator(port, tensors, [1, 2, 1, 1])
    if rank == 0:
        generator.start()
    own = store or TCPStore("127.0.0.1", port, is_master=False)
    sink = ChannelSink(Channel(own, rank, 0, 1, timeout_seconds=60))
    engine.mark_changes()
    first = sink if rank == 0 else None
    assert send(engine, engine.stream_weights(only_rank=0, bucket_bytes=1 << 12), first) > 0 or rank
    _step(engine, 0)
    send(engine, engine.stream_deltas(1), sink)
    if rank == 0:
        assert _wait(generator, 2) == ["", ""]
    expected = _weights(engine)
    if rank == 0:
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        generator.receiver.tensors = lacking
    # A receiver that lacks a name keeps its weights, and all ranks raise the error.
    _step(engine, 1)
    with pytest.raises(UsageError, match=r"receiver 1: version 3: this receiver has no tensor 'layers\.1\.up\.bias'"):
        send(engine, engine.stream_weights(only_rank=0), first)
    if rank == 0:
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        generator.receiver.tensors = tensors
    send(engine, engine.stream_weights(only_rank=0), first)
    now = _weights(engine)
    if rank == 0:
        generator.join(time_limits.seconds(60.0))
        assert all(torch.equal(tensors[name], value) for name, value in now.items())
    engine.destroy()


def _wait(generator: Generator, count: int) -> list[str]:
    for _ in range(600):
        if len(generator.said) >= count:
            break
        threading.Event().wait(0.05)
    return generator.said


def test_a_group_with_another_program(ranks: Ranks) -> None:
    ranks(2).run(_over_channels)


def _receives_one_packet(port: int) -> None:
    channel = Channel(TCPStore("127.0.0.1", port, is_master=False), 0, 1, 1, timeout_seconds=60)
    channel.receive()
    os.kill(os.getpid(), signal.SIGKILL)


def _to_one_that_is_killed() -> list[float]:
    engine = _engine()
    rank, ranks = engine.collectives.rank, engine.collectives
    losses = [_step(engine, 0)]
    sink = store = None
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        receiver = multiprocessing.get_context("fork").Process(target=_receives_one_packet, args=(store.port,))
        receiver.start()
        sink = ChannelSink(Channel(store, 0, 0, 1, timeout_seconds=60))
    ranks.gather_objects(None, "the generator is there")
    with pytest.raises(ConnectionError, match=r"weights of sender 0: lost the connection .*\[rank 0\]"):
        send(engine, engine.stream_weights(bucket_bytes=1 << 10, only_rank=0), sink)
    losses += [_step(engine, index) for index in (1, 2)]
    engine.destroy()
    return losses


def _uninterrupted() -> list[float]:
    engine = _engine()
    losses = [_step(engine, index) for index in range(3)]
    engine.destroy()
    return losses


def test_a_receiver_that_is_killed_in_the_middle(ranks: Ranks) -> None:
    """All ranks raise an error, and training continues as if nothing had been sent."""
    assert ranks(2).run(_to_one_that_is_killed) == ranks(2).run(_uninterrupted)


class Dying(Sink):
    """A sink that fails at its second packet."""

    def __init__(self) -> None:
        self.count, self.aborted = 0, False

    def put(self, packet: Packet) -> None:
        self.count += 1
        if self.count == 2:
            raise ConnectionError("the generator is gone")

    def finish(self) -> list[str]:
        raise AssertionError("finished after a failure")

    def abort(self) -> None:
        self.aborted = True


def _with_failures(folder: Path) -> None:
    plain = _engine()
    losses = [_step(plain, index) for index in range(4)]
    plain.destroy()
    engine = _engine()
    rank = engine.collectives.rank
    tensors = {name: torch.full_like(value, 7) for name, value in _weights(engine).items()}
    receiver = WeightReceiver(tensors)
    engine.mark_changes()
    seen = [_step(engine, 0)]
    dying = Dying()
    with pytest.raises(ConnectionError, match=r"the generator is gone \[rank 1\]"):
        send(engine, engine.stream_weights(bucket_bytes=1 << 10), dying if rank == 1 else None)
    assert dying.aborted == (rank == 1)
    seen.append(_step(engine, 1))
    files = FileSink(folder, versions=1)

    def published(packets: Any, *, everyone: bool = True) -> bool:
        """Returns True if the receiver, beside rank 0, has a new version."""
        send(engine, packets, files if everyone or rank == 0 else None)
        newer = rank == 0 and receive_files(receiver, folder, "generator")
        expected = _weights(engine)
        if newer:
            assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        return bool(engine.collectives.gather_objects(newer, "newer")[0])

    assert published(engine.stream_weights(only_rank=0), everyone=False)
    seen.append(_step(engine, 2))
    engine.collectives.barrier("stepped")
    # The receiver misses a version: it refuses the next delta, and then gets all weights.
    missed = engine.streamed_version + 1
    send(engine, engine.stream_deltas(missed - 1), files)
    seen.append(_step(engine, 3))
    assert not published(engine.stream_deltas(missed))
    with pytest.raises(UsageError, match=f"generator: version {missed + 1} is a delta to version {missed}"):
        send(engine, engine.stream_deltas(missed + 1), files)
    assert published(engine.stream_deltas(None))
    assert seen == losses
    assert len({path.name.split("-")[1] for path in folder.glob("weights-*")}) == 1  # older ones are removed
    engine.destroy()
    files.close()
    engine.collectives.barrier("closed")
    # A trainer that starts again replaces its folder, and no receiver applies its deltas to the earlier weights.
    engine = _engine()
    engine.mark_changes()
    again = FileSink(folder)
    send(engine, engine.stream_weights(only_rank=0), again if rank == 0 else None)
    for step in range(2):
        _step(engine, step)
        send(engine, engine.stream_deltas(engine.streamed_version), again)
    if rank == 0:
        receiver.version = 2  # by the numbers, the last delta fits
        assert not receive_files(receiver, folder, "generator")
        assert "another run of the trainer" in refusal_file(folder, "generator").read_text()
    engine.collectives.barrier("refused")
    with pytest.raises(UsageError, match="another run of the trainer"):
        send(engine, engine.stream_deltas(3), again)
    send(engine, engine.stream_deltas(None), again)
    assert rank != 0 or receive_files(receiver, folder, "generator")
    expected = _weights(engine)
    assert rank != 0 or all(torch.equal(receiver.tensors[name], value) for name, value in expected.items())
    engine.destroy()


def test_failures_are_named_on_all_ranks_and_training_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_with_failures, tmp_path / "shared")


def _around_saves(folder: Path) -> None:
    """Streams weights during a background save, after a load, and after a skipped step."""
    settings = config(2, "fp16", fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100})
    settings["checkpoint"] = {"async_save": True}
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    rank = engine.collectives.rank
    tensors = {name: torch.full_like(value, 7) for name, value in _weights(engine).items()}
    receiver, files = WeightReceiver(tensors), FileSink(folder / "shared")
    engine.mark_changes()

    def publish(packets: Any, *, everyone: bool = True) -> int:
        send(engine, packets, files if everyone or rank == 0 else None)
        assert rank != 0 or receive_files(receiver, folder / "shared", "generator")
        expected = _weights(engine)
        assert rank != 0 or all(torch.equal(tensors[name], value) for name, value in expected.items())
        paths = (folder / "shared").glob(f"weights-{engine.streamed_version:08d}-*")
        engine.collectives.barrier("counted")
        return sum(path.stat().st_size for path in paths)

    publish(engine.stream_weights(only_rank=0), everyone=False)
    _step(engine, 0)
    engine.save_checkpoint(folder / "saved")
    publish(engine.stream_deltas(1))  # while the save runs
    engine.wait_for_checkpoint()
    skipped = engine.skipped_steps
    _step(engine, 1, loss_factor=float("inf"))
    assert engine.skipped_steps == skipped + 1
    nothing = publish(engine.stream_deltas(2))
    _step(engine, 2)
    publish(engine.stream_deltas(3))
    engine.load_checkpoint(folder / "saved")
    everything = publish(engine.stream_deltas(4))
    nbytes = sum(value.nbytes for value in _weights(engine).values())
    assert nothing < nbytes / 3
    assert everything > nbytes
    engine.destroy()


def test_streams_beside_saves_loads_and_skipped_steps(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_around_saves, tmp_path)


def _to_safetensors(folder: Path) -> None:
    from safetensors.torch import load_file

    engine = _engine()
    rank = engine.collectives.rank
    path = folder / "weights.safetensors"
    send(engine, engine.stream_weights(only_rank=0, bucket_bytes=1 << 10), SafetensorsSink(path) if rank == 0 else None)
    expected = _weights(engine)
    loaded = load_file(path) if rank == 0 else expected
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    engine.destroy()


def test_a_safetensors_file(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_to_safetensors, tmp_path)


class Large(nn.Module):
    """Weights of a size at which a small rate leaves most of them unchanged in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x).float() - 1).square().mean()


def _payloads(rate: float) -> tuple[float, int]:
    """Returns (mean size of deltas relative to the weights, size of the marks relative to the number of elements)."""
    torch.manual_seed(3)
    settings = config(3, "bf16", optimizer={"type": "AdamW", "params": {"lr": rate}})
    engine, *_ = zeroaccel.initialize(Large(), config=settings)
    weights = sum(value.nbytes for _, value in engine.iter_named_full_params())
    engine.mark_changes()
    for _ in engine.stream_weights():
        pass
    total, most = 0, 0
    for step in range(5):
        torch.manual_seed(100 * step + engine.collectives.rank)
        train_step(engine, engine(torch.randn(8, 128).bfloat16()))
        bits = [b.changed.bits for u in engine.units for b in u.buffers if b.changed is not None]
        most = max(most, sum(one.numel() for one in bits if one is not None))
        own = sum(packet.payload.numel() for packet in engine.stream_deltas(engine.streamed_version))
        total += sum(engine.collectives.gather_objects(own, "sum"))
    numel = sum(b.own.numel for u in engine.units for b in u.buffers)
    assert most <= numel // 8 + 8 * len(engine.units)
    engine.destroy()
    return total / 5 / weights, most


def test_the_payload_follows_what_changes_and_is_never_more_than_all(ranks: Ranks) -> None:
    small, _ = ranks(2).run(_payloads, 3e-6)[0]
    large, _ = ranks(2).run(_payloads, 1e-1)[0]
    assert small < 0.05
    assert 0.98 < large < 1.02
