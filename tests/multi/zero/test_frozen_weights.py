"""Frozen weights that the engine quantizes: the same bits at every stage and tier, and a plain loop's losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroaccel
from tests.support.checkpoint_runs import train as train_steps
from tests.support.pool import Ranks
from tests.support.refusals import refused
from tests.support.training import config, plain_step, recording
from zeroaccel.comm.level_codes import FORMATS, decode, encode
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero.layout import round_up

WIDTH = 48  # no multiple of a block; its square is no multiple of an int8 block
VOCABULARY = 61


class Adapted(nn.Module):
    """A frozen layer with two small trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        for part in (self.base, self.norm):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        result: Tensor = x + torch.tanh(self.base(x) + self.up(self.down(x)))
        return result


class Model(nn.Module):
    """An embedding, blocks that may be recomputed in backward, and a frozen head."""

    def __init__(self, recomputes: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).requires_grad_(self.recomputes == "reentrant")
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recomputes == "reentrant") if self.recomputes else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


CODED = {"head.weight", *(f"blocks.{index}.base.weight" for index in range(3))}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


def _batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (2, 8), generator=generator) for _ in range(count)]


def _trained(model: nn.Module, optimizer: str) -> torch.optim.Optimizer:
    return OPTIMIZERS[optimizer]([param for param in model.parameters() if param.requires_grad])


def _initialized(model: nn.Module, stage: int, optimizer: str, precision: str = "fp32", **changes: Any) -> Any:
    settings = config(stage, precision, optimizer=None, **changes)
    return zeroaccel.initialize(model, _trained(model, optimizer), config=settings)[0]


