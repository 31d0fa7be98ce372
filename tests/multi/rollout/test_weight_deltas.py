"""Deltas: the changes of a step reach a receiver bit for bit, from each rank's shard and without a gather."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import SGD, Toy, batches, config, offloaded, recording, train_step
from zeroaccel.engine import Engine
from zeroaccel.rollout.receiver import Packet, WeightReceiver
from zeroaccel.zero import GatheredParameters, safe_set_full_fp32_param


def _to_all(engine: Engine, packets: list[Packet]) -> list[Packet]:
    """Returns the packets of all ranks, as a receiver gets them."""
    copies = [Packet(packet.manifest, packet.payload.clone()) for packet in packets if packet.payload is not None]
    return [packet for of_rank in engine.collectives.gather_objects(copies, "send") for packet in of_rank]


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


class Follower:
    """A receiver whose weights are compared with an engine after each version."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tensors = {name: torch.full_like(value, 7) for name, value in self._weights().items()}
        self.receiver = WeightReceiver(self.tensors)
        engine.mark_changes()
        for packet in engine.stream_weights():
            self.receiver.take(packet)
        self.check()

    def _weights(self) -> dict[str, Tensor]:
        values = {name: value.clone() for name, value in self.engine.iter_named_full_params()}
        return {**values, **{name: value.clone() for name, value in self.engine.module.named_buffers()}}

    def check(self) -> None:
        assert self.receiver.version == self.engine.streamed_version
        for name, value in self._weights().items():
            assert torch.equal(_bits(self.tensors[name]), _bits(value)), name

    def follow(self, since: int | None = None) -> tuple[int, bool]:
        """Receives a delta; returns (bytes of payloads, whether all weights came)."""
        packets = list(self.engine.stream_deltas(self.receiver.version if since is None else since))
        whole = packets[0].manifest["since"] is None
        nbytes = 0
        for packet in _to_all(self.engine, packets):
            assert packet.payload is not None
            nbytes += packet.payload.numel()
            self.receiver.take(packet)
        self.check()
        return nbytes, whole


def _follow_steps(settings: dict[str, Any]) -> None:
    torch.manual_seed(7)
    counted = recording()
    engine, *_ = zeroaccel.initialize(Toy(), config=settings, collectives=counted)
    follower, data = Follower(engine), iter(batches(counted.rank, 12))

    def step() -> None:
        train_step(engine, engine(next(data)))

    step()
    counted.reset()
    packets = list(engine.stream_deltas(1))
    assert [call.label for call in counted.calls if call.op in ("all_gather", "broadcast")] == []
    for packet in _to_all(engine, packets):
        follower.receiver.take(packet)
    follower.check()
    step()
    step()  # two steps at once
    assert follower.follow()[1] is False
    if settings["zero_optimization"].get("offload_optimizer", {}).get("update_during") == "next_step":
        engine.finish_update()
    elif "bf16" in settings or "fp16" in settings:
        assert follower.follow()[0] <= 64 + sum(b.nbytes + 16 for b in engine.module.buffers())  # no weight has changed
    # Writes by the program, to trained and frozen parameters.
    engine.finish_update()
    up, frozen = engine.module.layers[1].up.weight, engine.module.frozen
    with GatheredParameters([up, frozen], modifier_rank=0), torch.no_grad():
        up[2].fill_(float("nan"))
        frozen[3] = -0.0
    assert follower.follow()[1] is False
    safe_set_full_fp32_param(up, torch.ones(up.shape))
    engine.module.offset.add_(1)
    assert follower.follow()[1] is False
    step()
    assert follower.follow()[1] is False
    engine.destroy()


@pytest.mark.parametrize("tier", ["", "cpu", "nvme", "cpu-master", "next_step"])
def test_a_delta_gives_the_bits_of_the_engine_in_every_tier(ranks: Ranks, tmp_path: Path, tier: str) -> None:
    keys: dict[str, Any] = {}
    if tier in ("cpu", "nvme"):
        keys = offloaded(tmp_path, tier, tier)
    elif tier == "cpu-master":
        keys = offloaded(tmp_path, "cpu")
    elif tier:
        keys = offloaded(tmp_path, "cpu", "cpu", update_during=tier)
    ranks(2).run(_follow_steps, config(3, "bf16", **keys))


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "bf16"), (2, "fp16"), (3, "fp32")])
def test_a_delta_gives_the_bits_of_the_engine_at_every_stage(ranks: Ranks, stage: int, precision: str) -> None:
    ranks(2).run(_follow_steps, config(stage, precision, optimizer=SGD))
