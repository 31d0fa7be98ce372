"""Streams of all weights: each byte is gathered once, one unit and one bucket at a time, with the engine's bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.mesh_training import small_llama
from tests.support.pool import Ranks
from tests.support.training import Toy, batches, config, offloaded, recording, train_step
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.rollout.receiver import Packet, WeightReceiver

BUCKET = 1 << 11


def _trained(settings: dict[str, Any]) -> tuple[Engine, RecordingCollectives]:
    torch.manual_seed(7)
    counted = recording()
    engine, *_ = zeroaccel.initialize(Toy(), config=settings, collectives=counted)
    for batch in batches(counted.rank, 2):
        train_step(engine, engine(batch))
    return engine, counted


def _expected(engine: Engine) -> dict[str, Tensor]:
    values = {name: value.clone() for name, value in engine.iter_named_full_params()}
    return {**values, **{name: value.clone() for name, value in engine.module.named_buffers()}}


def receive(packets: Iterator[Packet], tensors: dict[str, Tensor]) -> WeightReceiver:
    """Receives a version of a stream into `tensors`."""
    receiver = WeightReceiver(tensors)
    assert [receiver.take(packet) for packet in packets][-1]
    return receiver


def _stream(settings: dict[str, Any]) -> None:
    engine, counted = _trained(settings)
    expected = _expected(engine)
    units = [sum(b.nbytes for b in unit.buffers if not b.persistent) for unit in engine.units]
    counted.reset()
    got = {name: torch.full_like(value, 7) for name, value in expected.items()}
    got["head.weight"] = torch.full_like(got["embed.weight"], 7)  # tied in the model, separate here
    receiver, sizes = WeightReceiver(got), []
    for packet in engine.stream_weights(bucket_bytes=BUCKET):
        unsharded = sum(b.full.untyped_storage().nbytes() for u in engine.units for b in u.buffers if not b.persistent)
        assert unsharded <= max(units)  # one unit
        assert packet.payload is not None
        assert packet.payload.untyped_storage().nbytes() <= BUCKET  # and one bucket
        sizes.append(packet.payload.numel())
        done = receiver.take(packet)
        assert done or all(bool((value == 7).all()) for value in got.values()), "weights changed before the end"
    assert done
    assert receiver.version == engine.streamed_version == 1
    assert not receiver.missing
    assert torch.equal(got.pop("head.weight"), expected["embed.weight"])
    for name, value in expected.items():
        assert got[name].dtype is value.dtype
        assert torch.equal(got[name], value), name
    gathered = sum(call.numel for call in counted.calls if call.op == "all_gather")
    assert gathered == sum(b.layout.numel for u in engine.units for b in u.buffers if not b.persistent)
    assert min(sizes[:-1]) > BUCKET - 64  # full buckets
    # Another dtype for some names, on one rank.
    names = ["layers.1.up.weight", "layers.1.up.bias", "offset"]
    counted.reset()
    packets = list(engine.stream_weights(names=names, dtype=torch.float32, only_rank=1))
    if counted.rank == 1:
        some = {name: torch.empty_like(expected[name], dtype=torch.float32) for name in names}
        receive(iter(packets), some)
        assert all(torch.equal(some[name], expected[name].float()) for name in names)
    else:
        assert [packet.payload for packet in packets] == [None]
    if settings["zero_optimization"]["stage"] == 3:
        wanted = [unit for unit in engine.units if not {*names}.isdisjoint(unit.fqns())]
        numel = sum(b.layout.numel for unit in wanted for b in unit.buffers if not b.persistent)
        assert numel == sum(call.numel for call in counted.calls if call.op == "all_gather")
    # Training continues unaffected.
    train_step(engine, engine(batches(counted.rank, 3)[2]))
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "precision", "tier"),
    [(0, "bf16", ""), (1, "fp32", ""), (2, "bf16", ""), (3, "bf16", ""), (3, "fp32", "cpu"), (3, "bf16", "nvme")],
)
def test_a_stream_has_every_weight_once(ranks: Ranks, tmp_path: Path, stage: int, precision: str, tier: str) -> None:
    ranks(2).run(_stream, config(stage, precision, **(offloaded(tmp_path, tier, tier) if tier else {})))


def _misuse() -> None:
    engine, counted = _trained(config(3, "bf16"))
    for arguments, said in [
        ({"dtype": torch.int8}, r"stream_weights\(dtype\): expected float32, bfloat16, float16 or None"),
        ({"names": ["norm.weigth"]}, r"stream_weights\(names\): .* got 'norm.weigth'"),
        ({"bucket_bytes": 100}, r"stream_weights\(bucket_bytes\): expected a multiple of 16, got 100"),
        ({"only_rank": 2}, r"stream_weights\(only_rank\): expected 0 to 1, got 2"),
        ({"only_rank": counted.rank}, "expected the same arguments on all ranks"),
        ({"names": [] if counted.rank else None}, "expected the same arguments on all ranks"),
    ]:
        with pytest.raises(UsageError, match=said):
            engine.stream_weights(**arguments)
    open_one = engine.stream_weights(bucket_bytes=BUCKET)
    next(open_one)
    with pytest.raises(EngineStateError, match="expected no other stream of weights"):
        engine.stream_weights()
    engine.backward(engine(batches(counted.rank, 1)[0]))
    with pytest.raises(EngineStateError, match="while parameters are gathered"):
        engine.step()
    open_one.close()
    engine.step()
    for _ in engine.stream_weights(bucket_bytes=BUCKET):
        break  # the loop drops the iterator
    for _ in engine.stream_weights():
        pass
    with pytest.raises(EngineStateError, match=r"call engine.mark_changes\(\) before"):
        engine.stream_deltas(1)
    engine.destroy()


def test_wrong_calls_are_errors_on_all_ranks(ranks: Ranks) -> None:
    ranks(2).run(_misuse)


def _adapted(*, dora: bool) -> nn.Module:
    """A small Llama with PEFT adapters, whose values differ from their initial ones, and one whole trained module."""
    from peft import LoraConfig, get_peft_model

    layers = ["q_proj", "down_proj", "embed_tokens"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers warns about a call of PEFT
        lora = LoraConfig(r=4, target_modules=layers, use_dora=dora, modules_to_save=["norm"])
        model: nn.Module = get_peft_model(small_llama(tie_word_embeddings=False), lora)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model.bfloat16()


def _merge(stage: int, dora: bool) -> None:
    counted = recording()
    adapted: Any = _adapted(dora=dora)
    merged = adapted.merge_and_unload(safe_merge=True).state_dict()
    model = _adapted(dora=dora)
    engine, *_ = zeroaccel.initialize(model, config=config(stage, "bf16"), collectives=counted)
    before = {name: value.clone() for name, value in engine.iter_named_full_params()}
    counted.reset()
    got = {name: torch.empty_like(value) for name, value in merged.items()}
    receiver = receive(engine.stream_weights(merge_adapters=True, bucket_bytes=BUCKET), got)
    assert not receiver.missing
    for name, value in merged.items():
        assert torch.equal(got[name], value), name
    gathered = sum(call.numel for call in counted.calls if call.op == "all_gather")
    assert gathered == sum(b.layout.numel for u in engine.units for b in u.buffers if not b.persistent)
    for name, value in engine.iter_named_full_params():
        assert torch.equal(value, before[name]), name
    engine.destroy()


@pytest.mark.parametrize(("stage", "dora"), [(2, False), (3, False), (3, True)])
def test_adapters_are_merged_in_copies(ranks: Ranks, stage: int, dora: bool) -> None:
    ranks(2).run(_merge, stage, dora)
