"""Streams and deltas of models that a mesh splits, with the names of the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.multi.parallel.test_mesh_axes import build, settings_of, train
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES
from tests.support.mixtures import small_mixture
from tests.support.pool import Ranks
from tests.support.training import ADAMW, Run, config
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.rollout.receiver import Packet, WeightReceiver

pytest.importorskip("transformers")


def _of_all(engine: Any, packets: Any) -> list[Packet]:
    """Returns the packets of each sender in the order in which a receiver gets them."""
    job = engine.collectives.job
    own = [Packet(p.manifest, p.payload.clone()) for p in packets]
    senders: dict[int, list[Packet]] = {}
    for of_rank in job.gather_objects(own, "send"):
        senders.setdefault(of_rank[0].manifest["sender"], of_rank)
    return [packet for of_sender in senders.values() for packet in of_sender]


def _check(engine: Any, tensors: dict[str, Tensor]) -> None:
    expected = engine.collectives.job.gather_objects(engine.consolidated_state_dict(), "reference")[0]
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name


def _follow(kind: str, mesh: ParallelConfig, stage: int) -> None:
    engine, *_ = zeroaccel.initialize(build(kind), config=settings_of(stage, ADAMW, "bf16"), parallel=mesh)
    shapes = engine.collectives.job.gather_objects(engine.consolidated_state_dict(), "shapes")[0]
    tensors = {name: torch.full_like(value, 7) for name, value in shapes.items()}
    receiver = WeightReceiver(tensors)
    engine.mark_changes()
    for packet in _of_all(engine, engine.stream_weights(bucket_bytes=1 << 14, as_saved=False)):
        receiver.take(packet)
    _check(engine, tensors)
    assert not receiver.missing
    train(engine, mesh, Run())
    packets = _of_all(engine, engine.stream_deltas(1))
    assert {packet.manifest["since"] for packet in packets} == {1}
    assert [receiver.take(packet) for packet in packets][-1]
    _check(engine, tensors)
    assert [receiver.take(packet) for packet in _of_all(engine, engine.stream_deltas(1))][-1]  # all weights
    _check(engine, tensors)
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "mesh", "stage"),
    [
        pytest.param("llama-tied", {"tp": 2}, 3, marks=NEEDS_SPLIT_LAYERS),
        pytest.param("gpt2", {"pp": 2}, 1, marks=NEEDS_STAGES),
        ("Mixtral", {"ep": 2}, 3),
        ("llama", {"sp": 2}, 2),
    ],
)
def test_a_divided_model_is_sent_by_the_names_of_the_whole(
    ranks: Ranks, kind: str, mesh: dict[str, int], stage: int
) -> None:
    ranks(4).run(_follow, kind, ParallelConfig(**mesh), stage)


def _saved(folder: Path) -> None:
    from safetensors.torch import load_file

    engine, *_ = zeroaccel.initialize(small_mixture("Mixtral"), config=config(3, "bf16"))
    plain = small_mixture("Mixtral").bfloat16()
    if engine.collectives.rank == 0:
        plain.save_pretrained(folder)
    engine.collectives.barrier("saved")
    expected = load_file(folder / "model.safetensors")
    tensors = {name: torch.empty_like(value) for name, value in expected.items()}
    receiver = WeightReceiver(tensors)
    for packet in engine.stream_weights(bucket_bytes=1 << 14):
        receiver.take(packet)
    assert not receiver.missing
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name
    engine.destroy()


def test_experts_have_the_names_and_layouts_of_a_saved_model(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_saved, tmp_path)