def _rounded(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Replaces the weights that the engine quantizes by their decoded codes; returns them by name."""
    codec, values = FORMATS[name], {}
    for fqn in sorted(CODED):
        param = model.get_parameter(fqn)
        padded = torch.zeros(round_up(param.numel(), codec.block_numel), dtype=param.dtype)
        padded[: param.numel()] = param.detach().flatten()
        code = torch.empty(codec.nbytes(padded.numel()), dtype=torch.uint8)
        encode(padded, codec, code)
        decode(code, codec, padded)
        values[fqn] = padded[: param.numel()].view(param.shape)
        param.data = values[fqn].clone()
    return values


def _plain(name: str, recomputes: str, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    model = Model(recomputes)
    values = _rounded(model, name)
    trained, losses = _trained(model, optimizer), []
    for tokens in _batches():
        losses.append(plain_step(trained, model(tokens)))
    return losses, values


SMALL = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}


def _places(folder: str) -> dict[str, tuple[int, dict[str, Any]]]:
    nvme = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    return {
        **{f"stage {stage}": (stage, {}) for stage in range(4)},
        "stage 0, freed at once": (0, SMALL),
        "freed at once": (3, SMALL),
        "persistent": (3, {"stage3_param_persistence_threshold": 10**6}),
        "host": (3, {"offload_param": {"device": "cpu"}}),
        "file": (3, {"offload_param": nvme}),
        "all in files": (3, {"offload_param": nvme, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}),
    }


def _run(name: str, optimizer: str, precision: str, folder: str) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for place, (stage, changes) in _places(folder).items():
        model = Model()
        engine = _initialized(model, stage, optimizer, precision, frozen_weights=name, **changes)
        losses = train_steps(engine, _batches())
        engine.destroy()
        found[place] = losses, {fqn: param.detach().clone() for fqn, param in model.named_parameters()}
    return found


@pytest.mark.parametrize(
    ("name", "optimizer", "precision"),
    [("int8", "SGD", "fp32"), ("nf4", "AdamW", "fp32"), ("mxfp4", "SGD", "bf16"), ("nf4", "SGD", "fp16")],
)
def test_bits_are_equal_at_all_stages_and_in_all_tiers(
    ranks: Ranks, tmp_path: Path, name: str, optimizer: str, precision: str
) -> None:
    expected, values = _plain(name, "", optimizer)
    for found in ranks(2).run(_run, name, optimizer, precision, str(tmp_path)):
        losses, weights = found["stage 0"]
        for place, (others, other_weights) in found.items():
            assert others == losses, place
            assert all(torch.equal(weights[fqn], other_weights[fqn]) for fqn in weights), place
        if precision == "fp32":
            assert all(torch.equal(weights[fqn], values[fqn]) for fqn in CODED)
            assert losses == pytest.approx(expected, abs=1e-6)
        assert losses[0] != losses[-1]


def _recomputed(name: str, recomputes: str) -> list[list[float]]:
    results = []
    for stage, changes in ((0, SMALL), (3, {}), (3, SMALL)):
        engine = _initialized(Model(recomputes), stage, "SGD", frozen_weights=name, **changes)
        results.append(train_steps(engine, _batches()))
        engine.destroy()
    return results


@pytest.mark.parametrize("recomputes", ["reentrant", "non-reentrant"])
def test_recomputed_blocks_have_the_losses_of_one_process(ranks: Ranks, recomputes: str) -> None:
    expected, _ = _plain("nf4", recomputes, "SGD")
    for results in ranks(2).run(_recomputed, "nf4", recomputes):
        assert results[0] == results[1] == results[2]
        assert results[0] == pytest.approx(expected, abs=1e-6)


def _memory_and_traffic(name: str, stage: int) -> tuple[int, list[tuple[str, int]]]:
    model, counted = Model(), recording()
    settings = config(stage, "bf16", frozen_weights=name, optimizer=None, **SMALL)
    engine, *_ = zeroaccel.initialize(model, _trained(model, "SGD"), config=settings, collectives=counted)
    codes = [buffer for unit in engine.units for buffer in unit.buffers if unit.name.startswith("codes of ")]
    assert {slot.fqn for buffer in codes for slot in buffer.layout.slots} == CODED
    assert not any(buffer.full.untyped_storage().nbytes() for buffer in codes)
    nbytes = sum(tensor.nbytes for buffer in codes for tensor in buffer.shard_tensors())
    counted.reset()
    train_steps(engine, _batches(1))
    calls = [(call.label, call.nbytes) for call in counted.calls if call.label.startswith("unshard codes")]
    engine.destroy()
    return nbytes, calls


@pytest.mark.parametrize("name", ["int8", "nf4", "mxfp4"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_have_and_send_codes_only(ranks: Ranks, name: str, world_size: int) -> None:
    codec = FORMATS[name]
    numels = [round_up(numel, codec.block_numel * world_size) for numel in (*(WIDTH * WIDTH,) * 3, VOCABULARY * WIDTH)]
    shards = [codec.nbytes(numel // world_size) for numel in numels]
    for nbytes, calls in ranks(world_size).run(_memory_and_traffic, name, 3):
        assert nbytes == sum(shards)
        # The head belongs to the root, whose codes are gathered first, in forward and in backward.
        expected = [] if world_size == 1 else [shards[3], *shards[:3], shards[3], *reversed(shards[:3])]
        assert [sent for _, sent in calls] == expected
    for nbytes, calls in ranks(world_size).run(_memory_and_traffic, name, 1):
        assert nbytes == sum(codec.nbytes(numel) for numel in numels)
        assert calls == []


def _second_copies(name: str) -> list[tuple[list[float], int, int]]:
    found = []
    in_two = {"zero_hpz_partition_size": 2}
    for changes in ({}, in_two, {**in_two, "offload_param": {"device": "cpu"}}):
        model, counted = Model(), recording()
        settings = config(3, "bf16", frozen_weights=name, optimizer=None, **SMALL, **changes)
        engine, *_ = zeroaccel.initialize(model, _trained(model, "SGD"), config=settings, collectives=counted)
        losses = train_steps(engine, _batches())
        engine.backward(engine(_batches()[0]))
        codes = [buffer for unit in engine.units for buffer in unit.buffers if unit.name.startswith("codes of ")]
        copies = sum(part.nbytes for buffer in codes for part in buffer.shard.secondary.tensors())
        sent = [call.nbytes for call in counted.calls if call.op == "gather_secondary" and "codes of" in call.label]
        engine.step()
        assert not any(list(buffer.shard.secondary.tensors()) for buffer in codes)
        engine.destroy()
        found.append((losses, copies, sum(sent)))
    return found


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_second_copies_hold_codes(ranks: Ranks, name: str) -> None:
    """With hpZ, backward gathers codes from two ranks instead of four. Regression: second copies were decoded."""
    codec = FORMATS[name]
    numels = [round_up(numel, codec.block_numel * 4) for numel in (*(WIDTH * WIDTH,) * 3, VOCABULARY * WIDTH)]
    nbytes = sum(4 * codec.nbytes(numel // 4) for numel in numels)
    for plain, *others in ranks(4).run(_second_copies, name):
        assert plain[1:] == (0, 0)
        assert plain[0][0] != plain[0][-1]
        for losses, copies, sent in others:
            assert losses == plain[0]
            assert copies == nbytes // 2
            assert sent == 5 * nbytes // 2


def _saved(folder: str, saves: tuple[int, str | None], resumes: list[tuple[int, str | None]]) -> list[list[float]]:
    engine = _initialized(Model(), saves[0], "AdamW", frozen_weights=saves[1])
    train_steps(engine, _batches()[:2])
    engine.save_checkpoint(folder)
    results = [train_steps(engine, _batches()[2:])]
    engine.destroy()
    for stage, name in resumes:
        model = Model()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)  # loading must replace these values
        engine = _initialized(model, stage, "AdamW", frozen_weights=name)
        engine.load_checkpoint(folder)
        results.append(train_steps(engine, _batches()[2:]))
        engine.destroy()
    return results


@pytest.mark.parametrize("name", ["int8", "nf4", "mxfp4"])
def test_runs_resume_with_the_same_bits(ranks: Ranks, tmp_path: Path, name: str) -> None:
    resumes: list[tuple[int, str | None]] = [(3, name), (0, name), (2, None)]
    for straight, *others in ranks(2).run(_saved, str(tmp_path), (3, name), resumes):
        for resumed in others:
            assert resumed == straight


def _accessed() -> tuple[bool, bool, float]:
    model = Model()
    engine = _initialized(model, 3, "SGD", frozen_weights="nf4")
    weight = model.blocks[1].base.weight
    with zeroaccel.zero.GatheredParameters([weight]):
        before = weight.detach().clone()
    with zeroaccel.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight[3] = 0.25
    with zeroaccel.zero.GatheredParameters([weight]):
        after = weight.detach().clone()
    state = engine.consolidated_state_dict()
    saved = state is None or torch.equal(state["blocks.1.base.weight"], after)
    engine.destroy()
    others = torch.ones(WIDTH, dtype=torch.bool)
    others[2:5] = False  # rows 2 and 4 share blocks with row 3
    return torch.equal(before[others], after[others]), saved, float((after[3] - 0.25).abs().max())


def test_values_are_read_and_written_in_a_block(ranks: Ranks) -> None:
    for others, saved, error in ranks(2).run(_accessed):
        assert others
        assert saved
        assert error < 0.16


def test_a_weight_that_is_to_be_trained_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "frozen_weights": "nf4"}}
    with refused(
        UsageError, "parameter 0.weight: zero_optimization.frozen_weights", "cannot be trained", "requires_grad"
    ):
        zeroaccel.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=settings)


def test_a_coded_weight_that_is_unfrozen_later_is_named() -> None:
    model = Model()
    engine = _initialized(model, 0, "SGD", frozen_weights="nf4")
    model.head.weight.requires_grad_(True)
    with refused(EngineStateError, "parameter head.weight", "requires_grad=False, as when", "requires_grad=True"):
        engine.backward(engine(_batches()[0]))
    engine.destroy()
